// File: device_model.h
//
// A model's weights on the device: matrices in BF16 as checkpoints store them, those that share
// their input behind each other (q|k|v|z|b|a, of gdn2 q|k|v|z|f|b|w, and gate|up), small vectors in
// FP32.
#ifndef SERVER_PIPELINE_CUDA_DEVICE_MODEL_H_
#define SERVER_PIPELINE_CUDA_DEVICE_MODEL_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "server/model/weights.h"
#include "server/pipeline/cuda/device_memory.h"

namespace gdn::pipeline {

struct DeviceLayer {
  model::LayerType type = model::LayerType::kLinearAttention;
  float* input_norm = nullptr;   // [hidden]
  uint16_t* in_proj = nullptr;   // [columns of the projection, hidden]
  float* conv = nullptr;         // [C, W]
  float* a_log = nullptr;        // [HV]; gdn2 [H]
  float* dt_bias = nullptr;      // [HV]; gdn2 [H * K]
  float* gated_norm = nullptr;   // [V]
  uint16_t* out_proj = nullptr;  // [hidden, HV * V]
  float* mlp_norm = nullptr;     // [hidden]
  uint16_t* gate_up = nullptr;   // [2 * intermediate, hidden]
  uint16_t* down = nullptr;      // [hidden, intermediate]
};

struct DeviceModel {
  uint16_t* embedding = nullptr;  // [vocab, hidden]; null if not held
  std::vector<DeviceLayer> layers;
  float* final_norm = nullptr;  // [hidden]; null without the head
  uint16_t* head = nullptr;     // [vocab, hidden]; the embedding where tied

  DeviceArray<std::byte> memory;  // All of the above.
  int64_t matrix_bytes = 0;       // Read by a step that gives logits, the embedding not counted.
  double upload_bytes_per_second = 0;

  // Consumes the weights: nothing refers to their storage afterwards.
  absl::Status Load(model::Weights weights, const model::LayerRange& range);
};

}  // namespace gdn::pipeline

#endif  // SERVER_PIPELINE_CUDA_DEVICE_MODEL_H_
