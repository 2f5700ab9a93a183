#include "server/engine/session_table.h"

#include "server/engine/random.h"

namespace gdn::engine {
namespace {

constexpr int64_t kNsPerMs = 1'000'000;

int64_t Later(int64_t now_ns, int64_t ttl_ms) {
  if (ttl_ms > (kNever - now_ns) / kNsPerMs) return kNever;
  return now_ns + ttl_ms * kNsPerMs;
}

}  // namespace

Session* SessionTable::Add(std::unique_ptr<Session> session, int64_t now_ns) {
  Session* added = session.get();
  do {
    added->id = RandomId();
  } while (sessions_.count(added->id) != 0);
  sessions_.emplace(added->id, std::move(session));
  Schedule(added, now_ns);
  return added;
}

Session* SessionTable::Find(std::string_view id) {
  const auto it = sessions_.find(id);
  return it == sessions_.end() ? nullptr : it->second.get();
}

Session* SessionTable::After(std::string_view id) {
  const auto it = sessions_.upper_bound(id);
  return it == sessions_.end() ? nullptr : it->second.get();
}

void SessionTable::Schedule(Session* session, int64_t now_ns) {
  if (session->ttl_ms == 0) return;
  session->expires_ns = Later(now_ns, session->ttl_ms);
  if (session->expires_ns != kNever) expiry_.emplace(session->expires_ns, session);
}

void SessionTable::Unschedule(Session* session) {
  if (session->expires_ns != kNever) expiry_.erase({session->expires_ns, session});
  session->expires_ns = kNever;
}

void SessionTable::BeginUse(Session* session) {
  Unschedule(session);
  session->in_use = true;
}

void SessionTable::EndUse(Session* session, int64_t now_ns, int64_t unix_time_ms) {
  session->in_use = false;
  session->last_use_time_ms = unix_time_ms;
  Schedule(session, now_ns);
}

void SessionTable::Remove(Session* session) {
  Unschedule(session);
  sessions_.erase(sessions_.find(session->id));
}

Session* SessionTable::Expired(int64_t now_ns) {
  return next_expiry_ns() <= now_ns && !expiry_.empty() ? expiry_.begin()->second : nullptr;
}

bool SessionTable::CheckInvariants() const {
  size_t scheduled = 0;
  for (const auto& [id, session] : sessions_) {
    if (session->id != id) return false;
    if (session->expires_ns == kNever) continue;
    if (session->in_use || session->ttl_ms == 0) return false;
    if (expiry_.count({session->expires_ns, session.get()}) == 0) return false;
    ++scheduled;
  }
  return scheduled == expiry_.size();
}

}  // namespace gdn::engine
