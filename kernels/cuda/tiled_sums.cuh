// The second half of a sum over few columns: blocks have left partial rows in tiles, which are
// added in a fixed order. The blocks here are small, so that they find room beside the last blocks
// of the first kernel and are there when it ends, and short, for their instructions are cold.
#ifndef KERNELS_CUDA_TILED_SUMS_CUH_
#define KERNELS_CUDA_TILED_SUMS_CUH_

#include "kernels/cuda/cluster.cuh"
#include "kernels/cuda/element.cuh"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/linear_launch.h"
#include "kernels/cuda/math.cuh"

namespace gdn::cuda {

// Tiles: [columns / 4 rounded up, count, 4]; what lies beyond the columns is not used.
constexpr int kTileColumns = 4;

inline int64_t Tiles(int64_t columns) { return (columns + kTileColumns - 1) / kTileColumns; }
inline int64_t TiledElements(int64_t count, int64_t columns) {
  return count * Tiles(columns) * kTileColumns;
}
__device__ inline int64_t TiledPlace(int64_t count, int64_t row, int64_t column) {
  return (column / kTileColumns * count + row) * kTileColumns + column % kTileColumns;
}

// Without partial rows the sums are zeros.
struct TiledSums {
  const float* partial;  // Tiles.
  int64_t count;         // Below 2^31.
  int64_t columns;
  void* sums;  // [columns]
  gdn_dtype dtype;
};

// Stays in the L2 until it is added: meanwhile the first kernel's inputs stream through.
__device__ inline void StoreKept(float* to, float value) {
  asm volatile(
      "{ .reg .b64 policy; createpolicy.fractional.L2::evict_last.b64 policy, 1.0; "
      "st.global.L2::cache_hint.f32 [%0], %1, policy; }" ::"l"(to),
      "f"(value)
      : "memory");
}

// A block a tile, kLanes threads a column. Each adds every kLanes-th row; then lanes of a warp are
// added in halves, and warps one after the other.
template <int kLanes>
__global__ void __launch_bounds__(kTileColumns* kLanes, 1024 / (kTileColumns * kLanes))
    SumTiles(const __grid_constant__ TiledSums p) {
  constexpr int kWarps = kTileColumns * kLanes / 32;
  constexpr int kLoads = 16;  // Under way at once.
  __shared__ float of_warps[kWarps][kTileColumns];
  const int column = static_cast<int>(threadIdx.x) % kTileColumns;
  const int lane = static_cast<int>(threadIdx.x) / kTileColumns;
  const auto count = static_cast<int>(p.count);
  const float* from = p.partial + (int64_t{blockIdx.x} * count + lane) * kTileColumns + column;
  WaitForPreviousKernel();
  AllowNextKernel();
  float sum = 0.0f;
#pragma unroll 1
  for (int left = count - lane; left > 0; left -= kLoads * kLanes) {
    float value[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      value[i] = left > i * kLanes ? __ldcg(from + i * kLanes * kTileColumns) : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i) sum += value[i];
    from += kLoads * kLanes * kTileColumns;
  }
  sum = LaneSum<32 - kTileColumns>(sum);
  if (threadIdx.x % 32 < kTileColumns) of_warps[threadIdx.x / 32][column] = sum;
  __syncthreads();
  const int64_t to = int64_t{blockIdx.x} * kTileColumns + column;
  if (lane > 0 || to >= p.columns) return;
  sum = 0.0f;
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) sum += of_warps[warp][column];
  StoreAs(p.sums, p.dtype, to, sum);
}

// After the kernel that leaves the partial rows, if there is one.
inline gdn_status LaunchTiledSums(const char* op, const TiledSums& p, const Device& device,
                                  cudaStream_t stream) {
  constexpr int kLanes = 64;
  return CheckCuda(op,
                   LaunchMaybeEarly(device.compute_capability >= 90,
                                    dim3(static_cast<unsigned>(Tiles(p.columns))),
                                    dim3(kTileColumns * kLanes), 0, stream, SumTiles<kLanes>, p));
}

}  // namespace gdn::cuda

#endif  // KERNELS_CUDA_TILED_SUMS_CUH_
