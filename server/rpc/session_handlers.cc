#include "server/rpc/session_handlers.h"

#include <grpcpp/support/async_unary_call.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "server/rpc/convert.h"
#include "server/rpc/coro.h"
#include "server/rpc/status.h"
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

// Unlike the others it waits for the engine: the state is copied between two steps.
Detached ServeFork(Env& env, Poller& poller) {
  Call call(env, poller, Rpc::kForkSession);
  v1::ForkSessionRequest request;
  grpc::ServerAsyncResponseWriter<v1::ForkSessionResponse> responder(&call.context);
  Op op;
  env.sessions.RequestForkSession(&call.context, &request, &responder, poller.queue(),
                                  poller.queue(), op.Start());
  if (!co_await op) co_return;
  call.Begin();
  ServeFork(env, poller);

  v1::ForkSessionResponse response;
  absl::Status status;
  std::unique_ptr<engine::ForkCall> handle;
  call.on_cancel = [&handle] { handle.reset(); };
  const Served* served = env.served.load(std::memory_order_acquire);
  if (served == nullptr) {
    status = NotReadyError();
  } else {
    engine::ForkRequest fork;
    fork.session_id = request.session_id();
    if (request.has_expected_position()) fork.expected_position = request.expected_position();
    if (request.has_count()) fork.count = request.count();
    fork.ttl_ms = Ttl(request);
    auto submitted = served->engine->ForkSession(std::move(fork), call.Options());
    status = submitted.status();
    if (status.ok()) handle = *std::move(submitted);
  }
  if (status.ok()) {
    std::optional<absl::StatusOr<std::vector<engine::SessionInfo>>> copies;
    while (!call.cancelled() && !(copies = handle->Take())) co_await call.event;
    handle.reset();
    status = copies ? copies->status() : absl::CancelledError();
    if (status.ok()) {
      for (const engine::SessionInfo& session : **copies) {
        EncodeSession(session, response.add_sessions());
      }
    }
  }
  const grpc::Status wire_status = ToGrpcStatus(status);
  if (wire_status.ok()) {
    responder.Finish(response, wire_status, op.Start());
  } else {
    responder.FinishWithError(wire_status, op.Start());
  }
  call.End(wire_status, co_await op);
  while (!call.done()) co_await call.event;
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
  ServeFork(env, poller);
}

}  // namespace gdn::rpc
