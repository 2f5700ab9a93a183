// T = (I + M)^-1 of two value heads at once, in hardly more time than of one: where the steps of
// delta_rule_chunk_solve.cuh let warps and lanes do the same twice, here each half has a head.
#ifndef KERNELS_CUDA_FUSED_PREFILL_MATRICES_PAIR_CUH_
#define KERNELS_CUDA_FUSED_PREFILL_MATRICES_PAIR_CUH_

#include "kernels/cuda/delta_rule_chunk_solve.cuh"
#include "kernels/cuda/fused_prefill_matrices.cuh"

namespace gdn::cuda::chunk {

// The inverses of the warp's diagonal blocks of 16 of both heads' M, which come transposed.
__device__ inline void InvertDiagonals(const float* first, const float* second,
                                       const TriangleTile (&tiles)[2], int warp, int lane) {
  const int top = lane / 8 % 2 * 8;
  const int column = lane % 8;
  const int block = 16 * warp;
  {
    const float* const transposed = lane < 16 ? first : second;
    const TriangleTile tile = {lane < 16 ? tiles[0].address : tiles[1].address};
    float x[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = i == column ? 1.0f : 0.0f;
#pragma unroll
    for (int j = 0; j < 7; ++j) {
#pragma unroll
      for (int i = (j + 1) / 4 * 4; i < 8; i += 4) {
        const float4 m =
            *reinterpret_cast<const float4*>(transposed + (top + j) * kDiagonalStride + top + i);
        if (i + 0 > j) x[i + 0] = fmaf(-m.x, x[j], x[i + 0]);
        if (i + 1 > j) x[i + 1] = fmaf(-m.y, x[j], x[i + 1]);
        if (i + 2 > j) x[i + 2] = fmaf(-m.z, x[j], x[i + 2]);
        if (i + 3 > j) x[i + 3] = fmaf(-m.w, x[j], x[i + 3]);
      }
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const __half value = __float2half_rn(x[i]);
      asm volatile(
          "st.shared.b16 [%0], %1;" ::"r"(TileAt(tile, block + top + i, (block + top) / 8) +
                                          static_cast<uint32_t>(column) * 2),
          "h"(*reinterpret_cast<const uint16_t*>(&value))
          : "memory");
    }
  }
  __syncwarp();
  const int row = block + 8 + lane / 4;
  const uint32_t pair = static_cast<uint32_t>(lane % 4) * 4;
  uint32_t a[2][4] = {};
  uint32_t b[2];
  float2 m[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    asm volatile("ld.shared.b32 %0, [%1];"
                 : "=r"(a[h][0])
                 : "r"(TileAt(tiles[h], row, block / 8 + 1) + pair)
                 : "memory");
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%0}, [%1];"
                 : "=r"(b[h])
                 : "r"(TileAt(tiles[h], block + lane % 8, block / 8))
                 : "memory");
    m[h] = *reinterpret_cast<const float2*>((h == 0 ? first : second) + lane / 4 * kDiagonalStride +
                                            8 + lane % 4 * 2);
  }
  float y[2][4] = {};
  float d[2][4] = {};
#pragma unroll
  for (int h = 0; h < 2; ++h) Product16(y[h], a[h], PackHalves(m[h].x, m[h].y), 0);
#pragma unroll
  for (int h = 0; h < 2; ++h) a[h][0] = PackHalves(y[h][0], y[h][1]);
#pragma unroll
  for (int h = 0; h < 2; ++h) Product16(d[h], a[h], b[h], 0);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(TileAt(tiles[h], row, block / 8) + pair),
                 "r"(PackHalves(-d[h][0], -d[h][1]))
                 : "memory");
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(TileAt(tiles[h], row - 8, block / 8 + 1) + pair),
                 "r"(0)
                 : "memory");
  }
}

// Of one head, by a warp: T's block of 16 below the diagonal of the block of 32 from `top` on.
__device__ inline void MergeWholeSixteens(const PackedSystem& system, const TriangleTile& t,
                                          int top, int lane) {
  uint32_t a[4];
  uint32_t b[4];
  uint32_t c[4];
  float y[2][4] = {};
  LoadA(t, top + 16, top + 16, lane, a);
  LoadSystem(system, top + 16, top, lane, b);
  LoadB(t, top, top, lane, c);
  Product16(y[0], a, b[0], b[1]);
  Product16(y[1], a, b[2], b[3]);
  SumAsA(y[0], y[1], a);
  float d[2][4] = {};
  Product16(d[0], a, c[0], c[1]);
  Product16(d[1], a, c[2], c[3]);
  StoreNegated(t, top + 16, top, lane, d[0]);
  StoreNegated(t, top + 16, top + 8, lane, d[1]);
}

// Of one head, by a warp: 16 rows of T's block of 32 below its diagonal.
__device__ inline void MergeWholeThirtyTwos(const PackedSystem& system, const TriangleTile& t,
                                            int row, int lane) {
  float y[4][4] = {};
  uint32_t a[4];
  uint32_t b[4];
#pragma unroll
  for (int k = 0; k < 32; k += 16) {
    if (k > row) continue;  // Above the diagonal.
    LoadA(t, 32 + row, 32 + k, lane, a);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      LoadSystem(system, 32 + k, 16 * n, lane, b);
      Product16(y[2 * n], a, b[0], b[1]);
      Product16(y[2 * n + 1], a, b[2], b[3]);
    }
  }
  float d[4][4] = {};
#pragma unroll
  for (int k = 0; k < 32; k += 16) {
    SumAsA(y[k / 8], y[k / 8 + 1], a);
#pragma unroll
    for (int column = 0; column <= k; column += 16) {
      LoadB(t, k, column, lane, b);
      Product16(d[column / 8], a, b[0], b[1]);
      Product16(d[column / 8 + 1], a, b[2], b[3]);
    }
  }
#pragma unroll
  for (int n = 0; n < 4; ++n) StoreNegated(t, 32 + row, 8 * n, lane, d[n]);
}

}  // namespace gdn::cuda::chunk

#endif  // KERNELS_CUDA_FUSED_PREFILL_MATRICES_PAIR_CUH_
