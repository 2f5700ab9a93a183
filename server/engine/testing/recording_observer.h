// An observer that counts. Any thread.
#ifndef SERVER_ENGINE_TESTING_RECORDING_OBSERVER_H_
#define SERVER_ENGINE_TESTING_RECORDING_OBSERVER_H_

#include <cstdint>
#include <mutex>
#include <vector>

#include "server/engine/observer.h"

namespace gdn::engine {

class RecordingObserver final : public Observer {
 public:
  struct Record {
    std::vector<StepStats> steps;
    Levels levels;
    std::vector<int64_t> queue_times;
    std::vector<int64_t> first_tokens;
    std::vector<int64_t> inter_tokens;
    std::vector<int64_t> blocked;
    int64_t streams_started = 0;
    int64_t finished_stop = 0;
    int64_t finished_length = 0;
    int64_t streams_cancelled = 0;
    int64_t streams_failed = 0;
    std::vector<int64_t> total_times;
    std::vector<int64_t> compute_times;
    int64_t cancelled_queued = 0;
    int64_t cancelled_prefill = 0;
    int64_t cancelled_decode = 0;
    int64_t rejected_queue = 0;
    int64_t rejected_slot = 0;
    int64_t rejected_draining = 0;
    int64_t evicted = 0;
    int64_t non_finite = 0;
    int64_t step_failed = 0;
    int64_t cancelled() const { return cancelled_queued + cancelled_prefill + cancelled_decode; }
    int64_t finished() const { return finished_stop + finished_length; }
    int64_t streams_ended() const { return finished() + streams_cancelled + streams_failed; }
  };

  Record record() const {
    const std::lock_guard<std::mutex> lock(mu_);
    return record_;
  }

  void OnStep(const StepStats& s) override {
    Do([&] { record_.steps.push_back(s); });
  }
  void OnLevels(const Levels& l) override {
    Do([&] { record_.levels = l; });
  }
  void OnQueueTime(int64_t ns) override {
    Do([&] { record_.queue_times.push_back(ns); });
  }
  void OnFirstToken(int64_t ns) override {
    Do([&] { record_.first_tokens.push_back(ns); });
  }
  void OnInterToken(int64_t ns) override {
    Do([&] { record_.inter_tokens.push_back(ns); });
  }
  void OnStreamStarted() override {
    Do([&] { ++record_.streams_started; });
  }
  void OnStreamEnded(StreamEnd e) override {
    Do([&] {
      ++(e == StreamEnd::kStop        ? record_.finished_stop
         : e == StreamEnd::kLength    ? record_.finished_length
         : e == StreamEnd::kCancelled ? record_.streams_cancelled
                                      : record_.streams_failed);
    });
  }
  void OnCallEnded(int64_t total_ns, std::optional<int64_t> compute_ns) override {
    Do([&] {
      record_.total_times.push_back(total_ns);
      if (compute_ns) record_.compute_times.push_back(*compute_ns);
    });
  }
  void OnCancelled(CancelPhase p) override {
    Do([&] {
      ++(p == CancelPhase::kQueued    ? record_.cancelled_queued
         : p == CancelPhase::kPrefill ? record_.cancelled_prefill
                                      : record_.cancelled_decode);
    });
  }
  void OnRejected(RejectionReason r) override {
    Do([&] {
      ++(r == RejectionReason::kQueueFull ? record_.rejected_queue
         : r == RejectionReason::kNoSlot  ? record_.rejected_slot
                                          : record_.rejected_draining);
    });
  }
  void OnEvicted(EvictionReason) override {
    Do([&] { ++record_.evicted; });
  }
  void OnNonFinite() override {
    Do([&] { ++record_.non_finite; });
  }
  void OnStepFailed() override {
    Do([&] { ++record_.step_failed; });
  }
  void OnStreamBlocked(int64_t ns) override {
    Do([&] { record_.blocked.push_back(ns); });
  }

 private:
  template <typename F>
  void Do(F f) {
    const std::lock_guard<std::mutex> lock(mu_);
    f();
  }

  mutable std::mutex mu_;
  Record record_;
};

}  // namespace gdn::engine

#endif  // SERVER_ENGINE_TESTING_RECORDING_OBSERVER_H_
