#include "gdn/kernels/gated_rms_norm.h"

#include "kernels/cuda/element.cuh"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/math.cuh"

namespace gdn::cuda {
namespace {

constexpr char kOp[] = "gated_rms_norm";
constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;

// One warp per head of a token.
__global__ void __launch_bounds__(kThreads)
    Kernel(const __grid_constant__ gdn_gated_rms_norm_args a) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t rows = a.tokens * a.heads;
  for (int64_t row = blockIdx.x * int64_t{kWarps} + threadIdx.x / 32; row < rows;
       row += int64_t{gridDim.x} * kWarps) {
    const int64_t token = row / a.heads;
    const int64_t head = row % a.heads;
    const int64_t x0 = token * a.x_token_stride + head * a.x_head_stride;
    const int64_t gate0 = token * a.gate_token_stride + head * a.gate_head_stride;
    const int64_t y0 = token * a.y_token_stride + head * a.y_head_stride;
    float sum = 0.0f;
    for (int64_t i = lane; i < a.dim; i += 32) {
      const float x = LoadAs(a.x, a.x_dtype, x0 + i);
      sum = fmaf(x, x, sum);
    }
    const float rstd = rsqrtf(LaneSum(sum) / static_cast<float>(a.dim) + a.eps);
    for (int64_t i = lane; i < a.dim; i += 32) {
      const float w = a.weight[i] + (a.zero_centered != 0 ? 1.0f : 0.0f);
      float n = LoadAs(a.x, a.x_dtype, x0 + i) * rstd * w;
      if (a.round_before_gate != 0) n = RoundAs(a.x_dtype, n);
      const float gate = LoadAs(a.gate, a.gate_dtype, gate0 + i);
      StoreAs(a.y, a.y_dtype, y0 + i, n * Activate(a.activation, gate));
    }
  }
}

}  // namespace

gdn_status GatedRmsNorm(const gdn_exec& exec, const gdn_gated_rms_norm_args& args) {
  if (args.tokens == 0) return GDN_OK;
  Device device;
  if (const gdn_status status = CurrentDevice(kOp, &device); status != GDN_OK) return status;
  Kernel<<<GridFor(args.tokens * args.heads, kWarps), kThreads, 0, Stream(exec)>>>(args);
  return CheckLaunch(kOp);
}

}  // namespace gdn::cuda
