#include "gdn/kernels/l2_norm.h"

#include "kernels/cuda/block_sum.cuh"
#include "kernels/cuda/element.cuh"
#include "kernels/cuda/launch.h"

namespace gdn::cuda {
namespace {

constexpr char kOp[] = "l2_norm";
constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;

// One block per row. In place is safe: the sum over the block separates reads from writes, and each
// element is read again by the thread that writes it.
__global__ void __launch_bounds__(kThreads) Kernel(const __grid_constant__ gdn_l2_norm_args a) {
  for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x) {
    float sum = 0.0f;
    for (int64_t i = threadIdx.x; i < a.dim; i += kThreads) {
      const float x = LoadAs(a.x, a.x_dtype, row * a.x_row_stride + i);
      sum = fmaf(x, x, sum);
    }
    const float square = BlockSum<kWarps>(sum) + a.eps;
    const float rstd = square == 0.0f ? 0.0f : rsqrtf(square);  // With eps 0 zeros stay zeros.
    for (int64_t i = threadIdx.x; i < a.dim; i += kThreads) {
      const float x = LoadAs(a.x, a.x_dtype, row * a.x_row_stride + i);
      StoreAs(a.y, a.y_dtype, row * a.y_row_stride + i, x * rstd * a.scale);
    }
    if (a.rstd != nullptr && threadIdx.x == 0) a.rstd[row] = rstd;
  }
}

}  // namespace

gdn_status L2Norm(const gdn_exec& exec, const gdn_l2_norm_args& args) {
  if (args.rows == 0) return GDN_OK;
  Device device;
  if (const gdn_status status = CurrentDevice(kOp, &device); status != GDN_OK) return status;
  Kernel<<<GridFor(args.rows, 1), kThreads, 0, Stream(exec)>>>(args);
  return CheckLaunch(kOp);
}

}  // namespace gdn::cuda
