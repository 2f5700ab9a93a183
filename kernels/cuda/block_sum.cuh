// Sum over a block, in a fixed order.
#ifndef KERNELS_CUDA_BLOCK_SUM_CUH_
#define KERNELS_CUDA_BLOCK_SUM_CUH_

#include "kernels/cuda/math.cuh"

namespace gdn::cuda {

// Every thread gets the sum. May be called repeatedly by all threads of the block.
template <int kWarps>
__device__ inline float BlockSum(float value) {
  __shared__ float partial[kWarps];
  value = LaneSum(value);
  __syncthreads();  // The readers of the call before are done.
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = value;
  __syncthreads();
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kWarps; ++i) sum += partial[i];
  return sum;
}

}  // namespace gdn::cuda

#endif  // KERNELS_CUDA_BLOCK_SUM_CUH_
