#include "server/rpc/batch_handler.h"

#include <grpcpp/support/async_unary_call.h>

#include <memory>
#include <optional>
#include <utility>

#include "absl/status/status.h"
#include "server/rpc/convert.h"
#include "server/rpc/coro.h"
#include "server/rpc/status.h"
#include "server/rpc/unary.h"

namespace gdn::rpc {
namespace {

// The engine has its own copy of the rows; a long prompt's message need not outlive it.
void FreeHiddenStates(SequenceRequests* sequences) {
  for (v1::SequenceRequest& sequence : *sequences) {
    if (sequence.input().has_hidden_states()) {
      delete sequence.mutable_input()->release_hidden_states();
    }
  }
}

template <typename Base, typename Request, typename Response>
Detached ServeBatch(
    Env& env, Poller& poller, Rpc rpc, engine::CallKind kind,
    RequestMethod<Base, Request, grpc::ServerAsyncResponseWriter<Response>> request_method) {
  Call call(env, poller, rpc);
  Request request;
  grpc::ServerAsyncResponseWriter<Response> responder(&call.context);
  Op op;
  (env.inference.*request_method)(&call.context, &request, &responder, poller.queue(),
                                  poller.queue(), op.Start());
  if (!co_await op) co_return;
  call.Begin();
  ServeBatch(env, poller, rpc, kind, request_method);

  Response response;
  absl::Status status;
  std::unique_ptr<engine::BatchCall> handle;
  call.on_cancel = [&handle] { handle.reset(); };
  const Served* served = env.served.load(std::memory_order_acquire);
  if (served == nullptr) {
    status = NotReadyError();
  } else {
    auto batch = DecodeBatch(request.sequences(), kind, served->facts.hidden_size,
                             served->engine->options());
    FreeHiddenStates(request.mutable_sequences());
    status = batch.status();
    if (status.ok()) {
      for (const engine::SequenceRequest& sequence : batch->sequences) {
        call.record.AddInput(env.log, sequence.session_id, sequence.input,
                             served->facts.hidden_size);
      }
      auto submitted = served->engine->Submit(*std::move(batch), call.Options());
      status = submitted.status();
      if (status.ok()) handle = *std::move(submitted);
    }
  }
  if (status.ok()) {
    std::optional<engine::BatchResult> result;
    while (!call.cancelled() && !(result = handle->Take())) co_await call.event;
    handle.reset();
    status = result ? result->status : absl::CancelledError();
    if (result) call.record.AddResult(result->sequences, result->timings);
    if (status.ok()) {
      EncodeBatch(*result, request.sequences(), served->facts, response.mutable_sequences(),
                  response.mutable_timings());
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

void ServePrefill(Env& env, Poller& poller) {
  ServeBatch(env, poller, Rpc::kPrefill, engine::CallKind::kPrefill,
             &v1::Inference::AsyncService::RequestPrefill);
}

void ServeStep(Env& env, Poller& poller) {
  ServeBatch(env, poller, Rpc::kStep, engine::CallKind::kStep,
             &v1::Inference::AsyncService::RequestStep);
}

}  // namespace gdn::rpc
