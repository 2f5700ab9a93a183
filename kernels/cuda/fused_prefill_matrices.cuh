// The two matrices of a chunk and value head, from products that the value heads of a key share.
#ifndef KERNELS_CUDA_FUSED_PREFILL_MATRICES_CUH_
#define KERNELS_CUDA_FUSED_PREFILL_MATRICES_CUH_

#include "kernels/cuda/delta_rule_chunk_keys.cuh"
#include "kernels/cuda/delta_rule_chunk_solve.cuh"
#include "kernels/cuda/fused_prefill_conv.cuh"
#include "kernels/cuda/fused_prefill_math.cuh"

namespace gdn::cuda::chunk {

// M of a chunk: the blocks of 16 before the diagonal, FP16, 8 rows of a block in different banks,
// and the diagonal blocks, transposed.
struct PackedSystem {
  uint16_t blocks[6][16 * 16];
  float diagonal[4][16 * kDiagonalStride];

  static __device__ uint32_t Place(int lane) {
    return static_cast<uint32_t>(lane % 16) * 32 +
           (static_cast<uint32_t>(lane / 16 ^ lane / 4 % 2) << 4);
  }
  __device__ uint32_t Block(int row, int column, int lane) const {
    return SharedAddress(blocks) + static_cast<uint32_t>(row * (row - 1) / 2 + column) * 512 +
           Place(lane);
  }
};
__device__ inline void LoadSystem(const PackedSystem& system, int row, int column, int lane,
                                  uint32_t (&out)[4]) {
  LoadMatricesTransposed(system.Block(row / 16, column / 16, lane), out);
}

// A Triangle in shared memory, as a tile without its quarter of zeros.
struct TriangleTile {
  uint32_t address;
};
__device__ inline uint32_t TileAt(const TriangleTile& tile, int row, int vector) {
  constexpr int kSkip = sizeof(Triangle::late);
  return tile.address + static_cast<uint32_t>(row * 64 + (vector < 4 ? kSkip : -kSkip)) +
         (static_cast<uint32_t>((vector ^ row / 2) & 3) << 4);
}

// Products of keys, and of queries times the scale of the output, with keys, as pairs of FP16: they
// stay in registers for all value heads.
__device__ inline void Grams(const Panel (&keys)[2], const Panel (&queries)[2], float scale,
                             uint32_t (&kk)[16], uint32_t (&qk)[16]) {
  float d[32];
  float e[32];
  ProductFence();
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const uint64_t k = PanelDescriptor(SharedAddress(keys[i / 4])) + i % 4 * kNextColumns;
    const uint64_t q = PanelDescriptor(SharedAddress(queries[i / 4])) + i % 4 * kNextColumns;
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

__device__ inline uint32_t TimesHalves(uint32_t pair, __half2 factors) {
  const __half2 product = __hmul2(*reinterpret_cast<const __half2*>(&pair), factors);
  return *reinterpret_cast<const uint32_t*>(&product);
}

// The warp's diagonal blocks of M, FP32 and transposed, and of P, as the words of a block.
__device__ inline void FormDiagonal(const InScalars& scalars,
                                    float (&m_block)[16 * kDiagonalStride], int warp, int lane,
                                    const uint32_t (&kk)[4], const uint32_t (&qk)[4],
                                    uint32_t (&p_word)[4]) {
  const int place = lane / 4;
  const int row = 16 * warp + place;
  const float log_decay[2] = {scalars.log_decay[row], scalars.log_decay[row + 8]};
  const float beta[2] = {scalars.walk.beta[row], scalars.walk.beta[row + 8]};
#pragma unroll
  for (int u = 0; u < 2; ++u) {
    const int column = 8 * u + lane % 4 * 2;
    const float2 earlier = *reinterpret_cast<const float2*>(&scalars.log_decay[16 * warp + column]);
    float* const to = &m_block[column * kDiagonalStride + place];
#pragma unroll
    for (int v = 0; v < 2; ++v) {
      const float2 key = UnpackPair<F16>(kk[2 * u + v]);
      const float2 query = UnpackPair<F16>(qk[2 * u + v]);
      const float2 decay =
          make_float2(DecayBetween(log_decay[v], earlier.x), DecayBetween(log_decay[v], earlier.y));
      to[8 * v] = beta[v] * key.x * decay.x;
      to[8 * v + kDiagonalStride] = beta[v] * key.y * decay.y;
      const bool below = column <= place + 8 * v;
      const bool strictly = column < place + 8 * v;
      p_word[2 * u + v] =
          PackHalves(below ? query.x * decay.x : 0.0f, strictly ? query.y * decay.y : 0.0f);
    }
  }
}

// The warp's rows of M, the diagonal block transposed as FP32 and the blocks before it as FP16, and
// of P; zeros in T after the diagonal's block. Both M and P take the same decays, each before the
// diagonal a product of two, up to and from the end of the earlier token's block of 16.
__device__ inline void FormMatrices(const InScalars& scalars, PackedSystem& system,
                                    const TriangleTile& t, const TriangleTile& p, int warp,
                                    int lane, const uint32_t (&kk)[16], const uint32_t (&qk)[16]) {
  const int row = 16 * warp + lane / 4;
  const float log_decay[2] = {scalars.log_decay[row], scalars.log_decay[row + 8]};
  const float beta[2] = {scalars.walk.beta[row], scalars.walk.beta[row + 8]};
#pragma unroll
  for (int block = 0; block < 4; ++block) {
    if (block >= 2 && warp < 2) break;  // The quarter of zeros.
    const auto at = [&](const TriangleTile& tile) {
      return BlockAddress(tile, 16 * warp, 16 * block, lane);
    };
    const uint32_t(&k)[4] = reinterpret_cast<const uint32_t(&)[4]>(kk[4 * block]);
    const uint32_t(&q)[4] = reinterpret_cast<const uint32_t(&)[4]>(qk[4 * block]);
    uint32_t p_word[4] = {};
    if (block < 3 && block < warp) {
      const float end = scalars.log_decay[16 * block + 15];
      __half2 from_end[2];
      __half2 scaled[2];
#pragma unroll
      for (int v = 0; v < 2; ++v) {
        const float decay = DecayBetween(log_decay[v], end);
        from_end[v] = __float2half2_rn(decay);
        scaled[v] = __float2half2_rn(beta[v] * decay);
      }
      uint32_t m_word[4];
#pragma unroll
      for (int u = 0; u < 2; ++u) {
        const __half2 to_end = *reinterpret_cast<const __half2*>(
            &scalars.to_block_end[16 * block + 8 * u + lane % 4 * 2]);
#pragma unroll
        for (int v = 0; v < 2; ++v) {
          m_word[2 * u + v] = TimesHalves(k[2 * u + v], __hmul2(to_end, scaled[v]));
          p_word[2 * u + v] = TimesHalves(q[2 * u + v], __hmul2(to_end, from_end[v]));
        }
      }
      StoreMatrices(system.Block(warp, block, lane), m_word[0], m_word[1], m_word[2], m_word[3]);
    } else if (block == warp) {
      FormDiagonal(scalars, system.diagonal[warp], warp, lane, k, q, p_word);
    } else {
      StoreMatrices(at(t), 0, 0, 0, 0);
    }
    StoreMatrices(at(p), p_word[0], p_word[1], p_word[2], p_word[3]);
  }
}

}  // namespace gdn::cuda::chunk

#endif  // KERNELS_CUDA_FUSED_PREFILL_MATRICES_CUH_
