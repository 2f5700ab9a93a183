// The launch of the fused decode kernels for K = V = 128, tiling by tiling.
#ifndef KERNELS_CUDA_FUSED_DECODE_128_CUH_
#define KERNELS_CUDA_FUSED_DECODE_128_CUH_

#include "kernels/cuda/fused_decode_split.cuh"
#include "kernels/cuda/fused_decode_stream.cuh"
#include "kernels/cuda/fused_decode_whole.cuh"

namespace gdn::cuda {
namespace decode128 {

template <typename X, typename S>
cudaError_t Launch(const DecodeParams& params, int tiling, cudaStream_t stream) {
  switch (tiling) {
    case 0:
      return LaunchStream<X, S>(params, stream);
    case 1:
      if (params.tokens == 1) return LaunchWhole<X, S, 8, 2, 2, 0, false>(params, stream);
      return LaunchSplit<X, S, 8, 2, 1>(params, stream);
    case 2:
      return LaunchSplit<X, S, 4, 2, 4>(params, stream);
    case 3:
      return LaunchSplit<X, S, 4, 1, 5>(params, stream);
    case 4:
      if constexpr (sizeof(S) == 4) {
        return LaunchWhole<X, S, 4, 4, 3, 4, false>(params, stream);
      } else {
        return LaunchWhole<X, S, 4, 4, 4, 4, true>(params, stream);
      }
    case 5:
      if constexpr (sizeof(S) == 4) {
        return LaunchWhole<X, S, 8, 2, 2, 2, false>(params, stream);
      } else {
        return LaunchWhole<X, S, 4, 4, 5, 3, true>(params, stream);
      }
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace decode128

template <typename X>
cudaError_t LaunchDecode128(const DecodeParams& params, gdn_dtype state_dtype, int tiling,
                            cudaStream_t stream) {
  return state_dtype == GDN_F32 ? decode128::Launch<X, float>(params, tiling, stream)
                                : decode128::Launch<X, Bf16>(params, tiling, stream);
}

}  // namespace gdn::cuda

#endif  // KERNELS_CUDA_FUSED_DECODE_128_CUH_
