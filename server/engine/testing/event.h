// A flag one thread raises and another waits for, with a deadline so that a lost wake fails the
// test instead of hanging it.
#ifndef SERVER_ENGINE_TESTING_EVENT_H_
#define SERVER_ENGINE_TESTING_EVENT_H_

#include <chrono>
#include <condition_variable>
#include <mutex>

namespace gdn::engine {

class Event {
 public:
  void Set() {
    const std::lock_guard<std::mutex> lock(mu_);
    set_ = true;
    cv_.notify_all();
  }
  // False after half a minute. Lowers the flag.
  bool Wait() {
    std::unique_lock<std::mutex> lock(mu_);
    const bool set = cv_.wait_until(
        lock, std::chrono::system_clock::now() + std::chrono::seconds(30), [this] { return set_; });
    set_ = false;
    return set;
  }

 private:
  std::mutex mu_;
  std::condition_variable cv_;
  bool set_ = false;
};

}  // namespace gdn::engine

#endif  // SERVER_ENGINE_TESTING_EVENT_H_
