// Rounding two values at once, which is one instruction for the 16-bit types.
#ifndef KERNELS_CUDA_NARROW_PAIR_CUH_
#define KERNELS_CUDA_NARROW_PAIR_CUH_

#include "kernels/cuda/element.cuh"

namespace gdn::cuda {

template <typename T>
__device__ inline void NarrowPair(float a, float b, T* to);
template <>
__device__ inline void NarrowPair<float>(float a, float b, float* to) {
  to[0] = a;
  to[1] = b;
}
template <>
__device__ inline void NarrowPair<Bf16>(float a, float b, Bf16* to) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(a, b);
  to[0] = pair.x;
  to[1] = pair.y;
}
template <>
__device__ inline void NarrowPair<F16>(float a, float b, F16* to) {
  const __half2 pair = __floats2half2_rn(a, b);
  to[0] = pair.x;
  to[1] = pair.y;
}

}  // namespace gdn::cuda

#endif  // KERNELS_CUDA_NARROW_PAIR_CUH_
