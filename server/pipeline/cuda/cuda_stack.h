// File: cuda_stack.h
//
// The residual stream through the Gated DeltaNet layers on the device. A layer is five launches for
// one-token rows: norm and in_proj, the fused decode step, out_proj and residual, norm and gate|up
// and SiLU, down and residual; with 9 to 128 rows, and up to 256 if all products take them so, on
// sm_90a and unless batch_invariant, the norms are split between the products. Longer sequences
// take the fused prefill instead of the fused step; gdn2 layers take separate ops.
#ifndef SERVER_PIPELINE_CUDA_CUDA_STACK_H_
#define SERVER_PIPELINE_CUDA_CUDA_STACK_H_

#include <cstdint>

#include "absl/status/status.h"
#include "gdn/kernels/fused_decode.h"
#include "gdn/kernels/linear.h"
#include "server/model/model_spec.h"
#include "server/pipeline/cuda/cuda_gdn2.h"
#include "server/pipeline/cuda/cuda_ops.h"
#include "server/pipeline/cuda/device_memory.h"
#include "server/pipeline/cuda/device_model.h"
#include "server/pipeline/cuda/device_state_pool.h"
#include "server/pipeline/cuda/stack_batch.h"
#include "server/pipeline/cuda/step_io.h"

namespace gdn::pipeline {

class CudaStack {
 public:
  // All borrowed. `max_rows` and `max_tokens` are the most sequences and tokens that a run has.
  absl::Status Create(const model::ModelSpec& spec, const DeviceModel* weights,
                      const DeviceStatePool* states, CudaOps* ops, int64_t max_rows,
                      int64_t max_tokens, bool batch_invariant);

  // Advances x, [num_tokens, hidden] dense, through all layers in place, and the states of the
  // slots that `arrays` names with it.
  absl::Status Run(const StackBatch& batch, const StepArrays& arrays, float* x);

 private:
  absl::Status CreatePlan(const char* name, gdn_linear_kind kind, int64_t n, int64_t k,
                          bool residual, LinearPlan* plan);
  absl::Status CreateInProj(model::LayerType type, LinearPlan* plan);
  // Whether the products of so many rows make each other's norms (linear.h).
  bool SplitsNorms(int64_t rows) const;
  absl::Status RunLayer(int64_t layer, const StackBatch& batch, const StepArrays& arrays,
                        bool split_norms, float* x);
  // What steps and prefills share: of all layers, and of one.
  gdn_fused_decode_args MixerShape() const;
  gdn_fused_decode_args MixerArgs(int64_t layer) const;
  absl::Status FusedStep(int64_t layer, const StackBatch& batch, const StepArrays& arrays);
  absl::Status Prefill(int64_t layer, const StackBatch& batch, const StepArrays& arrays);

  model::ModelSpec spec_;
  const DeviceModel* weights_ = nullptr;
  const DeviceStatePool* states_ = nullptr;
  CudaOps* ops_ = nullptr;
  int64_t max_tokens_ = 0;
  bool batch_invariant_ = false;
  LinearPlan in_proj_;  // Of each type of layer; null where the model has none.
  LinearPlan gdn2_in_proj_;
  LinearPlan out_proj_;
  LinearPlan gate_up_;
  LinearPlan down_;

  int64_t projection_stride_ = 0;     // Elements.
  DeviceArray<uint16_t> projection_;  // [T, q|k|v|z|b|a], of a gdn2 layer [T, q|k|v|z|f|b|w]
  DeviceArray<uint16_t> mixed_;       // [T, HV * V], the input of out_proj
  DeviceArray<uint16_t> inner_;       // [T, intermediate]
  DeviceArray<uint16_t> normed_;      // Of norms in two parts: n, without its factor,
  DeviceArray<float> squares_;        // and what that is found from.
  CudaGdn2 gdn2_;
};

}  // namespace gdn::pipeline

#endif  // SERVER_PIPELINE_CUDA_CUDA_STACK_H_
