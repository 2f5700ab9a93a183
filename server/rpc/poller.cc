#include "server/rpc/poller.h"

#include <grpc/support/time.h>

#include <utility>

namespace gdn::rpc {

void LiveCount::Add(int64_t change) {
  std::lock_guard lock(mutex_);
  count_ += change;
  if (count_ == 0) none_.notify_all();
}

bool LiveCount::WaitForNone(std::chrono::steady_clock::time_point deadline) {
  std::unique_lock lock(mutex_);
  return none_.wait_until(lock, deadline, [this] { return count_ == 0; });
}

Poller::Poller(std::unique_ptr<grpc::ServerCompletionQueue> queue, LiveCount* live_count)
    : queue_(std::move(queue)), live_count_(live_count) {}

Poller::~Poller() {
  if (!shut_) {  // Never started.
    queue_->Shutdown();
    void* tag = nullptr;
    bool ok = false;
    while (queue_->Next(&tag, &ok)) {
    }
  }
}

void Poller::Start(std::function<void()> begin) {
  thread_ = std::thread([this, begin = std::move(begin)] {
    begin();
    Loop();
  });
}

void Poller::Join() {
  if (thread_.joinable()) thread_.join();
}

void Poller::BeginDrain() {
  std::unique_lock lock(mutex_);
  drain_requested_ = true;
  Signal(std::move(lock));
}

void Poller::Stop() {
  std::unique_lock lock(mutex_);
  stop_requested_ = true;
  Signal(std::move(lock));
}

void Poller::Wake(Waker* waker) {
  std::unique_lock lock(mutex_);
  if (!waker->linked()) waker->InsertBefore(&ready_);
  Signal(std::move(lock));
}

void Poller::Forget(Waker* waker) {
  std::lock_guard lock(mutex_);
  if (waker->linked()) waker->Unlink();
}

// Sets the alarm unless it is set already: the event that is under way serves this cause too.
void Poller::Signal(std::unique_lock<std::mutex> lock) {
  if (armed_ || shut_) return;
  armed_ = true;
  lock.unlock();
  alarm_.Set(queue_.get(), gpr_inf_past(GPR_CLOCK_MONOTONIC), static_cast<Tag*>(this));
}

void Poller::Run(bool /*ok*/) {
  // Until the list is seen empty, calls that become ready meanwhile need no event of their own.
  // The bound lets the queue's other tags have their turn.
  constexpr int kMaxWakes = 1024;
  for (int i = 0;; ++i) {
    std::unique_lock lock(mutex_);
    if (ready_.next == &ready_ || i == kMaxWakes) {
      armed_ = false;
      const bool more = ready_.next != &ready_;
      const bool drain = drain_requested_;
      stopping_ = stop_requested_;
      if (more) {
        Signal(std::move(lock));
      } else {
        lock.unlock();
      }
      if (drain && !draining_) AnnounceDrain();
      return;
    }
    auto* waker = static_cast<Waker*>(ready_.next);
    waker->Unlink();
    lock.unlock();
    waker->event->Set();
  }
}

void Poller::AddLive(LiveCall* call) {
  call->InsertBefore(&live_);
  ++num_live_;
  live_count_->Add(1);
}

void Poller::RemoveLive(LiveCall* call) {
  call->Unlink();
  --num_live_;
  live_count_->Add(-1);
}

void Poller::AnnounceDrain() {
  draining_ = true;
  // An event may end any live call, this one included: move each to a new list before its turn.
  ListNode pending;
  while (live_.linked()) {
    ListNode* call = live_.next;
    call->Unlink();
    call->InsertBefore(&pending);
  }
  while (pending.linked()) {
    auto* call = static_cast<LiveCall*>(pending.next);
    call->Unlink();
    call->InsertBefore(&live_);
    call->event->Set();
  }
}

// The queue is shut down here, on the thread that starts all operations, and never under an alarm
// that is being set: starting an operation on a queue that was shut down aborts the process.
void Poller::ShutdownQueueIfIdle() {
  if (!stopping_ || num_live_ > 0) return;
  std::lock_guard lock(mutex_);
  if (shut_ || armed_) return;
  shut_ = true;
  queue_->Shutdown();
}

// With a deadline: now and then gRPC 1.51 loses the wake-up of a thread that waits for a queue's
// next event, and without one the thread would then wait for ever.
void Poller::Loop() {
  constexpr std::chrono::seconds kPatience(1);
  void* tag = nullptr;
  bool ok = false;
  for (;;) {
    switch (queue_->AsyncNext(&tag, &ok, std::chrono::system_clock::now() + kPatience)) {
      case grpc::CompletionQueue::SHUTDOWN:
        return;
      case grpc::CompletionQueue::GOT_EVENT:
        static_cast<Tag*>(tag)->Run(ok);
        break;
      case grpc::CompletionQueue::TIMEOUT:
        break;
    }
    ShutdownQueueIfIdle();
  }
}

}  // namespace gdn::rpc
