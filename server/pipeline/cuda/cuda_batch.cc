#include "server/pipeline/cuda/cuda_batch.h"

#include <algorithm>
#include <numeric>

#include "absl/strings/str_cat.h"

namespace gdn::pipeline {
namespace {

constexpr char kWhat[] = "cannot allocate pinned memory for a batch";

absl::Status CheckChained(size_t index, const SequenceInput& input, const CudaBatch* previous) {
  if (input.chained < 0) return absl::OkStatus();
  const auto from = static_cast<size_t>(input.chained);
  if (previous != nullptr && from < previous->sequences.size() &&
      previous->sequences[from].sample_row >= 0) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat("batch: sequence ", index,
                                                 ": is chained to sequence ", input.chained,
                                                 " of the batch before, which chose no token"));
}

}  // namespace

absl::Status CudaBatch::Build(std::span<const SequenceInput> inputs, const PipelineInfo& info,
                              const CudaBatch* previous) {
  GDN_RETURN_IF_ERROR(plan.Build(inputs, info));
  sequences.assign(inputs.size(), {});
  top_width = 0;
  history_count = 0;
  greedy = true;
  any_hidden_in = any_hidden_out = any_logits = false;
  int64_t steps = 0;
  int64_t prefills = 0;
  for (size_t i = 0; i < inputs.size(); ++i) {
    const SequenceInput& input = inputs[i];
    const SequencePlace& place = plan.places[i];
    GDN_RETURN_IF_ERROR(CheckChained(i, input, previous));
    Sequence& sequence = sequences[i];
    sequence.row = place.num_tokens == 1 ? steps++ : plan.steps.size() + prefills++;
    sequence.sample_row = place.sample_row;
    sequence.want_hidden = input.want_hidden;
    any_hidden_in = any_hidden_in || !input.hidden.empty();
    any_hidden_out = any_hidden_out || input.want_hidden != Positions::kNone;
    any_logits = any_logits || place.logits_rows > 0;
    if (input.sample == nullptr) continue;
    sequence.top_logprobs = input.sample->top_logprobs;
    greedy = greedy && input.sample->temperature == 0.0f;
    top_width = std::max(top_width, sequence.top_logprobs);
    history_count += static_cast<int64_t>(input.sample->history.size());
  }
  top_width = static_cast<int32_t>(std::min<int64_t>(top_width, info.vocab_size));
  decode = prefills == 0 && steps > 0 && !any_hidden_in && !any_hidden_out && !any_logits &&
           top_width == 0 && history_count == 0 && info.has_embedding && info.has_head;
  greedy = greedy && decode;
  if (!decode) return absl::OkStatus();
  OrderBySlot(inputs);
  // A graph computes logits for all its rows, in their order.
  for (Sequence& sequence : sequences) {
    if (sequence.sample_row >= 0) sequence.sample_row = sequence.row;
  }
  return absl::OkStatus();
}

void CudaBatch::OrderBySlot(std::span<const SequenceInput> inputs) {
  by_slot.resize(inputs.size());
  std::iota(by_slot.begin(), by_slot.end(), size_t{0});
  std::sort(by_slot.begin(), by_slot.end(),
            [&](size_t a, size_t b) { return inputs[a].write_slot < inputs[b].write_slot; });
  for (size_t row = 0; row < by_slot.size(); ++row) {
    sequences[by_slot[row]].row = static_cast<int64_t>(row);
  }
}

absl::Status CudaBatch::Fill(std::span<const SequenceInput> inputs, const PipelineInfo& info,
                             const CudaBatch* previous, int64_t padded_rows, StepRow* rows) {
  for (size_t i = 0; i < inputs.size(); ++i) {
    const SequenceInput& input = inputs[i];
    const Sequence& sequence = sequences[i];
    const SequencePlace& place = plan.places[i];
    StepRow row;
    if (place.num_tokens == 1 && !input.tokens.empty()) row.id = input.tokens[0];
    if (input.chained >= 0) {
      row.chained =
          static_cast<int32_t>(previous->sequences[static_cast<size_t>(input.chained)].sample_row);
    }
    row.read_slot = static_cast<int32_t>(input.fresh ? input.write_slot : input.read_slot);
    row.write_slot = static_cast<int32_t>(input.write_slot);
    row.fresh = input.fresh ? 1 : 0;
    const int64_t first_token = decode ? sequence.row : place.first_token;
    row.last_token =
        place.num_tokens == 0 ? -1 : static_cast<int32_t>(first_token + place.num_tokens - 1);
    row.sample_row = static_cast<int32_t>(sequence.sample_row);
    if (input.sample != nullptr) {
      const SampleSpec& spec = *input.sample;
      row.position = spec.position;
      row.seed = spec.seed;
      row.temperature = spec.temperature;
      row.top_p = spec.top_p;
      row.min_p = spec.min_p;
      row.repetition_penalty = spec.repetition_penalty;
      row.top_k = spec.top_k;
    }
    rows[sequence.row] = row;
  }
  const auto count = static_cast<int64_t>(inputs.size());
  for (int64_t row = count; row < padded_rows; ++row) rows[row] = StepRow();
  return decode ? absl::OkStatus() : FillPacked(inputs, info);
}

absl::Status CudaBatch::FillPacked(std::span<const SequenceInput> inputs,
                                   const PipelineInfo& info) {
  GDN_RETURN_IF_ERROR(ids.Grow(plan.num_tokens, kWhat));
  std::fill(ids.data(), ids.data() + plan.num_tokens, -1);
  if (any_hidden_in) {
    GDN_RETURN_IF_ERROR(hidden_in.Grow(plan.num_tokens * info.hidden_size, kWhat));
  }
  for (size_t i = 0; i < inputs.size(); ++i) {
    const int64_t first = plan.places[i].first_token;
    std::copy(inputs[i].tokens.begin(), inputs[i].tokens.end(), ids.data() + first);
    if (!inputs[i].hidden.empty()) {
      std::copy(inputs[i].hidden.begin(), inputs[i].hidden.end(),
                hidden_in.data() + first * info.hidden_size);
    }
  }
  const std::vector<int32_t>& lengths = plan.prefills.cu_seqlens;
  GDN_RETURN_IF_ERROR(cu_seqlens.Grow(static_cast<int64_t>(lengths.size()), kWhat));
  std::copy(lengths.begin(), lengths.end(), cu_seqlens.data());
  GDN_RETURN_IF_ERROR(logits_tokens.Grow(static_cast<int64_t>(plan.logits_tokens.size()), kWhat));
  std::transform(plan.logits_tokens.begin(), plan.logits_tokens.end(), logits_tokens.data(),
                 [](int64_t token) { return static_cast<int32_t>(token); });
  return history_count > 0 ? FillHistory(inputs) : absl::OkStatus();
}

absl::Status CudaBatch::FillHistory(std::span<const SequenceInput> inputs) {
  GDN_RETURN_IF_ERROR(history.Grow(history_count, kWhat));
  GDN_RETURN_IF_ERROR(history_offsets.Grow(plan.num_sampled + 1, kWhat));
  int64_t used = 0;
  int64_t row = 0;
  history_offsets.data()[0] = 0;
  // Inputs that choose are numbered in input order, as their rows of logits are.
  for (const SequenceInput& input : inputs) {
    if (input.sample == nullptr) continue;
    const std::span<const int32_t> ids_seen = input.sample->history;
    std::copy(ids_seen.begin(), ids_seen.end(), history.data() + used);
    used += static_cast<int64_t>(ids_seen.size());
    history_offsets.data()[++row] = used;
  }
  return absl::OkStatus();
}

void CudaBatch::Collect(const StepResult* results, const PipelineInfo& info,
                        std::vector<SequenceOutput>* outputs) {
  outputs->assign(sequences.size(), {});
  const int64_t hidden = info.hidden_size;
  const auto width = static_cast<size_t>(top_width);
  top.resize(static_cast<size_t>(plan.num_sampled) * width);
  for (size_t i = 0; i < top.size(); ++i) top[i] = {top_ids.data()[i], top_values.data()[i]};
  for (size_t i = 0; i < sequences.size(); ++i) {
    const Sequence& sequence = sequences[i];
    const SequencePlace& place = plan.places[i];
    SequenceOutput& output = (*outputs)[i];
    if (place.num_tokens == 0) continue;
    const StepResult& result = results[sequence.row];
    output.finite = result.finite != 0;
    if (sequence.want_hidden != Positions::kNone) {
      const int64_t rows = sequence.want_hidden == Positions::kAll ? place.num_tokens : 1;
      const int64_t end = place.first_token + place.num_tokens;
      output.hidden = {hidden_out.data() + (end - rows) * hidden,
                       static_cast<size_t>(rows * hidden)};
    }
    if (place.logits_rows > 0) {
      output.logits = {logits.data() + place.logits_row * info.vocab_size,
                       static_cast<size_t>(place.logits_rows * info.vocab_size)};
    }
    if (sequence.sample_row >= 0) {
      output.token = {result.token, result.logprob};
      output.top = std::span<const TokenLogprob>(top).subspan(
          static_cast<size_t>(place.sample_row) * width,
          std::min(width, static_cast<size_t>(sequence.top_logprobs)));
      output.finite = output.finite && result.token >= 0;
    }
  }
}

}  // namespace gdn::pipeline
