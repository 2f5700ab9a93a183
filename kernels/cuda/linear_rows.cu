// What the wide product needs around it: n beforehand, the gate afterwards.
#include "kernels/cuda/linear_rows.cuh"

#include <cstdint>

#include "kernels/cuda/cluster.cuh"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/linear_launch.h"

namespace gdn::cuda {
namespace linear {
namespace {

// One block a row. What follows may fetch its weights while the kernel before this one runs, so it
// is let in at once; it waits for this kernel, which waits for that one.
template <typename W>
__global__ void __launch_bounds__(kThreads) RowsKernel(const __grid_constant__ LinearRows p, W* n) {
  __shared__ NormScratch scratch;
  const Slice slice = SliceOf(p.k, static_cast<int>(threadIdx.x) / 32);
  const float4 weight = LoadNormWeight(p, slice);
  AllowNextKernel();
  WaitForPreviousKernel();
  PrepareRows<W, 1>(p, static_cast<int>(blockIdx.x), slice, weight, &scratch,
                    [&](int row, int element, uint2 values) {
                      const int k = slice.first * kStep + element;
                      if (k < p.k) *reinterpret_cast<uint2*>(n + int64_t{row} * p.k + k) = values;
                    });
}

constexpr int kGateThreads = 128;

__device__ inline float Gate(float gate, float up) { return Silu(gate) * up; }

template <typename Y>
struct Quad;
template <>
struct Quad<float> {
  using Raw = float4;
  static __device__ Raw Make(float a, float b, float c, float d) { return {a, b, c, d}; }
};
template <>
struct Quad<Bf16> {
  using Raw = uint2;
  static __device__ Raw Make(float a, float b, float c, float d) {
    return {PackPair<Bf16>(a, b), PackPair<Bf16>(c, d)};
  }
};
template <>
struct Quad<F16> {
  using Raw = uint2;
  static __device__ Raw Make(float a, float b, float c, float d) {
    return {PackPair<F16>(a, b), PackPair<F16>(c, d)};
  }
};

// A block takes four elements a thread of one row. kVectors: everything is aligned for that.
template <typename Y, bool kVectors>
__global__ void __launch_bounds__(kGateThreads)
    GateKernel(const __grid_constant__ LinearGateParams a) {
  const int64_t j = (blockIdx.x * int64_t{kGateThreads} + threadIdx.x) * 4;
  if (j >= a.outputs) return;
  const float* const p = a.p + blockIdx.y * a.p_row_stride + j;
  Y* const y = static_cast<Y*>(a.y) + blockIdx.y * a.y_row_stride + j;
  if constexpr (kVectors) {
    const float4 gate = *reinterpret_cast<const float4*>(p);
    const float4 up = *reinterpret_cast<const float4*>(p + a.outputs);
    *reinterpret_cast<typename Quad<Y>::Raw*>(y) = Quad<Y>::Make(
        Gate(gate.x, up.x), Gate(gate.y, up.y), Gate(gate.z, up.z), Gate(gate.w, up.w));
  } else {
    for (int i = 0; i < 4 && j + i < a.outputs; ++i) {
      y[i] = Narrow<Y>(Gate(p[i], p[a.outputs + i]));
    }
  }
}

template <typename Y>
void LaunchGate(const LinearGateParams& a, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>((a.outputs + 4 * kGateThreads - 1) / (4 * kGateThreads)),
                  static_cast<unsigned>(a.rows));
  const bool vectors = a.outputs % 4 == 0 && a.p_row_stride % 4 == 0 && a.y_row_stride % 4 == 0 &&
                       reinterpret_cast<uintptr_t>(a.y) % (4 * sizeof(Y)) == 0;
  const auto kernel = vectors ? GateKernel<Y, true> : GateKernel<Y, false>;
  kernel<<<grid, kGateThreads, 0, stream>>>(a);
}

}  // namespace
}  // namespace linear

cudaError_t LaunchLinearRows(gdn_dtype weight_dtype, const LinearRows& rows, void* n, bool early,
                             cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(rows.rows);
  if (weight_dtype == GDN_BF16) {
    return LaunchMaybeEarly(early, blocks, linear::kThreads, 0, stream, linear::RowsKernel<Bf16>,
                            rows, static_cast<Bf16*>(n));
  }
  return LaunchMaybeEarly(early, blocks, linear::kThreads, 0, stream, linear::RowsKernel<F16>, rows,
                          static_cast<F16*>(n));
}

cudaError_t LaunchLinearGate(const LinearGateParams& params, cudaStream_t stream) {
  switch (params.y_dtype) {
    case GDN_F32:
      linear::LaunchGate<float>(params, stream);
      break;
    case GDN_BF16:
      linear::LaunchGate<Bf16>(params, stream);
      break;
    case GDN_F16:
      linear::LaunchGate<F16>(params, stream);
      break;
  }
  return cudaGetLastError();
}

}  // namespace gdn::cuda
