#include "server/memory_trimmer.h"

#include <malloc.h>
#include <spdlog/spdlog.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <utility>

namespace gdn {

HeapUse ReadHeapUse() {
  std::ifstream file("/proc/self/statm");
  int64_t total_pages = 0;
  int64_t resident_pages = 0;
  file >> total_pages >> resident_pages;
  return {.resident_bytes = resident_pages * sysconf(_SC_PAGESIZE),
          .free_heap_bytes = static_cast<int64_t>(mallinfo2().fordblks)};
}

bool TrimPolicy::ShouldTrim(const HeapUse& use, bool idle, int64_t now_ms) {
  floor_bytes_ = std::min(floor_bytes_, use.resident_bytes);
  // What was given back still counts as free, so only growth since then tells of more.
  if (use.free_heap_bytes < kMinBytes || use.resident_bytes - floor_bytes_ < kMinBytes) {
    return false;
  }
  return idle || now_ms - last_ms_ >= kBusyIntervalMs;
}

void TrimPolicy::Trimmed(const HeapUse& after, int64_t now_ms) {
  floor_bytes_ = after.resident_bytes;
  last_ms_ = now_ms;
}

MemoryTrimmer::MemoryTrimmer(std::function<bool()> idle)
    : idle_(std::move(idle)), thread_([this] { Loop(); }) {}

MemoryTrimmer::~MemoryTrimmer() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  stop_changed_.notify_all();
  thread_.join();
}

void MemoryTrimmer::Loop() {
  constexpr std::chrono::seconds kInterval(5);
  const auto now_ms = [] {
    return std::chrono::duration_cast<std::chrono::milliseconds>(
               std::chrono::steady_clock::now().time_since_epoch())
        .count();
  };
  TrimPolicy policy;
  std::unique_lock lock(mutex_);
  while (!stop_changed_.wait_for(lock, kInterval, [this] { return stop_; })) {
    const HeapUse before = ReadHeapUse();
    if (!policy.ShouldTrim(before, idle_(), now_ms())) continue;
    malloc_trim(0);
    const HeapUse after = ReadHeapUse();
    policy.Trimmed(after, now_ms());
    spdlog::debug("gave {} MiB back to the system",
                  (before.resident_bytes - after.resident_bytes) >> 20);
  }
}

}  // namespace gdn
