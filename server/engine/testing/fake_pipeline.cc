#include "server/engine/testing/fake_pipeline.h"

#include <algorithm>
#include <bit>

#include "absl/strings/str_cat.h"

namespace gdn::engine {
namespace {

using pipeline::Positions;
using pipeline::SampleSpec;
using pipeline::SequenceInput;
using pipeline::SequenceOutput;
using pipeline::TokenLogprob;

uint64_t Mix(uint64_t a, uint64_t b) {
  uint64_t x = (a ^ (b + 0x9e3779b97f4a7c15u)) * 0xff51afd7ed558ccdu;
  x ^= x >> 33;
  x *= 0xc4ceb9fe1a85ec53u;
  return x ^ (x >> 29);
}

float ToFloat(uint64_t x) { return static_cast<float>(x % 2048) / 1024.0f - 1.0f; }

}  // namespace

void FakeSequence::Consume(int32_t token) {
  state_ = Mix(state_, static_cast<uint32_t>(token));
  ++position_;
}

void FakeSequence::ConsumeHidden(std::span<const float> row) {
  for (const float x : row) state_ = Mix(state_, std::bit_cast<uint32_t>(x) + 0x100000000u);
  ++position_;
}

std::vector<float> FakeSequence::Logits() const {
  std::vector<float> logits(static_cast<size_t>(info_.vocab_size));
  for (size_t i = 0; i < logits.size(); ++i) logits[i] = ToFloat(Mix(state_, i));
  return logits;
}

std::vector<float> FakeSequence::Hidden() const {
  std::vector<float> hidden(static_cast<size_t>(info_.hidden_size));
  for (size_t i = 0; i < hidden.size(); ++i) hidden[i] = ToFloat(Mix(state_, i + 1'000'000));
  return hidden;
}

TokenLogprob FakeSequence::Sample(const SampleSpec& spec) const {
  uint64_t x = Mix(state_, spec.seed);
  x = Mix(x, static_cast<uint64_t>(spec.position));
  x = Mix(x, std::bit_cast<uint32_t>(spec.temperature));
  for (const int32_t id : spec.history) x = Mix(x, static_cast<uint32_t>(id));
  const auto id = static_cast<int32_t>(x % static_cast<uint64_t>(info_.vocab_size));
  return {id, ToFloat(x)};
}

std::vector<TokenLogprob> FakeSequence::Top(int32_t count) const {
  std::vector<TokenLogprob> top;
  for (int32_t i = 0; i < count; ++i) top.push_back({i, ToFloat(Mix(state_, 77u + i))});
  return top;
}

std::vector<int32_t> FakeSequence::Generate(int64_t count, uint64_t seed) {
  std::vector<int32_t> tokens;
  for (int64_t i = 0; i < count; ++i) {
    SampleSpec spec;
    spec.seed = seed;
    spec.position = position_;
    tokens.push_back(Sample(spec).id);
    Consume(tokens.back());
  }
  return tokens;
}

pipeline::PipelineInfo FakePipeline::DefaultInfo(int64_t num_slots) {
  pipeline::PipelineInfo info;
  info.vocab_size = 1000;
  info.hidden_size = 3;
  info.num_slots = num_slots;
  info.state_bytes_per_slot = 4096;
  info.has_embedding = true;
  info.has_head = true;
  return info;
}

FakePipeline::FakePipeline(pipeline::PipelineInfo info)
    : info_(std::move(info)), slots_(static_cast<size_t>(info_.num_slots)) {}

std::vector<std::string> FakePipeline::violations() const {
  const std::lock_guard<std::mutex> lock(mu_);
  return violations_;
}

void FakePipeline::Violation(const std::string& what) {
  const std::lock_guard<std::mutex> lock(mu_);
  violations_.push_back(what);
}

void FakePipeline::CheckInputs(std::span<const SequenceInput> inputs) {
  std::vector<int> written(slots_.size(), 0);
  for (size_t i = 0; i < inputs.size(); ++i) {
    const SequenceInput& in = inputs[i];
    for (const int64_t slot : {in.read_slot, in.write_slot}) {
      if (slot < 0 || slot >= info_.num_slots) Violation(absl::StrCat("slot ", slot));
    }
    if (in.write_slot < 0 || in.write_slot >= info_.num_slots) continue;
    if (++written[static_cast<size_t>(in.write_slot)] > 1) {
      Violation(absl::StrCat("slot ", in.write_slot, " written twice in one batch"));
    }
    for (size_t j = 0; j < inputs.size(); ++j) {
      if (j != i && inputs[j].read_slot == in.write_slot && !inputs[j].fresh) {
        Violation(absl::StrCat("slot ", in.write_slot, " written and read by others"));
      }
    }
    if (!in.fresh && !slots_[static_cast<size_t>(in.read_slot)].written) {
      Violation(absl::StrCat("slot ", in.read_slot, " read and never written"));
    }
    const bool chained = in.chained >= 0;
    if (chained) CheckChain(in);
    if (!in.tokens.empty() + !in.hidden.empty() + chained > 1) Violation("two kinds of input");
    if (in.tokens.empty() && in.hidden.empty() && !chained && in.sample != nullptr) {
      Violation("empty sampled");
    }
    for (const int32_t token : in.tokens) {
      if (token < 0 || token >= info_.vocab_size) Violation(absl::StrCat("token ", token));
    }
  }
}

void FakePipeline::CheckChain(const SequenceInput& input) {
  const auto row = static_cast<size_t>(input.chained);
  if (info_.max_in_flight < 2) Violation("a chain in a pipeline that takes one batch at a time");
  if (row >= choices_.size() || choices_[row] == kNothing) {
    Violation(absl::StrCat("a chain to row ", row, ", which chooses nothing"));
  }
}

FakePipeline::InputCopy FakePipeline::Copy(const SequenceInput& input) {
  InputCopy copy;
  copy.tokens.assign(input.tokens.begin(), input.tokens.end());
  copy.hidden.assign(input.hidden.begin(), input.hidden.end());
  if (input.sample == nullptr) return copy;
  copy.sample = *input.sample;
  copy.history.assign(input.sample->history.begin(), input.sample->history.end());
  return copy;
}

void FakePipeline::CheckIntact(const Batch& batch) {
  for (size_t i = 0; i < batch.inputs.size(); ++i) {
    const InputCopy& then = batch.copies[i];
    const InputCopy now = Copy(batch.inputs[i]);
    bool same =
        now.tokens == then.tokens && now.hidden == then.hidden && now.history == then.history;
    if (then.sample.has_value()) {
      same = same && now.sample->position == then.sample->position &&
             now.sample->seed == then.sample->seed &&
             now.sample->temperature == then.sample->temperature &&
             now.sample->repetition_penalty == then.sample->repetition_penalty &&
             now.sample->top_logprobs == then.sample->top_logprobs;
    }
    if (!same) Violation(absl::StrCat("input ", i, " has changed between its Launch and its Wait"));
  }
}

absl::Status FakePipeline::Launch(std::span<const SequenceInput> inputs) {
  events_ += 'L';
  if (users_.fetch_add(1) != 0) Violation("Launch while the pipeline is in use");
  if (std::ssize(in_flight_) >= info_.max_in_flight) Violation("too many batches in flight");
  awaited_ = {};
  Batch batch;
  absl::Status status = Advance(inputs, &batch);
  choices_.clear();
  if (status.ok()) {
    for (size_t i = 0; i < inputs.size(); ++i) {
      choices_.push_back(inputs[i].sample != nullptr ? batch.outputs[i].token.id : kNothing);
    }
    in_flight_.push_back(std::move(batch));
  }
  users_.fetch_sub(1);
  return status;
}

absl::Status FakePipeline::Wait(std::vector<SequenceOutput>* outputs) {
  events_ += 'W';
  if (users_.fetch_add(1) != 0) Violation("Wait while the pipeline is in use");
  absl::Status status;
  if (on_wait_) status = on_wait_();
  if (in_flight_.empty()) {
    Violation("Wait with nothing in flight");
    status = absl::FailedPreconditionError("nothing is in flight");
  } else {
    awaited_ = std::move(in_flight_.front());
    in_flight_.pop_front();
    CheckIntact(awaited_);
    if (status.ok()) {
      *outputs = awaited_.outputs;
    } else {
      Lose(awaited_);
    }
  }
  users_.fetch_sub(1);
  return status;
}

void FakePipeline::Lose(const Batch& failed) {
  std::vector<bool> lost(slots_.size(), false);
  for (const SequenceInput& in : failed.inputs) {
    slots_[static_cast<size_t>(in.write_slot)] = {};
    lost[static_cast<size_t>(in.write_slot)] = true;
  }
  for (Batch& batch : in_flight_) {
    for (size_t i = 0; i < batch.inputs.size(); ++i) {
      const SequenceInput& in = batch.inputs[i];
      if (in.fresh || !lost[static_cast<size_t>(in.read_slot)]) continue;
      slots_[static_cast<size_t>(in.write_slot)] = {};
      for (float& x : batch.buffers[2 * i]) x += 1;
      for (float& x : batch.buffers[2 * i + 1]) x += 1;
      TokenLogprob& token = batch.outputs[i].token;
      token.id = static_cast<int32_t>((token.id + 1) % std::max<int64_t>(info_.vocab_size, 1));
    }
  }
}

absl::Status FakePipeline::Advance(std::span<const SequenceInput> inputs, Batch* batch) {
  if (inputs.empty()) Violation("an empty batch");
  CheckInputs(inputs);
  if (on_run_) {
    if (absl::Status status = on_run_(); !status.ok()) {
      // Nothing can be said about the states: make them garbage.
      for (const SequenceInput& in : inputs) slots_[static_cast<size_t>(in.write_slot)] = {};
      return status;
    }
  }
  batch->inputs.assign(inputs.begin(), inputs.end());
  for (const SequenceInput& in : inputs) batch->copies.push_back(Copy(in));
  batch->outputs.resize(inputs.size());
  batch->buffers.resize(2 * inputs.size());
  batch->tops.resize(inputs.size());
  std::vector<FakeRunItem> items;
  for (size_t i = 0; i < inputs.size(); ++i) items.push_back(AdvanceOne(inputs[i], i, batch));
  if (record_runs_) runs_.push_back(std::move(items));
  return absl::OkStatus();
}

FakeRunItem FakePipeline::AdvanceOne(const SequenceInput& in, size_t index, Batch* batch) {
  SequenceOutput& out = batch->outputs[index];
  std::vector<float>& logits = batch->buffers[2 * index];
  std::vector<float>& hidden = batch->buffers[2 * index + 1];
  FakeSequence sequence(info_);
  if (!in.fresh) sequence.set_state(slots_[static_cast<size_t>(in.read_slot)].state);
  const auto width = static_cast<size_t>(info_.hidden_size);
  const bool chained = in.chained >= 0 && in.chained < std::ssize(choices_);
  const std::span<const int32_t> tokens =
      chained ? std::span(choices_).subspan(static_cast<size_t>(in.chained), 1) : in.tokens;
  const size_t length = in.hidden.empty() ? tokens.size() : in.hidden.size() / width;
  const auto emit = [&](Positions want, bool last, const std::vector<float>& row,
                        std::vector<float>* to) {
    if (want == Positions::kAll || (want == Positions::kLast && last)) {
      to->insert(to->end(), row.begin(), row.end());
    }
  };
  for (size_t t = 0; t < length; ++t) {
    if (in.hidden.empty()) {
      out.finite = out.finite && tokens[t] != poison_token_ && tokens[t] >= 0;
      sequence.Consume(tokens[t]);
    } else {
      sequence.ConsumeHidden(in.hidden.subspan(t * width, width));
    }
    const bool last = t + 1 == length;
    if (in.want_logits != Positions::kNone) emit(in.want_logits, last, sequence.Logits(), &logits);
    if (in.want_hidden != Positions::kNone) emit(in.want_hidden, last, sequence.Hidden(), &hidden);
  }
  out.logits = logits;
  out.hidden = hidden;
  if (in.sample != nullptr) {
    out.token = sequence.Sample(*in.sample);
    if (sampled_token_.has_value()) out.token.id = *sampled_token_;
    batch->tops[index] = sequence.Top(in.sample->top_logprobs);
    out.top = batch->tops[index];
  }
  slots_[static_cast<size_t>(in.write_slot)] = {sequence.state(), true};
  return {in.write_slot, in.fresh, static_cast<int64_t>(length), in.sample != nullptr,
          in.chained >= 0};
}

absl::Status FakePipeline::CopySlot(int64_t from, int64_t to) {
  if (users_.fetch_add(1) != 0) Violation("CopySlot while the pipeline is in use");
  absl::Status status;
  if (on_copy_) status = on_copy_(to);
  if (from < 0 || from >= info_.num_slots || to < 0 || to >= info_.num_slots || from == to) {
    Violation(absl::StrCat("copy of slot ", from, " to ", to));
  } else if (!slots_[static_cast<size_t>(from)].written) {
    Violation(absl::StrCat("slot ", from, " copied and never written"));
  } else if (status.ok()) {
    slots_[static_cast<size_t>(to)] = slots_[static_cast<size_t>(from)];
  }
  users_.fetch_sub(1);
  return status;
}

}  // namespace gdn::engine
