// File: waiter.h
//
// Who waits for a call or a fork, and how to wake him.
//
// Thread-safety: all methods may be called from any thread.
#ifndef SERVER_ENGINE_WAITER_H_
#define SERVER_ENGINE_WAITER_H_

#include <mutex>

#include "server/engine/engine.h"

namespace gdn::engine {

struct Waiter {
  CallOptions options;

  // Wakes the caller, unless its handle is gone. Never under the engine's lock.
  void NotifyReady() {
    const std::lock_guard<std::recursive_mutex> lock(callback_mu);
    if (!detached && options.on_ready) options.on_ready();
  }
  // Afterwards on_ready is not running and never will be (unless this is called from within it).
  void Detach() {
    const std::lock_guard<std::recursive_mutex> lock(callback_mu);
    detached = true;
  }

  // Recursive, so that on_ready may destroy the handle.
  std::recursive_mutex callback_mu;
  bool detached = false;  // Guarded by callback_mu.
};

}  // namespace gdn::engine

#endif  // SERVER_ENGINE_WAITER_H_
