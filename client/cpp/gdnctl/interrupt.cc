#include "client/cpp/gdnctl/interrupt.h"

#include <pthread.h>
#include <unistd.h>

#include <utility>

#include "client/cpp/gdnctl/exit_code.h"

namespace gdn::gdnctl {
namespace {

constexpr int kWakeSignal = SIGUSR1;

// A shell ignores SIGINT on behalf of what it runs in the background; that is respected.
bool IsIgnored(int signal) {
  struct sigaction action;
  return sigaction(signal, nullptr, &action) == 0 && action.sa_handler == SIG_IGN;
}

[[noreturn]] void ExitInterrupted() { _exit(static_cast<int>(ExitCode::kInterrupted)); }

}  // namespace

void ExitOnInterrupt() {
  if (IsIgnored(SIGINT)) return;
  struct sigaction action = {};
  action.sa_handler = [](int) { ExitInterrupted(); };
  sigaction(SIGINT, &action, nullptr);
}

InterruptHandler::InterruptHandler(std::function<void()> on_interrupt)
    : on_interrupt_(std::move(on_interrupt)) {
  sigemptyset(&signals_);
  for (const int signal : {SIGINT, SIGTERM}) {
    if (!IsIgnored(signal)) sigaddset(&signals_, signal);
  }
  sigaddset(&signals_, kWakeSignal);
  pthread_sigmask(SIG_BLOCK, &signals_, &old_mask_);
  thread_ = std::thread([this] { Run(); });
}

InterruptHandler::~InterruptHandler() {
  stopping_ = true;
  pthread_kill(thread_.native_handle(), kWakeSignal);
  thread_.join();
  pthread_sigmask(SIG_SETMASK, &old_mask_, nullptr);
}

void InterruptHandler::Run() {
  while (true) {
    int signal = 0;
    if (sigwait(&signals_, &signal) != 0) continue;
    if (stopping_) return;
    if (signal == kWakeSignal) continue;
    if (interrupted_.exchange(true)) ExitInterrupted();
    on_interrupt_();
  }
}

}  // namespace gdn::gdnctl
