#include "server/rpc/step_stream.h"

#include <grpcpp/support/async_stream.h>

#include <memory>
#include <optional>
#include <utility>

#include "absl/status/status.h"
#include "server/rpc/convert.h"
#include "server/rpc/coro.h"
#include "server/rpc/status.h"

namespace gdn::rpc {
namespace {

using Stream = grpc::ServerAsyncReaderWriter<grpc::ByteBuffer, grpc::ByteBuffer>;

absl::Status Parse(grpc::ByteBuffer* buffer, v1::StepRequest* request) {
  if (grpc::SerializationTraits<v1::StepRequest>::Deserialize(buffer, request).ok()) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError("the message is not a gdn.v1.StepRequest");
}

grpc::ByteBuffer Serialize(const v1::StepResponse& response) {
  grpc::ByteBuffer buffer;
  bool own_buffer = false;
  grpc::SerializationTraits<v1::StepResponse>::Serialize(response, &buffer, &own_buffer);
  return buffer;
}

absl::StatusOr<std::unique_ptr<engine::BatchCall>> Submit(const Served* served,
                                                          const v1::StepRequest& request,
                                                          const RequestLogOptions& log,
                                                          Call* call) {
  if (served == nullptr) return NotReadyError();
  auto batch = DecodeBatch(request.sequences(), engine::CallKind::kStep, served->facts.hidden_size,
                           served->engine->options());
  if (!batch.ok()) return batch.status();
  for (const engine::SequenceRequest& sequence : batch->sequences) {
    call->record.AddInput(log, sequence.session_id, sequence.input, served->facts.hidden_size);
  }
  return served->engine->Submit(*std::move(batch), call->Options());
}

// While a request is being worked on, the next one is read and the last answer is written. Requests
// do not overlap in the engine: they may well name the same sessions.
Detached Serve(Env& env, Poller& poller) {
  Call call(env, poller, Rpc::kStepStream);
  Stream stream(&call.context);
  Op op;
  env.inference.RequestStepStream(&call.context, &stream, poller.queue(), poller.queue(),
                                  op.Start());
  if (!co_await op) co_return;
  call.Begin();
  Serve(env, poller);

  grpc::ByteBuffer incoming[2];
  v1::StepRequest request;  // Reused, so that a steady stream allocates little.
  v1::StepResponse response;
  Op read(&call.event);
  Op write(&call.event);
  std::unique_ptr<engine::BatchCall> handle;
  call.on_cancel = [&handle] { handle.reset(); };

  absl::Status status;
  stream.Read(&incoming[0], read.Start());
  for (int current = 0; !call.cancelled(); current ^= 1) {
    while (read.pending() && !call.cancelled() && !poller.draining()) co_await call.event;
    if (call.cancelled()) break;
    if (read.pending()) {
      status = DrainingError();
      break;
    }
    if (!read.ok()) break;  // Half-closed, and everything has been answered.
    status = Parse(&incoming[current], &request);
    if (!status.ok()) break;
    stream.Read(&incoming[current ^ 1], read.Start());

    auto submitted = Submit(env.served.load(std::memory_order_acquire), request, env.log, &call);
    status = submitted.status();
    if (!status.ok()) break;
    handle = *std::move(submitted);
    std::optional<engine::BatchResult> result;
    while (!call.cancelled() && !(result = handle->Take())) co_await call.event;
    handle.reset();
    while (write.pending()) co_await call.event;
    if (result) call.record.AddResult(result->sequences, result->timings);
    if (!result || !write.ok()) break;
    status = result->status;
    if (!status.ok()) break;
    response.Clear();
    EncodeBatch(*result, request.sequences(), env.served.load()->facts,
                response.mutable_sequences(), response.mutable_timings());
    stream.Write(Serialize(response), write.Start());
  }
  while (write.pending()) co_await call.event;
  if (status.ok() && (call.cancelled() || !write.ok())) status = absl::CancelledError();

  const grpc::Status wire_status = ToGrpcStatus(status);
  stream.Finish(wire_status, op.Start());
  call.End(wire_status, co_await op && !call.cancelled());
  // A read that is still out ends with the call; what a client writes after its end is dropped.
  while (!call.done() || read.pending()) co_await call.event;
}

}  // namespace

void ServeStepStream(Env& env, Poller& poller) { Serve(env, poller); }

}  // namespace gdn::rpc
