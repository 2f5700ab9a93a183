#include "server/rpc/request_log.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <iterator>
#include <random>

#include "absl/strings/str_cat.h"
#include "server/rpc/log_fields.h"

namespace gdn::rpc {
namespace {

constexpr size_t kMaxIdSize = 64;
constexpr size_t kMaxLoggedIds = 4096;  // Characters of token ids in a line.

bool IsIdCharacter(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-' ||
         c == '_' || c == '.' || c == ':';
}

// Distinct within the process, and hardly ever alike between two.
uint64_t NextId() {
  static const uint64_t base = std::random_device()() | uint64_t{std::random_device()()} << 32;
  static std::atomic<uint64_t> count = 0;
  // An odd factor keeps them distinct, and unlike their neighbours.
  return base + 0x9e3779b97f4a7c15u * count.fetch_add(1, std::memory_order_relaxed);
}

std::string_view CodeName(int code) {
  constexpr int kUnknown = 2;
  const bool known = code >= 0 && static_cast<size_t>(code) < kCodeNames.size();
  return kCodeNames[static_cast<size_t>(known ? code : kUnknown)];
}

bool IsServerFault(std::string_view name) {
  return name == "UNKNOWN" || name == "INTERNAL" || name == "DATA_LOSS";
}

}  // namespace

std::string ChooseRequestId(std::string_view given) {
  if (!given.empty() && given.size() <= kMaxIdSize && std::ranges::all_of(given, IsIdCharacter)) {
    return std::string(given);
  }
  return absl::StrCat(absl::Hex(NextId(), absl::kZeroPad16));
}

void RequestRecord::AddInput(const RequestLogOptions& options, std::string_view session,
                             const engine::Input& input, int64_t hidden_size) {
  if (session_id.empty()) session_id = session;
  ++sequences;
  input_tokens += input.is_hidden ? std::ssize(input.hidden) / std::max<int64_t>(hidden_size, 1)
                                  : std::ssize(input.tokens);
  if (!options.prompts) return;
  for (const int32_t token : input.tokens) {
    if (input_ids.size() >= kMaxLoggedIds) return;
    absl::StrAppend(&input_ids, input_ids.empty() ? "" : " ", token);
  }
}

void RequestRecord::AddResult(std::span<const engine::SequenceResult> results,
                              const engine::Timings& spent) {
  for (const engine::SequenceResult& result : results) {
    output_tokens += result.next_token.has_value() ? 1 : 0;
    if (fault.ok()) fault = result.status;
  }
  timings.queue_ns += spent.queue_ns;
  timings.compute_ns += spent.compute_ns;
  timings.total_ns += spent.total_ns;
}

void LogRequestBegin(const RequestRecord& record, Rpc rpc) {
  if (!spdlog::should_log(spdlog::level::debug)) return;
  std::string line = "request begins";
  AddField(&line, "request_id", record.id);
  AddField(&line, "rpc", kRpcNames[static_cast<size_t>(rpc)]);
  spdlog::debug(spdlog::string_view_t(line.data(), line.size()));
}

void LogRequestEnd(const RequestLogOptions& options, const RequestRecord& record, Rpc rpc, int code,
                   std::string_view message, int64_t duration_ns) {
  std::string_view name = CodeName(code);
  if (code == 0 && !record.fault.ok()) {
    name = CodeName(static_cast<int>(record.fault.code()));
    message = {record.fault.message().data(), record.fault.message().size()};
  }
  const bool failure = IsServerFault(name);
  const auto level = failure ? spdlog::level::warn : spdlog::level::info;
  if (options.which == LoggedRequests::kNone || !spdlog::should_log(level) ||
      (options.which == LoggedRequests::kFailures && !failure)) {
    return;
  }
  std::string line = "request ends";
  AddField(&line, "request_id", record.id);
  AddField(&line, "rpc", kRpcNames[static_cast<size_t>(rpc)]);
  AddField(&line, "code", name);
  if (!message.empty()) AddField(&line, "error", message.substr(0, 512));
  if (!record.session_id.empty()) AddField(&line, "session_id", record.session_id.substr(0, 64));
  AddField(&line, "sequences", record.sequences);
  AddField(&line, "input_tokens", record.input_tokens);
  AddField(&line, "output_tokens", record.output_tokens);
  AddField(&line, "queue_ns", record.timings.queue_ns);
  AddField(&line, "compute_ns", record.timings.compute_ns);
  AddField(&line, "total_ns", record.timings.total_ns);
  AddField(&line, "duration_ns", duration_ns);
  if (!record.input_ids.empty()) AddField(&line, "input_ids", record.input_ids);
  spdlog::log(level, spdlog::string_view_t(line.data(), line.size()));
}

}  // namespace gdn::rpc
