// File: scheduler.h
//
// Decides what the next step runs: decode rows first, then Step calls, then chunks of prompts under
// a token budget. Knows nothing of sessions, pipelines or time.
//
// Fairness. Calls of one class take turns: whoever was served goes to the end of its queue, and
// within a call so does a sequence. The head of a queue always fits, and every class that has work
// gets at least one row of every step (of every third step, with fewer rows than classes), so a
// call with k others of its class before it waits a bounded number of steps and nothing starves.
//
// Cuts. A sequence is cut at multiples of chunk_tokens from its start whoever else is waiting; a
// chunk that no longer fits under the budget waits, and smaller ones behind it may pass.
//
// Thread-safety: none; the engine's lock covers it.
#ifndef SERVER_ENGINE_SCHEDULER_H_
#define SERVER_ENGINE_SCHEDULER_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace gdn::engine {

enum class WorkClass : uint8_t { kDecode, kStep, kPrefill };
inline constexpr int kNumWorkClasses = 3;

// What one call still has to run. Owned by the call; the scheduler refers to it while it is queued.
struct Work {
  struct Sequence {
    int64_t index = 0;      // In the call.
    int64_t remaining = 0;  // Tokens, >= 1.
  };

  WorkClass work_class = WorkClass::kPrefill;
  std::vector<Sequence> pending;
  bool queued = false;    // Kept by the scheduler.
  void* owner = nullptr;  // The call.
};

struct BatchItem {
  Work* work = nullptr;
  int64_t sequence = 0;
  int64_t tokens = 0;
  WorkClass work_class = WorkClass::kPrefill;
};

class Scheduler {
 public:
  struct Limits {
    int64_t max_rows = 1;
    int64_t chunk_tokens = 1;
    int64_t prefill_token_budget = 1;
  };

  explicit Scheduler(const Limits& limits) : limits_(limits) {}

  // Queues work that has something pending, at the end of its class.
  void Add(Work* work);
  // Forgets the work, if it is queued.
  void Remove(Work* work);
  // Takes one sequence out of the work, and the work out of the queue if nothing is left of it.
  void Drop(Work* work, int64_t sequence);

  bool empty() const;
  // Fills `batch` with the next step and takes it off the works' pending tokens. Work with nothing
  // pending leaves its queue.
  void Next(std::vector<BatchItem>* batch);

 private:
  // Serves one class with at most `rows` rows; returns the number used.
  int64_t Serve(WorkClass work_class, int64_t rows, std::vector<BatchItem>* batch);
  int64_t ServeWork(Work* work, int64_t rows, std::vector<BatchItem>* batch);
  std::vector<Work*>& queue(WorkClass c) { return queues_[static_cast<size_t>(c)]; }

  Limits limits_;
  std::array<std::vector<Work*>, kNumWorkClasses> queues_;
  int first_class_ = 0;         // Whose turn it is when there are fewer rows than classes.
  int64_t prefill_tokens_ = 0;  // Of the step being filled.
  std::vector<Work*> served_;
  std::vector<Work::Sequence> advanced_;
};

}  // namespace gdn::engine

#endif  // SERVER_ENGINE_SCHEDULER_H_
