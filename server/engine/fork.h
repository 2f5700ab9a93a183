// File: fork.h
//
// The state of one ForkSession. The copies become sessions when the result is taken: until then
// nobody can find them, and if nobody takes it their slots are free again.
//
// Thread-safety: everything is under the engine's lock.
#ifndef SERVER_ENGINE_FORK_H_
#define SERVER_ENGINE_FORK_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "server/engine/session_table.h"
#include "server/engine/slot_pool.h"
#include "server/engine/waiter.h"

namespace gdn::engine {

struct Fork : Waiter {
  Session* parent = nullptr;  // In use until the copies are made; then nullptr.
  Session child;              // What each copy is like, but for its id and slot.
  std::vector<SlotHandle> slots;
  absl::Status status;  // Once done.
  bool done = false;
  bool abandoned = false;  // Nobody will take the result.
};

}  // namespace gdn::engine

#endif  // SERVER_ENGINE_FORK_H_
