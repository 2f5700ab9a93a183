// From x to n: RMSNorm over a row, rounded to the weight's type. Shared by the skinny product and
// the kernel that prepares rows for the wide one, so that both give the same bits.
//
// Eight warps divide K into contiguous slices of whole steps of 32 elements. A warp loads its slice
// of a row with all lanes, four neighbouring elements each.
#ifndef KERNELS_CUDA_LINEAR_ROWS_CUH_
#define KERNELS_CUDA_LINEAR_ROWS_CUH_

#include "kernels/cuda/element.cuh"
#include "kernels/cuda/linear.h"
#include "kernels/cuda/math.cuh"

namespace gdn::cuda::linear {

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kStep = 32;      // Elements of K.
constexpr int kPiece = 8;      // Elements of a lane in a step: 16 bytes of weights.
constexpr int kGroupRows = 8;  // Rows of x or of the weight that a warp's lanes cover.

__host__ __device__ constexpr int StepsPerWarp(int k) {
  return ((k + kStep - 1) / kStep + kWarps - 1) / kWarps;
}

// A warp's steps.
struct Slice {
  int first;
  int count;
};
__device__ inline Slice SliceOf(int k, int warp) {
  const int per_warp = StepsPerWarp(k);
  const int steps = (k + kStep - 1) / kStep;
  const int first = warp * per_warp;
  return {first, max(0, min(per_warp, steps - first))};
}

template <typename W>
__device__ inline uint2 Round(float4 v) {
  return {PackPair<W>(v.x, v.y), PackPair<W>(v.z, v.w)};
}

constexpr int kQuad = 4;            // Elements of a lane.
constexpr int kChunk = 32 * kQuad;  // Elements of a warp.

// Four elements of x. It may have been written by a kernel that ran beside this one on the same
// multiprocessor: it is read from the L2, where all writes meet.
template <typename W>
__device__ inline float4 LoadX(const LinearRows& p, int row, int k) {
  const int64_t at = row * p.x_row_stride + k;
  if (p.x_is_f32)
    return __ldcg(reinterpret_cast<const float4*>(static_cast<const float*>(p.x) + at));
  const uint2 raw = __ldcg(reinterpret_cast<const uint2*>(static_cast<const W*>(p.x) + at));
  const float2 low = UnpackPair<W>(raw.x);
  const float2 high = UnpackPair<W>(raw.y);
  return {low.x, low.y, high.x, high.y};
}

__device__ inline float SumSquares(float4 v, float sum) {
  return fmaf(v.w, v.w, fmaf(v.z, v.z, fmaf(v.y, v.y, fmaf(v.x, v.x, sum))));
}
__device__ inline float4 Normed(float4 x, float rstd, float4 w) {
  return {x.x * rstd * w.x, x.y * rstd * w.y, x.z * rstd * w.z, x.w * rstd * w.w};
}

// The sum over the lanes of each of kRows values: lane i gets that of row i * kRows / 32. Which
// lanes' sums meet first does not depend on kRows.
template <int kRows, int kBit = 16>
__device__ inline float SumLanes(const float (&v)[kRows], int lane) {
  if constexpr (kBit == 0) {
    return v[0];
  } else if constexpr (kRows > 1) {
    const bool upper = (lane & kBit) != 0;
    float kept[kRows / 2];
#pragma unroll
    for (int i = 0; i < kRows / 2; ++i) {
      const float sent = upper ? v[i] : v[i + kRows / 2];
      kept[i] = (upper ? v[i + kRows / 2] : v[i]) + __shfl_xor_sync(kFullMask, sent, kBit);
    }
    return SumLanes<kRows / 2, kBit / 2>(kept, lane);
  } else {
    const float sum[1] = {v[0] + __shfl_xor_sync(kFullMask, v[0], kBit)};
    return SumLanes<1, kBit / 2>(sum, lane);
  }
}

// Sums of squares of the slices.
struct NormScratch {
  float sums[kWarps][2 * kGroupRows];
};

// A barrier of the kThreads threads that work on rows; a block may have others.
__device__ inline void SyncConsumers() {
  asm volatile("bar.sync 1, %0;" ::"n"(kThreads) : "memory");
}

// The norm's weights for the slice's first chunk: loaded before the wait for x.
__device__ inline float4 LoadNormWeight(const LinearRows& p, Slice slice) {
  const int lane_k = slice.first * kStep + static_cast<int>(threadIdx.x) % 32 * kQuad;
  float4 w = {0.0f, 0.0f, 0.0f, 0.0f};
  if (p.norm_weight != nullptr && lane_k < p.k) {
    w = __ldg(reinterpret_cast<const float4*>(p.norm_weight + lane_k));
  }
  return w;
}

// Calls store(row, element, four values of n) for the rows first_row to first_row + kRows - 1 as
// far as they exist, and every element of the warp's slice, counted from its beginning; zero beyond
// K. `weight` is LoadNormWeight's. By the kThreads first threads of a block.
template <typename W, int kRows, typename Store>
__device__ inline void PrepareRows(const LinearRows& p, int first_row, Slice slice, float4 weight,
                                   NormScratch* scratch, Store&& store) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int k0 = slice.first * kStep;
  const int length = slice.count * kStep;
  const int inside = min(length, p.k - k0);  // Of the slice's elements.
  const int rows = p.rows - first_row;
  const bool norm = p.norm_weight != nullptr;
  const float4 zero = {0.0f, 0.0f, 0.0f, 0.0f};

  if (!norm && !p.x_is_f32) {  // Copied as they are, eight elements a lane.
    constexpr int kAcross = 2;
    constexpr int kDown = kRows < 4 ? kRows : 4;
    const W* const x = static_cast<const W*>(p.x) + first_row * p.x_row_stride + k0;
#pragma unroll 1
    for (int e0 = lane * kPiece; e0 < length; e0 += kAcross * 32 * kPiece) {
#pragma unroll 1
      for (int r0 = 0; r0 < min(rows, kRows); r0 += kDown) {
        uint4 raw[kDown][kAcross];
#pragma unroll
        for (int r = 0; r < kDown; ++r) {
#pragma unroll
          for (int i = 0; i < kAcross; ++i) {
            const int e = e0 + i * 32 * kPiece;
            raw[r][i] = {0, 0, 0, 0};
            if (r0 + r < rows && e < inside) {
              raw[r][i] = __ldcg(reinterpret_cast<const uint4*>(x + (r0 + r) * p.x_row_stride + e));
            }
          }
        }
#pragma unroll
        for (int r = 0; r < kDown; ++r) {
#pragma unroll
          for (int i = 0; i < kAcross; ++i) {
            const int e = e0 + i * 32 * kPiece;
            if (r0 + r < rows && e < length) {
              store(first_row + r0 + r, e, uint2{raw[r][i].x, raw[r][i].y});
              store(first_row + r0 + r, e + kQuad, uint2{raw[r][i].z, raw[r][i].w});
            }
          }
        }
      }
    }
    return;
  }

  // The first chunk stays in registers between the norm's passes; the others are read twice.
  const int e0 = lane * kQuad;
  float4 held[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    held[r] = zero;
    if (r < rows && e0 < inside) held[r] = LoadX<W>(p, first_row + r, k0 + e0);
  }
  float rstd = 1.0f;
  if (norm) {
    float sum[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) sum[r] = SumSquares(held[r], 0.0f);
#pragma unroll 1
    for (int e = e0 + kChunk; e < inside; e += kChunk) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        if (r < rows) sum[r] = SumSquares(LoadX<W>(p, first_row + r, k0 + e), sum[r]);
      }
    }
    const float total = SumLanes<kRows>(sum, lane);
    if (lane % (32 / kRows) == 0) scratch->sums[warp][lane / (32 / kRows)] = total;
    SyncConsumers();
    // Lane i takes row i.
    float square = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) square += scratch->sums[w][lane % kRows];
    rstd = rsqrtf(fmaf(square, p.inverse_k, p.norm_eps));
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const float factor = kRows == 1 ? rstd : __shfl_sync(kFullMask, rstd, r);
    if (r < rows && e0 < length) {
      store(first_row + r, e0, Round<W>(norm ? Normed(held[r], factor, weight) : held[r]));
    }
  }
#pragma unroll 1
  for (int chunk = kChunk; chunk < length; chunk += kChunk) {
    const int e = chunk + e0;
    float4 w = zero;
    if (norm && e < inside) w = __ldg(reinterpret_cast<const float4*>(p.norm_weight + k0 + e));
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float factor = kRows == 1 ? rstd : __shfl_sync(kFullMask, rstd, r);
      if (r < rows && e < length) {
        float4 x = zero;
        if (e < inside) x = LoadX<W>(p, first_row + r, k0 + e);
        store(first_row + r, e, Round<W>(norm ? Normed(x, factor, w) : x));
      }
    }
  }
}

}  // namespace gdn::cuda::linear

#endif  // KERNELS_CUDA_LINEAR_ROWS_CUH_
