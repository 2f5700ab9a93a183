// A clock that a test moves. Any thread.
#ifndef SERVER_ENGINE_TESTING_FAKE_CLOCK_H_
#define SERVER_ENGINE_TESTING_FAKE_CLOCK_H_

#include <atomic>
#include <cstdint>

#include "server/engine/clock.h"

namespace gdn::engine {

class FakeClock final : public Clock {
 public:
  int64_t NowNs() const override {
    return now_ns_.fetch_add(tick_ns_.load(std::memory_order_relaxed), std::memory_order_relaxed);
  }
  int64_t UnixTimeMs() const override { return 1'700'000'000'000 + now_ns_.load() / 1'000'000; }

  void AdvanceNs(int64_t ns) { now_ns_.fetch_add(ns); }
  void AdvanceMs(int64_t ms) { AdvanceNs(ms * 1'000'000); }
  // Every look at the clock moves it by this much.
  void set_tick_ns(int64_t ns) { tick_ns_ = ns; }

 private:
  mutable std::atomic<int64_t> now_ns_{1'000'000'000};
  std::atomic<int64_t> tick_ns_{0};
};

}  // namespace gdn::engine

#endif  // SERVER_ENGINE_TESTING_FAKE_CLOCK_H_
