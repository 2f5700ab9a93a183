// The matrix instruction of the linear op's own kernels, on operands in the lanes' order of
// linear_rows.cuh, and the copies that bring them.
#ifndef KERNELS_CUDA_LINEAR_MMA_CUH_
#define KERNELS_CUDA_LINEAR_MMA_CUH_

#include <cstdint>

#include "kernels/cuda/async_copy.cuh"
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

// One step of K: 32 elements of sixteen rows (g of `low` and `high`) times eight (`b`). Afterwards
// d holds row g, columns 2 t and 2 t + 1, then the same of row g + 8.
template <typename W>
__device__ inline void MultiplyStep(float (&d)[4], uint4 low, uint4 high, uint4 b) {
  Multiply<W>(d, low.x, high.x, low.y, high.y, b.x, b.y);
  Multiply<W>(d, low.z, high.z, low.w, high.w, b.z, b.w);
}

// 16 bytes, or zeros without reading `global`.
__device__ inline void CopyAsyncOrZero(void* shared, const void* global, bool copy) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(
                   static_cast<uint32_t>(__cvta_generic_to_shared(shared))),
               "l"(global), "r"(copy ? 16 : 0)
               : "memory");
}

// WaitForCopies for a number known at run time, up to 7.
__device__ inline void WaitForCopiesBut(int pending) {
  switch (pending) {
    case 0:
      return WaitForCopies<0>();
    case 1:
      return WaitForCopies<1>();
    case 2:
      return WaitForCopies<2>();
    case 3:
      return WaitForCopies<3>();
    case 4:
      return WaitForCopies<4>();
    case 5:
      return WaitForCopies<5>();
    case 6:
      return WaitForCopies<6>();
    default:
      return WaitForCopies<7>();
  }
}

}  // namespace gdn::cuda::linear

#endif  // KERNELS_CUDA_LINEAR_MMA_CUH_
