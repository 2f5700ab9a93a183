// The second half of a sum over rows or tokens: blocks have left partial rows, which are added in
// their order. The gated norm's dgamma has a form of its own: tiled_sums.cuh.
#ifndef KERNELS_CUDA_PARTIAL_SUMS_CUH_
#define KERNELS_CUDA_PARTIAL_SUMS_CUH_

#include "kernels/cuda/cluster.cuh"
#include "kernels/cuda/element.cuh"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/linear_launch.h"
#include "kernels/cuda/math.cuh"

namespace gdn::cuda {

constexpr int kSumColumns = 8;

// Columns [0, columns) of the partial rows go to `sums`, the next `more_columns` to `more_sums`,
// unless that is NULL. Without partial rows the sums are zeros.
struct PartialSums {
  const float* partial;  // [count, columns + more_columns]
  int64_t count;
  int64_t columns;
  void* sums;
  gdn_dtype dtype;
  int64_t more_columns;
  float* more_sums;
};

// kLanes threads a column, which add every kLanes-th row and then each other's sums, in halves.
template <int kLanes>
__global__ void __launch_bounds__(kSumColumns* kLanes)
    SumPartials(const __grid_constant__ PartialSums p) {
  constexpr int kWarps = kSumColumns * kLanes / 32;
  constexpr int kLoads = 8;  // Under way at once.
  __shared__ float of_warps[kWarps][kSumColumns];
  const int64_t width = p.columns + p.more_columns;
  const int64_t column = blockIdx.x * int64_t{kSumColumns} + threadIdx.x % kSumColumns;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const float* const from = p.partial + column;
  WaitForPreviousKernel();
  AllowNextKernel();
  float sum = 0.0f;
  if (column < width) {
    int64_t row = threadIdx.x / kSumColumns;
    for (; row + (kLoads - 1) * kLanes < p.count; row += kLoads * kLanes) {
      float value[kLoads];
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        value[i] = __ldcg(from + (row + i * kLanes) * width);
      }
#pragma unroll
      for (int i = 0; i < kLoads; ++i) sum += value[i];
    }
    for (; row < p.count; row += kLanes) sum += __ldcg(from + row * width);
  }
  sum = LaneSum<32 - kSumColumns>(sum);
  if (lane < kSumColumns) of_warps[warp][lane] = sum;
  __syncthreads();
  for (int c = warp; c < kSumColumns; c += kWarps) {
    const int64_t to = blockIdx.x * int64_t{kSumColumns} + c;
    sum = LaneSum(lane < kWarps ? of_warps[lane][c] : 0.0f);
    if (lane != 0 || to >= width) continue;
    if (to < p.columns) {
      StoreAs(p.sums, p.dtype, to, sum);
    } else if (p.more_sums != nullptr) {
      p.more_sums[to - p.columns] = sum;
    }
  }
}

// After the kernel that leaves the partial rows, if there is one.
inline gdn_status LaunchPartialSums(const char* op, const PartialSums& p, const Device& device,
                                    cudaStream_t stream) {
  constexpr int kMany = 128;
  constexpr int kFew = 16;
  constexpr int64_t kFewColumns = 4096;
  const int64_t width = p.columns + p.more_columns;
  const bool many = width <= kFewColumns;  // The blocks are few: then their lanes are many.
  const cudaError_t error =
      LaunchMaybeEarly(device.compute_capability >= 90,
                       dim3(static_cast<unsigned>((width + kSumColumns - 1) / kSumColumns)),
                       dim3(kSumColumns * (many ? kMany : kFew)), 0, stream,
                       many ? SumPartials<kMany> : SumPartials<kFew>, p);
  return CheckCuda(op, error);
}

}  // namespace gdn::cuda

#endif  // KERNELS_CUDA_PARTIAL_SUMS_CUH_
