// SIGINT and SIGTERM as a call on an ordinary thread, where cancelling a stream is allowed.
#ifndef CLIENT_CPP_GDNCTL_INTERRUPT_H_
#define CLIENT_CPP_GDNCTL_INTERRUPT_H_

#include <signal.h>

#include <atomic>
#include <functional>
#include <thread>

namespace gdn::gdnctl {

// From now on SIGINT ends the process with exit code 130, for calls with nothing to end cleanly.
void ExitOnInterrupt();

// While it lives, the first signal runs `on_interrupt` and a second one ends the process with exit
// code 130. Make it before any other thread exists: they inherit the blocked signals.
class InterruptHandler {
 public:
  explicit InterruptHandler(std::function<void()> on_interrupt);
  ~InterruptHandler();
  InterruptHandler(const InterruptHandler&) = delete;
  InterruptHandler& operator=(const InterruptHandler&) = delete;

  bool interrupted() const { return interrupted_; }

 private:
  void Run();

  std::function<void()> on_interrupt_;
  sigset_t signals_;
  sigset_t old_mask_;
  std::atomic<bool> stopping_ = false;
  std::atomic<bool> interrupted_ = false;
  std::thread thread_;
};

}  // namespace gdn::gdnctl

#endif  // CLIENT_CPP_GDNCTL_INTERRUPT_H_
