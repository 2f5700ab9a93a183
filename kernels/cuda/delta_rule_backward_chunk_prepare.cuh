// The first kernel of the chunked backward: see delta_rule_backward_chunk.cuh. A block, a
// warpgroup, takes a chunk of a key head and its value heads one after the other.
#ifndef KERNELS_CUDA_DELTA_RULE_BACKWARD_CHUNK_PREPARE_CUH_
#define KERNELS_CUDA_DELTA_RULE_BACKWARD_CHUNK_PREPARE_CUH_

#include "kernels/cuda/delta_rule_backward_chunk.cuh"
#include "kernels/cuda/delta_rule_chunk_solve.cuh"

namespace gdn::cuda::chunk {

template <int kPanels>
struct PrepareShared {
  Tile<kPanels> k;
  Tile<kPanels> q;
  uint16_t t[kPanelElements];  // FP16
  uint16_t p[kPanelElements];
  Solve solve;
  UnitScalars scalars;
};

// The products of 64 rows of a tile with 64 of another.
template <typename X, int kPanels>
__device__ inline void RowProducts(const uint16_t (&rows)[kPanels][kPanelElements],
                                   const uint16_t (&columns)[kPanels][kPanelElements],
                                   float (&d)[32]) {
#pragma unroll
  for (int panel = 0; panel < kPanels; ++panel) {
    const uint64_t a = TileDescriptor(rows[panel]);
    const uint64_t b = TileDescriptor(columns[panel]);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      Products<X>::template N64<false, false>(d, a + i * kNextColumns, b + i * kNextColumns,
                                              panel + i > 0);
    }
  }
}

// Of a head's tokens, by one warp; zeros past the end.
__device__ inline void PrepareScalars(const BackwardParams& p, const SlotChunk& chunk,
                                      int64_t value_head, int lane, UnitScalars* scalars) {
  const gdn_delta_rule_backward_args& a = p.args;
  float g[2];
  float beta[2];
  float prefix[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int i = lane + 32 * half;
    const int64_t at = (chunk.begin + i) * a.value_heads + value_head;
    g[half] = i < chunk.count ? a.g[at] : 0.0f;
    beta[half] = i < chunk.count ? a.beta[at] : 0.0f;
  }
  const float end = PrefixSums(g, lane, prefix);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int i = lane + 32 * half;
    const float decay = DecayBetween(prefix[half], 0.0f);
    scalars->beta[i] = beta[half];
    scalars->remembered[i] = beta[half] * decay;
    scalars->decay[i] = decay;
    scalars->to_end[i] = DecayBetween(end, prefix[half]);
    scalars->log_decay[i] = prefix[half];
  }
}

// P from the products of queries and keys, into a panel.
template <typename X>
__device__ inline void FormScaledMix(const UnitScalars& scalars, float scale, uint32_t panel,
                                     int warp, int lane, const float (&d)[32]) {
  const int row = 16 * warp + lane / 4;
  const float log_decay[2] = {scalars.log_decay[row], scalars.log_decay[row + 8]};
#pragma unroll
  for (int t = 0; t < 8; t += 2) {
    uint32_t word[4] = {};
    if (t <= 2 * warp) {
#pragma unroll
      for (int u = 0; u < 2; ++u) {
        const int column = 8 * (t + u) + lane % 4 * 2;
        const float2 earlier = *reinterpret_cast<const float2*>(&scalars.log_decay[column]);
#pragma unroll
        for (int v = 0; v < 2; ++v) {
          const int i = row + 8 * v;
          const float* from = &d[4 * (t + u) + 2 * v];
          const float x = from[0] * scale * DecayBetween(log_decay[v], earlier.x);
          const float y = from[1] * scale * DecayBetween(log_decay[v], earlier.y);
          word[2 * u + v] = PackPair<X>(column > i ? 0.0f : x, column + 1 > i ? 0.0f : y);
        }
      }
    }
    StoreMatrices(PairOfGroups(panel, 16 * warp, t, lane), word[0], word[1], word[2], word[3]);
  }
}

// A panel to the workspace, from FP16 to X.
template <typename X>
__device__ inline void StoreHalves(char* to, const uint16_t (&panel)[kPanelElements], int thread) {
  const uint4* const from = reinterpret_cast<const uint4*>(panel);
#pragma unroll
  for (int i = thread; i < kPanelElements / 8; i += kGroup) {
    const uint4 raw = from[i];
    const uint32_t word[4] = {raw.x, raw.y, raw.z, raw.w};
    uint32_t out[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float2 pair = UnpackPair<F16>(word[j]);
      out[j] = PackPair<X>(pair.x, pair.y);
    }
    reinterpret_cast<uint4*>(to)[i] = make_uint4(out[0], out[1], out[2], out[3]);
  }
}

template <typename X, int kPanels>
__global__ void __launch_bounds__(kGroup) PrepareKernel(const __grid_constant__ BackwardParams p) {
#ifdef GDN_WGMMA
  extern __shared__ char raw[];
  auto& shared = AlignedShared<PrepareShared<kPanels>>(raw);
  constexpr int kColumns = kPanels * kPanelColumns;
  const gdn_delta_rule_backward_args& a = p.args;
  const int64_t slot = blockIdx.x;
  const int64_t key_head = blockIdx.y;
  SlotChunk chunk;
  if (!ChunkOfSlot(a.cu_seqlens, a.sequences, slot, &chunk) || chunk.count == 0) return;
  const int thread = static_cast<int>(threadIdx.x);
  const int warp = thread / 32;
  const int lane = thread % 32;
  LoadRows<kGroup, kPanels>(
      shared.k, static_cast<const X*>(a.k) + chunk.begin * a.k_token_stride + key_head * kColumns,
      a.k_token_stride, chunk.count, thread);
  LoadRows<kGroup, kPanels>(
      shared.q, static_cast<const X*>(a.q) + chunk.begin * a.q_token_stride + key_head * kColumns,
      a.q_token_stride, chunk.count, thread);
  CommitCopies();
  for (int i = thread; i < kPanelElements / 8; i += kGroup) {
    reinterpret_cast<uint4*>(shared.t)[i] = make_uint4(0, 0, 0, 0);
  }
  WaitForCopies<0>();
  FenceForBulk();
  __syncthreads();
  float keys[32];
  float queries[32];
  ProductFence();
  RowProducts<X>(shared.k, shared.k, keys);
  RowProducts<X>(shared.q, shared.k, queries);
  CommitProducts();
  WaitForProducts<0>();
  Pin(keys);
  Pin(queries);
  const uint32_t system = SharedAddress(shared.solve.system);
  const uint32_t t = SharedAddress(shared.t);
  for (int r = 0; r < p.ratio; ++r) {
    const int64_t value_head = key_head * p.ratio + r;
    const int64_t tile = TileOf(a, slot, value_head);
    if (warp == 0) PrepareScalars(p, chunk, value_head, lane, &shared.scalars);
    __syncthreads();
    FormSystem(shared.scalars, shared.solve, warp, lane, keys);
    FormScaledMix<X>(shared.scalars, p.scale, SharedAddress(shared.p), warp, lane, queries);
    __syncwarp();
    InvertDiagonal(shared.solve.diagonal[warp], t, warp, lane);
    __syncthreads();
    MergeSixteens(system, t, warp, lane);
    __syncthreads();
    MergeThirtyTwos(system, t, warp, lane);
    __syncthreads();
    StoreHalves<X>(p.workspace.t + tile * kTileBytes, shared.t, thread);
    for (int i = thread; i < kPanelElements / 8; i += kGroup) {
      reinterpret_cast<uint4*>(p.workspace.p + tile * kTileBytes)[i] =
          reinterpret_cast<const uint4*>(shared.p)[i];
    }
    for (int i = thread; i < static_cast<int>(kScalarBytes / 16); i += kGroup) {
      reinterpret_cast<uint4*>(p.workspace.scalars + tile * kScalarBytes)[i] =
          reinterpret_cast<const uint4*>(&shared.scalars)[i];
    }
    __syncthreads();  // The next head takes the tiles' place.
  }
#endif
}

}  // namespace gdn::cuda::chunk

#endif  // KERNELS_CUDA_DELTA_RULE_BACKWARD_CHUNK_PREPARE_CUH_
