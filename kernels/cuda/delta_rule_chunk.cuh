// The chunked gated delta rule for K = V = 128 on the matrix units of sm_90a: what the roles of its
// one kernel share. A block takes a sequence's value head, or half of the head's value columns, and
// walks its chunks of 64 tokens, which are aligned to the sequence's own start.
//
// With G the inclusive sum of g within the chunk, S the state before it, and k, q of unit norm:
//     M[i][j] = beta_i exp(G_i - G_j) k_i.k_j  (j < i)         T = (I + M)^-1
//     R_i = beta_i (v_i - exp(G_i) S k_i)                      U = T R
//     o_i = exp(G_i) S q_i + sum_(j <= i) exp(G_i - G_j) (q_i.k_j) U_j
//     S  <- exp(G_63) S + sum_j exp(G_63 - G_j) U_j k_j^T
// A row past the sequence's end has beta = 0 and g = 0, hence U = 0.
//
// Roles, a warpgroup each, a pipeline through shared memory:
//     keys:  loads q, k and v one chunk ahead, brings q and k to unit norm, forms the scalars and
//     P, the
//            matrix of the output's sum             (delta_rule_chunk_keys.cuh)
//     solve: T                                      (delta_rule_chunk_solve.cuh)
//     state: 64 value columns of S in registers, transposed, as FP32; all that depends on S. Value
//            columns are independent, so one or two of these warpgroups in a block give the same
//            bits                                   (delta_rule_chunk_state.cuh)
//
// Operands are FP16 with FP32 sums: q and k have unit norm, T is bounded by beta's bound of 2, and
// FP16's rounding is an eighth of BF16's, which would miss the error bounds where beta nears 2.
#ifndef KERNELS_CUDA_DELTA_RULE_CHUNK_CUH_
#define KERNELS_CUDA_DELTA_RULE_CHUNK_CUH_

#include <cmath>
#include <cstdint>

#include "gdn/kernels/delta_rule.h"
#include "kernels/cuda/bulk_copy.cuh"
#include "kernels/cuda/chunk_slots.cuh"
#include "kernels/cuda/element.cuh"
#include "kernels/cuda/math.cuh"
#include "kernels/cuda/wgmma.cuh"

namespace gdn::cuda::chunk {

constexpr int kDim = 128;
constexpr int kGroup = 128;  // Threads of a role.
constexpr int kSlots = 3;    // Chunks in the pipeline.

// Indices of the named barriers.
constexpr int kKeysBarrier = 1;
constexpr int kSolveBarrier = 2;

struct Params {
  gdn_delta_rule_args args;
  float scale;  // Never 0.
  int32_t ratio;
  int32_t units;  // Of all blocks; positive.
};

// Of the output, from an op's argument.
inline float OutputScale(float scale) {
  return scale != 0.0f ? scale : static_cast<float>(1.0 / std::sqrt(1.0 * kDim));
}

// A tile of FP16 or raw elements: 64 rows, a panel for each 64 columns.
constexpr int kPanelElements = kChunk * kPanelColumns;
struct Keys {
  uint16_t k[2][kPanelElements];
  uint16_t q[2][kPanelElements];
};
struct Mix {
  uint16_t t[kPanelElements];  // T, [i][j]; blocks of 16 above the diagonal are zeros.
  uint16_t p[kPanelElements];  // exp(G_i - G_j) q_i.k_j, [i][j].
};

// Coefficients of a chunk's tokens. The key's size is 1 where the op normalises.
struct Scalars {
  float beta[kChunk];
  float remembered[kChunk];  // beta exp(G) |k|: of what the state predicts.
  float decay[kChunk];       // exp(G).
  float query[kChunk];       // Scale of the output.
  float to_end[kChunk];      // exp(G_63 - G) |k|.
  float log_decay[kChunk];   // G / ln 2.
  float key_size[kChunk];    // |k|.
};

constexpr int kDiagonalStride = 20;  // Keeps vectors aligned and rows in different banks.
struct Solve {
  uint16_t system[kPanelElements];          // M below its diagonal blocks of 16, as FP16.
  float diagonal[4][16 * kDiagonalStride];  // The diagonal blocks, transposed.
};

template <int kStates>
struct Shared {
  Keys keys[kSlots];
  Mix mix[kSlots];
  uint16_t values[kSlots][kStates][kPanelElements];
  Solve solve;
  Scalars scalars[kSlots];
  ArrivalBarrier loaded[kSlots];  // keys -> solve: unit keys and scalars are there.
  ArrivalBarrier ready[kSlots];   // keys, solve -> state: P and T too.
  ArrivalBarrier done[kSlots];    // state -> keys, solve: the chunk is no longer needed.
};

// A walk over the chunks of a block's units (sequence, value head, part of its columns), in the
// order that all roles share.
struct Cursor {
  int32_t unit;
  int32_t sequence;
  int32_t head;
  int32_t part;
  int32_t begin;  // First token of the sequence.
  int32_t length;
  int32_t first;  // Of the chunk's tokens, within the sequence.
};

// Makes `unit` the cursor's, if there is such a unit.
template <int kParts>
__device__ inline bool Enter(const Params& p, int unit, Cursor* at) {
  at->unit = unit;
  if (unit >= p.units) return false;
  const int heads = static_cast<int>(p.args.value_heads);
  const int pair = unit / kParts;
  at->part = unit % kParts;
  at->sequence = pair / heads;
  at->head = pair % heads;
  at->begin = p.args.cu_seqlens[at->sequence];
  at->length = p.args.cu_seqlens[at->sequence + 1] - at->begin;
  at->first = 0;
  return true;
}
__device__ inline bool IsPadding(const gdn_delta_rule_args& a, int sequence) {
  return a.read_index[sequence] < 0 || a.write_index[sequence] < 0;
}
// The first chunk at or after `unit`, skipping padding and empty sequences.
template <int kParts>
__device__ inline bool EnterChunks(const Params& p, int unit, Cursor* at) {
  for (; Enter<kParts>(p, unit, at); unit += static_cast<int>(gridDim.x)) {
    if (at->length > 0 && !IsPadding(p.args, at->sequence)) return true;
  }
  return false;
}
template <int kParts>
__device__ inline bool NextChunk(const Params& p, Cursor* at) {
  at->first += kChunk;
  return at->first < at->length ||
         EnterChunks<kParts>(p, at->unit + static_cast<int>(gridDim.x), at);
}

// Waits at the barrier of the slot of the block's n-th chunk for that chunk.
template <uint32_t kCount>
__device__ inline void WaitFor(ArrivalBarrier (&barriers)[kCount], uint32_t n) {
  barriers[n % kCount].Wait(n / kCount % 2);
}

// Hides where a value comes from, so that what follows from it is computed anew in each turn of a
// loop: a role has few registers to keep such things in.
__device__ inline int Opaque(int value) {
  asm volatile("" : "+r"(value));
  return value;
}

// 16 bytes into shared memory, or zeros.
__device__ inline void CopyOrZero(uint32_t shared, const void* global, bool copy) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global),
               "r"(copy ? 16 : 0)
               : "memory");
}

// A log decay in base 2. Below kForgotten its power is 0 in FP32; the bound keeps the sums of a
// chunk, and with them their rounding errors, small. A NaN stays one.
__device__ inline float LogDecay2(float g) {
  constexpr float kLog2E = 1.4426950408889634f;
  constexpr float kForgotten = -160.0f;
  float x = g * kLog2E;
  asm("max.NaN.f32 %0, %0, %1;" : "+f"(x) : "f"(kForgotten));
  return x;
}
// A chunk's inclusive sums of log decays in base 2, of tokens lane and lane + 32; returns the last.
__device__ inline float PrefixSums(const float (&g)[2], int lane, float (&prefix)[2]) {
  prefix[0] = LogDecay2(g[0]);
  prefix[1] = LogDecay2(g[1]);
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const float below[2] = {__shfl_up_sync(kFullMask, prefix[0], step),
                            __shfl_up_sync(kFullMask, prefix[1], step)};
    if (lane >= step) {
      prefix[0] += below[0];
      prefix[1] += below[1];
    }
  }
  prefix[1] += __shfl_sync(kFullMask, prefix[0], 31);
  return __shfl_sync(kFullMask, prefix[1], 31);
}
// exp of a difference that is <= 0 but for rounding, in base 2; a NaN stays one.
__device__ inline float DecayBetween(float later, float earlier) {
  float difference;
  asm("min.NaN.f32 %0, %1, 0f00000000;" : "=f"(difference) : "f"(later - earlier));
  return Exp2(difference);
}

}  // namespace gdn::cuda::chunk

#endif  // KERNELS_CUDA_DELTA_RULE_CHUNK_CUH_
