#include "server/rpc/call.h"

#include <algorithm>
#include <chrono>

namespace gdn::rpc {
namespace {

using std::chrono::system_clock;

// gRPC gives deadlines on the system clock. Far ones are as good as none, and would overflow.
std::optional<int64_t> ToDeadlineNs(system_clock::time_point deadline, const engine::Clock& clock) {
  constexpr std::chrono::hours kFar(24 * 365);
  const system_clock::time_point now = system_clock::now();
  if (deadline == system_clock::time_point::max() || deadline > now + kFar) return std::nullopt;
  const auto left = std::max(deadline - now, system_clock::duration::zero());
  return clock.NowNs() + std::chrono::duration_cast<std::chrono::nanoseconds>(left).count();
}

}  // namespace

absl::Status NotReadyError() {
  return absl::UnavailableError("the model is still being loaded; retry when health is SERVING");
}

absl::Status DrainingError() {
  return absl::UnavailableError("the server is draining; retry on another one");
}

Call::Call(Env& env, Poller& poller, Rpc rpc) : env_(env), poller_(poller), rpc_(rpc) {
  Waker::event = &event;
  LiveCall::event = &event;
  context.AsyncNotifyWhenDone(static_cast<Tag*>(this));
}

Call::~Call() {
  if (!begun_) return;
  poller_.Forget(this);
  poller_.RemoveLive(this);
  const int64_t duration_ns = env_.clock->NowNs() - begin_ns_;
  LogRequestEnd(env_.log, record, rpc_, code_, message_, duration_ns);
  if (env_.observer != nullptr) env_.observer->OnCallDone(rpc_, code_, duration_ns);
}

void Call::Begin() {
  begun_ = true;
  begin_ns_ = env_.clock->NowNs();
  deadline_ns_ = ToDeadlineNs(context.deadline(), *env_.clock);
  const auto given = context.client_metadata().find(kRequestIdKey);
  record.id = ChooseRequestId(given == context.client_metadata().end()
                                  ? std::string_view()
                                  : std::string_view(given->second.data(), given->second.size()));
  // Initial metadata would go out ahead of a refusal, and clients do not retry after any.
  context.AddTrailingMetadata(kRequestIdKey, record.id);
  LogRequestBegin(record, rpc_);
  if (env_.observer != nullptr) env_.observer->OnCallStarted(rpc_);
  poller_.AddLive(this);
}

engine::CallOptions Call::Options() {
  Waker* waker = this;
  return {.deadline_ns = deadline_ns_,
          .on_ready = [poller = &poller_, waker] { poller->Wake(waker); }};
}

void Call::End(const grpc::Status& status, bool sent) {
  if (sent) {
    code_ = status.error_code();
    message_ = status.error_message();
  } else if (deadline_ns_ && env_.clock->NowNs() >= *deadline_ns_) {
    code_ = grpc::StatusCode::DEADLINE_EXCEEDED;
  } else {
    code_ = grpc::StatusCode::CANCELLED;
  }
}

void Call::Run(bool /*ok*/) {
  done_ = true;
  cancelled_ = context.IsCancelled();
  if (cancelled_ && on_cancel) on_cancel();
  event.Set();
}

}  // namespace gdn::rpc
