// The two matrices of a chunk and value head, from products that the value heads of a key share.
#ifndef KERNELS_CUDA_FUSED_PREFILL_MATRICES_CUH_
#define KERNELS_CUDA_FUSED_PREFILL_MATRICES_CUH_

#include "kernels/cuda/delta_rule_chunk_keys.cuh"
#include "kernels/cuda/delta_rule_chunk_solve.cuh"
#include "kernels/cuda/fused_prefill_chunk.cuh"
#include "kernels/cuda/fused_prefill_math.cuh"

namespace gdn::cuda::chunk {

// Products of keys, and of queries times the scale of the output, with keys, as pairs of FP16: they
// stay in registers for all value heads.
__device__ inline void Grams(const Keys& keys, float scale, uint32_t (&kk)[16],
                             uint32_t (&qk)[16]) {
  float d[32];
  float e[32];
  ProductFence();
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const uint64_t k = PanelDescriptor(SharedAddress(keys.k[i / 4])) + i % 4 * kNextColumns;
    const uint64_t q = PanelDescriptor(SharedAddress(keys.q[i / 4])) + i % 4 * kNextColumns;
    ProductN64(d, k, k, i > 0);
    ProductN64(e, q, k, i > 0);
  }
  CommitProducts();
  WaitForProducts<0>();
  Pin(d);
  Pin(e);
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    kk[i] = PackHalves(d[2 * i], d[2 * i + 1]);
    qk[i] = PackHalves(scale * e[2 * i], scale * e[2 * i + 1]);
  }
}

// The warp's rows of M, as FormSystem writes them, and of P; both take the same decays.
__device__ inline void FormMatrices(const InScalars& scalars, Solve& solve, uint32_t p, int warp,
                                    int lane, const uint32_t (&kk)[16], const uint32_t (&qk)[16]) {
  const int row = 16 * warp + lane / 4;
  const float log_decay[2] = {scalars.log_decay[row], scalars.log_decay[row + 8]};
  const float beta[2] = {scalars.beta[row], scalars.beta[row + 8]};
  const uint32_t system = SharedAddress(solve.system);
#pragma unroll
  for (int t = 0; t < 8; t += 2) {
    uint32_t m_word[4] = {};
    uint32_t p_word[4] = {};
    // Blocks of 16: below the diagonal, on it, above it.
    if (t <= 2 * warp) {
#pragma unroll
      for (int u = 0; u < 2; ++u) {
        const int column = 8 * (t + u) + lane % 4 * 2;
        const float2 earlier = *reinterpret_cast<const float2*>(&scalars.log_decay[column]);
#pragma unroll
        for (int v = 0; v < 2; ++v) {
          const float2 key = UnpackPair<F16>(kk[2 * (t + u) + v]);
          const float2 query = UnpackPair<F16>(qk[2 * (t + u) + v]);
          const float2 decay = make_float2(DecayBetween(log_decay[v], earlier.x),
                                           DecayBetween(log_decay[v], earlier.y));
          const float2 m = make_float2(beta[v] * key.x * decay.x, beta[v] * key.y * decay.y);
          float2 mix = make_float2(query.x * decay.x, query.y * decay.y);
          if (t == 2 * warp) {
            float* const to =
                &solve.diagonal[warp][(8 * u + lane % 4 * 2) * kDiagonalStride + lane / 4 + 8 * v];
            to[0] = m.x;
            to[kDiagonalStride] = m.y;
            if (column > row + 8 * v) mix.x = 0.0f;
            if (column + 1 > row + 8 * v) mix.y = 0.0f;
          }
          m_word[2 * u + v] = PackHalves(m.x, m.y);
          p_word[2 * u + v] = PackHalves(mix.x, mix.y);
        }
      }
      if (t < 2 * warp) {
        StoreMatrices(BlockAddress(system, 16 * warp, 8 * t, lane), m_word[0], m_word[1], m_word[2],
                      m_word[3]);
      }
    }
    StoreMatrices(BlockAddress(p, 16 * warp, 8 * t, lane), p_word[0], p_word[1], p_word[2],
                  p_word[3]);
  }
}

// Zeros in the warp's rows of T above the diagonal's block.
__device__ inline void ClearAbove(uint32_t t, int warp, int lane) {
  for (int column = 16 * (warp + 1); column < kChunk; column += 16) {
    asm volatile(
        "st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(BlockAddress(t, 16 * warp, column, lane)),
        "r"(0)
        : "memory");
  }
}

}  // namespace gdn::cuda::chunk

#endif  // KERNELS_CUDA_FUSED_PREFILL_MATRICES_CUH_
