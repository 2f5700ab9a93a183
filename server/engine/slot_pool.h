// File: slot_pool.h
//
// Who owns which state slot. A handle is a value with a generation, so a stale one is recognised;
// every transition names the owner it expects, so a slot cannot be released twice or by a stranger.
//
// Thread-safety: none; the engine's lock covers it.
#ifndef SERVER_ENGINE_SLOT_POOL_H_
#define SERVER_ENGINE_SLOT_POOL_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/status.h"

namespace gdn::engine {

enum class SlotOwner : uint8_t {
  kFree,
  kLive,      // Of an idle session.
  kInFlight,  // Of a session that a call is using.
  kWarmUp,    // Slot 0, for ever.
};
inline constexpr int kNumSlotOwners = 4;

struct SlotHandle {
  int64_t index = -1;
  uint64_t generation = 0;
};

class SlotPool {
 public:
  // Slot 0 is reserved for warm-up, so num_slots - 1 can be acquired.
  explicit SlotPool(int64_t num_slots);

  std::optional<SlotHandle> Acquire(SlotOwner owner);
  // All or none.
  bool AcquireMany(SlotOwner owner, int64_t count, std::vector<SlotHandle>* handles);
  // FAILED_PRECONDITION, and nothing changes, unless the handle is current and `from` owns the
  // slot.
  absl::Status Transfer(SlotHandle handle, SlotOwner from, SlotOwner to);
  absl::Status Release(SlotHandle handle, SlotOwner from);

  int64_t num_slots() const { return static_cast<int64_t>(slots_.size()); }
  int64_t num_usable() const { return num_slots() - 1; }
  int64_t count(SlotOwner owner) const { return counts_[static_cast<size_t>(owner)]; }
  absl::Status CheckInvariants() const;

 private:
  struct Slot {
    SlotOwner owner = SlotOwner::kFree;
    uint64_t generation = 0;  // Grows with every release.
  };

  absl::Status CheckHandle(SlotHandle handle, SlotOwner from) const;
  void SetOwner(int64_t index, SlotOwner owner);

  std::vector<Slot> slots_;
  std::vector<int64_t> free_;  // A stack: the slot last used is the warmest.
  std::array<int64_t, kNumSlotOwners> counts_{};
};

}  // namespace gdn::engine

#endif  // SERVER_ENGINE_SLOT_POOL_H_
