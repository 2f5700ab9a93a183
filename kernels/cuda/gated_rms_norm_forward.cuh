// The forward kernels of the gated RMSNorm for training.
#ifndef KERNELS_CUDA_GATED_RMS_NORM_FORWARD_CUH_
#define KERNELS_CUDA_GATED_RMS_NORM_FORWARD_CUH_

#include <cuda_fp8.h>

#include "kernels/cuda/block_sum.cuh"
#include "kernels/cuda/cluster.cuh"
#include "kernels/cuda/gated_rms_norm_rows.cuh"

namespace gdn::cuda {

struct GatedForward {
  gdn_gated_rms_norm_forward_args args;  // With the strides that are used.
  RowAxes axes;
  bool dense;  // x and gate.
  int x_unit;  // Of UnitOf.
  int gate_unit;
  bool gamma_vectors;
  bool y_vectors;
};

constexpr float kE4m3Max = 448.0f;

// The bits of the largest magnitude: they order like the values, NaN above all.
__device__ inline uint32_t Largest(const Floats8& values, uint32_t largest) {
#pragma unroll
  for (int e = 0; e < kVectorElements; ++e) {
    largest = max(largest, __float_as_uint(values[e]) & 0x7fffffffu);
  }
  return largest;
}
template <int kLanes>
__device__ inline uint32_t LargestOfLanes(uint32_t value) {
#pragma unroll
  for (int bit = kLanes / 2; bit > 0; bit >>= 1) {
    value = max(value, __shfl_xor_sync(kFullMask, value, bit));
  }
  return value;
}

// Of a row from its largest magnitude. A NaN stays one.
__device__ inline float RowScale(uint32_t largest, float* inverse) {
  const float value = __uint_as_float(largest);
  const float floored = value < 0x1p-117f ? 0x1p-117f : value;
  *inverse = __fdiv_rn(floored, kE4m3Max);
  return __fdiv_rn(kE4m3Max, floored);
}

// Saturates, an infinity too; a NaN stays one.
__device__ inline uint2 ToE4m3(const Floats8& values, float scale) {
  uint32_t words[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float* v = values + 4 * half;
    const uint32_t low = __nv_cvt_float2_to_fp8x2(make_float2(v[0] * scale, v[1] * scale),
                                                  __NV_SATFINITE, __NV_E4M3);
    const uint32_t high = __nv_cvt_float2_to_fp8x2(make_float2(v[2] * scale, v[3] * scale),
                                                   __NV_SATFINITE, __NV_E4M3);
    words[half] = low | high << 16;
  }
  return make_uint2(words[0], words[1]);
}

// Joins a block's largest magnitude to *amax, which the kernel before this one set to 0. An integer
// maximum has no order.
template <int kThreads>
__device__ inline void JoinAmax(float* amax, uint32_t largest) {
  constexpr int kWarps = kThreads / 32;
  __shared__ uint32_t of_warps[kWarps];
  largest = __reduce_max_sync(kFullMask, largest);
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = largest;
  __syncthreads();
  if (threadIdx.x != 0) return;
#pragma unroll
  for (int i = 0; i < kWarps; ++i) largest = max(largest, of_warps[i]);
  auto* const bits = reinterpret_cast<uint32_t*>(amax);
  if (*static_cast<volatile uint32_t*>(bits) < largest) atomicMax(bits, largest);
}

// Rows of kDim neighbouring elements, read by accesses of Unit: kDim / 8 lanes a row, kRows rows a
// lane, whose loads are all under way before the first is used.
template <typename X, typename G, typename Unit, int kDim, bool kFp8, int kRows, int kThreads>
__global__ void __launch_bounds__(kThreads) ForwardRows(const __grid_constant__ GatedForward p) {
  constexpr int kLanes = kDim / kVectorElements;
  constexpr int kGroups = kThreads / kLanes;
  const gdn_gated_rms_norm_forward_args& a = p.args;
  const auto rows = static_cast<uint32_t>(p.axes.rows);
  const bool silu = a.in.activation == GDN_GATE_SILU;
  const int column = static_cast<int>(threadIdx.x) % kLanes * kVectorElements;
  const uint32_t first = blockIdx.x * uint32_t{kGroups * kRows} + threadIdx.x / kLanes;
  WaitForPreviousKernel();
  Vector<X> x[kRows];
  Vector<G> gate[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const uint32_t row = min(first + i * kGroups, rows - 1);  // A result too many is not stored.
    int64_t x0 = int64_t{row} * kDim;
    int64_t gate0 = x0;
    if (!p.dense) {
      const RowIndex index = IndexOf(p.axes, row);
      x0 = OffsetOf(a.in.x_strides, index);
      gate0 = OffsetOf(a.in.gate_strides, index);
    }
    x[i] = LoadUnits<Unit>(static_cast<const X*>(a.in.x) + x0 + column);
    gate[i] = LoadUnits<Unit>(static_cast<const G*>(a.in.gate) + gate0 + column);
  }
  Floats8 weight;
  LoadWeight(a.in, p.gamma_vectors, column, weight);
  uint32_t block_largest = 0;
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const uint32_t row = first + i * kGroups;
    Floats8 values, gates;
    WidenAll(x[i], values);
    WidenAll(gate[i], gates);
    const float rstd = InverseRms(LaneSum<kLanes - 1>(SumOfSquares(values, 0.0f)), kDim, a.eps);
    const Vector<X> y = GatedNorm<X>(values, gates, weight, rstd, silu);
    const bool stored = row < rows;
    const int64_t y0 = int64_t{row} * kDim + column;
    if (stored && a.rstd != nullptr && column == 0) a.rstd[row] = rstd;
    if constexpr (kFp8) {
      WidenAll(y, values);
      uint32_t largest = Largest(values, 0);
      float scale;
      if (a.fp8 == GDN_FP8_ROW) {
        largest = LargestOfLanes<kLanes>(largest);
        float inverse;
        scale = RowScale(largest, &inverse);
        if (stored && column == 0) a.fp8_scale_inv[row] = inverse;
      } else {
        scale = *a.fp8_scale;
      }
      const uint2 bytes = ToE4m3(values, scale);
      if (stored) *reinterpret_cast<uint2*>(static_cast<uint8_t*>(a.y) + y0) = bytes;
      if (stored) block_largest = max(block_largest, largest);
    } else {
      if (stored) StoreVector(static_cast<X*>(a.y) + y0, y);
      if (stored && a.amax != nullptr) {
        WidenAll(y, values);
        block_largest = Largest(values, block_largest);
      }
    }
  }
  if (kFp8 && a.fp8 == GDN_FP8_STATIC && a.fp8_scale_inv != nullptr && blockIdx.x == 0 &&
      threadIdx.x == 0) {
    *a.fp8_scale_inv = __fdiv_rn(1.0f, *a.fp8_scale);
  }
  if (a.amax != nullptr) JoinAmax<kThreads>(a.amax, block_largest);
}

constexpr int kAnyThreads = 256;

// Rows of any layout of up to 8 * kRowThreads * kVectors elements: a warp a row, or a block.
template <typename X, typename G, int kRowThreads, int kVectors>
__global__ void __launch_bounds__(kAnyThreads)
    ForwardAnyRows(const __grid_constant__ GatedForward p) {
  constexpr bool kWarpRows = kRowThreads == 32;
  constexpr int kBlockRows = kAnyThreads / kRowThreads;
  const gdn_gated_rms_norm_forward_args& a = p.args;
  const bool silu = a.in.activation == GDN_GATE_SILU;
  const int64_t dim = a.in.dim;
  const int64_t thread = threadIdx.x % kRowThreads;
  WaitForPreviousKernel();
  uint32_t block_largest = 0;
  for (int64_t row = blockIdx.x * int64_t{kBlockRows} + threadIdx.x / kRowThreads;
       row < p.axes.rows; row += int64_t{gridDim.x} * kBlockRows) {
    const RowIndex index = IndexOfAny(p.axes, row);
    const X* const x = static_cast<const X*>(a.in.x) + OffsetOf(a.in.x_strides, index);
    const G* const gate = static_cast<const G*>(a.in.gate) + OffsetOf(a.in.gate_strides, index);
    Floats8 values[kVectors];
    float sum = 0.0f;
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      const int64_t i = (thread + k * kRowThreads) * kVectorElements;
      LoadRow(x, a.in.x_strides.element, p.x_unit == 16, i, dim, values[k]);
      sum = SumOfSquares(values[k], sum);
    }
    if constexpr (kWarpRows) {
      sum = LaneSum(sum);
    } else {
      sum = BlockSum<kAnyThreads / 32>(sum);
    }
    const float rstd = InverseRms(sum, dim, a.eps);
    if (a.rstd != nullptr && thread == 0) a.rstd[row] = rstd;
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      const int64_t i = (thread + k * kRowThreads) * kVectorElements;
      Floats8 gates, weight;
      LoadRow(gate, a.in.gate_strides.element, p.gate_unit == 16, i, dim, gates);
      LoadWeight(a.in, p.gamma_vectors, i, weight);
      const Vector<X> y = GatedNorm<X>(values[k], gates, weight, rstd, silu);
      WidenAll(y, values[k]);
      uint32_t largest = 0;
      if (i < dim) largest = Largest(values[k], 0);  // Beyond the end there are zeros, n * act(0).
      if (a.fp8 == GDN_FP8_NONE) {
        StoreRow(static_cast<X*>(a.y) + row * dim, p.y_vectors, i, dim, y);
      } else {
        float scale;
        if (kWarpRows && a.fp8 == GDN_FP8_ROW) {  // Of 128 elements: never of a block.
          largest = LargestOfLanes<32>(largest);
          float inverse;
          scale = RowScale(largest, &inverse);
          if (thread == 0) a.fp8_scale_inv[row] = inverse;
        } else {
          scale = *a.fp8_scale;
        }
        const uint2 words = ToE4m3(values[k], scale);
#pragma unroll
        for (int e = 0; e < kVectorElements; ++e) {
          const uint32_t word = e < 4 ? words.x : words.y;
          if (i + e < dim) {
            static_cast<uint8_t*>(a.y)[row * dim + i + e] =
                static_cast<uint8_t>(word >> (e % 4 * 8));
          }
        }
      }
      block_largest = max(block_largest, largest);
    }
  }
  if (a.fp8 == GDN_FP8_STATIC && a.fp8_scale_inv != nullptr && blockIdx.x == 0 &&
      threadIdx.x == 0) {
    *a.fp8_scale_inv = __fdiv_rn(1.0f, *a.fp8_scale);
  }
  if (a.amax != nullptr) JoinAmax<kAnyThreads>(a.amax, block_largest);
}

}  // namespace gdn::cuda

#endif  // KERNELS_CUDA_GATED_RMS_NORM_FORWARD_CUH_
