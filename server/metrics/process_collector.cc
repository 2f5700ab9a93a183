#include "server/metrics/process_collector.h"

#include <sys/resource.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>
#include <string>
#include <utility>

namespace gdn::metrics {
namespace {

prometheus::MetricFamily Family(std::string name, std::string help, prometheus::MetricType type,
                                double value) {
  prometheus::ClientMetric metric;
  if (type == prometheus::MetricType::Counter) {
    metric.counter.value = value;
  } else {
    metric.gauge.value = value;
  }
  return {std::move(name), std::move(help), type, {std::move(metric)}};
}

double Seconds(const timeval& time) {
  return static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_usec);
}

double ResidentBytes() {
  std::ifstream file("/proc/self/statm");
  double total_pages = 0;
  double resident_pages = 0;
  file >> total_pages >> resident_pages;
  return resident_pages * static_cast<double>(sysconf(_SC_PAGESIZE));
}

double OpenFiles() {
  std::error_code error;
  const std::filesystem::directory_iterator begin("/proc/self/fd", error);
  return error ? 0.0 : static_cast<double>(std::distance(begin, {}));
}

// Boot time plus the process's start in clock ticks after it, field 22 of its stat line.
double StartTimeSeconds() {
  double boot_seconds = 0;
  std::ifstream stat("/proc/stat");
  for (std::string key; stat >> key;) {
    if (key == "btime") {
      stat >> boot_seconds;
      break;
    }
    stat.ignore(1 << 16, '\n');
  }
  std::ifstream self("/proc/self/stat");
  std::string line;
  std::getline(self, line);
  const size_t name_end = line.rfind(')');  // The name may hold spaces and parentheses.
  if (name_end == std::string::npos) return boot_seconds;
  std::istringstream fields(line.substr(name_end + 1));
  std::string skipped;
  for (int field = 3; field < 22; ++field) fields >> skipped;
  double start_ticks = 0;
  fields >> start_ticks;
  return boot_seconds + start_ticks / static_cast<double>(sysconf(_SC_CLK_TCK));
}

}  // namespace

std::vector<prometheus::MetricFamily> CollectProcess() {
  static const double start_time_seconds = StartTimeSeconds();
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  using Type = prometheus::MetricType;
  return {
      Family("process_resident_memory_bytes", "Resident memory.", Type::Gauge, ResidentBytes()),
      Family("process_cpu_seconds_total", "User and system CPU time.", Type::Counter,
             Seconds(usage.ru_utime) + Seconds(usage.ru_stime)),
      Family("process_start_time_seconds", "Start of the process, Unix time.", Type::Gauge,
             start_time_seconds),
      Family("process_open_fds", "Open file descriptors.", Type::Gauge, OpenFiles()),
  };
}

}  // namespace gdn::metrics
