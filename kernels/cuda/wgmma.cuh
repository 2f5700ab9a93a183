// The matrix products of a warpgroup on sm_90a, in the shapes used here: FP16 operands, FP32 sums,
// a tile of 64 rows. B lies in shared memory, A there or in registers.
//
// Tiles in shared memory are panels of 64 elements (128 bytes) a row, rows one after the other, the
// 16-byte vectors of a row permuted by the row's index (the 128-byte swizzle): see PanelOffset. A
// panel starts on 1024 bytes.
//
// A sum d of m64nN: warp w, lane 4 g + c holds, for each group t of 8 columns, d[4 t + {0, 1}] at
// row 16 w + g, columns 8 t + 2 c + {0, 1}, and d[4 t + {2, 3}] at row + 8. An A operand in
// registers for 16 columns of it is the pairs of groups 2 s and 2 s + 1 in that order, as FP16.
#ifndef KERNELS_CUDA_WGMMA_CUH_
#define KERNELS_CUDA_WGMMA_CUH_

#include <cuda_fp16.h>

#include <cstdint>

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define GDN_WGMMA
#endif

namespace gdn::cuda {

constexpr int kPanelColumns = 64;
constexpr uint32_t kPanelRowBytes = 128;

__device__ inline uint32_t SharedAddress(const void* shared) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
}

// Bytes from a panel's start to the 16-byte vector `vector` (0..7) of a row.
__device__ inline uint32_t PanelOffset(int row, int vector) {
  return static_cast<uint32_t>(row) * kPanelRowBytes +
         (static_cast<uint32_t>(vector ^ (row & 7)) << 4);
}

// The operand descriptor of a panel. `leading_bytes`: between panels, where a transposed operand is
// wider than one.
__device__ inline uint64_t PanelDescriptor(uint32_t address, uint32_t leading_bytes = 16) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62;
  constexpr uint64_t kEightRows = uint64_t{8 * kPanelRowBytes / 16} << 32;
  return kSwizzle128 | kEightRows | static_cast<uint64_t>(leading_bytes / 16) << 16 |
         ((address & 0x3ffffu) >> 4);
}
// Descriptors of 16 columns further, and of 16 rows further.
constexpr uint64_t kNextColumns = 32 / 16;
constexpr uint64_t kNextRows = 16 * kPanelRowBytes / 16;

// Before the first product that uses registers written since the last one.
__device__ inline void ProductFence() {
#ifdef GDN_WGMMA
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}
// Closes a group of products.
__device__ inline void CommitProducts() {
#ifdef GDN_WGMMA
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}
// Waits until all but the last kPending groups are done.
template <int kPending>
__device__ inline void WaitForProducts() {
#ifdef GDN_WGMMA
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
#endif
}

// Keeps the compiler from moving uses of d across an asynchronous product's wait.
template <int kSize>
__device__ inline void Pin(float (&d)[kSize]) {
#pragma unroll
  for (int i = 0; i < kSize; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

template <int kRegisters>
__device__ inline void GrowRegisters() {
#ifdef GDN_WGMMA
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
#endif
}
template <int kRegisters>
__device__ inline void ShrinkRegisters() {
#ifdef GDN_WGMMA
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
#endif
}

// d (+)= A B^T of 64 columns; A [64][16], B [64][16] in panels.
__device__ inline void ProductN64(float (&d)[32], uint64_t a, uint64_t b, bool accumulate) {
#ifdef GDN_WGMMA
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15,"
      " %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "%32, %33, p, 1, 1, 0, 0;\n}\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
        "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),
        "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]),
        "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]),
        "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
      : "l"(a), "l"(b), "r"(accumulate ? 1 : 0));
#endif
}

// The same with A in registers.
__device__ inline void ProductN64(float (&d)[32], const uint32_t (&a)[4], uint64_t b,
                                  bool accumulate) {
#ifdef GDN_WGMMA
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15,"
      " %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "{%32, %33, %34, %35}, %36, p, 1, 1, 0;\n}\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
        "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),
        "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]),
        "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]),
        "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate ? 1 : 0));
#endif
}

// d (+)= A B of 128 columns; A in registers, B [16][128] in two panels.
__device__ inline void ProductN128Transposed(float (&d)[64], const uint32_t (&a)[4], uint64_t b,
                                             bool accumulate) {
#ifdef GDN_WGMMA
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15,"
      " %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31,"
      " %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47,"
      " %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
      "{%64, %65, %66, %67}, %68, p, 1, 1, 1;\n}\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
        "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),
        "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]),
        "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]),
        "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]),
        "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]),
        "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]),
        "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
        "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]),
        "+f"(d[63])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate ? 1 : 0));
#endif
}

__device__ inline uint32_t PackHalves(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// Four 8x8 matrices of 16-bit elements: lane l gives the address of row l % 8 of matrix l / 8.
__device__ inline void LoadMatrices(uint32_t address, uint32_t (&out)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(address)
               : "memory");
}
__device__ inline void LoadMatricesTransposed(uint32_t address, uint32_t (&out)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(address)
               : "memory");
}
__device__ inline void StoreMatrices(uint32_t address, uint32_t a, uint32_t b, uint32_t c,
                                     uint32_t d) {
#ifdef GDN_WGMMA
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
#endif
}

// Where a lane finds, transposed, the first 16 rows of a panel as LoadMatricesTransposed brings
// them into the layout of a sum whose rows are the panel's columns.
__device__ inline uint32_t ColumnsOf(uint32_t panel, int thread) {
  const int lane = thread % 32;
  const int vector = thread / 32 * 2 + lane / 8 % 2;
  return panel + PanelOffset(lane / 16 * 8 + lane % 8, vector);
}

// What lies at the first place from `raw` on where a panel may start.
constexpr uint32_t kPanelAlignment = 1024;
template <typename T>
__device__ inline T& AlignedShared(char* raw) {
  return *reinterpret_cast<T*>(raw + (kPanelAlignment - SharedAddress(raw) % kPanelAlignment) %
                                         kPanelAlignment);
}

// A barrier among `threads` threads of the block; 0 is __syncthreads' own.
__device__ inline void NamedBarrier(int index, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(index), "r"(threads) : "memory");
}

}  // namespace gdn::cuda

#endif  // KERNELS_CUDA_WGMMA_CUH_
