// What the fused decode kernels and their launcher share.
#ifndef KERNELS_CUDA_FUSED_DECODE_CUH_
#define KERNELS_CUDA_FUSED_DECODE_CUH_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "gdn/kernels/fused_decode.h"
#include "kernels/cuda/decode_tiling.h"

namespace gdn::cuda {

constexpr int kMaxDecodeTokens = 8;

struct FusedParams {
  gdn_fused_decode_args args;
  int64_t channels;  // Of the convolution: 2*H*K + HV*V.
  float scale;       // Never 0.
  int32_t ratio;     // HV / H.
};

// Grid y and z together count rows: y alone ends at 65535.
constexpr int64_t kMaxGridY = 65535;
__device__ inline int64_t GridRow() { return blockIdx.y + blockIdx.z * kMaxGridY; }

// One translation unit per activation type.
template <typename X>
cudaError_t LaunchDecode128(const FusedParams& params, int tiling, cudaStream_t stream);
template <typename X>
cudaError_t LaunchDecodeGeneric(const FusedParams& params, cudaStream_t stream);

}  // namespace gdn::cuda

#endif  // KERNELS_CUDA_FUSED_DECODE_CUH_
