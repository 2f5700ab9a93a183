#include "kernels/cuda/linear_rows.cuh"

#include "kernels/cuda/cluster.cuh"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/linear_launch.h"

namespace gdn::cuda {
namespace linear {
namespace {

template <typename W>
__global__ void __launch_bounds__(kThreads)
    RowsKernel(const __grid_constant__ LinearRows p, const LinearOrder order, W* n) {
  __shared__ NormScratch scratch;
  const Slice slice = SliceOf(p.k, static_cast<int>(threadIdx.x) / 32);
  if (order.early_release) AllowNextKernel();
  const float4 weight = LoadNormWeight(p, slice);
  WaitForPreviousKernel();
  AllowNextKernel();
  PrepareRows<W, 2 * kGroupRows>(p, static_cast<int>(blockIdx.x) * 2 * kGroupRows, slice, weight,
                                 &scratch, [&](int row, int element, uint2 values) {
                                   const int k = slice.first * kStep + element;
                                   if (k < p.k)
                                     *reinterpret_cast<uint2*>(n + int64_t{row} * p.k + k) = values;
                                 });
}

__global__ void __launch_bounds__(256) GateKernel(const __grid_constant__ LinearGateParams a) {
  const int64_t count = a.rows * a.outputs;
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * blockDim.x) {
    const int64_t row = i / a.outputs;
    const int64_t j = i % a.outputs;
    const float* const p = a.p + row * a.p_row_stride + j;
    StoreAs(a.y, a.y_dtype, row * a.y_row_stride + j, Silu(p[0]) * p[a.outputs]);
  }
}

}  // namespace
}  // namespace linear

cudaError_t LaunchLinearRows(gdn_dtype weight_dtype, const LinearRows& rows, LinearOrder order,
                             void* n, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>((rows.rows + 15) / 16));
  if (weight_dtype == GDN_BF16) {
    return LaunchMaybeEarly(order.early_start, grid, dim3(linear::kThreads), 0, stream,
                            linear::RowsKernel<Bf16>, rows, order, static_cast<Bf16*>(n));
  }
  return LaunchMaybeEarly(order.early_start, grid, dim3(linear::kThreads), 0, stream,
                          linear::RowsKernel<F16>, rows, order, static_cast<F16*>(n));
}

cudaError_t LaunchLinearGate(const LinearGateParams& params, cudaStream_t stream) {
  linear::GateKernel<<<GridFor(params.rows * params.outputs, 256), 256, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace gdn::cuda
