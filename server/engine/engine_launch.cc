// The first half of a step: who runs, and what the pipeline is given.
#include <algorithm>
#include <span>

#include "server/engine/engine_impl.h"

namespace gdn::engine {
namespace {

using pipeline::SequenceInput;

// The next chunk of an input; `choose` if a token is to be chosen after it.
SequenceInput FeedInput(const CallSequence& sequence, int64_t tokens, int64_t hidden_size,
                        bool* choose) {
  SequenceInput input;
  const auto begin = static_cast<size_t>(sequence.launched);
  const auto count = static_cast<size_t>(tokens);
  if (sequence.input.is_hidden) {
    const auto width = static_cast<size_t>(hidden_size);
    input.hidden =
        std::span<const float>(sequence.input.hidden).subspan(begin * width, count * width);
  } else {
    input.tokens = std::span<const int32_t>(sequence.input.tokens).subspan(begin, count);
  }
  const bool last = sequence.launched + tokens == sequence.length;
  const auto wanted = [last](Positions positions) {
    return positions == Positions::kLast && !last ? Positions::kNone : positions;
  };
  input.want_logits = wanted(sequence.output.logits);
  input.want_hidden = wanted(sequence.output.hidden);
  *choose = last && sequence.output.next_token;
  return input;
}

// The next token that the stream has not been fed. If no completed step has told it, the step
// launched just before this one chooses it: at most that one is in flight when a step is launched.
SequenceInput FeedToken(const Stream& stream, bool* choose) {
  SequenceInput input;
  if (stream.fed_tokens < stream.output_tokens) {
    input.tokens = std::span<const int32_t>(&stream.last_token, 1);
  } else {
    input.chained = stream.chosen_row;
  }
  *choose = stream.fed_tokens + 1 < stream.total_tokens;
  return input;
}

}  // namespace

bool EngineImpl::RunStep(Lock& lock) {
  bool launched = false;
  // After a failed launch nothing is launched until everything before it and itself is completed.
  while (!steps_.full() && !scheduler_.empty() &&
         (steps_.empty() || steps_.back().launch_status.ok()) && LaunchStep(lock)) {
    launched = true;
  }
  return CompleteStep(lock) || launched;
}

bool EngineImpl::LaunchStep(Lock& lock) {
  AcquirePipeline(lock);
  Step& step = steps_.Push();
  scheduler_.Next(&step.batch);
  step.start_ns = clock_->NowNs();
  if (step.batch.empty()) {  // All ended while the pipeline was busy.
    steps_.PopNewest();
    ReleasePipeline();
    return false;
  }
  step.samples.resize(step.batch.size());
  for (const BatchItem& item : step.batch) Prepare(item, &step);

  lock.unlock();
  step.launch_status = pipeline_->Launch(step.inputs);
  lock.lock();
  ReleasePipeline();
  return true;
}

void EngineImpl::Prepare(const BatchItem& item, Step* step) {
  Call* call = Owner(item);
  CallSequence& sequence = SequenceOf(item);
  Stream* stream = call->stream.get();
  if (call->newest_step != step->number) {
    call->newest_step = step->number;
    ++call->steps_in_flight;
    step->calls.push_back(call);
  }
  if (!call->started) {
    call->started = true;
    --queued_calls_;
    call->timings.queue_ns = step->start_ns - call->admitted_ns;
    outbox_.Add(Outbox::Event::kQueueTime, call->timings.queue_ns);
  }

  SequenceInput input;
  bool choose = false;
  if (item.work_class == WorkClass::kDecode) {
    input = FeedToken(*stream, &choose);
    ++stream->fed_tokens;
  } else {
    input = FeedInput(sequence, item.tokens, pipeline_->info().hidden_size, &choose);
    sequence.launched += item.tokens;
    call->waiting_tokens -= item.tokens;
    queued_tokens_ -= item.tokens;
  }
  const int64_t position = sequence.session->position + sequence.tokens_in_flight;
  input.read_slot = sequence.session->slot.index;
  input.write_slot = input.read_slot;
  input.fresh = position == 0;
  ++sequence.rows_in_flight;
  sequence.tokens_in_flight += item.tokens;

  if (choose) {
    const size_t row = step->inputs.size();
    pipeline::SampleSpec& sample = step->samples[row];
    sample = sequence.sample;
    sample.position = position + item.tokens;
    sample.history = sequence.history.distinct();
    input.sample = &sample;
    if (stream != nullptr) {
      if (stream->return_logits) input.want_logits = Positions::kLast;
      stream->chosen_row = static_cast<int64_t>(row);
    }
  }
  step->inputs.push_back(input);
  if (choose && stream != nullptr && Chains(sequence)) QueueDecode(call);
}

bool EngineImpl::Chains(const CallSequence& sequence) const {
  // The penalty needs the history, and so the token, on the host.
  return steps_.limit() > 1 && sequence.sample.repetition_penalty == 1.0f;
}

void EngineImpl::QueueDecode(Call* call) {
  const Stream& stream = *call->stream;
  if (stream.fed_tokens >= stream.tokens_to_feed() || stream.paused || call->sequences[0].lost ||
      call->ending.has_value()) {
    scheduler_.Drop(&call->work, 0);
    return;
  }
  call->work.work_class = WorkClass::kDecode;
  call->work.pending.assign(1, {0, 1});
  scheduler_.Add(&call->work);
}

}  // namespace gdn::engine
