// File: poller.h
//
// One completion queue and the one thread that polls it. All code of a call runs on the thread of
// the queue it arrived at. Other threads reach it through Wake(), which costs one queue event for
// any number of calls that became ready together.
#ifndef SERVER_RPC_POLLER_H_
#define SERVER_RPC_POLLER_H_

#include <grpcpp/alarm.h>
#include <grpcpp/completion_queue.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "server/rpc/coro.h"

namespace gdn::rpc {

// A doubly linked list node that is its own list when alone.
struct ListNode {
  ListNode* prev = this;
  ListNode* next = this;

  bool linked() const { return next != this; }
  void InsertBefore(ListNode* position) {
    prev = position->prev;
    next = position;
    prev->next = this;
    position->prev = this;
  }
  void Unlink() {
    prev->next = next;
    next->prev = prev;
    prev = next = this;
  }
};

// The calls that are live on all pollers of a server. Thread-safe.
class LiveCount {
 public:
  void Add(int64_t change);
  // False if there were still some at the deadline.
  bool WaitForNone(std::chrono::steady_clock::time_point deadline);

 private:
  std::mutex mutex_;
  std::condition_variable none_;
  int64_t count_ = 0;
};

class Poller final : private Tag {
 public:
  // Something that can be woken from another thread: its event is set on the poller's thread.
  struct Waker : ListNode {
    Event* event = nullptr;
  };
  // A call between its arrival and its end.
  struct LiveCall : ListNode {
    Event* event = nullptr;
  };

  Poller(std::unique_ptr<grpc::ServerCompletionQueue> queue, LiveCount* live_count);
  ~Poller();  // Stop() and Join() first, if it was started.
  Poller(const Poller&) = delete;
  Poller& operator=(const Poller&) = delete;

  // Starts the thread, which calls `begin` before it polls.
  void Start(std::function<void()> begin);
  // Lets live calls know that the server drains. Any thread.
  void BeginDrain();
  // Ends the thread once no call is live. The server must have been shut down. Any thread.
  void Stop();
  void Join();

  // Any thread, as long as the waker's call is live.
  void Wake(Waker* waker);
  // Poller's thread: nobody will call Wake(waker) again, forget what is pending.
  void Forget(Waker* waker);

  // Poller's thread.
  void AddLive(LiveCall* call);
  void RemoveLive(LiveCall* call);
  bool draining() const { return draining_; }
  bool stopping() const { return stopping_; }

  grpc::ServerCompletionQueue* queue() const { return queue_.get(); }

 private:
  void Loop();
  void Run(bool ok) override;  // The alarm went off.
  void Signal(std::unique_lock<std::mutex> lock);
  void AnnounceDrain();
  void ShutdownQueueIfIdle();

  const std::unique_ptr<grpc::ServerCompletionQueue> queue_;
  LiveCount* const live_count_;
  grpc::Alarm alarm_;
  std::thread thread_;

  std::mutex mutex_;  // Guards what other threads touch.
  ListNode ready_;
  bool armed_ = false;  // The alarm is set and has not been handled.
  bool drain_requested_ = false;
  bool stop_requested_ = false;
  bool shut_ = false;

  ListNode live_;  // The rest belongs to the poller's thread.
  int64_t num_live_ = 0;
  bool draining_ = false;
  bool stopping_ = false;
};

}  // namespace gdn::rpc

#endif  // SERVER_RPC_POLLER_H_
