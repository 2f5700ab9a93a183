// File: cuda_batch.h
//
// A batch in flight: its layout, and the host memory its inputs and outputs travel through.
#ifndef SERVER_PIPELINE_CUDA_CUDA_BATCH_H_
#define SERVER_PIPELINE_CUDA_CUDA_BATCH_H_

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "server/pipeline/batch_plan.h"
#include "server/pipeline/cuda/device_memory.h"
#include "server/pipeline/cuda/step_io.h"
#include "server/pipeline/pipeline.h"

namespace gdn::pipeline {

struct CudaBatch {
  BatchPlan plan;
  int64_t step = 0;       // Its number, which says whose turn it is.
  bool decode = false;    // One token id a row and nothing but choices wanted: fits a graph.
  bool greedy = false;    // A decode batch of which no row draws at random.
  bool timed = false;     // Its ops are timed one by one.
  bool measured = false;  // It has passed `begin`, so the time to `done` is known.
  int32_t top_width = 0;  // Alternatives per row of logits.

  // Per input: its row, its row among the logits if it chooses (-1: not), and what it wanted.
  struct Sequence {
    int64_t row = 0;
    int64_t sample_row = -1;
    Positions want_hidden = Positions::kNone;
    int32_t top_logprobs = 0;
  };
  std::vector<Sequence> sequences;

  // Pinned; grown on demand.
  PinnedArray<int32_t> ids;              // [tokens]
  PinnedArray<int32_t> cu_seqlens;       // [prefills + 1]
  PinnedArray<int32_t> logits_tokens;    // [rows of logits]
  PinnedArray<int32_t> history;          // Of all choosing rows, packed.
  PinnedArray<int64_t> history_offsets;  // [choosing rows + 1]
  PinnedArray<float> hidden_in;          // [tokens, hidden], where given.
  PinnedArray<float> hidden_out;         // [tokens, hidden]
  PinnedArray<float> logits;             // [rows of logits, vocab]
  PinnedArray<int32_t> top_ids;          // [choosing rows, top_width]
  PinnedArray<float> top_values;
  std::vector<TokenLogprob> top;
  bool any_hidden_in = false;
  bool any_hidden_out = false;
  bool any_logits = false;
  std::vector<size_t> by_slot;
  int64_t history_count = 0;  // 0: no row has a repetition penalty.

  CudaEvent begin;
  CudaEvent done;

  // Lays the batch out and checks it against the one before, `previous`, which must still be in
  // flight or just awaited where inputs are chained to it; nullptr: none.
  absl::Status Build(std::span<const SequenceInput> inputs, const PipelineInfo& info,
                     const CudaBatch* previous);
  // Writes rows [0, padded_rows), those behind the batch's as padding, and the pinned inputs.
  absl::Status Fill(std::span<const SequenceInput> inputs, const PipelineInfo& info,
                    const CudaBatch* previous, int64_t padded_rows, StepRow* rows);
  // What came back, once `done`.
  void Collect(const StepResult* results, const PipelineInfo& info,
               std::vector<SequenceOutput>* outputs);

 private:
  // Gives the sequences of a decode batch their rows: memory that is walked in order is faster.
  void OrderBySlot(std::span<const SequenceInput> inputs);
  absl::Status FillPacked(std::span<const SequenceInput> inputs, const PipelineInfo& info);
  absl::Status FillHistory(std::span<const SequenceInput> inputs);
};

}  // namespace gdn::pipeline

#endif  // SERVER_PIPELINE_CUDA_CUDA_BATCH_H_
