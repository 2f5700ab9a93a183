#include "server/rpc/session_handlers.h"

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "server/rpc/convert.h"
#include "server/rpc/unary.h"

namespace gdn::rpc {
namespace {

constexpr int64_t kDefaultPageSize = 100;
constexpr int64_t kMaxPageSize = 1000;

std::optional<int64_t> Ttl(const auto& request) {
  if (!request.has_ttl_ms()) return std::nullopt;
  return request.ttl_ms();
}

absl::Status GetModel(const Served& served, const v1::GetModelRequest&, v1::ModelInfo* response) {
  *response = served.info;
  return absl::OkStatus();
}

absl::Status CreateSession(const Served& served, const v1::CreateSessionRequest& request,
                           v1::Session* response) {
  const auto session = served.engine->CreateSession(Ttl(request));
  if (!session.ok()) return session.status();
  EncodeSession(*session, response);
  return absl::OkStatus();
}

absl::Status GetSession(const Served& served, const v1::GetSessionRequest& request,
                        v1::Session* response) {
  const auto session = served.engine->GetSession(request.session_id());
  if (!session.ok()) return session.status();
  EncodeSession(*session, response);
  return absl::OkStatus();
}

absl::Status ListSessions(const Served& served, const v1::ListSessionsRequest& request,
                          v1::ListSessionsResponse* response) {
  if (request.page_size() < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("page_size: ", request.page_size(), " is negative"));
  }
  const int64_t limit = request.page_size() == 0
                            ? kDefaultPageSize
                            : std::min<int64_t>(request.page_size(), kMaxPageSize);
  // One more than asked for shows whether this page is the last. A page token is the id it follows.
  int64_t total = 0;
  std::vector<engine::SessionInfo> sessions =
      served.engine->ListSessions(request.page_token(), limit + 1, &total);
  if (std::ssize(sessions) > limit) {
    sessions.resize(static_cast<size_t>(limit));
    response->set_next_page_token(sessions.back().id);
  }
  for (const engine::SessionInfo& session : sessions) {
    EncodeSession(session, response->add_sessions());
  }
  response->set_total(total);
  return absl::OkStatus();
}

absl::Status DeleteSession(const Served& served, const v1::DeleteSessionRequest& request,
                           v1::DeleteSessionResponse* response) {
  const auto position = served.engine->DeleteSession(request.session_id());
  if (!position.ok()) return position.status();
  response->set_position(*position);
  return absl::OkStatus();
}

absl::Status ForkSession(const Served& served, const v1::ForkSessionRequest& request,
                         v1::ForkSessionResponse* response) {
  std::optional<int64_t> expected_position;
  if (request.has_expected_position()) expected_position = request.expected_position();
  const auto sessions =
      served.engine->ForkSession(request.session_id(), expected_position,
                                 request.has_count() ? request.count() : 1, Ttl(request));
  if (!sessions.ok()) return sessions.status();
  for (const engine::SessionInfo& session : *sessions) {
    EncodeSession(session, response->add_sessions());
  }
  return absl::OkStatus();
}

}  // namespace

void ServeSessions(Env& env, Poller& poller) {
  using Inference = v1::Inference::AsyncService;
  using Sessions = v1::Sessions::AsyncService;
  ServeUnary(env, poller, Rpc::kGetModel, &env.inference, &Inference::RequestGetModel, GetModel);
  ServeUnary(env, poller, Rpc::kCreateSession, &env.sessions, &Sessions::RequestCreateSession,
             CreateSession);
  ServeUnary(env, poller, Rpc::kGetSession, &env.sessions, &Sessions::RequestGetSession,
             GetSession);
  ServeUnary(env, poller, Rpc::kListSessions, &env.sessions, &Sessions::RequestListSessions,
             ListSessions);
  ServeUnary(env, poller, Rpc::kDeleteSession, &env.sessions, &Sessions::RequestDeleteSession,
             DeleteSession);
  ServeUnary(env, poller, Rpc::kForkSession, &env.sessions, &Sessions::RequestForkSession,
             ForkSession);
}

}  // namespace gdn::rpc
