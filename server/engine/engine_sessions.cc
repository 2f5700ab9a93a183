// Sessions by name: create, look, list, delete.
#include <utility>

#include "server/engine/engine_impl.h"
#include "server/engine/validate.h"

namespace gdn::engine {
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
  if (absl::Status status = ValidateTtl(ttl_ms); !status.ok()) return status;
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

}  // namespace gdn::engine
