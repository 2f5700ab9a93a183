// The second half of a step: what its outputs mean for the calls.
#include <algorithm>
#include <span>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/engine/engine_impl.h"
#include "server/engine/step_stats.h"

namespace gdn::engine {
namespace {

using pipeline::SequenceInput;
using pipeline::SequenceOutput;

// Room for all of a call's rows at the first of them.
void Append(std::span<const float> values, int64_t total, std::vector<float>* out) {
  if (values.empty()) return;
  if (out->empty()) out->reserve(static_cast<size_t>(total));
  out->insert(out->end(), values.begin(), values.end());
}

std::string NameOf(const Session& session) {
  return session.id.empty() ? "the session of this call" : absl::StrCat("session ", session.id);
}

absl::Status StepError(const Session& session, const absl::Status& status) {
  const std::string message =
      absl::StrCat("the step that ran ", NameOf(session),
                   " failed, and the session was removed: ", status.message(),
                   "; start a new session and send its history again");
  return absl::IsDataLoss(status) ? absl::DataLossError(message) : absl::InternalError(message);
}

absl::Status NonFiniteError(const Session& session) {
  return absl::DataLossError(absl::StrCat("the state or output of ", NameOf(session),
                                          " became NaN or infinite at position ", session.position,
                                          ", and the session was removed; start a new session"));
}

// A throw-away session that was fed its last token, before that was known to be the last.
bool IsWaste(const Call& call) {
  return call.stream != nullptr && call.stream->throw_away != nullptr && call.stream->complete();
}

}  // namespace

bool EngineImpl::CompleteStep(Lock& lock) {
  if (steps_.empty()) return false;
  AcquirePipeline(lock);
  if (steps_.empty()) {
    ReleasePipeline();
    return false;
  }
  Step& step = steps_.front();

  lock.unlock();
  absl::Status status = step.launch_status;
  if (status.ok()) status = pipeline_->Wait(&step.outputs);
  const int64_t end_ns = clock_->NowNs();
  if (status.ok() && step.outputs.size() != step.inputs.size()) {
    status = absl::InternalError(absl::StrCat("the pipeline gave ", step.outputs.size(),
                                              " outputs for ", step.inputs.size(), " sequences"));
  }
  for (size_t i = 0; i < step.batch.size(); ++i) {
    Stage(step.batch[i], step.inputs[i], status.ok() ? &step.outputs[i] : nullptr, status);
  }
  // A step launched while another was running has not run since then.
  const int64_t duration_ns = end_ns - std::max(step.start_ns, last_step_end_ns_);
  last_step_end_ns_ = end_ns;
  observer_->OnStep(MakeStepStats(step.batch, duration_ns));
  lock.lock();

  ReleasePipeline();
  for (const BatchItem& item : step.batch) Apply(item, end_ns);
  for (Call* call : step.calls) {
    call->timings.compute_ns += duration_ns;
    AfterStep(call);
  }
  steps_.PopOldest();
  return true;
}

void EngineImpl::Settle(Lock& lock) {
  while (CompleteStep(lock)) {
    lock.unlock();
    Publish(&outbox_);
    lock.lock();
  }
}

void EngineImpl::Stage(const BatchItem& item, const SequenceInput& input,
                       const SequenceOutput* output, const absl::Status& step_status) {
  CallSequence& sequence = SequenceOf(item);
  if (sequence.lost) return;
  const Session& session = *sequence.session;
  if (output == nullptr) {
    sequence.staged_status = StepError(session, step_status);
    return;
  }
  const pipeline::PipelineInfo& info = pipeline_->info();
  const Stream* stream = Owner(item)->stream.get();
  const bool chosen = input.sample != nullptr && (stream == nullptr || !stream->complete());
  // A sampler that finds no token says so by an id outside the vocabulary.
  if (!output->finite ||
      (chosen && (output->token.id < 0 || output->token.id >= info.vocab_size))) {
    sequence.staged_status = NonFiniteError(session);
    sequence.staged_non_finite = true;
    return;
  }
  if (!input.hidden.empty()) {
    sequence.staged_hash = HashHidden(session.token_hash, input.hidden, info.hidden_size);
  } else if (input.chained >= 0) {  // The step before has told the token since.
    sequence.staged_hash = HashTokens(session.token_hash, std::span(&stream->last_token, 1));
  } else {
    sequence.staged_hash = HashTokens(session.token_hash, input.tokens);
  }
  if (stream == nullptr) {
    const auto total = [&](Positions positions, int64_t width) {
      return positions == Positions::kAll ? sequence.length * width : width;
    };
    Append(output->logits, total(sequence.output.logits, info.vocab_size), &sequence.result.logits);
    Append(output->hidden, total(sequence.output.hidden, info.hidden_size),
           &sequence.result.hidden);
  }
  if (!chosen) return;
  ChosenToken& token = sequence.staged_token.emplace();
  token.id = output->token.id;
  token.logprob = output->token.logprob;
  token.top.assign(output->top.begin(), output->top.end());
  if (stream != nullptr) token.logits.assign(output->logits.begin(), output->logits.end());
}

void EngineImpl::Apply(const BatchItem& item, int64_t now_ns) {
  Call* call = Owner(item);
  CallSequence& sequence = SequenceOf(item);
  --sequence.rows_in_flight;
  sequence.tokens_in_flight -= item.tokens;
  if (!sequence.lost && !IsWaste(*call)) ApplyRow(call, &sequence, item, now_ns);
  if (sequence.rows_in_flight > 0) return;
  if (sequence.lost) {
    Quarantine(call, &sequence);
    sequence.done = true;
  } else if (const Stream* stream = call->stream.get()) {
    sequence.done = stream->complete() && stream->fed_tokens >= stream->tokens_to_feed();
  } else {
    sequence.done = sequence.consumed == sequence.length;
    if (sequence.done) sequence.result.next_token = std::move(sequence.staged_token);
  }
  if (sequence.done) --call->unfinished;
}

void EngineImpl::ApplyRow(Call* call, CallSequence* sequence, const BatchItem& item,
                          int64_t now_ns) {
  if (!sequence->staged_status.ok()) {
    ApplyFailure(call, sequence, item);
    return;
  }
  Session* session = sequence->session;
  session->position += item.tokens;
  session->token_hash = sequence->staged_hash;
  if (item.work_class != WorkClass::kDecode) sequence->consumed += item.tokens;
  if (call->stream == nullptr) {
    sequence->result.position = session->position;
    return;
  }
  call->stream->position = session->position;
  if (sequence->staged_token.has_value()) ApplyToken(call, sequence, now_ns);
}

void EngineImpl::ApplyFailure(Call* call, CallSequence* sequence, const BatchItem& item) {
  outbox_.Add(sequence->staged_non_finite ? Outbox::Event::kNonFinite : Outbox::Event::kStepFailed);
  const int64_t rest = sequence->length - sequence->launched;
  call->waiting_tokens -= rest;
  queued_tokens_ -= rest;
  scheduler_.Drop(&call->work, item.sequence);
  sequence->lost = true;
  sequence->result.status = std::move(sequence->staged_status);
}

void EngineImpl::ApplyToken(Call* call, CallSequence* sequence, int64_t now_ns) {
  Stream& stream = *call->stream;
  ChosenToken token = *std::exchange(sequence->staged_token, std::nullopt);
  sequence->history.Add(token.id);
  stream.last_token = token.id;
  ++stream.output_tokens;
  if (stream.output_tokens == 1) {
    sequence->input = Input();  // Large, and a stream may live long.
    stream.first_token_ns = now_ns - call->admitted_ns;
    outbox_.Add(Outbox::Event::kFirstToken, stream.first_token_ns);
  } else {
    outbox_.Add(Outbox::Event::kInterToken, now_ns - stream.last_token_ns);
  }
  stream.last_token_ns = now_ns;
  if (std::binary_search(stream.stop_ids.begin(), stream.stop_ids.end(), token.id)) {
    stream.finish_reason = FinishReason::kStop;
    stream.total_tokens = stream.output_tokens;
  }
  stream.buffer.push_back(std::move(token));
  if (stream.complete()) {  // What is left to run for it does not wait for its reader.
    Resume(&stream, now_ns, &outbox_);
  } else if (!stream.paused && static_cast<int64_t>(stream.buffer.size()) >= stream.buffer_limit) {
    stream.paused = true;
    stream.paused_since_ns = now_ns;
    ++blocked_streams_;
  }
  QueueDecode(call);
}

void EngineImpl::Resume(Stream* stream, int64_t now_ns, Outbox* outbox) {
  if (!std::exchange(stream->paused, false)) return;
  --blocked_streams_;
  outbox->Add(Outbox::Event::kStreamBlocked, now_ns - stream->paused_since_ns);
}

void EngineImpl::AfterStep(Call* call) {
  --call->steps_in_flight;
  if (call->unfinished == 0) {
    absl::Status status;
    if (call->stream != nullptr) {
      status = call->sequences[0].result.status;
      StreamEnd end = StreamEnd::kFailed;
      if (status.ok()) {
        const bool stop = call->stream->finish_reason == FinishReason::kStop;
        end = stop ? StreamEnd::kStop : StreamEnd::kLength;
      }
      outbox_.AddEnum(Outbox::Event::kStreamEnded, end);
    }
    EndCall(call, std::move(status), &outbox_);
  } else if (call->ending.has_value() && call->steps_in_flight == 0) {
    EndEarly(call, *std::exchange(call->ending, std::nullopt), &outbox_);
  } else if (call->stream != nullptr && !call->stream->buffer.empty()) {
    outbox_.Ready(call->shared_from_this());
  }
}

}  // namespace gdn::engine
