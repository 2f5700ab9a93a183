// The fused decode step for K = V = 128 and W = 4.
//
// Work is divided by rows of the state: a warp holds eight rows (or twice eight) of one value head
// in registers and needs nothing of the others except, at the very end, the sum of o^2 over the
// head. All rows of the state are loaded before anything is computed, and a row is written as soon
// as it is done. Products with the old state come first (p = S k, r = S q), so that
//     u = beta (v - alpha p),  o = alpha r + (k.q) u,  S <- alpha S + u k^T
// need one reduction instead of two in a row; the norms of q and k are factors on p and r.
//
// The blocks that work on one key head of one batch row form a cluster: r = HV/H value heads, each
// divided into kSplits blocks. That cluster is the unit in which
// - the q and k columns of the convolution state are shared: every block reads them, the block of
//   rank 0 writes them. Its writes come after a cluster barrier at which every thread of the
//   cluster arrives once it has used the columns it read, so no read can see the new values. The v
//   columns are read and written by one warp, which writes after the shuffles that depend on its
//   reads;
// - the sums of o^2 meet: each warp stores its partial sum into the shared memory of all blocks of
//   its head, and the same cluster barrier makes it visible. A barrier at the start guarantees that
//   those blocks run; none leaves before it has passed the last one, so no remote store is late.
// No other block touches these slots (fused_decode.h), so there is no other race.
//
// Bits: the division into warps is the same for every tiling; only which block a warp belongs to
// differs. Every reduction has one fixed order: within a warp by lane, over the sixteen partial
// sums of o^2 by index. So the result is independent of the tiling, and the tiling may follow the
// batch.
#ifndef KERNELS_CUDA_FUSED_DECODE_128_CUH_
#define KERNELS_CUDA_FUSED_DECODE_128_CUH_

#include "kernels/cuda/cluster.cuh"
#include "kernels/cuda/element.cuh"
#include "kernels/cuda/fused_decode.cuh"
#include "kernels/cuda/math.cuh"
#include "kernels/cuda/state_tile.cuh"

namespace gdn::cuda::decode128 {

constexpr int kDim = 128;
constexpr int kTaps = 3;
constexpr int kPartials = kDim / kTileRows;
constexpr int kQkPairs = kDim;  // Pairs of neighbouring channels in q|k of one key head.

__device__ inline float Convolve(float h0, float h1, float h2, float x, const float4& w) {
  return Silu(fmaf(w.w, x, fmaf(w.z, h2, fmaf(w.y, h1, w.x * h0))));
}

// A pair of channels of q|k: raw inputs until the convolution, then the new state.
template <typename X, int kTokens>
struct QkPair {
  using Raw = typename Pair<X>::Raw;

  int64_t channel;
  int64_t column;
  Raw taps[kTaps];
  Raw x[kTokens];
  float4 weight[2];

  __device__ void Locate(const FusedParams& p, int64_t key_head, int pair) {
    const gdn_fused_decode_args& a = p.args;
    const bool is_key = pair >= kDim / 2;
    const int64_t in_head = key_head * kDim + 2 * pair - (is_key ? kDim : 0);
    channel = in_head + (is_key ? a.key_heads * kDim : 0);
    column = in_head + (is_key ? a.k_offset : a.q_offset);
    const float4* weights = reinterpret_cast<const float4*>(a.conv_weight) + channel;
    weight[0] = weights[0];
    weight[1] = weights[1];
  }
  __device__ void LoadX(const X* x0, int64_t stride, int tokens) {
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      if (t < tokens) x[t] = *reinterpret_cast<const Raw*>(x0 + t * stride + column);
    }
  }
  __device__ void LoadTaps(const X* state, int64_t channels) {
#pragma unroll
    for (int j = 0; j < kTaps; ++j) {
      taps[j] = *reinterpret_cast<const Raw*>(state + j * channels + channel);
    }
  }
  __device__ void ZeroTaps() {
#pragma unroll
    for (int j = 0; j < kTaps; ++j) taps[j] = Pair<X>::Zero();
  }
  // Writes the rounded outputs of token t to out[t][0..1] and leaves the new state in taps.
  __device__ void Run(float* out, int out_stride, int tokens) {
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      if (t < tokens) {
        const float2 h0 = Pair<X>::Widen(taps[0]);
        const float2 h1 = Pair<X>::Widen(taps[1]);
        const float2 h2 = Pair<X>::Widen(taps[2]);
        const float2 now = Pair<X>::Widen(x[t]);
        float2 y;
        y.x = RoundTo<X>(Convolve(h0.x, h1.x, h2.x, now.x, weight[0]));
        y.y = RoundTo<X>(Convolve(h0.y, h1.y, h2.y, now.y, weight[1]));
        *reinterpret_cast<float2*>(out + t * out_stride) = y;
        taps[0] = taps[1];
        taps[1] = taps[2];
        taps[2] = x[t];
      }
    }
  }
  __device__ void StoreTaps(X* state, int64_t channels) const {
#pragma unroll
    for (int j = 0; j < kTaps; ++j) {
      *reinterpret_cast<Raw*>(state + j * channels + channel) = taps[j];
    }
  }
};

template <typename X, typename S, int kWarps, int kGroups, int kTokens, int kMinBlocks>
__global__ void __launch_bounds__(32 * kWarps, kMinBlocks)
    Kernel(const __grid_constant__ FusedParams p) {
  using Tile = StateTile<S>;
  using Raw = typename Tile::Raw;
  constexpr int kSplits = kPartials / (kWarps * kGroups);
  constexpr int kThreads = 32 * kWarps;
  constexpr int kPairs = kThreads < kQkPairs ? kQkPairs / kThreads : 1;
  constexpr int kBlockRows = kWarps * kGroups * kTileRows;
  constexpr bool kMany = kTokens > 1;

  __shared__ alignas(16) float qk[kTokens][2 * kDim];
  __shared__ alignas(16) float squares[kTokens][kPartials];
  __shared__ float outputs[kMany ? kTokens : 1][kMany ? kBlockRows : 1];

  if constexpr (kSplits > 1) ClusterArrive();  // First barrier: this block runs.

  const gdn_fused_decode_args& a = p.args;
  const int64_t row = GridRow();
  if (row >= a.rows) return;
  const int tokens = kMany ? static_cast<int>(a.tokens) : 1;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const uint32_t rank = ClusterRank();
  const int64_t key_head = ClusterX();
  const int64_t head = key_head * p.ratio + rank / kSplits;
  const int group0 = (static_cast<int>(rank % kSplits) * kWarps + warp) * kGroups;
  const int own_row = group0 * kTileRows + Tile::OwnRow(lane);
  // Of the four lanes with the same own row, the one that stores.
  const bool writer = (lane & (1 | Tile::kVectorLane)) == 0;

  const int64_t read = a.read_index[row];
  const int64_t write = a.write_index[row];
  const bool fresh = a.fresh != nullptr && a.fresh[row] != 0;

  // What depends on nothing: weights.
  const bool has_pair = static_cast<int>(threadIdx.x) < kQkPairs;
  QkPair<X, kTokens> pairs[kPairs];
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    if (has_pair) pairs[i].Locate(p, key_head, static_cast<int>(threadIdx.x) + i * kThreads);
  }
  const int64_t v_channel = 2 * a.key_heads * kDim + head * kDim + own_row;
  float4 v_weight[kGroups];
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    v_weight[g] = reinterpret_cast<const float4*>(a.conv_weight)[v_channel + g * kTileRows];
  }
  const float a_log = a.a_log[head];
  const float dt_bias = a.dt_bias[head];

  // The projections: at once, or after the kernel before has finished.
  const X* x0 = static_cast<const X*>(a.x) + row * tokens * a.x_token_stride;
  const X* v_x = x0 + a.v_offset + head * kDim + own_row;
  const X* z_x = x0 + a.z_offset + head * kDim + own_row;
  X v_next[kGroups];
  X z[kGroups];
  float a_x;
  float b_x;
  const auto load_x = [&] {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      if (has_pair) pairs[i].LoadX(x0, a.x_token_stride, tokens);
    }
#pragma unroll
    for (int g = 0; g < kGroups; ++g) v_next[g] = v_x[g * kTileRows];
    // Lane t holds the gates of token t.
    const X* gates = x0 + (kMany ? min(lane, tokens - 1) * a.x_token_stride : 0) + head;
    a_x = Widen(gates[a.a_offset]);
    b_x = Widen(gates[a.b_offset]);
    if constexpr (!kMany) {
#pragma unroll
      for (int g = 0; g < kGroups; ++g) z[g] = z_x[g * kTileRows];
    }
  };
  if (a.early_start == 0) load_x();

  X* const y0 = static_cast<X*>(a.y) + row * tokens * a.y_token_stride + head * kDim + own_row;
  if (read < 0 || write < 0) {  // The same for the whole cluster.
    if (a.early_start != 0) {
      WaitForPreviousKernel();
      AllowNextKernel();
    }
    if (writer) {
      for (int t = 0; t < tokens; ++t) {
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
          y0[t * a.y_token_stride + g * kTileRows] = Narrow<X>(0.0f);
        }
      }
    }
    return;
  }

  // The states.
  const X* conv_in = static_cast<const X*>(a.conv_state) + read * a.conv_slot_stride;
  X v_taps[kGroups][kTaps];
  const int64_t tile_offset =
      head * (kDim * kDim) + group0 * (kTileRows * kDim) + Tile::Column(lane);
  Raw raw[kGroups][Tile::kLoads];
  if (fresh) {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) pairs[i].ZeroTaps();
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
#pragma unroll
      for (int j = 0; j < kTaps; ++j) v_taps[g][j] = Narrow<X>(0.0f);
#pragma unroll
      for (int i = 0; i < Tile::kLoads; ++i) raw[g][i] = Tile::Zero();
    }
  } else {
    if (has_pair) {
#pragma unroll
      for (int i = 0; i < kPairs; ++i) pairs[i].LoadTaps(conv_in, p.channels);
    }
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
#pragma unroll
      for (int j = 0; j < kTaps; ++j) {
        v_taps[g][j] = conv_in[j * p.channels + v_channel + g * kTileRows];
      }
    }
    const S* state = static_cast<const S*>(a.state) + read * a.state_slot_stride + tile_offset;
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
#pragma unroll
      for (int i = 0; i < Tile::kLoads; ++i) {
        raw[g][i] =
            *reinterpret_cast<const Raw*>(state + (g * kTileRows + Tile::Row(i, lane)) * kDim);
      }
    }
  }
  if (a.early_start != 0) {
    WaitForPreviousKernel();
    AllowNextKernel();
    load_x();
  }

  if (has_pair) {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      pairs[i].Run(&qk[0][2 * (threadIdx.x + i * kThreads)], 2 * kDim, tokens);
    }
  }
  float norm_weight[kGroups];
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    norm_weight[g] = a.norm_weight[own_row + g * kTileRows] + (a.zero_centered != 0 ? 1.0f : 0.0f);
  }
  const float log_decay = LogDecay(a_x, dt_bias, a_log);
  const float lane_decay = expf(log_decay);
  const float lane_beta = WriteStrength(b_x, a.beta_scale);
  __syncthreads();
  // Second barrier, where only the convolution state needs it.
  if constexpr (kSplits == 1) {
    if (p.ratio > 1) ClusterArrive();
  }

  // Many tokens: the state stays in FP32 registers over all of them.
  float held[kMany ? kGroups : 1][kMany ? Tile::kLoads : 1][Tile::kVec];
  if constexpr (kMany) {
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
#pragma unroll
      for (int i = 0; i < Tile::kLoads; ++i) Tile::Unpack(raw[g][i], held[g][i]);
    }
  }
  S* const state_out = static_cast<S*>(a.state) + write * a.state_slot_stride + tile_offset;
  float o[kGroups];

  if constexpr (kSplits > 1) ClusterWait();  // First barrier: the blocks of this head run.
#pragma unroll 1
  for (int t = 0; t < tokens; ++t) {
    float q[Tile::kVec];
    float k[Tile::kVec];
#pragma unroll
    for (int i = 0; i < Tile::kVec; i += 4) {
      *reinterpret_cast<float4*>(&q[i]) =
          *reinterpret_cast<const float4*>(&qk[t][Tile::Column(lane) + i]);
      *reinterpret_cast<float4*>(&k[i]) =
          *reinterpret_cast<const float4*>(&qk[t][kDim + Tile::Column(lane) + i]);
    }
    float qq = 0.0f;
    float kk = 0.0f;
    float kq = 0.0f;
#pragma unroll
    for (int i = 0; i < Tile::kVec; ++i) {
      qq = fmaf(q[i], q[i], qq);
      kk = fmaf(k[i], k[i], kk);
      kq = fmaf(k[i], q[i], kq);
    }
    qq = LaneSum<Tile::kColumnLanes>(qq);
    kk = LaneSum<Tile::kColumnLanes>(kk);
    kq = LaneSum<Tile::kColumnLanes>(kq);
    const float q_factor = a.use_qk_l2norm != 0 ? rsqrtf(qq + kQkNormEps) * p.scale : p.scale;
    const float k_factor = a.use_qk_l2norm != 0 ? rsqrtf(kk + kQkNormEps) : 1.0f;
    kq = kq * k_factor * q_factor;
    const float decay = kMany ? __shfl_sync(kFullMask, lane_decay, t) : lane_decay;
    const float beta = kMany ? __shfl_sync(kFullMask, lane_beta, t) : lane_beta;

#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const X v_now = v_next[g];
      if constexpr (kMany) {
        if (t + 1 < tokens) v_next[g] = v_x[(t + 1) * a.x_token_stride + g * kTileRows];
      }
      const float v = RoundTo<X>(Convolve(Widen(v_taps[g][0]), Widen(v_taps[g][1]),
                                          Widen(v_taps[g][2]), Widen(v_now), v_weight[g]));
      v_taps[g][0] = v_taps[g][1];
      v_taps[g][1] = v_taps[g][2];
      v_taps[g][2] = v_now;

      float local[kMany ? 1 : Tile::kLoads][Tile::kVec];
      float with_k[Tile::kLoads];
      float with_q[Tile::kLoads];
#pragma unroll
      for (int i = 0; i < Tile::kLoads; ++i) {
        if constexpr (!kMany) Tile::Unpack(raw[g][i], local[i]);
        const float* s = kMany ? held[kMany ? g : 0][kMany ? i : 0] : local[kMany ? 0 : i];
        with_k[i] = 0.0f;
        with_q[i] = 0.0f;
#pragma unroll
        for (int c = 0; c < Tile::kVec; ++c) {
          with_k[i] = fmaf(s[c], k[c], with_k[i]);
          with_q[i] = fmaf(s[c], q[c], with_q[i]);
        }
      }
      const float mine = Reduce<Tile>(with_k, with_q, lane);
      const float other = __shfl_xor_sync(kFullMask, mine, Tile::kVectorLane);
      const bool has_q = (lane & Tile::kVectorLane) != 0;
      const float sk = (has_q ? other : mine) * k_factor;
      const float sq = (has_q ? mine : other) * q_factor;
      const float u = beta * fmaf(-decay, sk, v);
      const float uk = u * k_factor;

#pragma unroll
      for (int i = 0; i < Tile::kLoads; ++i) {
        const float row_u = __shfl_sync(kFullMask, uk, Tile::Owner(i, lane));
        float* s = kMany ? held[kMany ? g : 0][kMany ? i : 0] : local[kMany ? 0 : i];
#pragma unroll
        for (int c = 0; c < Tile::kVec; ++c) s[c] = fmaf(row_u, k[c], decay * s[c]);
        if (t + 1 == tokens) {
          *reinterpret_cast<Raw*>(state_out + (g * kTileRows + Tile::Row(i, lane)) * kDim) =
              Tile::Pack(s);
        }
      }

      float out = fmaf(kq, u, decay * sq);
      if (a.round_o != 0) out = RoundTo<X>(out);
      const float sum = LaneSum<Tile::kRowLanes>(out * out);
      if constexpr (kSplits > 1) {
        if (lane < kSplits) {
          StoreRemote(&squares[t][group0 + g], rank / kSplits * kSplits + lane, sum);
        }
      } else {
        if (lane == 0) squares[t][group0 + g] = sum;
      }
      o[g] = out;
      if constexpr (kMany) {
        if (writer) outputs[t][own_row % kBlockRows + g * kTileRows] = out;
      }
    }
  }

  X* const conv_out = static_cast<X*>(a.conv_state) + write * a.conv_slot_stride;
  if (writer) {
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
#pragma unroll
      for (int j = 0; j < kTaps; ++j) {
        conv_out[j * p.channels + v_channel + g * kTileRows] = v_taps[g][j];
      }
    }
  }

  // The norm and the gate.
  if constexpr (kSplits > 1) {
    ClusterArrive();
    ClusterWait();
  } else {
    __syncthreads();
  }
  for (int t = 0; t < tokens; ++t) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kPartials; i += 4) {
      const float4 part = *reinterpret_cast<const float4*>(&squares[t][i]);
      sum += part.x;
      sum += part.y;
      sum += part.z;
      sum += part.w;
    }
    const float rstd = rsqrtf(sum * (1.0f / kDim) + a.eps);
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      float out = o[g];
      float gate;
      if constexpr (kMany) {
        out = outputs[t][own_row % kBlockRows + g * kTileRows];
        gate = Widen(z_x[t * a.x_token_stride + g * kTileRows]);
      } else {
        gate = Widen(z[g]);
      }
      float n = out * rstd * norm_weight[g];
      if (a.round_before_gate != 0) n = RoundTo<X>(n);
      if (writer) {
        y0[t * a.y_token_stride + g * kTileRows] = Narrow<X>(n * Activate(a.activation, gate));
      }
    }
  }

  if (rank == 0) {
    if constexpr (kSplits == 1) {
      if (p.ratio > 1) ClusterWait();  // Second barrier: nobody needs the old columns any more.
    }
    if (has_pair) {
#pragma unroll
      for (int i = 0; i < kPairs; ++i) pairs[i].StoreTaps(conv_out, p.channels);
    }
  }
}

template <typename X, typename S, int kWarps, int kGroups, int kMinBlocks>
cudaError_t LaunchTiling(const FusedParams& params, cudaStream_t stream) {
  const gdn_fused_decode_args& a = params.args;
  const auto cluster = static_cast<unsigned>(params.ratio * (kPartials / (kWarps * kGroups)));
  cudaLaunchAttribute attributes[2];
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(a.key_heads) * cluster,
                        static_cast<unsigned>(a.rows < kMaxGridY ? a.rows : kMaxGridY),
                        static_cast<unsigned>((a.rows + kMaxGridY - 1) / kMaxGridY));
  config.blockDim = dim3(32 * kWarps);
  config.stream = stream;
  config.attrs = attributes;
  if (cluster > 1) {
    attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
    attributes[config.numAttrs].val.clusterDim = {cluster, 1, 1};
    ++config.numAttrs;
  }
  if (a.early_start != 0) {
    attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[config.numAttrs].val.programmaticStreamSerializationAllowed = 1;
    ++config.numAttrs;
  }
  if (a.tokens == 1) {
    return cudaLaunchKernelEx(&config, Kernel<X, S, kWarps, kGroups, 1, kMinBlocks>, params);
  }
  return cudaLaunchKernelEx(&config, Kernel<X, S, kWarps, kGroups, kMaxDecodeTokens, 1>, params);
}

template <typename X, typename S>
cudaError_t Launch(const FusedParams& params, int tiling, cudaStream_t stream) {
  switch (tiling) {
    case 0:
      return LaunchTiling<X, S, 16, 1, 2>(params, stream);
    case 1:
      return LaunchTiling<X, S, 8, 2, 2>(params, stream);
    case 2:
      return LaunchTiling<X, S, 8, 1, 2>(params, stream);
    case 3:
      return LaunchTiling<X, S, 4, 1, 2>(params, stream);
    case 4:
      return LaunchTiling<X, S, 2, 1, 2>(params, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace gdn::cuda::decode128

namespace gdn::cuda {

template <typename X>
cudaError_t LaunchDecode128(const FusedParams& params, int tiling, cudaStream_t stream) {
  return params.args.state_dtype == GDN_F32 ? decode128::Launch<X, float>(params, tiling, stream)
                                            : decode128::Launch<X, Bf16>(params, tiling, stream);
}

}  // namespace gdn::cuda

#endif  // KERNELS_CUDA_FUSED_DECODE_128_CUH_
