#include "gdn/kernels/gdn2_gates.h"

#include "kernels/cuda/element.cuh"
#include "kernels/cuda/launch.h"

namespace gdn::cuda {
namespace {

constexpr int kThreads = 256;

__device__ inline float PreciseSigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

__device__ inline float DecayAt(const gdn2_gates_args& a, int64_t t, int64_t channel) {
  float x = LoadAs(a.f, a.fbw_dtype, t * a.f_token_stride + channel);
  if (a.dt_bias != nullptr) x += a.dt_bias[channel];
  const float rate = a.a_log != nullptr ? expf(a.a_log[channel / a.key_dim]) : 1.0f;
  if (a.decay == GDN2_DECAY_BOUNDED) return a.lower_bound * PreciseSigmoid(rate * x);
  return -rate * (x > 20.0f ? x : log1pf(expf(x)));
}

__global__ void __launch_bounds__(kThreads) Kernel(const __grid_constant__ gdn2_gates_args a) {
  const int64_t width = a.gate_heads * a.key_dim;
  const int64_t line = width + a.write_width;
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < a.tokens * line;
       i += int64_t{gridDim.x} * kThreads) {
    const int64_t t = i / line;
    const int64_t column = i % line;
    if (column < width) {
      a.g[t * width + column] = DecayAt(a, t, column);
      const float b = LoadAs(a.b, a.fbw_dtype, t * a.b_token_stride + column);
      StoreAs(a.erase, a.gate_dtype, t * width + column, a.erase_scale * PreciseSigmoid(b));
    } else {
      const int64_t j = column - width;
      const float w = LoadAs(a.w, a.fbw_dtype, t * a.w_token_stride + j);
      StoreAs(a.write, a.gate_dtype, t * a.write_width + j, PreciseSigmoid(w));
    }
  }
}

}  // namespace

gdn_status Gdn2Gates(const gdn_exec& exec, const gdn2_gates_args& args) {
  if (args.tokens == 0) return GDN_OK;
  const int64_t count = args.tokens * (args.gate_heads * args.key_dim + args.write_width);
  Kernel<<<GridFor(count, kThreads), kThreads, 0, Stream(exec)>>>(args);
  return CheckLaunch("gdn2_gates");
}

}  // namespace gdn::cuda
