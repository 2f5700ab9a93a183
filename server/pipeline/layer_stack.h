// File: layer_stack.h
//
// The residual stream through the Gated DeltaNet layers, written once against the ops of the C ABI.
#ifndef SERVER_PIPELINE_LAYER_STACK_H_
#define SERVER_PIPELINE_LAYER_STACK_H_

#include <cstdint>

#include "absl/status/status.h"
#include "gdn/kernels/gated_rms_norm.h"
#include "server/model/model_spec.h"
#include "server/pipeline/aligned_buffer.h"
#include "server/pipeline/batch_plan.h"
#include "server/pipeline/gdn2_rule.h"
#include "server/pipeline/op_runner.h"
#include "server/pipeline/packed_weights.h"
#include "server/pipeline/state_pool.h"

namespace gdn::pipeline {

class LayerStack {
 public:
  // `ops`, `weights` and `states` are borrowed and must outlive the stack.
  LayerStack(const model::ModelSpec& spec, const PackedModel* weights, StatePool* states,
             OpRunner* ops);

  // Sizes the activation buffers for `tokens` rows.
  void Reserve(int64_t tokens);
  // Of those buffers.
  int64_t bytes() const {
    return normed_.bytes() + projection_.bytes() + conv_out_.bytes() + g_.bytes() + beta_.bytes() +
           gdn2_.bytes() + mixed_.bytes() + gate_up_.bytes();
  }

  // Advances x, [plan.num_tokens, hidden] dense, through all layers in place, and the states of the
  // plan's slots with it.
  absl::Status Run(const BatchPlan& plan, float* x);

 private:
  absl::Status RunLayer(int64_t layer, const BatchPlan& plan, float* x);
  absl::Status Mix(int64_t layer, const BatchPlan& plan);
  absl::Status Gates(int64_t layer, int64_t tokens);
  absl::Status MixGroup(int64_t layer, const SequenceGroup& group, bool step, int64_t first_token);
  absl::Status Convolve(int64_t layer, const SequenceGroup& group, bool step, int64_t first_token);
  absl::Status DeltaRule(int64_t layer, const SequenceGroup& group, bool step, int64_t first_token);
  absl::Status Norm(int64_t tokens, const float* x, const std::vector<float>& weight, float* y);
  absl::Status Product(const char* name, int64_t tokens, const float* x, int64_t x_stride,
                       const PackedWeight& weight, float* y, int64_t y_stride, bool accumulate);

  const model::ModelSpec& spec_;
  const PackedModel* weights_;
  StatePool* states_;
  OpRunner* ops_;

  // Row strides of the buffers below, in elements.
  int64_t projection_stride_;
  int64_t conv_stride_;
  int64_t mixed_stride_;
  int64_t gate_up_stride_;
  AlignedBuffer<float> normed_;      // [T, hidden], dense
  AlignedBuffer<float> projection_;  // [T, q|k|v|z|b|a], of a gdn2 layer [T, q|k|v|z|f|b|w]
  AlignedBuffer<float> conv_out_;    // [T, conv_channels]
  AlignedBuffer<float> g_;           // [T, HV]
  AlignedBuffer<float> beta_;        // [T, HV]
  Gdn2Rule gdn2_;                    // Of the gdn2 layers, in place of the two.
  AlignedBuffer<float> mixed_;       // [T, HV * V]
  AlignedBuffer<float> gate_up_;     // [T, 2 * intermediate]
};

}  // namespace gdn::pipeline

#endif  // SERVER_PIPELINE_LAYER_STACK_H_
