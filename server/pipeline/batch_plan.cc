#include "server/pipeline/batch_plan.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "server/pipeline/kernel_status.h"

namespace gdn::pipeline {
namespace {

void Clear(SequenceGroup* group) {
  group->read_slot.clear();
  group->write_slot.clear();
  group->fresh.clear();
  group->cu_seqlens.assign(1, 0);
}

absl::Status Invalid(size_t index, const std::string& what) {
  return absl::InvalidArgumentError(absl::StrCat("batch: sequence ", index, ": ", what));
}

absl::Status Check(size_t index, const SequenceInput& input, const PipelineInfo& info) {
  if (input.write_slot < 0 || input.write_slot >= info.num_slots) {
    return Invalid(index, absl::StrCat("write slot ", input.write_slot, " is outside [0, ",
                                       info.num_slots, ")"));
  }
  if (!input.fresh && (input.read_slot < 0 || input.read_slot >= info.num_slots)) {
    return Invalid(index, absl::StrCat("read slot ", input.read_slot, " is outside [0, ",
                                       info.num_slots, ")"));
  }
  const bool chained = input.chained >= 0;
  if (int{!input.tokens.empty()} + int{!input.hidden.empty()} + int{chained} > 1) {
    return Invalid(index, "has more than one of tokens, hidden states and a chained token");
  }
  if (chained && info.max_in_flight < 2) {
    return Invalid(index, "is chained, but this pipeline has one batch in flight at a time");
  }
  if ((chained || !input.tokens.empty()) && !info.has_embedding) {
    return Invalid(index, "has tokens, but this slice of the stack holds no embedding");
  }
  if (static_cast<int64_t>(input.hidden.size()) % info.hidden_size != 0) {
    return Invalid(index, absl::StrCat("hidden states hold ", input.hidden.size(),
                                       " values, not a multiple of ", info.hidden_size));
  }
  for (const int32_t token : input.tokens) {
    if (token < 0 || token >= info.vocab_size) {
      return Invalid(index,
                     absl::StrCat("token ", token, " is outside [0, ", info.vocab_size, ")"));
    }
  }
  const bool wants_head = input.want_logits != Positions::kNone || input.sample != nullptr;
  if (wants_head && !info.has_head) {
    return Invalid(index, "wants logits, but this slice of the stack holds no head");
  }
  if (input.sample != nullptr && input.tokens.empty() && input.hidden.empty() && !chained) {
    return Invalid(index, "wants a token after an empty input");
  }
  return absl::OkStatus();
}

int64_t NumTokens(const SequenceInput& input, const PipelineInfo& info) {
  if (input.chained >= 0) return 1;
  if (!input.tokens.empty()) return static_cast<int64_t>(input.tokens.size());
  return static_cast<int64_t>(input.hidden.size()) / info.hidden_size;
}

}  // namespace

void BatchPlan::AddTo(SequenceGroup* group, const SequenceInput& input, int64_t tokens) {
  group->read_slot.push_back(input.fresh ? input.write_slot : input.read_slot);
  group->write_slot.push_back(input.write_slot);
  group->fresh.push_back(input.fresh ? 1 : 0);
  group->cu_seqlens.push_back(group->cu_seqlens.back() + static_cast<int32_t>(tokens));
}

absl::Status BatchPlan::Build(std::span<const SequenceInput> inputs, const PipelineInfo& info) {
  Clear(&steps);
  Clear(&prefills);
  places.assign(inputs.size(), {});
  logits_tokens.clear();
  num_sampled = 0;

  for (size_t i = 0; i < inputs.size(); ++i) {
    GDN_RETURN_IF_ERROR(Check(i, inputs[i], info));
    const SequenceInput& input = inputs[i];
    places[i].num_tokens = NumTokens(input, info);
    if (places[i].num_tokens != 1) continue;
    places[i].first_token = steps.size();
    AddTo(&steps, input, 1);
  }
  num_tokens = steps.size();
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (places[i].num_tokens == 1) continue;
    places[i].first_token = num_tokens;
    num_tokens += places[i].num_tokens;
    AddTo(&prefills, inputs[i], places[i].num_tokens);
  }
  phase =
      prefills.size() == 0 ? Phase::kDecode : (steps.size() == 0 ? Phase::kPrefill : Phase::kMixed);

  // Sampled rows come first, so that they are one dense block for the sampler.
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (inputs[i].sample == nullptr) continue;
    places[i].sample_row = num_sampled++;
    logits_tokens.push_back(places[i].first_token + places[i].num_tokens - 1);
  }
  for (size_t i = 0; i < inputs.size(); ++i) {
    SequencePlace& place = places[i];
    if (inputs[i].want_logits == Positions::kNone || place.num_tokens == 0) continue;
    const bool all = inputs[i].want_logits == Positions::kAll && place.num_tokens > 1;
    place.logits_rows = all ? place.num_tokens : 1;
    if (!all && place.sample_row >= 0) {
      place.logits_row = place.sample_row;
      continue;
    }
    place.logits_row = static_cast<int64_t>(logits_tokens.size());
    const int64_t end = place.first_token + place.num_tokens;
    for (int64_t t = end - place.logits_rows; t < end; ++t) logits_tokens.push_back(t);
  }
  return absl::OkStatus();
}

}  // namespace gdn::pipeline
