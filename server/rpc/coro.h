// File: coro.h
//
// C++20 coroutines over gRPC completion queues. A call is one detached coroutine; an Op is one
// asynchronous operation of it, whose address is the tag in the queue.
//
// Thread-safety: everything here is confined to the thread that polls the queue. Since a tag comes
// out of the queue on that very thread, nothing resumes a coroutine that is still running.
#ifndef SERVER_RPC_CORO_H_
#define SERVER_RPC_CORO_H_

#include <coroutine>
#include <exception>
#include <utility>

namespace gdn::rpc {

// What a completion queue's tags point to.
class Tag {
 public:
  virtual void Run(bool ok) = 0;

 protected:
  ~Tag() = default;
};

// The type of a coroutine that starts at once, nobody waits for, and frees itself at its end.
struct Detached {
  struct promise_type {
    Detached get_return_object() { return {}; }
    std::suspend_never initial_suspend() noexcept { return {}; }
    std::suspend_never final_suspend() noexcept { return {}; }
    void return_void() {}
    void unhandled_exception() { std::terminate(); }
  };
};

// Something one coroutine waits for; stays set until a wait has consumed it. Several causes may
// share an event: the waiter looks at its conditions again each time.
class Event {
 public:
  void Set() {
    set_ = true;
    if (waiter_) std::exchange(waiter_, {}).resume();
  }
  bool await_ready() const { return set_; }
  void await_suspend(std::coroutine_handle<> waiter) { waiter_ = waiter; }
  void await_resume() { set_ = false; }

 private:
  bool set_ = false;
  std::coroutine_handle<> waiter_;
};

// One operation on a completion queue: `writer.Write(m, op.Start()); ... if (!co_await op) ...`.
// It need not be waited for at once: a coroutine that has other things to watch passes its event,
// and polls pending(). Must not be destroyed while pending.
class Op final : public Tag {
 public:
  explicit Op(Event* event = nullptr) : event_(event) {}
  Op(const Op&) = delete;
  Op& operator=(const Op&) = delete;

  void* Start() {
    pending_ = true;
    return static_cast<Tag*>(this);
  }
  bool pending() const { return pending_; }
  bool ok() const { return ok_; }

  void Run(bool ok) override {
    ok_ = ok;
    pending_ = false;
    if (waiter_) {
      std::exchange(waiter_, {}).resume();
    } else if (event_ != nullptr) {
      event_->Set();
    }
  }

  bool await_ready() const { return !pending_; }
  void await_suspend(std::coroutine_handle<> waiter) { waiter_ = waiter; }
  bool await_resume() const { return ok_; }

 private:
  bool pending_ = false;
  bool ok_ = true;
  Event* event_;
  std::coroutine_handle<> waiter_;
};

}  // namespace gdn::rpc

#endif  // SERVER_RPC_CORO_H_
