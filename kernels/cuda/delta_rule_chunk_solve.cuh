// The solve role of the chunked delta rule: T = (I + M)^-1, see delta_rule_chunk.cuh.
#ifndef KERNELS_CUDA_DELTA_RULE_CHUNK_SOLVE_CUH_
#define KERNELS_CUDA_DELTA_RULE_CHUNK_SOLVE_CUH_

#include "kernels/cuda/delta_rule_chunk.cuh"
#include "kernels/cuda/delta_rule_chunk_keys.cuh"

namespace gdn::cuda::chunk {

// d += A B for 16 rows, 16 steps and 8 columns.
__device__ inline void Product16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// Where a tile of 64 by 64 has the 16-byte vector `vector` of a row. A tile is a panel's address,
// or of another type with such a function.
__device__ inline uint32_t TileAt(uint32_t panel, int row, int vector) {
  return panel + PanelOffset(row, vector);
}
// The 16x16 block at (row, column) of a tile, as an A operand and as a B operand: of the latter,
// out[0], out[1] are the first eight columns.
template <typename Tile>
__device__ inline uint32_t BlockAddress(const Tile& tile, int row, int column, int lane) {
  return TileAt(tile, row + lane % 16, column / 8 + lane / 16);
}
template <typename Tile>
__device__ inline void LoadA(const Tile& panel, int row, int column, int lane, uint32_t (&out)[4]) {
  LoadMatrices(BlockAddress(panel, row, column, lane), out);
}
template <typename Tile>
__device__ inline void LoadB(const Tile& panel, int row, int column, int lane, uint32_t (&out)[4]) {
  LoadMatricesTransposed(BlockAddress(panel, row, column, lane), out);
}
// Two neighbouring sums of 8 columns as the A operand of 16 steps.
__device__ inline void SumAsA(const float (&left)[4], const float (&right)[4], uint32_t (&a)[4]) {
  a[0] = PackHalves(left[0], left[1]);
  a[1] = PackHalves(left[2], left[3]);
  a[2] = PackHalves(right[0], right[1]);
  a[3] = PackHalves(right[2], right[3]);
}
// Stores -d, a sum of 8 columns, at (row, column) of a panel.
template <typename Tile>
__device__ inline void StoreNegated(const Tile& tile, int row, int column, int lane,
                                    const float (&d)[4]) {
#pragma unroll
  for (int v = 0; v < 2; ++v) {
    const uint32_t to = TileAt(tile, row + lane / 4 + 8 * v, column / 8) + lane % 4 * 4;
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(PackHalves(-d[2 * v], -d[2 * v + 1]))
                 : "memory");
  }
}

// Writes the warp's rows of M: the diagonal block transposed as FP32, the blocks before it as FP16.
template <typename S>
__device__ inline void FormSystem(const S& scalars, Solve& solve, int warp, int lane,
                                  const float (&d)[32]) {
  const int row = 16 * warp + lane / 4;
  const float log_decay[2] = {scalars.log_decay[row], scalars.log_decay[row + 8]};
  const float strength[2] = {scalars.beta[row] * KeySize(scalars, row),
                             scalars.beta[row + 8] * KeySize(scalars, row + 8)};
  const uint32_t panel = SharedAddress(solve.system);
#pragma unroll
  for (int t = 0; t < 8; t += 2) {
    if (t > 2 * warp) break;  // Above the diagonal.
    uint32_t word[4];
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      const int column = 8 * (t + u) + lane % 4 * 2;
      const float2 earlier = *reinterpret_cast<const float2*>(&scalars.log_decay[column]);
      const float2 size = KeySizes(scalars, column);
#pragma unroll
      for (int v = 0; v < 2; ++v) {
        const float* from = &d[4 * (t + u) + 2 * v];
        const float x = strength[v] * from[0] * DecayBetween(log_decay[v], earlier.x) * size.x;
        const float y = strength[v] * from[1] * DecayBetween(log_decay[v], earlier.y) * size.y;
        if (t == 2 * warp) {
          float* const to =
              &solve.diagonal[warp][(8 * u + lane % 4 * 2) * kDiagonalStride + lane / 4 + 8 * v];
          to[0] = x;
          to[kDiagonalStride] = y;
        }
        word[2 * u + v] = PackHalves(x, y);
      }
    }
    if (t < 2 * warp) {
      StoreMatrices(BlockAddress(panel, 16 * warp, 8 * t, lane), word[0], word[1], word[2],
                    word[3]);
    }
  }
}

// The inverse of the warp's diagonal block of 16. Its two diagonal blocks of eight by forward
// substitution in FP32, a column a lane (twice): entries of `transposed` on and above M's diagonal
// are not read. Then -D_1 M_10 D_0 below them.
template <typename Tile>
__device__ inline void InvertDiagonal(const float* transposed, const Tile& tile, int warp,
                                      int lane) {
  const int top = lane / 8 % 2 * 8;
  const int column = lane % 8;
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
  // Each half of the warp stores half of the rows.
  const int block = 16 * warp;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = block + top + i + (lane < 16 ? 0 : 4);
    const __half value = __float2half_rn(lane < 16 ? x[i] : x[i + 4]);
    asm volatile("st.shared.b16 [%0], %1;" ::"r"(TileAt(tile, row, (block + top) / 8) +
                                                 static_cast<uint32_t>(column) * 2),
                 "h"(*reinterpret_cast<const uint16_t*>(&value))
                 : "memory");
  }
  __syncwarp();
  const int row = block + 8 + lane / 4;
  const uint32_t pair = static_cast<uint32_t>(lane % 4) * 4;
  uint32_t a[4] = {};
  asm volatile("ld.shared.b32 %0, [%1];"
               : "=r"(a[0])
               : "r"(TileAt(tile, row, block / 8 + 1) + pair)
               : "memory");
  const float2 m =
      *reinterpret_cast<const float2*>(transposed + lane / 4 * kDiagonalStride + 8 + lane % 4 * 2);
  float y[4] = {};
  Product16(y, a, PackHalves(m.x, m.y), 0);
  a[0] = PackHalves(y[0], y[1]);
  uint32_t b;
  asm volatile("ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%0}, [%1];"
               : "=r"(b)
               : "r"(TileAt(tile, block + lane % 8, block / 8))
               : "memory");
  float d[4] = {};
  Product16(d, a, b, 0);
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(TileAt(tile, row, block / 8) + pair),
               "r"(PackHalves(-d[0], -d[1]))
               : "memory");
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(TileAt(tile, row - 8, block / 8 + 1) + pair), "r"(0)
               : "memory");
}

// A block of M as a B operand. M is a panel, or of another type with such a function.
__device__ inline void LoadSystem(uint32_t panel, int row, int column, int lane,
                                  uint32_t (&out)[4]) {
  LoadB(panel, row, column, lane, out);
}

// T's block of 16 below the diagonal of a block of 32, -D_1 M_10 D_0: eight columns of it.
template <typename System, typename Tile>
__device__ inline void MergeSixteens(const System& system, const Tile& t, int warp, int lane) {
  const int top = warp / 2 * 32;
  uint32_t a[4];
  uint32_t b[4];
  float y[2][4] = {};
  LoadA(t, top + 16, top + 16, lane, a);
  LoadSystem(system, top + 16, top, lane, b);
  Product16(y[0], a, b[0], b[1]);
  Product16(y[1], a, b[2], b[3]);
  SumAsA(y[0], y[1], a);
  LoadB(t, top, top, lane, b);
  float d[4] = {};
  const bool right = warp % 2 != 0;
  Product16(d, a, right ? b[2] : b[0], right ? b[3] : b[1]);
  StoreNegated(t, top + 16, top + 8 * (warp % 2), lane, d);
}

// The same for blocks of 32: 16 rows and 16 columns of it.
template <typename System, typename Tile>
__device__ inline void MergeThirtyTwos(const System& system, const Tile& t, int warp, int lane) {
  const int row = warp / 2 * 16;
  const int column = warp % 2 * 16;
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
  float d[2][4] = {};
#pragma unroll
  for (int k = 0; k < 32; k += 16) {
    if (k < column) continue;
    SumAsA(y[k / 8], y[k / 8 + 1], a);
    LoadB(t, k, column, lane, b);
    Product16(d[0], a, b[0], b[1]);
    Product16(d[1], a, b[2], b[3]);
  }
  StoreNegated(t, 32 + row, column, lane, d[0]);
  StoreNegated(t, 32 + row, column + 8, lane, d[1]);
}

template <int kStates>
__device__ inline void SolveRole(const Params& p, Shared<kStates>& shared, int thread) {
  constexpr int kParts = 2 / kStates;
  Solve& solve = shared.solve;
  const uint32_t system = SharedAddress(solve.system);
  Cursor at;
  bool more = EnterChunks<kParts>(p, static_cast<int>(blockIdx.x), &at);
  for (uint32_t n = 0; more; ++n, more = NextChunk<kParts>(p, &at)) {
    const int lane = Opaque(thread) % 32;
    const int warp = Opaque(thread) / 32;
    const uint32_t t = SharedAddress(shared.mix[n % kSlots].t);
    WaitFor(shared.loaded, n);
    const Keys& keys = shared.keys[n % kSlots];
    float d[32];
    Gram(keys.k, keys.k, d);
    NamedBarrier(kSolveBarrier, kGroup);  // The chunk before no longer needs the system.
    FormSystem(shared.scalars[n % kSlots], solve, warp, lane, d);
    if (n >= kSlots) WaitFor(shared.done, n - kSlots);
    __syncwarp();
    InvertDiagonal(solve.diagonal[warp], t, warp, lane);
    NamedBarrier(kSolveBarrier, kGroup);
    MergeSixteens(system, t, warp, lane);
    NamedBarrier(kSolveBarrier, kGroup);
    MergeThirtyTwos(system, t, warp, lane);
    FenceForBulk();
    shared.ready[n % kSlots].Arrive();
  }
}

}  // namespace gdn::cuda::chunk

#endif  // KERNELS_CUDA_DELTA_RULE_CHUNK_SOLVE_CUH_
