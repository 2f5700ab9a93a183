// The fused decode step for every legal shape: plain, correct, slower.
//
// One block per key head of a batch row takes its r value heads in turn, so q and k are convolved
// once and no other block reads or writes these columns of the convolution state: each is read and
// written by the same thread. A warp takes one row of the state at a time and keeps it in registers
// over all tokens. No cluster, no alignment, any element strides.
#ifndef KERNELS_CUDA_FUSED_DECODE_GENERIC_CUH_
#define KERNELS_CUDA_FUSED_DECODE_GENERIC_CUH_

#include "kernels/cuda/element.cuh"
#include "kernels/cuda/fused_decode.cuh"
#include "kernels/cuda/math.cuh"

namespace gdn::cuda {
namespace decode_generic {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kMaxPerLane = 256 / 32;  // K <= 256.
constexpr int kMaxWidth = 8;
static_assert(kWarps >= kMaxDecodeTokens, "warp t prepares and normalises token t");

// One channel over all tokens: out[t * out_stride] gets the rounded outputs.
template <typename X>
__device__ inline void ConvolveChannel(const GenericDecodeParams& p, const X* x, int64_t channel,
                                       int64_t read, int64_t write, bool fresh, float* out,
                                       int64_t out_stride) {
  const gdn_fused_decode_args& a = p.args;
  const int width = static_cast<int>(a.conv_width);
  X* const state = static_cast<X*>(a.conv_state);
  float window[kMaxWidth];  // The last W inputs, newest at W - 1.
#pragma unroll
  for (int j = 0; j < kMaxWidth; ++j) {
    window[j] = j + 1 < width && !fresh
                    ? Widen(state[read * a.conv_slot_stride + j * p.channels + channel])
                    : 0.0f;
  }
  for (int64_t t = 0; t < a.tokens; ++t) {
    const float now = Widen(x[t * a.x_token_stride]);
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < kMaxWidth; ++j) {
      if (j + 1 == width) window[j] = now;
      if (j < width) sum = fmaf(a.conv_weight[channel * width + j], window[j], sum);
    }
    out[t * out_stride] = RoundTo<X>(Silu(sum));
#pragma unroll
    for (int j = 0; j + 1 < kMaxWidth; ++j) window[j] = window[j + 1];
  }
#pragma unroll
  for (int j = 0; j < kMaxWidth; ++j) {
    if (j + 1 < width) {
      state[write * a.conv_slot_stride + j * p.channels + channel] = Narrow<X>(window[j]);
    }
  }
}

template <typename X, typename S>
__global__ void __launch_bounds__(kThreads) Kernel(const __grid_constant__ GenericDecodeParams p) {
  extern __shared__ float shared[];
  const gdn_fused_decode_args& a = p.args;
  const int64_t row = blockIdx.y + blockIdx.z * kMaxGridY;
  if (row >= a.rows) return;
  const int K = static_cast<int>(a.key_dim);
  const int V = static_cast<int>(a.value_dim);
  const int tokens = static_cast<int>(a.tokens);
  const int64_t key_head = blockIdx.x;
  const int tid = static_cast<int>(threadIdx.x);
  const int lane = tid % 32;
  const int warp = tid / 32;
  const int64_t read = a.read_index[row];
  const int64_t write = a.write_index[row];
  const bool fresh = a.fresh != nullptr && a.fresh[row] != 0;
  const X* const x = static_cast<const X*>(a.x) + row * tokens * a.x_token_stride;
  X* const y = static_cast<X*>(a.y) + row * tokens * a.y_token_stride;

  if (read < 0 || write < 0) {
    const int64_t count = static_cast<int64_t>(p.ratio) * V;
    for (int t = 0; t < tokens; ++t) {
      for (int64_t i = tid; i < count; i += kThreads) {
        y[t * a.y_token_stride + key_head * count + i] = Narrow<X>(0.0f);
      }
    }
    return;
  }

  float* const qk = shared;               // [T][2][K]
  float* const vo = qk + tokens * 2 * K;  // [T][V]: v, and o in its place.
  for (int i = tid; i < 2 * K; i += kThreads) {
    const bool is_key = i >= K;
    const int64_t in_head = key_head * K + (is_key ? i - K : i);
    ConvolveChannel(p, x + (is_key ? a.k_offset : a.q_offset) + in_head,
                    in_head + (is_key ? a.key_heads * K : 0), read, write, fresh, qk + i, 2 * K);
  }
  __syncthreads();
  if (warp < tokens) {
    float* const q = qk + warp * 2 * K;
    float* const k = q + K;
    float qq = 0.0f;
    float kk = 0.0f;
    for (int i = lane; i < K; i += 32) {
      qq = fmaf(q[i], q[i], qq);
      kk = fmaf(k[i], k[i], kk);
    }
    const bool norm = a.use_qk_l2norm != 0;
    const float q_factor = (norm ? rsqrtf(LaneSum(qq) + kQkNormEps) : 1.0f) * p.scale;
    const float k_factor = norm ? rsqrtf(LaneSum(kk) + kQkNormEps) : 1.0f;
    for (int i = lane; i < K; i += 32) {
      q[i] *= q_factor;
      k[i] *= k_factor;
    }
  }

  for (int j = 0; j < p.ratio; ++j) {
    const int64_t head = key_head * p.ratio + j;
    for (int i = tid; i < V; i += kThreads) {
      const int64_t in_heads = head * V + i;
      ConvolveChannel(p, x + a.v_offset + in_heads, 2 * a.key_heads * K + in_heads, read, write,
                      fresh, vo + i, V);
    }
    // Lane t holds the gates of token t.
    const X* const gates = x + min(lane, tokens - 1) * a.x_token_stride + head;
    const float lane_decay =
        expf(LogDecay(Widen(gates[a.a_offset]), a.dt_bias[head], a.a_log[head]));
    const float lane_beta = WriteStrength(Widen(gates[a.b_offset]), a.beta_scale);
    __syncthreads();

    for (int i = warp; i < V; i += kWarps) {
      const int64_t offset = (head * V + i) * K + lane;
      const S* const from = static_cast<const S*>(a.state) + read * a.state_slot_stride + offset;
      S* const to = static_cast<S*>(a.state) + write * a.state_slot_stride + offset;
      float s[kMaxPerLane];
#pragma unroll
      for (int c = 0; c < kMaxPerLane; ++c) {
        s[c] = lane + 32 * c < K && !fresh ? Widen(from[32 * c]) : 0.0f;
      }
      for (int t = 0; t < tokens; ++t) {
        const float* const q = qk + t * 2 * K;
        const float* const k = q + K;
        const float decay = __shfl_sync(kFullMask, lane_decay, t);
        const float beta = __shfl_sync(kFullMask, lane_beta, t);
        float predicted = 0.0f;
#pragma unroll
        for (int c = 0; c < kMaxPerLane; ++c) {
          if (lane + 32 * c < K) {
            s[c] *= decay;
            predicted = fmaf(s[c], k[lane + 32 * c], predicted);
          }
        }
        const float u = beta * (vo[t * V + i] - LaneSum(predicted));
        float o = 0.0f;
#pragma unroll
        for (int c = 0; c < kMaxPerLane; ++c) {
          if (lane + 32 * c < K) {
            s[c] = fmaf(u, k[lane + 32 * c], s[c]);
            o = fmaf(s[c], q[lane + 32 * c], o);
          }
        }
        o = LaneSum(o);
        __syncwarp();  // Every lane has read v[t][i].
        if (lane == 0) vo[t * V + i] = a.round_o != 0 ? RoundTo<X>(o) : o;
      }
#pragma unroll
      for (int c = 0; c < kMaxPerLane; ++c) {
        if (lane + 32 * c < K) to[32 * c] = Narrow<S>(s[c]);
      }
    }
    __syncthreads();

    if (warp < tokens) {
      const float* const o = vo + warp * V;
      float sum = 0.0f;
      for (int i = lane; i < V; i += 32) sum = fmaf(o[i], o[i], sum);
      const float rstd = rsqrtf(LaneSum(sum) / static_cast<float>(V) + a.eps);
      for (int i = lane; i < V; i += 32) {
        float n = o[i] * rstd * (a.norm_weight[i] + (a.zero_centered != 0 ? 1.0f : 0.0f));
        if (a.round_before_gate != 0) n = RoundTo<X>(n);
        const float z = Widen(x[warp * a.x_token_stride + a.z_offset + head * V + i]);
        y[warp * a.y_token_stride + head * V + i] = Narrow<X>(n * Activate(a.activation, z));
      }
    }
    __syncthreads();  // The next head overwrites v.
  }
}

template <typename X, typename S>
cudaError_t Launch(const GenericDecodeParams& params, cudaStream_t stream) {
  const gdn_fused_decode_args& a = params.args;
  const dim3 grid(static_cast<unsigned>(a.key_heads),
                  static_cast<unsigned>(a.rows < kMaxGridY ? a.rows : kMaxGridY),
                  static_cast<unsigned>((a.rows + kMaxGridY - 1) / kMaxGridY));
  // At most 8 * (2 * 256 + 512) floats: within what every block may use.
  const auto bytes =
      static_cast<unsigned>(a.tokens * (2 * a.key_dim + a.value_dim) * sizeof(float));
  Kernel<X, S><<<grid, kThreads, bytes, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace decode_generic

template <typename X>
cudaError_t LaunchDecodeGeneric(const GenericDecodeParams& params, cudaStream_t stream) {
  return params.args.state_dtype == GDN_F32 ? decode_generic::Launch<X, float>(params, stream)
                                            : decode_generic::Launch<X, Bf16>(params, stream);
}

}  // namespace gdn::cuda

#endif  // KERNELS_CUDA_FUSED_DECODE_GENERIC_CUH_
