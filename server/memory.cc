#include "server/memory.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <limits>
#include <optional>
#include <sstream>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace gdn {
namespace {

constexpr int64_t kUnlimited = std::numeric_limits<int64_t>::max();

// The number after `key` in a file of lines like "MemTotal: 16384 kB" or "inactive_file 123".
std::optional<int64_t> Field(const std::string& path, const std::string& key) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string word;
    int64_t value = 0;
    if (words >> word && word == key && words >> value) return value;
  }
  return std::nullopt;
}

// The number that is the whole of a file; "max" is none.
std::optional<int64_t> Number(const std::string& path) {
  std::ifstream file(path);
  int64_t value = 0;
  if (file >> value) return value;
  return std::nullopt;
}

struct Group {
  bool unified = true;
  std::string path;  // From the root of its hierarchy: "/a/b".
};

// The process's control group for memory.
Group MemoryGroup(const std::string& root) {
  Group group;
  std::ifstream file(root + "/proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {  // hierarchy:controllers:path
    const size_t first = line.find(':');
    const size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers =
        absl::StrCat(",", line.substr(first + 1, second - first - 1), ",");
    if (controllers == ",,") {
      group.path = line.substr(second + 1);
    } else if (controllers.find(",memory,") != std::string::npos) {
      return {false, line.substr(second + 1)};
    }
  }
  return group;
}

// Lowers `limits` to those of one group.
void ApplyGroup(const std::string& folder, bool unified, MemoryLimits* limits) {
  const auto limit =
      Number(folder + (unified ? "/memory.max" : "/memory.limit_in_bytes")).value_or(kUnlimited);
  if (limit == kUnlimited) return;
  limits->total_bytes = std::min(limits->total_bytes, limit);
  const int64_t used =
      Number(folder + (unified ? "/memory.current" : "/memory.usage_in_bytes")).value_or(0);
  // Cached files count as used and make room when needed.
  const int64_t cached =
      Field(folder + "/memory.stat", unified ? "inactive_file" : "total_inactive_file").value_or(0);
  limits->available_bytes =
      std::min(limits->available_bytes, std::max<int64_t>(0, limit - (used - cached)));
}

std::string Gibibytes(int64_t bytes) {
  return absl::StrFormat("%.2f GiB", static_cast<double>(bytes) / (1 << 30));
}

}  // namespace

MemoryLimits ReadMemoryLimits(const std::string& root) {
  constexpr int64_t kKibibyte = 1024;
  MemoryLimits limits = {kUnlimited, kUnlimited};
  const std::string info = root + "/proc/meminfo";
  if (const auto total = Field(info, "MemTotal:")) limits.total_bytes = *total * kKibibyte;
  if (const auto available = Field(info, "MemAvailable:")) {
    limits.available_bytes = *available * kKibibyte;
  }
  const Group group = MemoryGroup(root);
  const std::string hierarchy = root + (group.unified ? "/sys/fs/cgroup" : "/sys/fs/cgroup/memory");
  // Each group on the way up has its say. In a container, the path may be one of the host, and only
  // the root is there to be read.
  for (std::filesystem::path path = group.path;; path = path.parent_path()) {
    ApplyGroup(hierarchy + (path == "/" ? "" : path.string()), group.unified, &limits);
    if (path.empty() || path == path.root_path()) break;
  }
  return limits;
}

absl::StatusOr<std::string> CheckStateMemory(int64_t max_sessions, int64_t bytes_per_session,
                                             const MemoryLimits& limits) {
  const int64_t states = max_sessions + 1;  // The engine has one of its own.
  int64_t needed = 0;
  const bool overflow = __builtin_mul_overflow(states, bytes_per_session, &needed);
  if (!overflow && needed <= limits.available_bytes) return std::string();
  const bool impossible = overflow || needed > limits.total_bytes;
  const int64_t bound = impossible ? limits.total_bytes : limits.available_bytes;
  std::string text = absl::StrCat(
      "--max-sessions=", max_sessions, ": ", states, " states (one is the engine's) of ",
      bytes_per_session, " bytes are ", overflow ? "more than 2^63 bytes" : Gibibytes(needed),
      ", but ",
      impossible ? "all memory that the server may use is " : "memory that is available is ",
      Gibibytes(bound), ", room for ", std::max<int64_t>(0, bound / bytes_per_session - 1),
      " sessions; lower --max-sessions, or halve the states with --state-type=bfloat16");
  if (impossible) return absl::InvalidArgumentError(text);
  return text;
}

}  // namespace gdn
