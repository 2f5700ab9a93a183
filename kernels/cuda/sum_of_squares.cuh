// The sum of a row's squares by vectors, in the order of the kernels that go by elements.
#ifndef KERNELS_CUDA_SUM_OF_SQUARES_CUH_
#define KERNELS_CUDA_SUM_OF_SQUARES_CUH_

#include "kernels/cuda/math.cuh"
#include "kernels/cuda/vector.cuh"

namespace gdn::cuda {

// Of a row of eight neighbouring elements a lane, kLanes lanes a row. By elements, a warp takes 32
// of them and sums by LaneSum(), and the warps are summed in their order: here lanes halve the
// elements between them until each has one. All lanes of the row get the sum.
template <int kLanes>
__device__ inline float VectorSumOfSquares(const float (&x)[kVectorElements]) {
  const unsigned lane = threadIdx.x % 32;
  const bool second = (lane & 2) != 0;
  const bool odd = (lane & 1) != 0;
  float square[kVectorElements];
#pragma unroll
  for (int e = 0; e < kVectorElements; ++e) square[e] = x[e] * x[e];
  float half[4];  // Elements 0, 1, 4, 5 or 2, 3, 6, 7.
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int low = i < 2 ? i : i + 2;
    const float sent = second ? square[low] : square[low + 2];
    half[i] = (second ? square[low + 2] : square[low]) + __shfl_xor_sync(kFullMask, sent, 2);
  }
  float quarter[2];  // Elements e and e + 4, where e is the lane's index among four.
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float sent = odd ? half[2 * i] : half[2 * i + 1];
    quarter[i] = (odd ? half[2 * i + 1] : half[2 * i]) + __shfl_xor_sync(kFullMask, sent, 1);
  }
  const float of_warp = LaneSum<3>(quarter[0] + quarter[1]);
  float sum = 0.0f;
#pragma unroll
  for (int w = 0; w < kLanes / 4; ++w) {
    sum += __shfl_sync(kFullMask, of_warp, static_cast<int>(lane) / kLanes * kLanes + 4 * w);
  }
  return sum;
}

}  // namespace gdn::cuda

#endif  // KERNELS_CUDA_SUM_OF_SQUARES_CUH_
