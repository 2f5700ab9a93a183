// Forks: the engine thread copies the state, the caller's thread makes sessions of the copies.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/engine/call_handles.h"
#include "server/engine/engine_impl.h"
#include "server/engine/validate.h"

namespace gdn::engine {

absl::StatusOr<std::unique_ptr<ForkCall>> EngineImpl::ForkSession(ForkRequest request,
                                                                  CallOptions options) {
  if (absl::Status status = ValidateFork(request, pool_.num_usable()); !status.ok()) return status;
  auto fork = std::make_shared<Fork>();
  fork->options = std::move(options);
  Outbox outbox;
  absl::Status status;
  {
    const Lock lock(mu_);
    status = AdmitFork(fork, request, &outbox);
  }
  Publish(&outbox);
  if (!status.ok()) return status;
  return std::unique_ptr<ForkCall>(std::make_unique<ForkHandle>(this, std::move(fork)));
}

absl::Status EngineImpl::AdmitFork(const std::shared_ptr<Fork>& fork, const ForkRequest& request,
                                   Outbox* outbox) {
  if (absl::Status status = CheckAccepting(outbox); !status.ok()) return status;
  EvictExpired(outbox);
  absl::StatusOr<Session*> parent =
      FindIdle(request.session_id, request.expected_position, "session_id");
  if (!parent.ok()) return parent.status();
  if (absl::Status status = CheckDeadline(fork->options); !status.ok()) return status;
  if (!pool_.AcquireMany(SlotOwner::kInFlight, request.count, &fork->slots)) {
    return NoSlotError(request.count, outbox);
  }
  forking_slots_ += request.count;
  // In use, the parent can neither move on nor go away while its state is copied.
  fork->parent = *parent;
  UseSession(fork->parent);
  fork->child.parent_id = fork->parent->id;
  fork->child.ttl_ms = request.ttl_ms.value_or(fork->parent->ttl_ms);
  fork->child.position = fork->parent->position;
  fork->child.token_hash = fork->parent->token_hash;
  if (fork->child.position > 0) {
    forks_.push_back(fork);
    Wake();
  } else {  // The slot holds nothing.
    EndFork(fork, absl::OkStatus(), outbox);
  }
  return absl::OkStatus();
}

bool EngineImpl::RunForks(Lock& lock) {
  bool worked = false;
  while (!forks_.empty()) {
    const std::shared_ptr<Fork> fork = std::move(forks_.front());
    forks_.pop_front();
    absl::Status status = CheckDeadline(fork->options);
    if (status.ok()) status = Copy(lock, *fork);
    EndFork(fork, std::move(status), &outbox_);
    done_cv_.notify_all();
    worked = true;
  }
  return worked;
}

absl::Status EngineImpl::Copy(Lock& lock, const Fork& fork) {
  AcquirePipeline(lock);
  lock.unlock();
  absl::Status status;
  for (const SlotHandle& to : fork.slots) {
    status = pipeline_->CopySlot(fork.parent->slot.index, to.index);
    if (!status.ok()) break;
  }
  lock.lock();
  ReleasePipeline();
  if (status.ok()) return status;
  return absl::InternalError(absl::StrCat("the state of session ", fork.parent->id,
                                          " could not be copied: ", status.message(),
                                          "; the session itself is as it was"));
}

void EngineImpl::EndFork(const std::shared_ptr<Fork>& fork, absl::Status status, Outbox* outbox) {
  ReturnSession(std::exchange(fork->parent, nullptr));
  fork->status = std::move(status);
  fork->done = true;
  if (fork->abandoned || !fork->status.ok()) FreeCopies(fork.get());
  outbox->Ready(fork);
}

void EngineImpl::FreeCopies(Fork* fork) {
  for (const SlotHandle& slot : fork->slots) Expect(pool_.Release(slot, SlotOwner::kInFlight));
  forking_slots_ -= static_cast<int64_t>(fork->slots.size());
  fork->slots.clear();
}

void EngineImpl::Abandon(Fork* fork) {
  Outbox outbox;
  {
    const Lock lock(mu_);
    if (std::exchange(fork->abandoned, true)) return;
    const auto queued = std::find_if(forks_.begin(), forks_.end(),
                                     [fork](const auto& other) { return other.get() == fork; });
    if (queued != forks_.end()) {
      const std::shared_ptr<Fork> owner = std::move(*queued);
      forks_.erase(queued);
      EndFork(owner, absl::CancelledError("the fork was cancelled"), &outbox);
      done_cv_.notify_all();
    } else if (fork->done) {
      FreeCopies(fork);
    }  // Else it is being copied, and EndFork does the rest.
  }
  Publish(&outbox);
}

std::optional<absl::StatusOr<std::vector<SessionInfo>>> EngineImpl::Take(Fork* fork) {
  std::vector<SessionInfo> result;
  {
    const Lock lock(mu_);
    if (!fork->done || std::exchange(fork->abandoned, true)) return std::nullopt;
    if (!fork->status.ok()) return std::move(fork->status);
    result.reserve(fork->slots.size());
    forking_slots_ -= static_cast<int64_t>(fork->slots.size());
    for (const SlotHandle& slot : fork->slots) {
      Expect(pool_.Transfer(slot, SlotOwner::kInFlight, SlotOwner::kLive));
      Session* child = AddSession(slot, fork->child.ttl_ms);
      child->parent_id = fork->child.parent_id;
      child->position = fork->child.position;
      child->token_hash = fork->child.token_hash;
      result.push_back(Describe(*child));
    }
    fork->slots.clear();
  }
  Outbox outbox;
  Publish(&outbox);
  return result;
}

}  // namespace gdn::engine
