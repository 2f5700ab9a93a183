// What the fused decode kernels and their launcher share.
#ifndef KERNELS_CUDA_FUSED_DECODE_CUH_
#define KERNELS_CUDA_FUSED_DECODE_CUH_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "gdn/kernels/fused_decode.h"

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

// How the 128x128 kernel divides a head: `splits` blocks, each of `warps` warps that hold `groups`
// times eight rows of the state.
struct DecodeTiling {
  int warps;
  int groups;
  int splits;
};

// The tilings that are compiled; all give the same bits.
constexpr DecodeTiling kDecodeTilings[] = {{16, 1, 1}, {8, 2, 1}, {8, 1, 2}, {4, 1, 4}, {2, 1, 8}};
constexpr int kNumDecodeTilings = 5;

// Index into kDecodeTilings for the arguments on the current device, or -1 for the generic kernel.
gdn_status ChooseDecodeTiling(const gdn_fused_decode_args& args, int* tiling);

// Runs the given tiling, or the generic kernel for -1; GDN_UNSUPPORTED_SHAPE where the arguments or
// the device rule it out.
gdn_status FusedDecodeWith(const gdn_exec& exec, const gdn_fused_decode_args& args, int tiling);

// One translation unit per activation type.
template <typename X>
cudaError_t LaunchDecode128(const FusedParams& params, int tiling, cudaStream_t stream);
template <typename X>
cudaError_t LaunchDecodeGeneric(const FusedParams& params, cudaStream_t stream);

}  // namespace gdn::cuda

#endif  // KERNELS_CUDA_FUSED_DECODE_CUH_
