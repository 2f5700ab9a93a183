// The solve role of the chunked delta rule: T = (I + M)^-1, see delta_rule_chunk.cuh.
#ifndef KERNELS_CUDA_DELTA_RULE_CHUNK_SOLVE_CUH_
#define KERNELS_CUDA_DELTA_RULE_CHUNK_SOLVE_CUH_

#include "kernels/cuda/delta_rule_chunk.cuh"
#include "kernels/cuda/delta_rule_chunk_keys.cuh"

namespace gdn::cuda::chunk {

__device__ inline uint32_t ToTf32(float x) {
  uint32_t y;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
  return y;
}

// A 16x8 product over 8 columns of A in TF32. The order of those columns is free as long as A and B
// agree; here slot c of A's fragment is column 2 c, slot c + 4 column 2 c + 1, so that a sum's
// registers are an A operand.
__device__ inline void ProductTf32(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
// A and B operands at (row, column) of the system.
__device__ inline void LoadA(const float* system, int row, int column, int lane, uint32_t (&a)[4]) {
  const float* from = system + (row + lane / 4) * kSystemStride + column + lane % 4 * 2;
  const float2 top = *reinterpret_cast<const float2*>(from);
  const float2 bottom = *reinterpret_cast<const float2*>(from + 8 * kSystemStride);
  a[0] = ToTf32(top.x);
  a[1] = ToTf32(bottom.x);
  a[2] = ToTf32(top.y);
  a[3] = ToTf32(bottom.y);
}
__device__ inline void LoadB(const float* system, int row, int column, int lane, uint32_t (&b)[2]) {
  const float* from = system + (row + lane % 4 * 2) * kSystemStride + column + lane / 4;
  b[0] = ToTf32(from[0]);
  b[1] = ToTf32(from[kSystemStride]);
}
__device__ inline void SumAsA(const float (&d)[4], uint32_t (&a)[4]) {
  a[0] = ToTf32(d[0]);
  a[1] = ToTf32(d[2]);
  a[2] = ToTf32(d[1]);
  a[3] = ToTf32(d[3]);
}

// The inverse of the warp's diagonal block, a column a lane (twice), by forward substitution.
__device__ inline void InvertDiagonal(Solve& solve, int warp, int lane) {
  const int column = lane % 16;
  const float* const transposed = solve.diagonal[warp];
  float x[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) x[i] = i == column ? 1.0f : 0.0f;
#pragma unroll
  for (int j = 0; j < 15; ++j) {
#pragma unroll
    for (int i = (j + 1) / 4 * 4; i < 16; i += 4) {
      const float4 m = *reinterpret_cast<const float4*>(transposed + j * kDiagonalStride + i);
      if (i + 0 > j) x[i + 0] = fmaf(-m.x, x[j], x[i + 0]);
      if (i + 1 > j) x[i + 1] = fmaf(-m.y, x[j], x[i + 1]);
      if (i + 2 > j) x[i + 2] = fmaf(-m.z, x[j], x[i + 2]);
      if (i + 3 > j) x[i + 3] = fmaf(-m.w, x[j], x[i + 3]);
    }
  }
  float* const to = solve.system + 16 * warp * kSystemStride + 16 * warp + column;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    to[(lane < 16 ? i : i + 8) * kSystemStride] = lane < 16 ? x[i] : x[i + 8];
  }
}

// T's block below the diagonal of blocks (2 p, 2 p + 1): the half of its columns that is the
// warp's. -D_1 M_10 D_0.
__device__ inline void MergeSixteens(const float* system, int warp, int lane, float (&d)[4]) {
  const int top = warp / 2 * 32;
  float y[2][4] = {};
#pragma unroll
  for (int k = 0; k < 16; k += 8) {
    uint32_t a[4];
    LoadA(system, top + 16, top + 16 + k, lane, a);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      uint32_t b[2];
      LoadB(system, top + 16 + k, top + 8 * n, lane, b);
      ProductTf32(y[n], a, b);
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) d[i] = 0.0f;
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    uint32_t a[4];
    uint32_t b[2];
    SumAsA(y[k], a);
    LoadB(system, top + 8 * k, top + warp % 2 * 8, lane, b);
    ProductTf32(d, a, b);
  }
}

// The same for the two blocks of 32: 16 rows and 16 columns of it are the warp's.
__device__ inline void MergeThirtyTwos(const float* system, int warp, int lane, float (&d)[2][4]) {
  const int row = warp / 2 * 16;
  const int column = warp % 2 * 16;
  float y[4][4] = {};
#pragma unroll
  for (int k = 0; k < 32; k += 8) {
    if (k >= row + 16) continue;  // Above the diagonal.
    uint32_t a[4];
    LoadA(system, 32 + row, 32 + k, lane, a);
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      uint32_t b[2];
      LoadB(system, 32 + k, 8 * n, lane, b);
      ProductTf32(y[n], a, b);
    }
  }
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) d[n][i] = 0.0f;
  }
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    if (8 * k < column) continue;
    uint32_t a[4];
    SumAsA(y[k], a);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      uint32_t b[2];
      LoadB(system, 8 * k, column + 8 * n, lane, b);
      ProductTf32(d[n], a, b);
    }
  }
}

template <int kStates>
__device__ inline void SolveRole(const Params& p, Shared<kStates>& shared, int thread) {
  constexpr int kParts = 2 / kStates;
  Solve& solve = shared.solve;
  Cursor at;
  bool more = EnterChunks<kParts>(p, static_cast<int>(blockIdx.x), &at);
  for (uint32_t n = 0; more; ++n, more = NextChunk<kParts>(p, &at)) {
    const int lane = Opaque(thread) % 32;
    const int warp = Opaque(thread) / 32;
    const int row = 16 * warp + lane / 4;
    WaitFor(shared.loaded, n);
    const Keys& keys = shared.keys[n % kSlots];
    const Scalars& scalars = shared.scalars[n % kSlots];
    float d[32];
    Gram(keys.k, keys.k, d);
    NamedBarrier(kSolveBarrier, kGroup);  // The chunk before no longer needs the system.
    const float log_decay[2] = {scalars.log_decay[row], scalars.log_decay[row + 8]};
    const float strength[2] = {scalars.beta[row] * scalars.key_size[row],
                               scalars.beta[row + 8] * scalars.key_size[row + 8]};
#pragma unroll
    for (int t = 0; t < 8; ++t) {
      if (t > 2 * warp + 1) continue;  // Above the diagonal's block.
      const int column = 8 * t + lane % 4 * 2;
      const float2 earlier = *reinterpret_cast<const float2*>(&scalars.log_decay[column]);
      const float2 size = *reinterpret_cast<const float2*>(&scalars.key_size[column]);
#pragma unroll
      for (int v = 0; v < 2; ++v) {
        const int i = row + 8 * v;
        float2 m;
        m.x = strength[v] * (d[4 * t + 2 * v] * DecayBetween(log_decay[v], earlier.x)) * size.x;
        m.y = strength[v] * (d[4 * t + 2 * v + 1] * DecayBetween(log_decay[v], earlier.y)) * size.y;
        if (column >= i) m.x = 0.0f;
        if (column + 1 >= i) m.y = 0.0f;
        if (t >= 2 * warp) {
          float* const to =
              &solve.diagonal[warp][(column - 16 * warp) * kDiagonalStride + i - 16 * warp];
          to[0] = m.x;
          to[kDiagonalStride] = m.y;
        } else {
          *reinterpret_cast<float2*>(&solve.system[i * kSystemStride + column]) = m;
        }
      }
    }
    __syncwarp();
    InvertDiagonal(solve, warp, lane);
    NamedBarrier(kSolveBarrier, kGroup);

    float sixteens[4];
    MergeSixteens(solve.system, warp, lane, sixteens);
    NamedBarrier(kSolveBarrier, kGroup);
    {
      float* const to = &solve.system[(warp / 2 * 32 + 16 + lane / 4) * kSystemStride +
                                      warp / 2 * 32 + warp % 2 * 8 + lane % 4 * 2];
      *reinterpret_cast<float2*>(to) = make_float2(-sixteens[0], -sixteens[1]);
      *reinterpret_cast<float2*>(to + 8 * kSystemStride) = make_float2(-sixteens[2], -sixteens[3]);
    }
    NamedBarrier(kSolveBarrier, kGroup);

    float thirty_twos[2][4];
    MergeThirtyTwos(solve.system, warp, lane, thirty_twos);
    if (n >= kSlots) WaitFor(shared.done, n - kSlots);
    char* const tile = reinterpret_cast<char*>(shared.mix[n % kSlots].t);
    // The two blocks of 32 on the diagonal, and the zeros above them: a quarter of a row a thread.
    {
      const int i = thread / 2;
      const int first = i / 32 * 32 + thread % 2 * 16;
#pragma unroll
      for (int v = 0; v < 2; ++v) {
        uint32_t word[4];
#pragma unroll
        for (int u = 0; u < 4; ++u) {
          const int j = first + 8 * v + 2 * u;
          // The block of 16 above the diagonal was never written.
          const float2 x = *reinterpret_cast<const float2*>(&solve.system[i * kSystemStride + j]);
          word[u] = PackHalves(j <= i ? x.x : 0.0f, j + 1 <= i ? x.y : 0.0f);
        }
        *reinterpret_cast<uint4*>(tile + PanelOffset(i, first / 8 + v)) =
            make_uint4(word[0], word[1], word[2], word[3]);
        if (i < 32) {
          *reinterpret_cast<uint4*>(tile + PanelOffset(i, 4 + first / 8 + v)) =
              make_uint4(0, 0, 0, 0);
        }
      }
    }
#pragma unroll
    for (int t = 0; t < 2; ++t) {
#pragma unroll
      for (int v = 0; v < 2; ++v) {
        const int i = 32 + warp / 2 * 16 + lane / 4 + 8 * v;
        *reinterpret_cast<uint32_t*>(tile + PanelOffset(i, warp % 2 * 2 + t) + lane % 4 * 4) =
            PackHalves(-thirty_twos[t][2 * v], -thirty_twos[t][2 * v + 1]);
      }
    }
    FenceForBulk();
    shared.ready[n % kSlots].Arrive();
  }
}

}  // namespace gdn::cuda::chunk

#endif  // KERNELS_CUDA_DELTA_RULE_CHUNK_SOLVE_CUH_
