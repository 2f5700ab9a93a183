// From x to n: RMSNorm over a row, rounded to the weight's type. Shared by the skinny product and
// the kernel that prepares rows for the wide one, so that both give the same bits.
//
// Eight warps divide K into contiguous slices of whole steps of 32 elements. Within a step a lane
// holds eight neighbouring elements of one row: lane 4 g + t elements 8 t..8 t + 7 of row g. That
// is also the lane that needs them as an operand of the matrix instruction: which eight elements of
// K stand behind its indices does not matter as long as both operands agree.
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
__device__ inline uint32_t Pack(float low, float high);
template <>
__device__ inline uint32_t Pack<Bf16>(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}
template <>
__device__ inline uint32_t Pack<F16>(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

template <typename W>
__device__ inline void Unpack(uint4 raw, float (&v)[kPiece]) {
  const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = Pair<W>::Widen(*reinterpret_cast<const typename Pair<W>::Raw*>(&words[i]));
    v[2 * i] = pair.x;
    v[2 * i + 1] = pair.y;
  }
}

// x may have been written by a kernel that ran beside this one on the same multiprocessor: it is
// read from the L2, where all writes meet.
template <typename W>
__device__ inline void LoadX(const LinearRows& p, int row, int k, float (&v)[kPiece]) {
  const int64_t at = row * p.x_row_stride + k;
  if (p.x_is_f32) {
    const float4* const from = reinterpret_cast<const float4*>(static_cast<const float*>(p.x) + at);
    const float4 low = __ldcg(from);
    const float4 high = __ldcg(from + 1);
    v[0] = low.x;
    v[1] = low.y;
    v[2] = low.z;
    v[3] = low.w;
    v[4] = high.x;
    v[5] = high.y;
    v[6] = high.z;
    v[7] = high.w;
  } else {
    Unpack<W>(__ldcg(reinterpret_cast<const uint4*>(static_cast<const W*>(p.x) + at)), v);
  }
}

__device__ inline void LoadNormWeight(const float* weight, int k, float (&v)[kPiece]) {
  const float4 low = *reinterpret_cast<const float4*>(weight + k);
  const float4 high = *reinterpret_cast<const float4*>(weight + k + 4);
  v[0] = low.x;
  v[1] = low.y;
  v[2] = low.z;
  v[3] = low.w;
  v[4] = high.x;
  v[5] = high.y;
  v[6] = high.z;
  v[7] = high.w;
}

template <typename W>
__device__ inline uint4 RoundPiece(const float (&x)[kPiece]) {
  return {Pack<W>(x[0], x[1]), Pack<W>(x[2], x[3]), Pack<W>(x[4], x[5]), Pack<W>(x[6], x[7])};
}

template <typename W>
__device__ inline uint4 NormPiece(const float (&x)[kPiece], float rstd, const float (&w)[kPiece]) {
  return {Pack<W>(x[0] * rstd * w[0], x[1] * rstd * w[1]),
          Pack<W>(x[2] * rstd * w[2], x[3] * rstd * w[3]),
          Pack<W>(x[4] * rstd * w[4], x[5] * rstd * w[5]),
          Pack<W>(x[6] * rstd * w[6], x[7] * rstd * w[7])};
}

// Steps of a slice whose elements stay in registers between the norm's two passes.
constexpr int kHeldSteps = 4;

// The norm's weights for those steps, kept in shared memory from before the wait for x, and the
// sums of squares.
struct NormScratch {
  float weights[kWarps][kHeldSteps * kStep];
  float sums[kWarps][2 * kGroupRows];
};

// By a whole warp, for itself.
__device__ inline void LoadNormWeights(const LinearRows& p, Slice slice, NormScratch* scratch) {
  if (p.norm_weight == nullptr) return;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int k = slice.first * kStep + lane * 4;  // kHeldSteps * kStep = 32 * 4.
  static_assert(kHeldSteps * kStep == 32 * 4);
  if (lane * 4 < slice.count * kStep && k < p.k) {
    *reinterpret_cast<float4*>(&scratch->weights[warp][lane * 4]) =
        __ldg(reinterpret_cast<const float4*>(p.norm_weight + k));
  }
  __syncwarp();
}

// A barrier of the kThreads threads that work on rows; a block may have others.
__device__ inline void SyncConsumers() {
  asm volatile("bar.sync 1, %0;" ::"n"(kThreads) : "memory");
}

// Calls store(row, step, piece) for row first_row + g of each lane, with two halves row
// first_row + 8 + g too, as far as there are such rows, and every step of the warp's slice; zero
// beyond K. LoadNormWeights has been called. By the kThreads first threads of a block.
template <typename W, int kHalves, typename Store>
__device__ inline void PrepareRows(const LinearRows& p, int first_row, Slice slice,
                                   NormScratch* scratch, Store&& store) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane_k = slice.first * kStep + lane % 4 * kPiece;
  const int row0 = first_row + lane / 4;
  const uint4 zero = {0, 0, 0, 0};
  const auto has_row = [&](int half) { return row0 + half * kGroupRows < p.rows; };

  if (p.norm_weight == nullptr && !p.x_is_f32) {
    constexpr int kBatch = 12;  // Loads in flight.
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      if (!has_row(half)) continue;
      const int row = row0 + half * kGroupRows;
      const W* const x = static_cast<const W*>(p.x) + row * p.x_row_stride + lane_k;
      for (int s0 = 0; s0 < slice.count; s0 += kBatch) {
        uint4 raw[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          const int s = s0 + i;
          raw[i] = zero;
          if (s < slice.count && lane_k + s * kStep < p.k) {
            raw[i] = __ldcg(reinterpret_cast<const uint4*>(x + s * kStep));
          }
        }
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          if (s0 + i < slice.count) store(row, s0 + i, raw[i]);
        }
      }
    }
    return;
  }

  float held[kHalves][kHeldSteps][kPiece];
  float rstd[kHalves];
  if (p.norm_weight != nullptr) {
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      if (!has_row(half)) continue;
#pragma unroll
      for (int s = 0; s < kHeldSteps; ++s) {
        const int k = lane_k + s * kStep;
        if (s < slice.count && k < p.k) LoadX<W>(p, row0 + half * kGroupRows, k, held[half][s]);
      }
    }
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      float sum = 0.0f;
      if (has_row(half)) {
#pragma unroll
        for (int s = 0; s < kHeldSteps; ++s) {
          if (s < slice.count && lane_k + s * kStep < p.k) {
#pragma unroll
            for (int i = 0; i < kPiece; ++i) sum = fmaf(held[half][s][i], held[half][s][i], sum);
          }
        }
        for (int s = kHeldSteps; s < slice.count; ++s) {
          const int k = lane_k + s * kStep;
          if (k >= p.k) break;
          float v[kPiece];
          LoadX<W>(p, row0 + half * kGroupRows, k, v);
#pragma unroll
          for (int i = 0; i < kPiece; ++i) sum = fmaf(v[i], v[i], sum);
        }
      }
      sum = LaneSum<3>(sum);
      if (lane % 4 == 0) scratch->sums[warp][half * kGroupRows + lane / 4] = sum;
    }
    SyncConsumers();
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      float sum = 0.0f;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) sum += scratch->sums[w][half * kGroupRows + lane / 4];
      rstd[half] = rsqrtf(sum / static_cast<float>(p.k) + p.norm_eps);
    }
  }

#pragma unroll
  for (int half = 0; half < kHalves; ++half) {
    if (!has_row(half)) continue;
    const int row = row0 + half * kGroupRows;
    if (p.norm_weight != nullptr) {
#pragma unroll
      for (int s = 0; s < kHeldSteps; ++s) {
        if (s >= slice.count) continue;
        float w[kPiece];
        LoadNormWeight(scratch->weights[warp], s * kStep + lane % 4 * kPiece, w);
        const bool inside = lane_k + s * kStep < p.k;
        store(row, s, inside ? NormPiece<W>(held[half][s], rstd[half], w) : zero);
      }
    }
    for (int s = p.norm_weight != nullptr ? kHeldSteps : 0; s < slice.count; ++s) {
      const int k = lane_k + s * kStep;
      if (k >= p.k) {
        store(row, s, zero);
        continue;
      }
      float v[kPiece];
      LoadX<W>(p, row, k, v);
      if (p.norm_weight != nullptr) {
        float w[kPiece];
        LoadNormWeight(p.norm_weight, k, w);
        store(row, s, NormPiece<W>(v, rstd[half], w));
      } else {
        store(row, s, RoundPiece<W>(v));
      }
    }
  }
}

}  // namespace gdn::cuda::linear

#endif  // KERNELS_CUDA_LINEAR_ROWS_CUH_
