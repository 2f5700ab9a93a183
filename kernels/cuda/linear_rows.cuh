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
  const float4 low = __ldg(reinterpret_cast<const float4*>(weight + k));
  const float4 high = __ldg(reinterpret_cast<const float4*>(weight + k + 4));
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
__device__ inline uint4 NormPiece(const float (&x)[kPiece], float rstd, const float (&w)[kPiece]) {
  return {Pack<W>(x[0] * rstd * w[0], x[1] * rstd * w[1]),
          Pack<W>(x[2] * rstd * w[2], x[3] * rstd * w[3]),
          Pack<W>(x[4] * rstd * w[4], x[5] * rstd * w[5]),
          Pack<W>(x[6] * rstd * w[6], x[7] * rstd * w[7])};
}

// Steps of a slice whose elements stay in registers between the norm's two passes.
constexpr int kHeldSteps = 4;

// The weights of the norm for this warp's first steps: loaded before the wait for x.
struct HeldNormWeights {
  float v[kHeldSteps][kPiece];

  __device__ void Load(const LinearRows& p, Slice slice, int lane) {
    if (p.norm_weight == nullptr) return;
#pragma unroll
    for (int s = 0; s < kHeldSteps; ++s) {
      const int k = (slice.first + s) * kStep + lane % 4 * kPiece;
      if (s < slice.count && k < p.k) LoadNormWeight(p.norm_weight, k, v[s]);
    }
  }
};

// Calls store(row, step, piece) for the rows first_row + g and first_row + 8 + g of each lane, as
// far as there are such rows, and every step of the warp's slice; zero beyond K. `scratch` holds
// kWarps * 16 floats of shared memory. By all threads of a block of kThreads.
template <typename W, typename Store>
__device__ inline void PrepareRows(const LinearRows& p, int first_row, Slice slice,
                                   const HeldNormWeights& held_weights, float* scratch,
                                   Store&& store) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane_k = slice.first * kStep + lane % 4 * kPiece;
  const int row0 = first_row + lane / 4;
  const bool has_row[2] = {row0 < p.rows, row0 + kGroupRows < p.rows};
  const uint4 zero = {0, 0, 0, 0};

  if (p.norm_weight == nullptr && !p.x_is_f32) {
    constexpr int kBatch = 16;  // Loads in flight.
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (!has_row[half]) continue;
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

  float held[2][kHeldSteps][kPiece];
  float rstd[2] = {1.0f, 1.0f};
  if (p.norm_weight != nullptr) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (!has_row[half]) continue;
#pragma unroll
      for (int s = 0; s < kHeldSteps; ++s) {
        const int k = lane_k + s * kStep;
        if (s < slice.count && k < p.k) LoadX<W>(p, row0 + half * kGroupRows, k, held[half][s]);
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = 0.0f;
      if (has_row[half]) {
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
      if (lane % 4 == 0) scratch[warp * 2 * kGroupRows + half * kGroupRows + lane / 4] = sum;
    }
    __syncthreads();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = 0.0f;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        sum += scratch[w * 2 * kGroupRows + half * kGroupRows + lane / 4];
      }
      rstd[half] = rsqrtf(sum / static_cast<float>(p.k) + p.norm_eps);
    }
  }

#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (!has_row[half]) continue;
    const int row = row0 + half * kGroupRows;
    if (p.norm_weight != nullptr) {
#pragma unroll
      for (int s = 0; s < kHeldSteps; ++s) {
        if (s >= slice.count) continue;
        const bool inside = lane_k + s * kStep < p.k;
        store(row, s, inside ? NormPiece<W>(held[half][s], rstd[half], held_weights.v[s]) : zero);
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
      float w[kPiece] = {1.0f, 1.0f, 1.0f, 1.0f, 1.0f, 1.0f, 1.0f, 1.0f};
      if (p.norm_weight != nullptr) LoadNormWeight(p.norm_weight, k, w);
      store(row, s, NormPiece<W>(v, rstd[half], w));
    }
  }
}

}  // namespace gdn::cuda::linear

#endif  // KERNELS_CUDA_LINEAR_ROWS_CUH_
