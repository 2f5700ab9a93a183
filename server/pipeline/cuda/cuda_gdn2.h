// File: cuda_gdn2.h
//
// What a gdn2 layer does on the device between its two products, as separate ops: gates,
// convolution, the norm of q and k, the rule, the gated output norm.
#ifndef SERVER_PIPELINE_CUDA_CUDA_GDN2_H_
#define SERVER_PIPELINE_CUDA_CUDA_GDN2_H_

#include <cstdint>

#include "absl/status/status.h"
#include "gdn/kernels/gdn2.h"
#include "server/model/model_spec.h"
#include "server/pipeline/cuda/cuda_ops.h"
#include "server/pipeline/cuda/device_memory.h"
#include "server/pipeline/cuda/device_model.h"
#include "server/pipeline/cuda/device_state_pool.h"
#include "server/pipeline/cuda/stack_batch.h"
#include "server/pipeline/cuda/step_io.h"

namespace gdn::pipeline {

class CudaGdn2 {
 public:
  // All borrowed; `spec` and `states` must outlive the object. Before CudaOps::AllocateWorkspace.
  absl::Status Create(const model::ModelSpec* spec, const DeviceStatePool* states, CudaOps* ops,
                      int64_t max_rows, int64_t max_tokens);

  // From the projection's rows, `projection_stride` elements apart, to `mixed`, [T, HV * V] dense.
  absl::Status Run(int64_t layer, const DeviceLayer& weights, const StackBatch& batch,
                   const StepArrays& arrays, const uint16_t* projection, int64_t projection_stride,
                   uint16_t* mixed);

 private:
  // Sequences that go through the same ops.
  struct Group {
    bool step = false;
    int64_t sequences = 0;
    int64_t tokens = 0;
    int64_t first = 0;  // As a token, and as a sequence.
    const int32_t* cu_seqlens = nullptr;
  };
  absl::Status Gates(const DeviceLayer& weights, int64_t tokens, const uint16_t* projection,
                     int64_t projection_stride);
  absl::Status Convolve(int64_t layer, const DeviceLayer& weights, const Group& group,
                        const StepArrays& arrays, const uint16_t* projection,
                        int64_t projection_stride);
  // But for the state, which the layer brings.
  gdn2_args RuleArgs(const Group& group) const;
  absl::Status Rule(int64_t layer, const Group& group, const StepArrays& arrays);
  absl::Status OutputNorm(const DeviceLayer& weights, int64_t tokens, const uint16_t* projection,
                          int64_t projection_stride, uint16_t* mixed);

  const model::ModelSpec* spec_ = nullptr;
  const DeviceStatePool* states_ = nullptr;
  CudaOps* ops_ = nullptr;
  DeviceArray<uint16_t> conv_out_;  // [T, q|k|v]
  DeviceArray<float> g_;            // [T, H * K]
  DeviceArray<float> erase_;        // [T, H * K]
  DeviceArray<float> write_;        // [T, HV * V]
  DeviceArray<float> o_;            // [T, HV * V], not rounded before its norm
};

}  // namespace gdn::pipeline

#endif  // SERVER_PIPELINE_CUDA_CUDA_GDN2_H_
