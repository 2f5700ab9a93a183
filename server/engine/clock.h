// Time as the engine sees it; tests move it by hand.
#ifndef SERVER_ENGINE_CLOCK_H_
#define SERVER_ENGINE_CLOCK_H_

#include <chrono>
#include <cstdint>

namespace gdn::engine {

class Clock {
 public:
  virtual ~Clock() = default;
  virtual int64_t NowNs() const = 0;  // Monotonic, from an arbitrary origin.
  virtual int64_t UnixTimeMs() const = 0;
};

class SystemClock final : public Clock {
 public:
  int64_t NowNs() const override {
    return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
  }
  int64_t UnixTimeMs() const override {
    return std::chrono::duration_cast<std::chrono::milliseconds>(
               std::chrono::system_clock::now().time_since_epoch())
        .count();
  }
};

}  // namespace gdn::engine

#endif  // SERVER_ENGINE_CLOCK_H_
