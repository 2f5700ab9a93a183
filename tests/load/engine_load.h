// What the engine benchmarks share: a clock, a wait for engine callbacks, the rate of greedy
// streams.
#ifndef TESTS_LOAD_ENGINE_LOAD_H_
#define TESTS_LOAD_ENGINE_LOAD_H_

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "server/engine/engine.h"

namespace gdn {

inline double Seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Waits until `done()`; engine callbacks wake it.
class Waiter {
 public:
  void Wake() {
    { std::lock_guard<std::mutex> lock(mutex_); }
    wake_.notify_one();
  }
  template <typename Done>
  void Wait(Done done) {
    std::unique_lock<std::mutex> lock(mutex_);
    while (!done()) wake_.wait_for(lock, std::chrono::milliseconds(20));
  }

 private:
  std::mutex mutex_;
  std::condition_variable wake_;
};

// Tokens per second of `streams` greedy streams, prompts excluded.
inline absl::StatusOr<double> DecodeRate(engine::Engine* engine, int streams, int tokens) {
  Waiter waiter;
  std::vector<std::unique_ptr<engine::GenerateCall>> calls;
  for (int i = 0; i < streams; ++i) {
    engine::GenerateRequest request;
    request.input.tokens = {65 + i % 26, 110, 100, 32};
    request.max_new_tokens = tokens;
    request.ignore_eos = true;
    auto call = engine->Generate(std::move(request), {.on_ready = [&] { waiter.Wake(); }});
    if (!call.ok()) return call.status();
    calls.push_back(*std::move(call));
  }
  std::vector<bool> done(calls.size());
  std::vector<int> received(calls.size());
  double first = 0;
  int64_t counted = 0;
  size_t finished = 0;
  absl::Status failed;
  double last = 0;
  waiter.Wait([&] {
    for (size_t i = 0; i < calls.size(); ++i) {
      while (auto chunk = calls[i]->Drain()) {
        received[i] += static_cast<int>(chunk->tokens.size());
        if (first > 0) counted += static_cast<int64_t>(chunk->tokens.size());
        if (chunk->done && !done[i]) {
          if (!chunk->status.ok()) failed = chunk->status;
          done[i] = true;
          ++finished;
        }
      }
    }
    // The clock starts once every stream has its first token.
    if (first == 0 && *std::min_element(received.begin(), received.end()) > 0) first = Seconds();
    last = Seconds();
    return finished == calls.size();
  });
  if (!failed.ok()) return failed;
  return static_cast<double>(counted) / (last - first);
}

}  // namespace gdn

#endif  // TESTS_LOAD_ENGINE_LOAD_H_
