// File: packed_weights.h
//
// A model's weights in the form the kernels multiply with. Products that share their input are
// packed as one: q|k|v|z|b|a (gdn2: q|k|v|z|f|b|w) and gate|up.
#ifndef SERVER_PIPELINE_PACKED_WEIGHTS_H_
#define SERVER_PIPELINE_PACKED_WEIGHTS_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "gdn/kernels/matmul.h"
#include "server/model/weights.h"

namespace gdn::pipeline {

struct PackedDeleter {
  void operator()(gdn_packed_weight* weight) const { gdn_packed_weight_destroy(weight); }
};
using PackedWeight = std::unique_ptr<gdn_packed_weight, PackedDeleter>;

struct PackedLayer {
  model::LayerType type = model::LayerType::kLinearAttention;
  std::vector<float> input_norm;
  PackedWeight in_proj;  // rows in the order of the projection's columns
  std::vector<float> conv;
  std::vector<float> a_log;
  std::vector<float> dt_bias;
  std::vector<float> gated_norm;
  PackedWeight out_proj;
  std::vector<float> mlp_norm;
  PackedWeight gate_up;  // rows gate|up
  PackedWeight down;
};

struct PackedModel {
  std::vector<std::byte> embedding;  // [vocab, hidden] as stored; empty if not held
  gdn_dtype embedding_type = GDN_F32;
  std::vector<PackedLayer> layers;
  std::vector<float> final_norm;
  PackedWeight head;  // null if not held

  // Of the matrices; the vectors are small.
  int64_t matrix_bytes() const;
};

struct PackOptions {
  gdn_backend backend = GDN_BACKEND_CPU;
  gdn_matmul_math math = GDN_MATH_BF16;
  int32_t row_block = 0;
  int32_t threads = 1;
};

// Consumes the weights: nothing refers to their storage afterwards.
absl::StatusOr<PackedModel> PackWeights(model::Weights weights, const model::LayerRange& range,
                                        const PackOptions& options);

}  // namespace gdn::pipeline

#endif  // SERVER_PIPELINE_PACKED_WEIGHTS_H_
