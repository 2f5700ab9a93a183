// File: gdn2_rule.h
//
// What a gdn2 layer does between its projection and its output norm, the convolution apart: gates,
// the norm of q and k, and the rule.
#ifndef SERVER_PIPELINE_GDN2_RULE_H_
#define SERVER_PIPELINE_GDN2_RULE_H_

#include <cstdint>

#include "absl/status/status.h"
#include "gdn/kernels/gdn2.h"
#include "server/model/model_spec.h"
#include "server/pipeline/aligned_buffer.h"
#include "server/pipeline/batch_plan.h"
#include "server/pipeline/op_runner.h"
#include "server/pipeline/packed_weights.h"
#include "server/pipeline/state_pool.h"

namespace gdn::pipeline {

class Gdn2Rule {
 public:
  // All borrowed. The strides are those of the buffers below, in elements.
  Gdn2Rule(const model::ModelSpec& spec, StatePool* states, OpRunner* ops,
           int64_t projection_stride, int64_t conv_stride, int64_t mixed_stride)
      : spec_(spec),
        states_(states),
        ops_(ops),
        projection_stride_(projection_stride),
        conv_stride_(conv_stride),
        mixed_stride_(mixed_stride) {}

  void Reserve(int64_t tokens);
  int64_t bytes() const { return g_.bytes() + erase_.bytes() + write_.bytes(); }

  // From the columns f|b|w of the first `tokens` rows of the projection, for the Runs of a layer.
  absl::Status Gates(const PackedLayer& weights, int64_t tokens, const float* projection);
  // Advances the group's slots by its rows of `conv_out`, q|k|v, whose q and k it normalises in
  // place, and writes the rows of `mixed`.
  absl::Status Run(int64_t layer, const SequenceGroup& group, bool step, int64_t first_token,
                   float* conv_out, float* mixed);

 private:
  const model::ModelSpec& spec_;
  StatePool* states_;
  OpRunner* ops_;
  int64_t projection_stride_;
  int64_t conv_stride_;
  int64_t mixed_stride_;
  AlignedBuffer<float> g_;      // [T, H * K]
  AlignedBuffer<float> erase_;  // [T, H * K]
  AlignedBuffer<float> write_;  // [T, HV * V]
};

}  // namespace gdn::pipeline

#endif  // SERVER_PIPELINE_GDN2_RULE_H_
