// The matrix instruction of the linear op's own kernels, on operands in the lanes' order of
// linear_rows.cuh.
#ifndef KERNELS_CUDA_LINEAR_MMA_CUH_
#define KERNELS_CUDA_LINEAR_MMA_CUH_

#include <cstdint>

#include "kernels/cuda/element.cuh"

namespace gdn::cuda::linear {

template <typename W>
__device__ inline void Multiply(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                uint32_t b0, uint32_t b1);
template <>
__device__ inline void Multiply<Bf16>(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                      uint32_t a3, uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
template <>
__device__ inline void Multiply<F16>(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                     uint32_t a3, uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// One step of K: 32 elements of sixteen rows (g of `low` and `high`) times eight (`b`), its halves
// to two sums, so that no instruction waits for the one before it. Each d holds row g, columns 2 t
// and 2 t + 1, then the same of row g + 8.
template <typename W>
__device__ inline void MultiplyStep(float (&d0)[4], float (&d1)[4], uint4 low, uint4 high,
                                    uint4 b) {
  Multiply<W>(d0, low.x, high.x, low.y, high.y, b.x, b.y);
  Multiply<W>(d1, low.z, high.z, low.w, high.w, b.z, b.w);
}

}  // namespace gdn::cuda::linear

#endif  // KERNELS_CUDA_LINEAR_MMA_CUH_
