#include "gdn/kernels/gates.h"

#include "kernels/cuda/element.cuh"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/math.cuh"

namespace gdn::cuda {
namespace {

constexpr char kOp[] = "gates";
constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) Kernel(const __grid_constant__ gdn_gates_args a) {
  const int64_t count = a.tokens * a.value_heads;
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * kThreads) {
    const int64_t token = i / a.value_heads;
    const int64_t head = i % a.value_heads;
    a.g[i] = LogDecay(LoadAs(a.a, a.dtype, token * a.a_token_stride + head), a.dt_bias[head],
                      a.a_log[head]);
    a.beta[i] = WriteStrength(LoadAs(a.b, a.dtype, token * a.b_token_stride + head), a.beta_scale);
  }
}

}  // namespace

gdn_status Gates(const gdn_exec& exec, const gdn_gates_args& args) {
  if (args.tokens == 0) return GDN_OK;
  Device device;
  if (const gdn_status status = CurrentDevice(kOp, &device); status != GDN_OK) return status;
  Kernel<<<GridFor(args.tokens * args.value_heads, kThreads), kThreads, 0, Stream(exec)>>>(args);
  return CheckLaunch(kOp);
}

}  // namespace gdn::cuda
