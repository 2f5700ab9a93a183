// File: sampler.h
//
// Chooses the tokens of a batch's sampled rows with the sampling op, and keeps its results.
#ifndef SERVER_PIPELINE_SAMPLER_H_
#define SERVER_PIPELINE_SAMPLER_H_

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "gdn/kernels/sampling.h"
#include "server/pipeline/batch_plan.h"
#include "server/pipeline/op_runner.h"
#include "server/pipeline/pipeline.h"

namespace gdn::pipeline {

class Sampler {
 public:
  // `ops` is borrowed.
  Sampler(OpRunner* ops, int64_t vocab_size) : ops_(ops), vocab_size_(vocab_size) {}

  // Samples rows [0, plan.num_sampled) of `logits`, [.., vocab_size] dense.
  absl::Status Run(std::span<const SequenceInput> inputs, const BatchPlan& plan,
                   const float* logits);

  // Of the last Run; valid until the next.
  TokenLogprob token(int64_t row) const;
  std::span<const TokenLogprob> top(int64_t row, int32_t count) const;

 private:
  OpRunner* ops_;
  int64_t vocab_size_;
  int32_t top_width_ = 0;
  std::vector<gdn_sampling_params> params_;
  std::vector<int64_t> positions_;
  std::vector<int32_t> history_;
  std::vector<int64_t> history_offsets_;
  std::vector<int32_t> tokens_;
  std::vector<float> logprobs_;
  std::vector<int32_t> top_ids_;
  std::vector<float> top_values_;
  std::vector<TokenLogprob> top_;
};

}  // namespace gdn::pipeline

#endif  // SERVER_PIPELINE_SAMPLER_H_
