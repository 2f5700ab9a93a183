#include "gdn/kernels/rms_norm.h"

#include "kernels/cuda/block_sum.cuh"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/row_view.cuh"

namespace gdn::cuda {
namespace {

constexpr char kOp[] = "rms_norm";
constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;

// One block per row. In place is safe: the sum over the block separates reads from writes, and each
// element is read again by the thread that writes it. A thread adds eight neighbours at a time: the
// order of the gated norm's sums, so that both give the same bits.
template <typename X>
__global__ void __launch_bounds__(kThreads)
    Kernel(const __grid_constant__ gdn_rms_norm_args a, bool vectors) {
  for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x) {
    const X* const x = static_cast<const X*>(a.x) + row * a.x_row_stride;
    float sum = 0.0f;
    for (int64_t i = threadIdx.x * int64_t{kVectorElements}; i < a.dim;
         i += kThreads * kVectorElements) {
      float values[kVectorElements];
      LoadRow(x, 1, vectors, i, a.dim, values);
#pragma unroll
      for (int e = 0; e < kVectorElements; ++e) sum = fmaf(values[e], values[e], sum);
    }
    const float rstd = rsqrtf(BlockSum<kWarps>(sum) / static_cast<float>(a.dim) + a.eps);
    for (int64_t i = threadIdx.x; i < a.dim; i += kThreads) {
      const float w = a.weight[i] + (a.zero_centered != 0 ? 1.0f : 0.0f);
      StoreAs(a.y, a.y_dtype, row * a.y_row_stride + i, Widen(x[i]) * rstd * w);
    }
  }
}

}  // namespace

gdn_status RmsNorm(const gdn_exec& exec, const gdn_rms_norm_args& args) {
  if (args.rows == 0) return GDN_OK;
  Device device;
  if (const gdn_status status = CurrentDevice(kOp, &device); status != GDN_OK) return status;
  const bool vectors =
      IsVectorAligned(args.x, args.x_row_stride) && args.dim % kVectorElements == 0;
  ForElementType(args.x_dtype, [&]<typename X>() {
    Kernel<X><<<GridFor(args.rows, 1), kThreads, 0, Stream(exec)>>>(args, vectors);
  });
  return CheckLaunch(kOp);
}

}  // namespace gdn::cuda
