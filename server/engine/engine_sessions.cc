// Sessions by name: create, look, list, delete, fork.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/engine/engine_impl.h"

namespace gdn::engine {
namespace {

absl::Status CheckTtl(std::optional<int64_t> ttl_ms) {
  if (!ttl_ms.has_value() || *ttl_ms >= 0) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("ttl_ms is ", *ttl_ms, ", expected >= 0 (0: never evicted)"));
}

}  // namespace

SessionInfo EngineImpl::Describe(const Session& session) const {
  SessionInfo info;
  info.id = session.id;
  info.parent_id = session.parent_id;
  info.position = session.position;
  info.token_hash = session.token_hash;
  info.create_time_ms = session.create_time_ms;
  info.last_use_time_ms = session.last_use_time_ms;
  info.ttl_ms = session.ttl_ms;
  info.in_use = session.in_use;
  info.state_bytes = pipeline_->info().state_bytes_per_slot;
  return info;
}

Session* EngineImpl::AddSession(SlotHandle slot, int64_t ttl_ms) {
  auto session = std::make_unique<Session>();
  session->slot = slot;
  session->ttl_ms = ttl_ms;
  session->create_time_ms = clock_->UnixTimeMs();
  session->last_use_time_ms = session->create_time_ms;
  Session* added = sessions_.Add(std::move(session), clock_->NowNs());
  if (sessions_.next_expiry_ns() < sleeping_until_ns_) Wake();
  return added;
}

absl::StatusOr<SessionInfo> EngineImpl::CreateSession(std::optional<int64_t> ttl_ms) {
  if (absl::Status status = CheckTtl(ttl_ms); !status.ok()) return status;
  Outbox outbox;
  absl::StatusOr<SessionInfo> result = [&]() -> absl::StatusOr<SessionInfo> {
    const Lock lock(mu_);
    if (absl::Status status = CheckAccepting(&outbox); !status.ok()) return status;
    EvictExpired(&outbox);
    const std::optional<SlotHandle> slot = pool_.Acquire(SlotOwner::kLive);
    if (!slot.has_value()) return NoSlotError(1, &outbox);
    return Describe(*AddSession(*slot, ttl_ms.value_or(options_.default_ttl_ms)));
  }();
  Publish(&outbox);
  return result;
}

absl::StatusOr<SessionInfo> EngineImpl::GetSession(std::string_view id) {
  Outbox outbox;
  absl::StatusOr<SessionInfo> result = [&]() -> absl::StatusOr<SessionInfo> {
    const Lock lock(mu_);
    EvictExpired(&outbox);
    const Session* session = sessions_.Find(id);
    if (session == nullptr) return UnknownSession("session_id", id);
    return Describe(*session);
  }();
  if (!outbox.empty()) Publish(&outbox);
  return result;
}

std::vector<SessionInfo> EngineImpl::ListSessions(std::string_view after, int64_t limit,
                                                  int64_t* total) {
  Outbox outbox;
  std::vector<SessionInfo> result;
  {
    const Lock lock(mu_);
    EvictExpired(&outbox);
    *total = sessions_.size();
    const Session* session = sessions_.After(after);
    while (session != nullptr && static_cast<int64_t>(result.size()) < limit) {
      result.push_back(Describe(*session));
      session = sessions_.After(session->id);
    }
  }
  if (!outbox.empty()) Publish(&outbox);
  return result;
}

absl::StatusOr<int64_t> EngineImpl::DeleteSession(std::string_view id) {
  Outbox outbox;
  absl::StatusOr<int64_t> result = [&]() -> absl::StatusOr<int64_t> {
    const Lock lock(mu_);
    EvictExpired(&outbox);
    absl::StatusOr<Session*> session = FindIdle(id, std::nullopt, "session_id");
    if (!session.ok()) return session.status();
    const int64_t position = (*session)->position;
    Expect(pool_.Release((*session)->slot, SlotOwner::kLive));
    sessions_.Remove(*session);
    return position;
  }();
  Publish(&outbox);
  return result;
}

absl::StatusOr<std::vector<SessionInfo>> EngineImpl::ForkSession(
    std::string_view id, std::optional<int64_t> expected_position, int32_t count,
    std::optional<int64_t> ttl_ms) {
  if (absl::Status status = CheckTtl(ttl_ms); !status.ok()) return status;
  if (count < 1) {
    return absl::InvalidArgumentError(absl::StrCat("count is ", count, ", expected >= 1"));
  }
  if (count > pool_.num_usable()) {
    return absl::OutOfRangeError(absl::StrCat("count is ", count, ", over the limit of ",
                                              pool_.num_usable(), " (limits.max_sessions)"));
  }
  Outbox outbox;
  absl::StatusOr<std::vector<SessionInfo>> result =
      Fork(id, expected_position, count, ttl_ms, &outbox);
  Publish(&outbox);
  return result;
}

absl::StatusOr<std::vector<SessionInfo>> EngineImpl::Fork(std::string_view id,
                                                          std::optional<int64_t> expected_position,
                                                          int32_t count,
                                                          std::optional<int64_t> ttl_ms,
                                                          Outbox* outbox) {
  Lock lock(mu_);
  if (absl::Status status = CheckAccepting(outbox); !status.ok()) return status;
  EvictExpired(outbox);
  absl::StatusOr<Session*> found = FindIdle(id, expected_position, "session_id");
  if (!found.ok()) return found.status();
  Session* parent = *found;
  std::vector<SlotHandle> slots;
  slots.reserve(static_cast<size_t>(count));
  if (!pool_.AcquireMany(SlotOwner::kInFlight, count, &slots)) return NoSlotError(count, outbox);

  // In use, the parent can neither move on nor go away while its state is copied.
  UseSession(parent);
  forking_slots_ += count;
  absl::Status status;
  if (parent->position > 0) {  // Before that its slot holds nothing.
    CopyCommand command;
    command.from = parent->slot.index;
    for (const SlotHandle& slot : slots) command.to.push_back(slot.index);
    if (thread_running_) {
      copies_.push_back(&command);
      Wake();
      done_cv_.wait(lock, [&command] { return command.done; });
    } else {
      Copy(lock, &command);
    }
    status = std::move(command.status);
  }
  forking_slots_ -= count;
  Expect(pool_.Transfer(parent->slot, SlotOwner::kInFlight, SlotOwner::kLive));
  sessions_.EndUse(parent, clock_->NowNs(), clock_->UnixTimeMs());

  if (!status.ok()) {
    for (const SlotHandle& slot : slots) Expect(pool_.Release(slot, SlotOwner::kInFlight));
    if (absl::IsUnavailable(status)) return status;
    return absl::InternalError(absl::StrCat("the state of session ", parent->id,
                                            " could not be copied: ", status.message(),
                                            "; the session itself is as it was"));
  }
  std::vector<SessionInfo> result;
  result.reserve(slots.size());
  for (const SlotHandle& slot : slots) {
    Expect(pool_.Transfer(slot, SlotOwner::kInFlight, SlotOwner::kLive));
    Session* child = AddSession(slot, ttl_ms.value_or(parent->ttl_ms));
    child->parent_id = parent->id;
    child->position = parent->position;
    child->token_hash = parent->token_hash;
    result.push_back(Describe(*child));
  }
  return result;
}

}  // namespace gdn::engine
