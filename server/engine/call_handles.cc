#include "server/engine/call_handles.h"

#include "absl/status/status.h"

namespace gdn::engine {

void EngineImpl::Cancel(Call* call) {
  Outbox outbox;
  {
    const Lock lock(mu_);
    if (call->done) return;
    EndEarly(call, absl::CancelledError("the call was cancelled"), &outbox);
  }
  if (!outbox.empty()) Publish(&outbox);
}

std::optional<BatchResult> EngineImpl::Take(Call* call) {
  const Lock lock(mu_);
  if (!call->done || std::exchange(call->delivered, true)) return std::nullopt;
  BatchResult result;
  result.timings = call->timings;
  result.sequences.reserve(call->sequences.size());
  for (CallSequence& sequence : call->sequences) {
    if (!sequence.done) sequence.result.status = call->status;
    result.sequences.push_back(std::move(sequence.result));
  }
  result.status = std::move(call->status);
  return result;
}

std::optional<GenerateChunk> EngineImpl::Drain(Call* call) {
  Stream& stream = *call->stream;
  GenerateChunk chunk;
  Outbox outbox;
  {
    const Lock lock(mu_);
    if (call->delivered || (stream.buffer.empty() && !call->done)) return std::nullopt;
    chunk.tokens.swap(stream.buffer);
    chunk.position = stream.position;
    if (call->done) {
      call->delivered = true;
      chunk.done = true;
      chunk.status = std::move(call->status);
      chunk.finish_reason = stream.finish_reason;
      chunk.input_tokens = call->sequences[0].length;
      chunk.output_tokens = stream.output_tokens;
      chunk.time_to_first_token_ns = stream.first_token_ns;
      chunk.timings = call->timings;
    } else if (stream.paused) {
      Resume(&stream, clock_->NowNs(), &outbox);
      QueueDecode(call);
      Wake();
    }
  }
  if (!outbox.empty()) Publish(&outbox);
  return chunk;
}

}  // namespace gdn::engine
