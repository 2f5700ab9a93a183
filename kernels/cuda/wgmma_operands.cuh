// The matrix products of wgmma.cuh with operands of either 16-bit type, both from shared memory or
// A from registers, each of them transposed or not: for the backward of the delta rule.
//
// A transposed operand lies in memory with its steps as rows: A [16][64], B [16][N]. Descriptors
// then go on by kNextRows instead of kNextColumns.
#ifndef KERNELS_CUDA_WGMMA_OPERANDS_CUH_
#define KERNELS_CUDA_WGMMA_OPERANDS_CUH_

#include <cstdint>

#include "kernels/cuda/element.cuh"
#include "kernels/cuda/wgmma.cuh"

namespace gdn::cuda {

// As StoreMatrices, each 8x8 matrix transposed.
__device__ inline void StoreMatricesTransposed(uint32_t address, uint32_t a, uint32_t b, uint32_t c,
                                               uint32_t d) {
#ifdef GDN_WGMMA
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
      "r"(a), "r"(b), "r"(c), "r"(d)
      : "memory");
#endif
}

#ifdef GDN_WGMMA

#define GDN_REGISTERS_32                                                   \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define GDN_REGISTERS_64                                                             \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define GDN_SUMS_32(d)                                                                            \
  "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), \
      "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]),    \
      "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]),  \
      "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]),  \
      "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
#define GDN_SUMS_64(d)                                                                           \
  "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]),     \
      "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), \
      "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), \
      "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), \
      "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])

template <typename X>
struct Products;

// kTransposeA, kTransposeB: see the head of this file.
#define GDN_PRODUCTS(X, TYPE)                                                                   \
  template <>                                                                                   \
  struct Products<X> {                                                                          \
    /* d (+)= A B^T of 64 columns, both in shared memory. */                                    \
    template <bool kTransposeA, bool kTransposeB>                                               \
    static __device__ void N64(float (&d)[32], uint64_t a, uint64_t b, bool accumulate) {       \
      asm volatile(                                                                             \
          "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"                                          \
          "wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " {" GDN_REGISTERS_32     \
          "}, %32, %33, p, 1, 1, %35, %36;\n}\n"                                                \
          : GDN_SUMS_32(d)                                                                      \
          : "l"(a), "l"(b), "r"(accumulate ? 1 : 0), "n"(kTransposeA ? 1 : 0),                  \
            "n"(kTransposeB ? 1 : 0));                                                          \
    }                                                                                           \
    /* The same with A in registers. */                                                         \
    template <bool kTransposeB>                                                                 \
    static __device__ void N64(float (&d)[32], const uint32_t (&a)[4], uint64_t b,              \
                               bool accumulate) {                                               \
      asm volatile(                                                                             \
          "{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"                                          \
          "wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " {" GDN_REGISTERS_32     \
          "}, {%32, %33, %34, %35}, %36, p, 1, 1, %38;\n}\n"                                    \
          : GDN_SUMS_32(d)                                                                      \
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate ? 1 : 0),        \
            "n"(kTransposeB ? 1 : 0));                                                          \
    }                                                                                           \
    /* d += A B of 128 columns: A in registers, B transposed, in two panels. */                 \
    static __device__ void N128Transposed(float (&d)[64], const uint32_t (&a)[4], uint64_t b) { \
      asm volatile(                                                                             \
          "{\n.reg .pred p;\nsetp.eq.b32 p, 0, 0;\n"                                            \
          "wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE " {" GDN_REGISTERS_32    \
          ", " GDN_REGISTERS_64 "}, {%64, %65, %66, %67}, %68, p, 1, 1, 1;\n}\n"                \
          : GDN_SUMS_32(d), GDN_SUMS_64(d)                                                      \
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                \
    }                                                                                           \
  };

GDN_PRODUCTS(Bf16, "bf16")
GDN_PRODUCTS(F16, "f16")

#undef GDN_PRODUCTS
#undef GDN_SUMS_64
#undef GDN_SUMS_32
#undef GDN_REGISTERS_64
#undef GDN_REGISTERS_32

#else

// Elsewhere than on sm_90a the kernels that use these are never launched.
template <typename X>
struct Products {
  template <bool kTransposeA, bool kTransposeB>
  static __device__ void N64(float (&)[32], uint64_t, uint64_t, bool) {}
  template <bool kTransposeB>
  static __device__ void N64(float (&)[32], const uint32_t (&)[4], uint64_t, bool) {}
  static __device__ void N128Transposed(float (&)[64], const uint32_t (&)[4], uint64_t) {}
};

#endif

}  // namespace gdn::cuda

#endif  // KERNELS_CUDA_WGMMA_OPERANDS_CUH_
