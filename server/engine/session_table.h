// File: session_table.h
//
// The sessions by id, and the order in which idle ones expire.
//
// Thread-safety: none; the engine's lock covers it.
#ifndef SERVER_ENGINE_SESSION_TABLE_H_
#define SERVER_ENGINE_SESSION_TABLE_H_

#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <utility>

#include "server/engine/slot_pool.h"
#include "server/engine/token_hash.h"
#include "server/engine/types.h"

namespace gdn::engine {

inline constexpr int64_t kNever = std::numeric_limits<int64_t>::max();

struct Session {
  std::string id;  // Empty: lives as long as its Generate call, and is in no table.
  std::string parent_id;
  SlotHandle slot;
  int64_t position = 0;  // 0: the slot holds nothing of this session yet; start from zero.
  uint64_t token_hash = kEmptyHash;
  int64_t create_time_ms = 0;
  int64_t last_use_time_ms = 0;
  int64_t ttl_ms = 0;
  bool in_use = false;
  int64_t expires_ns = kNever;  // Kept by the table while the session is idle.
};

// A pointer stays valid until Remove; nobody removes a session that is in use except its user.
class SessionTable {
 public:
  // Adds an idle session; its id is drawn here.
  Session* Add(std::unique_ptr<Session> session, int64_t now_ns);
  Session* Find(std::string_view id);
  // nullptr, or the next session after `id` in order.
  Session* After(std::string_view id);
  // Marks the session used; while it is, it does not expire.
  void BeginUse(Session* session);
  void EndUse(Session* session, int64_t now_ns, int64_t unix_time_ms);
  void Remove(Session* session);

  // When the next idle session expires; kNever if none does.
  int64_t next_expiry_ns() const { return expiry_.empty() ? kNever : expiry_.begin()->first; }
  // The idle session that expires next, if it is due.
  Session* Expired(int64_t now_ns);

  int64_t size() const { return static_cast<int64_t>(sessions_.size()); }
  bool CheckInvariants() const;

  template <typename F>
  void ForEach(F f) const {
    for (const auto& [id, session] : sessions_) f(*session);
  }

 private:
  void Schedule(Session* session, int64_t now_ns);
  void Unschedule(Session* session);

  std::map<std::string, std::unique_ptr<Session>, std::less<>> sessions_;
  std::set<std::pair<int64_t, Session*>> expiry_;  // Idle sessions with a TTL.
};

}  // namespace gdn::engine

#endif  // SERVER_ENGINE_SESSION_TABLE_H_
