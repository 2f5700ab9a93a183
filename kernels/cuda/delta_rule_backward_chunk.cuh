// The chunked backward of the gated delta rule for K = V = 64 or 128 on the matrix units of
// sm_90a: what its four kernels share. Chunks of 64 tokens are aligned to the sequence's own start;
// G, M, T, R, U and S are those of delta_rule_chunk.cuh, P has the output's scale:
//     P[i][j] = scale exp(G_i - G_j) q_i.k_j  (j <= i)        E_j = exp(G_63 - G_j)
// With dS the gradient by the state after the chunk, and D for d_o:
//     dU = P^T D + E (k dS^T)        dR = T^T dU        d_v = beta dR
//     dS <- exp(G_63) dS + sum_i scale exp(G_i) D_i q_i^T - sum_i beta_i exp(G_i) dR_i k_i^T
// and, with X = dR U^T and Y = D U^T:
//     A[i][j] = scale exp(G_i - G_j) Y[i][j]  (j <= i)   B[i][j] = -beta_i exp(G_i - G_j) X[i][j]
//     (j < i) dq = scale exp(G) (D S) + A k dk = E (U dS) - beta exp(G) (dR S) + A^T q + (B + B^T)
//     k d_beta_i = dR_i.(v_i - exp(G_i) S k_i) - sum_(j < i) exp(G_i - G_j) k_i.k_j X[i][j] d_g_t =
//     the sum of what passes the boundary before token t: Z[i][j] = A[i][j] q_i.k_j +
//             B[i][j] k_i.k_j for j < t <= i, what tokens take from S (t <= i) and give to the next
//             state (j < t), and exp(G_63) <dS, S>. Nothing is subtracted, so that a token which
//             forgets everything has a d_g of exactly 0.
// A row past the sequence's end has zero q, k, v, d_o and beta.
//
// Kernels, each of which leaves its results to the later ones in the workspace:
//     prepare: T, P and the scalars of every chunk and head (delta_rule_backward_chunk_prepare.cuh)
//     states:  walks the chunks forward; S of every chunk, U   (delta_rule_backward_chunk_walk.cuh)
//     gradients of states: walks them backward; dS, dR         (the same)
//     keys:    dq, dk, d_v, d_beta, d_g of every chunk         (delta_rule_backward_chunk_keys.cuh)
//
// Operands have the type of q, k, v, whose range gradients need, with FP32 sums.
#ifndef KERNELS_CUDA_DELTA_RULE_BACKWARD_CHUNK_CUH_
#define KERNELS_CUDA_DELTA_RULE_BACKWARD_CHUNK_CUH_

#include <cstdint>

#include "gdn/kernels/delta_rule_backward.h"
#include "kernels/cuda/async_copy.cuh"
#include "kernels/cuda/bulk_copy.cuh"
#include "kernels/cuda/chunk_slots.cuh"
#include "kernels/cuda/delta_rule_chunk.cuh"
#include "kernels/cuda/delta_rule_chunk_keys.cuh"
#include "kernels/cuda/wgmma_operands.cuh"

namespace gdn::cuda::chunk {

// Tiles in the workspace and in shared memory are kPanels panels of 64 columns, one or two: of 64
// rows of tokens, or of kPanels times as many rows of value columns for states.
template <int kPanels>
using Tile = uint16_t[kPanels][kPanelElements];
template <int kPanels>
using StateTile = uint16_t[kPanels][kPanels * kPanelElements];
constexpr int64_t kTileBytes = 2 * int64_t{kPanelElements};

// Coefficients of the tokens of a chunk, whose keys are unit keys.
struct UnitScalars {
  float beta[kChunk];
  float remembered[kChunk];
  float decay[kChunk];
  float to_end[kChunk];
  float log_decay[kChunk];
};

__device__ inline float2 KeySizes(const UnitScalars&, int) { return make_float2(1.0f, 1.0f); }
__device__ inline float KeySize(const UnitScalars&, int) { return 1.0f; }

// For each slot and value head.
struct BackwardWorkspace {
  char* scalars;  // UnitScalars
  char* t;        // A panel, as is p.
  char* p;
  char* u;  // Panels of 64 value columns, as is d_r.
  char* d_r;
  char* states;    // S before the chunk: panels of 64 key columns, as is d_states.
  char* d_states;  // dS after the chunk.
};
constexpr int64_t kScalarBytes = sizeof(UnitScalars);
constexpr int64_t BackwardBytes(int64_t panels) {
  return kScalarBytes + (2 + 2 * panels + 2 * panels * panels) * kTileBytes;
}

struct BackwardParams {
  gdn_delta_rule_backward_args args;
  float scale;  // Never 0.
  int32_t ratio;
  BackwardWorkspace workspace;
};

inline BackwardWorkspace LayOutBackward(const gdn_delta_rule_backward_args& a, void* workspace) {
  const int64_t tiles = ChunkSlots(a.tokens, a.sequences) * a.value_heads;
  const int64_t panels = a.key_dim / kPanelColumns;
  BackwardWorkspace w;
  w.t = static_cast<char*>(workspace);
  w.p = w.t + tiles * kTileBytes;
  w.u = w.p + tiles * kTileBytes;
  w.d_r = w.u + tiles * panels * kTileBytes;
  w.states = w.d_r + tiles * panels * kTileBytes;
  w.d_states = w.states + tiles * panels * panels * kTileBytes;
  w.scalars = w.d_states + tiles * panels * panels * kTileBytes;
  return w;
}

// The place of a chunk's head among the tiles of a kind.
__device__ inline int64_t TileOf(const gdn_delta_rule_backward_args& a, int64_t slot,
                                 int64_t value_head) {
  return slot * a.value_heads + value_head;
}

// Starts the copy of 64 rows of 64 kPanels elements into panels; rows past `count` become zeros.
template <int kThreads, int kPanels, typename X>
__device__ inline void LoadRows(void* panels, const X* from, int64_t stride, int count,
                                int thread) {
  constexpr int kVectors = 8 * kPanels;
  constexpr int kStep = kThreads / kVectors;
  const int row = thread / kVectors;
  const int vector = thread % kVectors;
  CopyRows<kChunk / kStep, kStep>(
      SharedAddress(panels) + vector / 8 * uint32_t{kTileBytes} + PanelOffset(row, vector % 8),
      from + vector * 8, stride, row, count);
}

// Starts the copy of kBytes as they are.
template <int kThreads, int kBytes>
__device__ inline void LoadBytes(void* shared, const char* from, int thread) {
  static_assert(kBytes % 16 == 0);
  const uint32_t to = SharedAddress(shared);
  constexpr int kVectors = kBytes / 16;
#pragma unroll
  for (int i = 0; i < (kVectors + kThreads - 1) / kThreads; ++i) {
    const int vector = thread + i * kThreads;
    if (kVectors % kThreads == 0 || vector < kVectors) {
      CopyAsync<16>(to + vector * 16, from + vector * 16);
    }
  }
}

// The descriptor of a panel, formed where it is used: kept, those of all tiles take a role's
// registers.
template <int kElements>
__device__ inline uint64_t TileDescriptor(const uint16_t (&panel)[kElements]) {
  return PanelDescriptor(static_cast<uint32_t>(Opaque(static_cast<int>(SharedAddress(panel)))));
}

// Groups t and t + 1 of a warp's 16 rows of a sum, packed, into a panel: rows from `row` on.
__device__ inline uint32_t PairOfGroups(uint32_t panel, int row, int t, int lane) {
  const int matrix = lane / 8;
  return panel + PanelOffset(row + lane % 8 + matrix % 2 * 8, t + matrix / 2);
}
// The same for a panel whose rows are the sum's columns: `column` the sum's first row there.
__device__ inline uint32_t PairOfGroupsTransposed(uint32_t panel, int column, int t, int lane) {
  const int matrix = lane / 8;
  return panel + PanelOffset(8 * (t + matrix / 2) + lane % 8, column / 8 + matrix % 2);
}

}  // namespace gdn::cuda::chunk

#endif  // KERNELS_CUDA_DELTA_RULE_BACKWARD_CHUNK_CUH_
