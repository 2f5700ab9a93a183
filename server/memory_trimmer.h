// File: memory_trimmer.h
//
// Gives memory back to the system after a burst. free() keeps what it gets for later, and what a
// hundred large messages took would stay with the process for ever.
//
// Thread-safety: TrimPolicy belongs to one thread, which MemoryTrimmer starts.
#ifndef SERVER_MEMORY_TRIMMER_H_
#define SERVER_MEMORY_TRIMMER_H_

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>

namespace gdn {

struct HeapUse {
  int64_t resident_bytes = 0;   // Of the whole process.
  int64_t free_heap_bytes = 0;  // Free in malloc's arenas, whether resident or given back.
};
HeapUse ReadHeapUse();

// Decides when trimming is worth its while: it holds the lock of each arena in turn, and what is
// given back must be faulted in again.
class TrimPolicy {
 public:
  // True: trim now, then call Trimmed(). `idle`: nothing is being computed.
  bool ShouldTrim(const HeapUse& use, bool idle, int64_t now_ms);
  void Trimmed(const HeapUse& after, int64_t now_ms);

  // Less than this is not worth it.
  static constexpr int64_t kMinBytes = 32 << 20;
  // A server that is never idle trims this often at most.
  static constexpr int64_t kBusyIntervalMs = 60'000;

 private:
  int64_t floor_bytes_ = 0;  // Resident after the last time, or less since.
  int64_t last_ms_ = -kBusyIntervalMs;
};

// A thread that looks every few seconds.
class MemoryTrimmer {
 public:
  explicit MemoryTrimmer(std::function<bool()> idle);
  ~MemoryTrimmer();
  MemoryTrimmer(const MemoryTrimmer&) = delete;
  MemoryTrimmer& operator=(const MemoryTrimmer&) = delete;

 private:
  void Loop();

  const std::function<bool()> idle_;
  std::mutex mutex_;
  std::condition_variable stop_changed_;
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace gdn

#endif  // SERVER_MEMORY_TRIMMER_H_
