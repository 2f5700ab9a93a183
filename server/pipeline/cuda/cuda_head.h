// File: cuda_head.h
//
// The end of a step on the device: final norm, head, and the choice of tokens.
#ifndef SERVER_PIPELINE_CUDA_CUDA_HEAD_H_
#define SERVER_PIPELINE_CUDA_CUDA_HEAD_H_

#include <cstdint>

#include "absl/status/status.h"
#include "gdn/kernels/linear.h"
#include "gdn/kernels/linear_argmax.h"
#include "gdn/kernels/sampling.h"
#include "server/model/model_spec.h"
#include "server/pipeline/cuda/cuda_batch.h"
#include "server/pipeline/cuda/cuda_ops.h"
#include "server/pipeline/cuda/device_memory.h"
#include "server/pipeline/cuda/device_model.h"
#include "server/pipeline/cuda/step_io.h"

namespace gdn::pipeline {

class CudaHead {
 public:
  // All borrowed. `max_rows` is the most that choose in a step; more logits are computed in parts.
  absl::Status Create(const model::ModelSpec& spec, const DeviceModel* weights, CudaOps* ops,
                      int64_t max_rows, int64_t max_tokens, bool batch_invariant);

  // Logits and choices of the first `rows` rows of x, for a graph.
  absl::Status RunDense(int64_t rows, const StepArrays& arrays, const float* x);
  // The same for at most greedy_rows() rows that are all greedy, without logits in memory.
  absl::Status RunGreedy(int64_t rows, const StepArrays& arrays, const float* x);
  int64_t greedy_rows() const { return greedy_rows_; }
  // Logits, choices and whatever else the batch asks for, on their way to the batch's memory.
  absl::Status Run(CudaBatch* batch, const StepArrays& arrays, const float* x);

  static constexpr int32_t kMaxTopLogprobs = 64;

 private:
  absl::Status PrepareGreedy();
  gdn_linear_argmax_args GreedyArgs(int64_t rows) const;
  absl::Status Logits(int64_t rows, const float* x, bool early_start);
  absl::Status Sample(int64_t rows, const StepArrays& arrays, const CudaBatch* batch);
  absl::Status SendChoiceInputs(const CudaBatch& batch);
  absl::Status FetchAlternatives(CudaBatch* batch);

  model::ModelSpec spec_;
  const DeviceModel* weights_ = nullptr;
  CudaOps* ops_ = nullptr;
  int64_t max_rows_ = 0;
  int64_t greedy_rows_ = 0;
  LinearPlan plan_;
  DeviceArray<float> gathered_;         // [max_rows, hidden]
  DeviceArray<float> logits_;           // [max_rows, vocab]
  DeviceArray<int32_t> logits_tokens_;  // [max_tokens + max_rows]
  DeviceArray<int32_t> top_ids_;        // [max_rows, kMaxTopLogprobs]
  DeviceArray<float> top_values_;
  DeviceArray<int32_t> history_;  // Grown on demand.
  DeviceArray<int64_t> history_offsets_;
};

}  // namespace gdn::pipeline

#endif  // SERVER_PIPELINE_CUDA_CUDA_HEAD_H_
