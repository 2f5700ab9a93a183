#include "server/rpc/generate.h"

#include <grpcpp/support/async_stream.h>

#include <algorithm>
#include <cstddef>
#include <memory>
#include <optional>
#include <utility>

#include "absl/status/status.h"
#include "server/rpc/convert.h"
#include "server/rpc/coro.h"
#include "server/rpc/status.h"

namespace gdn::rpc {
namespace {

// A backlog of tokens with logits is cut into messages of about this size.
constexpr size_t kMessageBytes = 1 << 20;

absl::StatusOr<std::unique_ptr<engine::GenerateCall>> Submit(const Served* served,
                                                             const v1::GenerateRequest& request,
                                                             const RequestLogOptions& log,
                                                             Call* call) {
  if (served == nullptr) return NotReadyError();
  auto generate = DecodeGenerate(request, served->facts.hidden_size, served->engine->options());
  if (!generate.ok()) return generate.status();
  call->record.AddInput(log, generate->session_id, generate->input, served->facts.hidden_size);
  return served->engine->Generate(*std::move(generate), call->Options());
}

size_t TokensPerMessage(const engine::GenerateChunk& chunk) {
  if (chunk.tokens.empty()) return 1;
  const engine::ChosenToken& token = chunk.tokens.front();
  const size_t token_bytes = 32 + 16 * token.top.size() + sizeof(float) * token.logits.size();
  return std::max<size_t>(1, kMessageBytes / token_bytes);
}

v1::FinishReason ToProto(engine::FinishReason reason) {
  switch (reason) {
    case engine::FinishReason::kStop:
      return v1::FINISH_REASON_STOP;
    case engine::FinishReason::kLength:
      return v1::FINISH_REASON_LENGTH;
  }
  return v1::FINISH_REASON_UNSPECIFIED;
}

// Tokens [begin, end) of the chunk. The chunk's position is that after its last token.
void EncodeTokens(const engine::GenerateChunk& chunk, size_t begin, size_t end,
                  v1::GenerateResponse* response) {
  response->Clear();
  for (size_t i = begin; i < end; ++i) EncodeToken(chunk.tokens[i], response->add_tokens());
  response->set_position(chunk.position - static_cast<int64_t>(chunk.tokens.size() - end));
  EncodeTimings(chunk.timings, response->mutable_timings());
}

void EncodeEnd(const engine::GenerateChunk& chunk, v1::GenerateResponse* response) {
  response->set_finish_reason(ToProto(chunk.finish_reason));
  v1::Usage* usage = response->mutable_usage();
  usage->set_input_tokens(chunk.input_tokens);
  usage->set_output_tokens(chunk.output_tokens);
  usage->set_time_to_first_token_ns(chunk.time_to_first_token_ns);
}

// One write is in flight at a time. Until it is done nothing is drained, so a reader that lags gets
// several tokens in a message, and pauses its own stream once the engine's buffer is full.
Detached Serve(Env& env, Poller& poller) {
  Call call(env, poller, Rpc::kGenerate);
  v1::GenerateRequest request;
  grpc::ServerAsyncWriter<v1::GenerateResponse> writer(&call.context);
  Op op;
  env.inference.RequestGenerate(&call.context, &request, &writer, poller.queue(), poller.queue(),
                                op.Start());
  if (!co_await op) co_return;
  call.Begin();
  Serve(env, poller);

  v1::GenerateResponse response;
  std::unique_ptr<engine::GenerateCall> handle;
  call.on_cancel = [&handle] { handle.reset(); };
  absl::Status status;
  {
    auto submitted = Submit(env.served.load(std::memory_order_acquire), request, env.log, &call);
    status = submitted.status();
    if (status.ok()) handle = *std::move(submitted);
  }
  bool first = true;
  bool finished = false;
  bool done = !status.ok();
  while (!done && !call.cancelled()) {
    const std::optional<engine::GenerateChunk> chunk = handle->Drain();
    if (!chunk) {
      co_await call.event;
      continue;
    }
    done = chunk->done;
    call.record.timings = chunk->timings;
    call.record.output_tokens += std::ssize(chunk->tokens);
    if (done) status = chunk->status;
    const size_t size = chunk->tokens.size();
    const size_t step = TokensPerMessage(*chunk);
    for (size_t begin = 0; begin < size || (begin == 0 && done && status.ok()); begin += step) {
      const size_t end = std::min(size, begin + step);
      EncodeTokens(*chunk, begin, end, &response);
      if (first) response.set_seed(handle->seed());
      first = false;
      if (end == size && done && status.ok()) {
        EncodeEnd(*chunk, &response);
        writer.WriteAndFinish(response, grpc::WriteOptions(), grpc::Status::OK, op.Start());
        finished = true;
      } else {
        grpc::WriteOptions options;
        if (end < size) options.set_buffer_hint();
        writer.Write(response, options, op.Start());
      }
      if (!co_await op || finished || call.cancelled()) break;
    }
    if (finished || !op.ok()) break;
  }
  handle.reset();
  if (!finished) {
    if (status.ok()) status = absl::CancelledError();  // A write failed, or the client is gone.
    writer.Finish(ToGrpcStatus(status), op.Start());
    co_await op;
  }
  call.End(ToGrpcStatus(status), op.ok() && !call.cancelled());
  while (!call.done()) co_await call.event;
}

}  // namespace

void ServeGenerate(Env& env, Poller& poller) { Serve(env, poller); }

}  // namespace gdn::rpc
