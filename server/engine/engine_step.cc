// One step: the batch, the run, and what its outputs mean for the calls.
#include <algorithm>
#include <span>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/engine/engine_impl.h"

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

absl::Status RunError(const Session& session, const absl::Status& status) {
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

}  // namespace

bool EngineImpl::RunStep(Lock& lock) {
  if (scheduler_.empty()) return false;
  AcquirePipeline(lock);
  scheduler_.Next(&batch_);
  const int64_t start_ns = clock_->NowNs();
  inputs_.clear();
  step_calls_.clear();
  for (const BatchItem& item : batch_) Prepare(item, start_ns);
  if (batch_.empty()) {  // All ended while the pipeline was busy.
    ReleasePipeline();
    return false;
  }

  lock.unlock();
  absl::Status status = pipeline_->Run(inputs_, &outputs_);
  const int64_t end_ns = clock_->NowNs();
  if (status.ok() && outputs_.size() != inputs_.size()) {
    status = absl::InternalError(absl::StrCat("the pipeline gave ", outputs_.size(),
                                              " outputs for ", inputs_.size(), " sequences"));
  }
  for (size_t i = 0; i < batch_.size(); ++i) {
    Stage(batch_[i], inputs_[i], status.ok() ? &outputs_[i] : nullptr, status);
  }
  observer_->OnStep(Measure(end_ns - start_ns));
  lock.lock();

  ReleasePipeline();
  for (const BatchItem& item : batch_) Apply(item, end_ns);
  for (Call* call : step_calls_) {
    call->timings.compute_ns += end_ns - start_ns;
    AfterStep(call);
  }
  return true;
}

void EngineImpl::Prepare(const BatchItem& item, int64_t now_ns) {
  Call* call = Owner(item);
  CallSequence& sequence = SequenceOf(item);
  Session* session = sequence.session;
  if (!call->in_step) {
    call->in_step = true;
    step_calls_.push_back(call);
  }
  if (!call->started) {
    call->started = true;
    --queued_calls_;
    call->timings.queue_ns = now_ns - call->admitted_ns;
    outbox_.Add(Outbox::Event::kQueueTime, call->timings.queue_ns);
  }

  SequenceInput input;
  input.read_slot = session->slot.index;
  input.write_slot = session->slot.index;
  input.fresh = session->position == 0;
  bool choose = false;
  if (item.work_class == WorkClass::kDecode) {
    input.tokens = std::span<const int32_t>(&call->stream->last_token, 1);
    choose = !call->stream->absorbing;
  } else {
    call->waiting_tokens -= item.tokens;
    queued_tokens_ -= item.tokens;
    const auto begin = static_cast<size_t>(sequence.consumed);
    const auto count = static_cast<size_t>(item.tokens);
    if (sequence.input.is_hidden) {
      const auto width = static_cast<size_t>(pipeline_->info().hidden_size);
      input.hidden =
          std::span<const float>(sequence.input.hidden).subspan(begin * width, count * width);
    } else {
      input.tokens = std::span<const int32_t>(sequence.input.tokens).subspan(begin, count);
    }
    const bool last = sequence.consumed + item.tokens == sequence.length;
    const auto wanted = [last](Positions positions) {
      return positions == Positions::kLast && !last ? Positions::kNone : positions;
    };
    input.want_logits = wanted(sequence.output.logits);
    input.want_hidden = wanted(sequence.output.hidden);
    choose = last && sequence.output.next_token;
  }
  if (choose) {
    sequence.sample.position = session->position + item.tokens;
    sequence.sample.history = sequence.history.distinct();
    input.sample = &sequence.sample;
    if (call->stream != nullptr && call->stream->return_logits) {
      input.want_logits = Positions::kLast;
    }
  }
  inputs_.push_back(input);
}

void EngineImpl::Stage(const BatchItem& item, const SequenceInput& input,
                       const SequenceOutput* output, const absl::Status& run_status) {
  CallSequence& sequence = SequenceOf(item);
  const Session& session = *sequence.session;
  if (output == nullptr) {
    sequence.staged_status = RunError(session, run_status);
    return;
  }
  const pipeline::PipelineInfo& info = pipeline_->info();
  const bool chosen = input.sample != nullptr;
  // A sampler that finds no token says so by an id outside the vocabulary.
  if (!output->finite ||
      (chosen && (output->token.id < 0 || output->token.id >= info.vocab_size))) {
    sequence.staged_status = NonFiniteError(session);
    sequence.staged_non_finite = true;
    return;
  }
  sequence.staged_hash = input.hidden.empty()
                             ? HashTokens(session.token_hash, input.tokens)
                             : HashHidden(session.token_hash, input.hidden, info.hidden_size);
  const bool stream = Owner(item)->stream != nullptr;
  if (!stream) {
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
  if (stream) token.logits.assign(output->logits.begin(), output->logits.end());
}

void EngineImpl::Apply(const BatchItem& item, int64_t now_ns) {
  Call* call = Owner(item);
  CallSequence& sequence = SequenceOf(item);
  if (!sequence.staged_status.ok()) {
    ApplyFailure(call, &sequence, item);
    return;
  }
  Session* session = sequence.session;
  session->position += item.tokens;
  session->token_hash = sequence.staged_hash;
  if (item.work_class != WorkClass::kDecode) sequence.consumed += item.tokens;
  if (call->stream != nullptr) {
    call->stream->position = session->position;
    if (sequence.staged_token.has_value()) {
      ApplyToken(call, &sequence, now_ns);
    } else if (call->stream->absorbing) {
      sequence.done = true;
    }
  } else {
    sequence.result.position = session->position;
    sequence.done = sequence.consumed == sequence.length;
    if (sequence.done) sequence.result.next_token = std::move(sequence.staged_token);
  }
  if (sequence.done) --call->unfinished;
}

void EngineImpl::ApplyFailure(Call* call, CallSequence* sequence, const BatchItem& item) {
  outbox_.Add(sequence->staged_non_finite ? Outbox::Event::kNonFinite : Outbox::Event::kStepFailed);
  if (item.work_class != WorkClass::kDecode) {
    const int64_t rest = sequence->length - sequence->consumed - item.tokens;
    call->waiting_tokens -= rest;
    queued_tokens_ -= rest;
  }
  scheduler_.Drop(&call->work, item.sequence);
  Quarantine(call, sequence);
  sequence->done = true;
  --call->unfinished;
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
  const bool stop = std::binary_search(stream.stop_ids.begin(), stream.stop_ids.end(), token.id);
  stream.buffer.push_back(std::move(token));
  if (stop || stream.output_tokens == stream.max_new_tokens) {
    stream.finish_reason = stop ? FinishReason::kStop : FinishReason::kLength;
    if (stream.throw_away != nullptr) {
      sequence->done = true;
      return;
    }
    stream.absorbing = true;
  } else if (static_cast<int64_t>(stream.buffer.size()) >= stream.buffer_limit) {
    stream.paused = true;
    stream.paused_since_ns = now_ns;
    ++blocked_streams_;
    return;
  }
  QueueDecode(call);
}

void EngineImpl::QueueDecode(Call* call) {
  call->work.work_class = WorkClass::kDecode;
  call->work.pending.assign(1, {0, 1});
  scheduler_.Add(&call->work);
}

void EngineImpl::AfterStep(Call* call) {
  call->in_step = false;
  if (call->unfinished == 0) {
    absl::Status status;
    if (call->stream != nullptr) {
      status = call->sequences[0].result.status;
      if (status.ok()) {
        outbox_.AddEnum(Outbox::Event::kFinished, call->stream->finish_reason);
      }
    }
    EndCall(call, std::move(status), &outbox_);
  } else if (call->ending.has_value()) {
    EndEarly(call, *std::exchange(call->ending, std::nullopt), &outbox_);
  } else if (call->stream != nullptr && !call->stream->buffer.empty()) {
    outbox_.Ready(call->shared_from_this());
  }
}

StepStats EngineImpl::Measure(int64_t duration_ns) const {
  StepStats stats;
  stats.duration_ns = duration_ns;
  for (const BatchItem& item : batch_) {
    if (item.work_class == WorkClass::kPrefill) {
      stats.prefill_tokens += item.tokens;
      ++stats.prefill_sequences;
    } else {
      stats.decode_tokens += item.tokens;
      ++stats.decode_sequences;
    }
  }
  if (stats.decode_sequences == 0) {
    stats.phase = pipeline::Phase::kPrefill;
  } else {
    stats.phase = stats.prefill_sequences == 0 ? pipeline::Phase::kDecode : pipeline::Phase::kMixed;
  }
  return stats;
}

absl::Status EngineImpl::WarmUp() {
  const pipeline::PipelineInfo& info = pipeline_->info();
  const auto tokens =
      static_cast<size_t>(std::min(options_.prefill_chunk_tokens, options_.max_input_tokens));
  const std::vector<int32_t> ids(info.has_embedding ? tokens : 0, 0);
  const std::vector<float> rows(
      info.has_embedding ? 0 : tokens * static_cast<size_t>(info.hidden_size), 0.0f);
  const pipeline::SampleSpec sample;
  Lock lock(mu_);
  AcquirePipeline(lock);
  lock.unlock();
  absl::Status status;
  // A prompt, then one token after it.
  for (const size_t length : {tokens, size_t{1}}) {
    SequenceInput input;
    input.read_slot = 0;
    input.write_slot = 0;
    input.fresh = length == tokens;
    input.tokens = std::span(ids).first(std::min(length, ids.size()));
    input.hidden = std::span(rows).first(
        std::min(length * static_cast<size_t>(info.hidden_size), rows.size()));
    if (info.has_head) input.sample = &sample;
    status = pipeline_->Run(std::span(&input, 1), &outputs_);
    if (status.ok() && (outputs_.size() != 1 || !outputs_[0].finite)) {
      status = absl::DataLossError(
          "the model gives NaN or infinity on the warm-up input; check its weights");
    }
    if (!status.ok()) break;
  }
  lock.lock();
  ReleasePipeline();
  return status;
}

}  // namespace gdn::engine
