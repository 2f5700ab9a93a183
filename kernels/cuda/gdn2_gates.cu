#include "gdn/kernels/gdn2_gates.h"

#include "kernels/cuda/element.cuh"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/math.cuh"

namespace gdn::cuda {
namespace {

constexpr int kThreads = 256;
// Of the sums over tokens: 32 channels side by side, each by 32 threads, a warp's lanes neighbours.
constexpr int kSumThreads = 1024;
constexpr int kSumRows = kSumThreads / 32;

__device__ inline float PreciseSigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }
// 1 - s is sigmoid(-x), without cancellation.
__device__ inline float SigmoidSlope(float x) { return PreciseSigmoid(x) * PreciseSigmoid(-x); }

struct Decay {
  float x;
  float g;
  float slope;  // of g by x
};

__device__ inline Decay DecayAt(const gdn2_gates_args& a, int64_t t, int64_t channel) {
  Decay d;
  d.x = LoadAs(a.f, a.fbw_dtype, t * a.f_token_stride + channel);
  if (a.dt_bias != nullptr) d.x += a.dt_bias[channel];
  const float rate = a.a_log != nullptr ? expf(a.a_log[channel / a.key_dim]) : 1.0f;
  if (a.decay == GDN2_DECAY_BOUNDED) {
    d.g = a.lower_bound * PreciseSigmoid(rate * d.x);
    d.slope = a.lower_bound * SigmoidSlope(rate * d.x) * rate;
  } else {
    d.g = -rate * (d.x > 20.0f ? d.x : log1pf(expf(d.x)));
    d.slope = -rate * (d.x > 20.0f ? 1.0f : PreciseSigmoid(d.x));
  }
  return d;
}

__global__ void __launch_bounds__(kThreads) Kernel(const __grid_constant__ gdn2_gates_args a) {
  const int64_t width = a.gate_heads * a.key_dim;
  const int64_t line = width + a.write_width;
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < a.tokens * line;
       i += int64_t{gridDim.x} * kThreads) {
    const int64_t t = i / line;
    const int64_t column = i % line;
    if (column < width) {
      a.g[t * width + column] = DecayAt(a, t, column).g;
      const float b = LoadAs(a.b, a.fbw_dtype, t * a.b_token_stride + column);
      StoreAs(a.erase, a.gate_dtype, t * width + column, a.erase_scale * PreciseSigmoid(b));
    } else {
      const int64_t j = column - width;
      const float w = LoadAs(a.w, a.fbw_dtype, t * a.w_token_stride + j);
      StoreAs(a.write, a.gate_dtype, t * a.write_width + j, PreciseSigmoid(w));
    }
  }
}

// Sums a channel's 32 parts in their order; every thread of a column gets it.
__device__ inline float ColumnSum(float (&parts)[kSumRows][33], float value) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  __syncthreads();
  parts[threadIdx.x / 32][lane] = value;
  __syncthreads();
  float sum = 0.0f;
  for (int i = 0; i < kSumRows; ++i) sum += parts[i][lane];
  return sum;
}

// A block for a gate head: d_f, d_b, and what sums over the tokens.
__global__ void __launch_bounds__(kSumThreads)
    HeadKernel(const __grid_constant__ gdn2_gates_backward_args p) {
  __shared__ float parts[kSumRows][33];
  const gdn2_gates_args& a = p.forward;
  const int64_t width = a.gate_heads * a.key_dim;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int64_t head = blockIdx.x; head < a.gate_heads; head += gridDim.x) {
    float d_a_log = 0.0f;
    for (int64_t first = 0; first < a.key_dim; first += 32) {
      const bool inside = first + lane < a.key_dim;
      const int64_t channel = head * a.key_dim + first + lane;
      float d_dt_bias = 0.0f;
      float d_rate = 0.0f;
      for (int64_t t = threadIdx.x / 32; inside && t < a.tokens; t += kSumRows) {
        const Decay decay = DecayAt(a, t, channel);
        const float d_g = p.d_g[t * width + channel];
        const float d_f = d_g * decay.slope;
        d_dt_bias += d_f;
        d_rate =
            a.decay == GDN2_DECAY_BOUNDED ? fmaf(d_f, decay.x, d_rate) : fmaf(d_g, decay.g, d_rate);
        StoreAs(p.d_f, a.fbw_dtype, t * width + channel, d_f);
        const float b = LoadAs(a.b, a.fbw_dtype, t * a.b_token_stride + channel);
        StoreAs(p.d_b, a.fbw_dtype, t * width + channel,
                p.d_erase[t * width + channel] * a.erase_scale * SigmoidSlope(b));
      }
      d_dt_bias = ColumnSum(parts, d_dt_bias);
      d_a_log += LaneSum(ColumnSum(parts, d_rate));
      if (inside && threadIdx.x < 32 && p.d_dt_bias != nullptr) p.d_dt_bias[channel] = d_dt_bias;
    }
    if (threadIdx.x == 0 && p.d_a_log != nullptr) p.d_a_log[head] = d_a_log;
  }
}

__global__ void __launch_bounds__(kThreads)
    WriteKernel(const __grid_constant__ gdn2_gates_backward_args p) {
  const gdn2_gates_args& a = p.forward;
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < a.tokens * a.write_width;
       i += int64_t{gridDim.x} * kThreads) {
    const int64_t at = i / a.write_width * a.w_token_stride + i % a.write_width;
    StoreAs(p.d_w, a.fbw_dtype, i, p.d_write[i] * SigmoidSlope(LoadAs(a.w, a.fbw_dtype, at)));
  }
}

}  // namespace

gdn_status Gdn2Gates(const gdn_exec& exec, const gdn2_gates_args& args) {
  if (args.tokens == 0) return GDN_OK;
  const int64_t count = args.tokens * (args.gate_heads * args.key_dim + args.write_width);
  Kernel<<<GridFor(count, kThreads), kThreads, 0, Stream(exec)>>>(args);
  return CheckLaunch("gdn2_gates");
}

gdn_status Gdn2GatesBackward(const gdn_exec& exec, const gdn2_gates_backward_args& args) {
  constexpr char kOp[] = "gdn2_gates_backward";
  const gdn2_gates_args& in = args.forward;
  // Without tokens the sums are zeros.
  HeadKernel<<<GridFor(in.gate_heads, 1), kSumThreads, 0, Stream(exec)>>>(args);
  if (const gdn_status status = CheckLaunch(kOp); status != GDN_OK) return status;
  if (in.tokens == 0) return GDN_OK;
  WriteKernel<<<GridFor(in.tokens * in.write_width, kThreads), kThreads, 0, Stream(exec)>>>(args);
  return CheckLaunch(kOp);
}

}  // namespace gdn::cuda
