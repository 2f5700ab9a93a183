// File: batch_plan.h
//
// How a ragged batch is laid out for the ops: single-token sequences first (they take the recurrent
// step), longer ones packed behind them (they take the chunked prefill). Which path a sequence
// takes depends on its own length alone.
#ifndef SERVER_PIPELINE_BATCH_PLAN_H_
#define SERVER_PIPELINE_BATCH_PLAN_H_

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "server/pipeline/pipeline.h"

namespace gdn::pipeline {

// A run of sequences that go through one launch.
struct SequenceGroup {
  std::vector<int64_t> read_slot;
  std::vector<int64_t> write_slot;
  std::vector<uint8_t> fresh;
  std::vector<int32_t> cu_seqlens;  // [n + 1], from 0, in tokens of the group.
  int64_t size() const { return static_cast<int64_t>(read_slot.size()); }
};

// Where a sequence's outputs come from.
struct SequencePlace {
  int64_t first_token = 0;  // Its first row among the batch's tokens.
  int64_t num_tokens = 0;
  int64_t logits_row = -1;  // First of its rows among the logits; -1: none.
  int64_t logits_rows = 0;  // Rows returned to the caller.
  int64_t sample_row = -1;  // Among the sampled rows, which are the first of the logits.
};

struct BatchPlan {
  SequenceGroup steps;     // One token each: rows [0, steps.size()) of the batch.
  SequenceGroup prefills;  // The tokens behind them.
  int64_t num_tokens = 0;
  std::vector<SequencePlace> places;   // One per input, in input order.
  std::vector<int64_t> logits_tokens;  // Token row behind each row of logits.
  int64_t num_sampled = 0;
  Phase phase = Phase::kDecode;

  // INVALID_ARGUMENT names the sequence and what is wrong with it.
  absl::Status Build(std::span<const SequenceInput> inputs, const PipelineInfo& info);

 private:
  void AddTo(SequenceGroup* group, const SequenceInput& input, int64_t tokens);
};

}  // namespace gdn::pipeline

#endif  // SERVER_PIPELINE_BATCH_PLAN_H_
