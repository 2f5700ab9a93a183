// GDN2 by chunks of 64 tokens, which are aligned to the sequence's own start, for K = V = 128 on
// the matrix units of sm_90a: what its two kernels share.
//
// With G the inclusive sum of g within the chunk (a vector of key channels, as are e, k and q), S
// the state before it, k and q of unit norm, |k| and |q| their sizes (1 where the op normalises):
//     A[i][j] = |k_i| |k_j| sum_c (e_i k_i)_c k_jc exp(G_ic - G_jc)  (j < i)     T = (I + A)^-1
//     P[i][j] = sum_c q_ic k_jc exp(G_ic - G_jc)  (j <= i)
//     R_i = w_i v_i - |k_i| S (exp(G_i) e_i k_i)          U_i = |k_i| (T R)_i
//     o_i = scale |q_i| (S (exp(G_i) q_i) + sum_(j <= i) P[i][j] U_j)
//     S  <- S diag(exp(G_63)) + sum_j U_j (exp(G_63 - G_j) k_j)^T
// A row past the sequence's end has zero q, k, v and g, hence U = 0.
//
// No factor is above 1: every exponent is the difference of a later and an earlier G. Where i and j
// lie in different blocks of 16 tokens, A and P are products on the matrix units, of
// exp(G_i - G_b) and exp(G_b - G_j) with b the last token before i's block; within a block the
// pairs are summed in FP32.
//
//     prepare: every chunk and gate head at once: all that does not depend on S, to the workspace
//                                                              (gdn2_chunk_prepare.cuh)
//     walk:    a sequence's value head, or half of its value columns, over the chunks
//                                                              (gdn2_chunk_walk.cuh)
//
// Operands are FP16 with FP32 sums, for the reasons of delta_rule_chunk.cuh.
#ifndef KERNELS_CUDA_GDN2_CHUNK_CUH_
#define KERNELS_CUDA_GDN2_CHUNK_CUH_

#include <cstdint>

#include "gdn/kernels/gdn2.h"
#include "kernels/cuda/bulk_copy.cuh"
#include "kernels/cuda/chunk_slots.cuh"
#include "kernels/cuda/delta_rule_chunk.cuh"
#include "kernels/cuda/wgmma.cuh"

namespace gdn::cuda::gdn2 {

using namespace chunk;  // NOLINT(build/namespaces)

constexpr uint32_t kPanelBytes = 2 * kPanelElements;

// A chunk of a gate head in the workspace, as the walk brings it to shared memory. Panels
// (wgmma.cuh) of FP16, whose rows are tokens.
struct ChunkTile {
  uint16_t erased[2][kPanelElements];   // exp(G) e k
  uint16_t queries[2][kPanelElements];  // exp(G) q
  uint16_t keys[2][kPanelElements];     // exp(G_63 - G) k
  uint16_t t[kPanelElements];
  uint16_t p[kPanelElements];
  float decay[kDim];    // exp(G_63)
  float size[kChunk];   // |k|
  float query[kChunk];  // scale |q|
};
static_assert(sizeof(ChunkTile) % 1024 == 0);  // Keeps panels behind it aligned.

// w v of a chunk of a value head, FP16: panels of 64 value columns, whose rows are tokens.
using ValueTile = uint16_t[2][kPanelElements];

struct Params {
  gdn2_args args;
  float scale;         // Never 0.
  int32_t ratio;       // HV / H
  int32_t gate_ratio;  // HV / G
  ChunkTile* tiles;    // [slot of a chunk][G]
  ValueTile* values;   // [slot of a chunk][HV]
};

__device__ inline bool IsPadding(const gdn2_args& a, int64_t sequence) {
  return a.read_index[sequence] < 0 || a.write_index[sequence] < 0;
}

}  // namespace gdn::cuda::gdn2

#endif  // KERNELS_CUDA_GDN2_CHUNK_CUH_
