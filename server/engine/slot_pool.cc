#include "server/engine/slot_pool.h"

#include "absl/strings/str_cat.h"

namespace gdn::engine {
namespace {

const char* Name(SlotOwner owner) {
  switch (owner) {
    case SlotOwner::kFree:
      return "free";
    case SlotOwner::kLive:
      return "live";
    case SlotOwner::kInFlight:
      return "in flight";
    case SlotOwner::kWarmUp:
      return "warm-up";
  }
  return "unknown";
}

}  // namespace

SlotPool::SlotPool(int64_t num_slots) : slots_(static_cast<size_t>(num_slots)) {
  counts_[static_cast<size_t>(SlotOwner::kFree)] = num_slots;
  SetOwner(0, SlotOwner::kWarmUp);
  free_.reserve(slots_.size());
  for (int64_t i = num_slots - 1; i > 0; --i) free_.push_back(i);
}

void SlotPool::SetOwner(int64_t index, SlotOwner owner) {
  Slot& slot = slots_[static_cast<size_t>(index)];
  --counts_[static_cast<size_t>(slot.owner)];
  ++counts_[static_cast<size_t>(owner)];
  slot.owner = owner;
}

std::optional<SlotHandle> SlotPool::Acquire(SlotOwner owner) {
  if (free_.empty()) return std::nullopt;
  const int64_t index = free_.back();
  free_.pop_back();
  SetOwner(index, owner);
  return SlotHandle{index, slots_[static_cast<size_t>(index)].generation};
}

bool SlotPool::AcquireMany(SlotOwner owner, int64_t count, std::vector<SlotHandle>* handles) {
  if (count > static_cast<int64_t>(free_.size())) return false;
  for (int64_t i = 0; i < count; ++i) handles->push_back(*Acquire(owner));
  return true;
}

absl::Status SlotPool::CheckHandle(SlotHandle handle, SlotOwner from) const {
  if (handle.index < 0 || handle.index >= num_slots()) {
    return absl::FailedPreconditionError(
        absl::StrCat("slot ", handle.index, " is not in [0, ", num_slots(), ")"));
  }
  const Slot& slot = slots_[static_cast<size_t>(handle.index)];
  if (slot.generation != handle.generation) {
    return absl::FailedPreconditionError(absl::StrCat("slot ", handle.index, " is of generation ",
                                                      slot.generation, ", the handle of ",
                                                      handle.generation));
  }
  if (slot.owner != from) {
    return absl::FailedPreconditionError(
        absl::StrCat("slot ", handle.index, " is ", Name(slot.owner), ", expected ", Name(from)));
  }
  return absl::OkStatus();
}

absl::Status SlotPool::Transfer(SlotHandle handle, SlotOwner from, SlotOwner to) {
  if (absl::Status status = CheckHandle(handle, from); !status.ok()) return status;
  if (from == SlotOwner::kFree || from == SlotOwner::kWarmUp || to == SlotOwner::kFree ||
      to == SlotOwner::kWarmUp) {
    return absl::FailedPreconditionError(absl::StrCat(
        "slot ", handle.index, " cannot go from ", Name(from), " to ", Name(to), " by a transfer"));
  }
  SetOwner(handle.index, to);
  return absl::OkStatus();
}

absl::Status SlotPool::Release(SlotHandle handle, SlotOwner from) {
  if (absl::Status status = CheckHandle(handle, from); !status.ok()) return status;
  if (from == SlotOwner::kFree || from == SlotOwner::kWarmUp) {
    return absl::FailedPreconditionError(
        absl::StrCat("slot ", handle.index, " is ", Name(from), " and cannot be released"));
  }
  ++slots_[static_cast<size_t>(handle.index)].generation;
  SetOwner(handle.index, SlotOwner::kFree);
  free_.push_back(handle.index);
  return absl::OkStatus();
}

absl::Status SlotPool::CheckInvariants() const {
  std::array<int64_t, kNumSlotOwners> counts{};
  for (const Slot& slot : slots_) ++counts[static_cast<size_t>(slot.owner)];
  if (counts != counts_) return absl::InternalError("slot counts do not match the slots' owners");
  if (slots_[0].owner != SlotOwner::kWarmUp || count(SlotOwner::kWarmUp) != 1) {
    return absl::InternalError("slot 0, and it alone, must be the warm-up slot");
  }
  std::vector<bool> seen(slots_.size(), false);
  for (const int64_t index : free_) {
    if (index < 0 || index >= num_slots() || seen[static_cast<size_t>(index)]) {
      return absl::InternalError(absl::StrCat("slot ", index, " is wrongly in the free list"));
    }
    seen[static_cast<size_t>(index)] = true;
    if (slots_[static_cast<size_t>(index)].owner != SlotOwner::kFree) {
      return absl::InternalError(absl::StrCat("slot ", index, " is in the free list and owned"));
    }
  }
  if (static_cast<int64_t>(free_.size()) != count(SlotOwner::kFree)) {
    return absl::InternalError("the free list does not hold every free slot");
  }
  return absl::OkStatus();
}

}  // namespace gdn::engine
