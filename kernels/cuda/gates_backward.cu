#include "gdn/kernels/gates_backward.h"

#include "kernels/cuda/launch.h"
#include "kernels/cuda/partial_sums.cuh"
#include "kernels/cuda/vector.cuh"

namespace gdn::cuda {
namespace {

constexpr char kOp[] = "gates_backward";
constexpr int kHeads = 32;   // Of a block: its lanes.
constexpr int kStreams = 8;  // Its warps: each takes every eighth token.
constexpr int kTokens = 32;  // Of a block: those behind a partial row.

int64_t Partials(const gdn_gates_backward_args& args) {
  return (args.tokens + kTokens - 1) / kTokens;
}

template <typename T>
__global__ void __launch_bounds__(kHeads* kStreams)
    Kernel(const __grid_constant__ gdn_gates_backward_args a, float* partial) {
  __shared__ float of_streams[2][kStreams][kHeads];
  const int lane = static_cast<int>(threadIdx.x) % kHeads;
  const int stream = static_cast<int>(threadIdx.x) / kHeads;
  const int64_t h = blockIdx.y * int64_t{kHeads} + lane;
  const int64_t begin = blockIdx.x * int64_t{kTokens};
  const int64_t end = min(a.tokens, begin + kTokens);
  WaitForPreviousKernel();
  AllowNextKernel();
  float d_a_log = 0.0f;
  float d_dt_bias = 0.0f;
  if (h < a.value_heads) {
    const float rate = expf(a.a_log[h]);
    const float bias = a.dt_bias[h];
#pragma unroll 4
    for (int64_t t = begin + stream; t < end; t += kStreams) {
      const float x = Widen(static_cast<const T*>(a.a)[t * a.a_token_stride + h]) + bias;
      const float b = Widen(static_cast<const T*>(a.b)[t * a.b_token_stride + h]);
      const float rate_d_g = -(rate * a.d_g[t * a.value_heads + h]);
      const float d_beta = a.d_beta[t * a.value_heads + h];
      const bool linear = x > 20.0f;
      const float e = expf(x);
      const float softplus = linear ? x : log1pf(e);
      const float d_a = rate_d_g * (linear ? 1.0f : e / (1.0f + e));
      d_a_log = fmaf(rate_d_g, softplus, d_a_log);
      d_dt_bias += d_a;
      static_cast<T*>(a.d_a)[t * a.d_a_token_stride + h] = Narrow<T>(d_a);
      // sigmoid(b) * (1 - sigmoid(b)), which is even, without cancellation.
      const float small = expf(-fabsf(b));
      const float slope = small / ((1.0f + small) * (1.0f + small));
      static_cast<T*>(a.d_b)[t * a.d_b_token_stride + h] = Narrow<T>(d_beta * a.beta_scale * slope);
    }
  }
  of_streams[0][stream][lane] = d_a_log;
  of_streams[1][stream][lane] = d_dt_bias;
  __syncthreads();
  if (stream >= 2 || h >= a.value_heads) return;
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kStreams; ++i) sum += of_streams[stream][i][lane];
  partial[(blockIdx.x * 2 + stream) * a.value_heads + h] = sum;
}

}  // namespace

size_t GatesBackwardWorkspace(const gdn_gates_backward_args& args) {
  return static_cast<size_t>(Partials(args) * 2 * args.value_heads) * sizeof(float);
}

gdn_status GatesBackward(const gdn_exec& exec, const gdn_gates_backward_args& args) {
  Device device;
  if (const gdn_status status = CurrentDevice(kOp, &device); status != GDN_OK) return status;
  auto* const partial = static_cast<float*>(exec.workspace);
  const int64_t partials = Partials(args);
  GDN_CHECK_ARG(partials < int64_t{1} << 31, GDN_UNSUPPORTED_SHAPE,
                "%s: tokens must be below 2^38 on CUDA, got %lld", kOp,
                static_cast<long long>(args.tokens));
  if (partials > 0) {
    const dim3 grid(static_cast<unsigned>(partials),
                    static_cast<unsigned>((args.value_heads + kHeads - 1) / kHeads));
    cudaError_t error = cudaSuccess;
    ForElementType(args.dtype, [&]<typename T>() {
      error = LaunchMaybeEarly(device.compute_capability >= 90, grid, dim3(kHeads * kStreams), 0,
                               Stream(exec), Kernel<T>, args, partial);
    });
    if (const gdn_status status = CheckCuda(kOp, error); status != GDN_OK) return status;
  }
  const PartialSums sums = {partial, partials,         args.value_heads, args.d_a_log,
                            GDN_F32, args.value_heads, args.d_dt_bias};
  return LaunchPartialSums(kOp, sums, device, Stream(exec));
}

}  // namespace gdn::cuda
