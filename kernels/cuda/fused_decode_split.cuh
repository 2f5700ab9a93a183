// The fused decode step for K = V = 128 and W = 4 at small batches: bound by latency.
//
// A head is divided into kSplits blocks by rows of its state. A warp holds eight rows (or twice
// eight) in registers and needs nothing of the others except, at the very end, the sum of o^2 over
// the head. All rows are loaded before anything is computed. Products with the old state come first
// (p = S k, r = S q), so that
//     u = beta (v - decay p),  o = decay r + (k.q) u,  S <- decay S + u k^T
// need one reduction instead of two in a row, and o is known before S is written. The norms of q
// and k are factors on p and r.
//
// The blocks that work on one key head of one batch row form a cluster: r = HV/H value heads, each
// divided into kSplits blocks. That cluster is the unit in which
// - the q and k columns of the convolution state are shared: every block reads them, the block of
//   rank 0 writes them. Its writes come after a cluster barrier at which every thread arrives once
//   the values it read have been used (its own convolution, then a barrier of the block), so no
//   read can still be under way when they change. The barrier orders nothing else, hence its
//   relaxed form. The v columns are read and written by one warp, which writes after the shuffles
//   that depend on its reads;
// - the sums of o^2 meet: each warp sends its partial sum to all blocks of its head, where a
//   barrier in shared memory counts the bytes that have come. A first cluster barrier guarantees
//   that these blocks run and have set theirs up; none leaves before all its sums have come, so
//   none comes late.
// No other block touches these slots (fused_decode.h), so there is no other race.
//
// Bits: the division into warps is the same for every tiling; only which block a warp belongs to
// differs. Every reduction has one fixed order: within a warp by lane, over the sixteen partial
// sums of o^2 by index. So the result is independent of the tiling, and the tiling may follow the
// batch.
#ifndef KERNELS_CUDA_FUSED_DECODE_SPLIT_CUH_
#define KERNELS_CUDA_FUSED_DECODE_SPLIT_CUH_

#include "kernels/cuda/async_copy.cuh"
#include "kernels/cuda/bulk_copy.cuh"
#include "kernels/cuda/cluster.cuh"
#include "kernels/cuda/decode_step.cuh"

namespace gdn::cuda::decode128 {

constexpr int kQkPairs = kDim;  // Pairs of neighbouring channels in q|k of one key head.

// A pair of channels of q|k.
template <typename X, int kTokens>
struct QkPair {
  using Raw = typename Pair<X>::Raw;

  int32_t channel;
  int32_t column;
  Raw taps[kTaps];
  Raw x[kTokens];
  float4 weight[2];

  __device__ void Locate(const DecodeParams& p, int key_head, int pair) {
    const bool is_key = pair >= kDim / 2;
    const int in_head = key_head * kDim + 2 * pair - (is_key ? kDim : 0);
    channel = in_head + (is_key ? static_cast<int>(p.key_heads) * kDim : 0);
    column = in_head + (is_key ? p.k_offset : p.q_offset);
  }
  __device__ void LoadWeight(const DecodeParams& p) {
    const float4* weights = reinterpret_cast<const float4*>(p.conv_weight) + channel;
    weight[0] = weights[0];
    weight[1] = weights[1];
  }
  __device__ void LoadX(const X* x0, int64_t stride, int tokens) {
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      if (t < tokens) x[t] = *reinterpret_cast<const Raw*>(x0 + t * stride + column);
    }
  }
  __device__ void LoadTaps(const X* state, int channels) {
#pragma unroll
    for (int j = 0; j < kTaps; ++j) {
      taps[j] = *reinterpret_cast<const Raw*>(state + j * channels + channel);
    }
  }
  __device__ void ZeroTaps() {
#pragma unroll
    for (int j = 0; j < kTaps; ++j) taps[j] = Pair<X>::Zero();
  }
  __device__ void StoreTaps(X* state, int channels) const {
#pragma unroll
    for (int j = 0; j < kTaps; ++j) {
      *reinterpret_cast<Raw*>(state + j * channels + channel) = taps[j];
    }
  }
};

template <typename X, typename S, int kWarps, int kGroups, int kTokens, int kMinBlocks>
__global__ void __launch_bounds__(32 * kWarps, kMinBlocks)
    SplitKernel(const __grid_constant__ DecodeParams p) {
  using Tile = SplitTile<S>;
  using Raw = typename Piece<S>::Raw;
  constexpr int kVec = Piece<S>::kVec;
  constexpr int kSplits = kPartials / (kWarps * kGroups);
  constexpr int kThreads = 32 * kWarps;
  constexpr int kPairs = kThreads < kQkPairs ? kQkPairs / kThreads : 1;
  constexpr int kBlockRows = kWarps * kGroups * kTileRows;
  constexpr bool kMany = kTokens > 1;

  __shared__ alignas(16) float qk[kTokens][2 * kDim];
  __shared__ alignas(16) float squares[kTokens][kPartials];
  __shared__ float outputs[kMany ? kTokens : 1][kMany ? kBlockRows : 1];
  __shared__ ArrivalBarrier squares_here;

  // Touches the lines of the parameters together, so that their misses overlap.
  asm volatile("" ::"l"(p.read_index), "l"(p.conv_weight), "l"(p.norm_weight), "f"(p.eps));
  if constexpr (kSplits > 1) {
    if (threadIdx.x == 0) {
      squares_here.Init();
      ArrivalBarrier::FenceInit();
      squares_here.ArriveExpecting(p.tokens * kPartials * sizeof(float));
    }
    __syncwarp();
    ClusterArrive();  // First barrier: this block runs, and may be sent sums.
  }

  const int64_t row = blockIdx.y + blockIdx.z * kMaxGridY;
  if (row >= p.rows) return;
  const int64_t read = p.read_index[row];
  const int64_t write = p.write_index[row];
  const uint8_t fresh = p.fresh != nullptr ? p.fresh[row] : uint8_t{0};

  const int tokens = kMany ? p.tokens : 1;
  const int tid = static_cast<int>(threadIdx.x);
  const int lane = tid % 32;
  const int warp = tid / 32;
  const uint32_t rank = ClusterRank();
  const int key_head = static_cast<int>(ClusterX());
  const int head = key_head * p.ratio + static_cast<int>(rank) / kSplits;
  const int group0 = (static_cast<int>(rank % kSplits) * kWarps + warp) * kGroups;
  const int own_row = group0 * kTileRows + Tile::OwnRow(lane);
  const bool writer = IsRowWriter(lane);
  const bool has_pair = tid < kQkPairs;

  // Nothing loaded here is touched before the loads of the state are on their way: the first use of
  // a value would hold back every load after it.
  const X* const x0 = static_cast<const X*>(p.x) + row * tokens * p.x_token_stride;
  const X* const v_x = x0 + p.v_offset + head * kDim + own_row;
  const X* const z_x = x0 + p.z_offset + head * kDim + own_row;
  QkPair<X, kTokens> pairs[kPairs];
  X v_next[kGroups];
  X z[kGroups];
  X a_x;
  X b_x;
#pragma unroll
  for (int i = 0; i < kPairs; ++i) pairs[i].Locate(p, key_head, tid + i * kThreads);
  const auto load_x = [&] {
    if (has_pair) {
#pragma unroll
      for (int i = 0; i < kPairs; ++i) pairs[i].LoadX(x0, p.x_token_stride, tokens);
    }
#pragma unroll
    for (int g = 0; g < kGroups; ++g) v_next[g] = v_x[g * kTileRows];
    // Lane t holds the gates of token t.
    const X* gates = x0 + (kMany ? min(lane, tokens - 1) * p.x_token_stride : 0) + head;
    a_x = gates[p.a_offset];
    b_x = gates[p.b_offset];
    if constexpr (!kMany) {
#pragma unroll
      for (int g = 0; g < kGroups; ++g) z[g] = z_x[g * kTileRows];
    }
  };
  // At once, or after the kernel before has finished.
  if (p.early_start == 0) load_x();

  const int v_channel = 2 * static_cast<int>(p.key_heads) * kDim + head * kDim + own_row;
  X* const y0 = static_cast<X*>(p.y) + row * tokens * p.y_token_stride + head * kDim + own_row;
  if (read < 0 || write < 0) {  // The same for the whole cluster.
    if (p.early_start != 0) {
      WaitForPreviousKernel();
      AllowNextKernel();
    }
    if (writer) {
      for (int t = 0; t < tokens; ++t) {
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
          y0[t * p.y_token_stride + g * kTileRows] = Narrow<X>(0.0f);
        }
      }
    }
    return;
  }

  // The states.
  const X* conv_in = static_cast<const X*>(p.conv_state) + read * p.conv_slot_stride;
  X v_taps[kGroups][kTaps];
  const int64_t tile_offset = int64_t{head} * (kDim * kDim) + group0 * (kTileRows * kDim) +
                              Tile::FirstRow(lane) * kDim + Tile::Column(lane);
  Raw raw[kGroups][Tile::kAccesses];
  if (fresh != 0) {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) pairs[i].ZeroTaps();
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
#pragma unroll
      for (int j = 0; j < kTaps; ++j) v_taps[g][j] = Narrow<X>(0.0f);
#pragma unroll
      for (int i = 0; i < Tile::kAccesses; ++i) raw[g][i] = Piece<S>::Zero();
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
    const S* state = static_cast<const S*>(p.state) + read * p.state_slot_stride + tile_offset;
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
#pragma unroll
      for (int i = 0; i < Tile::kAccesses; ++i) {
        raw[g][i] =
            *reinterpret_cast<const Raw*>(state + (g * kTileRows + i * Tile::kAccessRows) * kDim);
      }
    }
  }
  if (has_pair) {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) pairs[i].LoadWeight(p);
  }
  float4 v_weight[kGroups];
  float norm_weight[kGroups];
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    v_weight[g] = reinterpret_cast<const float4*>(p.conv_weight)[v_channel + g * kTileRows];
    norm_weight[g] = p.norm_weight[own_row + g * kTileRows];
  }
  const float a_log = p.a_log[head];
  const float dt_bias = p.dt_bias[head];
  if (p.early_start != 0) {
    // x is not final yet, but its lines may come to the L2, where all writes meet.
    for (int t = 0; t < tokens; ++t) {
      const X* const line = x0 + t * p.x_token_stride;
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        if (has_pair) PrefetchToL2(line + pairs[i].column);
      }
      PrefetchToL2(line + (v_x - x0));
      PrefetchToL2(line + (z_x - x0));
      PrefetchToL2(line + p.a_offset + head);
      PrefetchToL2(line + p.b_offset + head);
    }
  }
  if (p.early_start != 0) {
    WaitForPreviousKernel();
    AllowNextKernel();
    load_x();
  }

  if (has_pair) {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      float* const out = &qk[0][2 * (tid + i * kThreads)];
#pragma unroll
      for (int t = 0; t < kTokens; ++t) {
        if (t < tokens) {
          *reinterpret_cast<float2*>(out + t * 2 * kDim) =
              ConvolvePair<X>(pairs[i].taps, pairs[i].x[t], pairs[i].weight[0], pairs[i].weight[1]);
        }
      }
    }
  }
  const float lane_decay = expf(LogDecay(Widen(a_x), dt_bias, a_log));
  const float lane_beta = WriteStrength(Widen(b_x), p.beta_scale);
  __syncthreads();
  if constexpr (kSplits > 1) ClusterWait();  // First barrier: the blocks of this head run.
  const bool in_cluster = kSplits > 1 || p.ratio > 1;
  if (in_cluster) ClusterArrive();  // Second barrier: this block has used the q and k columns.

  // Over many tokens the state stays in FP32 registers.
  float held[kGroups][Tile::kAccesses][kVec];
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
#pragma unroll
    for (int i = 0; i < Tile::kAccesses; ++i) Piece<S>::Unpack(raw[g][i], held[g][i]);
  }
  S* const state_out = static_cast<S*>(p.state) + write * p.state_slot_stride + tile_offset;
  float o[kGroups];

#pragma unroll 1
  for (int t = 0; t < tokens; ++t) {
    const bool last = !kMany || t + 1 == tokens;
    float q[kVec];
    float k[kVec];
    float qq = 0.0f;
    float kk = 0.0f;
    float kq = 0.0f;
#pragma unroll
    for (int i = 0; i < kVec; i += 4) {
      const float* const from = &qk[t][Tile::Column(lane) + i];
      *reinterpret_cast<float4*>(&q[i]) = *reinterpret_cast<const float4*>(from);
      *reinterpret_cast<float4*>(&k[i]) = *reinterpret_cast<const float4*>(from + kDim);
    }
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      qq = fmaf(q[i], q[i], qq);
      kk = fmaf(k[i], k[i], kk);
      kq = fmaf(k[i], q[i], kq);
    }
    const KeyFactors factors =
        MakeFactors(p, Tile::SumColumns(qq), Tile::SumColumns(kk), Tile::SumColumns(kq));
    const float decay = kMany ? __shfl_sync(kFullMask, lane_decay, t) : lane_decay;
    const float beta = kMany ? __shfl_sync(kFullMask, lane_beta, t) : lane_beta;
    float uk[kGroups];
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const X v_now = v_next[g];
      if constexpr (kMany) {
        if (!last) v_next[g] = v_x[(t + 1) * p.x_token_stride + g * kTileRows];
      }
      const float v = RoundTo<X>(Convolve(Widen(v_taps[g][0]), Widen(v_taps[g][1]),
                                          Widen(v_taps[g][2]), Widen(v_now), v_weight[g]));
      v_taps[g][0] = v_taps[g][1];
      v_taps[g][1] = v_taps[g][2];
      v_taps[g][2] = v_now;

      float with_k[Tile::kAccesses];
      float with_q[Tile::kAccesses];
#pragma unroll
      for (int i = 0; i < Tile::kAccesses; ++i) {
        with_k[i] = 0.0f;
        with_q[i] = 0.0f;
#pragma unroll
        for (int c = 0; c < kVec; ++c) {
          with_k[i] = fmaf(held[g][i][c], k[c], with_k[i]);
          with_q[i] = fmaf(held[g][i][c], q[c], with_q[i]);
        }
      }
      const float2 sums = ReduceRows<S>(with_k, with_q, lane);
      const RowStep step = StepRow(factors, decay, beta, v, sums.x, sums.y);
      uk[g] = step.uk;
      o[g] = p.round_o != 0 ? RoundTo<X>(step.o) : step.o;
      const float sum = Tile::SumRows(o[g] * o[g]);
      if constexpr (kSplits > 1) {
        if (lane < kSplits) {
          SendFloat(&squares[t][group0 + g], rank / kSplits * kSplits + lane, sum, &squares_here);
        }
      } else {
        if (lane == 0) squares[t][group0 + g] = sum;
      }
      if constexpr (kMany) {
        if (writer) outputs[t][own_row % kBlockRows + g * kTileRows] = o[g];
      }
    }
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
#pragma unroll
      for (int i = 0; i < Tile::kAccesses; ++i) {
        const float row_uk = __shfl_sync(kFullMask, uk[g], Tile::Owner(i, lane));
#pragma unroll
        for (int c = 0; c < kVec; ++c) {
          held[g][i][c] = UpdateElement(held[g][i][c], k[c], decay, row_uk);
        }
        if (last) {
          *reinterpret_cast<Raw*>(state_out + (g * kTileRows + i * Tile::kAccessRows) * kDim) =
              Piece<S>::Pack(held[g][i]);
        }
      }
    }
  }

  X* const conv_out = static_cast<X*>(p.conv_state) + write * p.conv_slot_stride;
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
    squares_here.Wait(0);
  } else {
    __syncthreads();
  }
  for (int t = 0; t < tokens; ++t) {
    const float rstd = InverseRms(squares[t], p.eps);
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      float out = o[g];
      float gate;
      if constexpr (kMany) {
        out = outputs[t][own_row % kBlockRows + g * kTileRows];
        gate = Widen(z_x[t * p.x_token_stride + g * kTileRows]);
      } else {
        gate = Widen(z[g]);
      }
      if (writer) {
        y0[t * p.y_token_stride + g * kTileRows] =
            NormaliseAndGate<X>(p, out, rstd, NormWeight(p, norm_weight[g]), gate);
      }
    }
  }

  if (rank == 0) {
    if (in_cluster) ClusterWait();  // Second barrier: nobody needs the old columns any more.
    if (has_pair) {
#pragma unroll
      for (int i = 0; i < kPairs; ++i) pairs[i].StoreTaps(conv_out, p.channels);
    }
  }
}

template <typename X, typename S, int kWarps, int kGroups, int kMinBlocks>
cudaError_t LaunchSplit(const DecodeParams& params, cudaStream_t stream) {
  const auto cluster = static_cast<unsigned>(params.ratio * (kPartials / (kWarps * kGroups)));
  const int64_t rows = params.rows;
  cudaLaunchAttribute attributes[2];
  cudaLaunchConfig_t config = {};
  config.gridDim =
      dim3(params.key_heads * cluster, static_cast<unsigned>(rows < kMaxGridY ? rows : kMaxGridY),
           static_cast<unsigned>((rows + kMaxGridY - 1) / kMaxGridY));
  config.blockDim = dim3(32 * kWarps);
  config.stream = stream;
  config.attrs = attributes;
  if (cluster > 1) {
    attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
    attributes[config.numAttrs].val.clusterDim = {cluster, 1, 1};
    ++config.numAttrs;
  }
  if (params.early_start != 0) {
    attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[config.numAttrs].val.programmaticStreamSerializationAllowed = 1;
    ++config.numAttrs;
  }
  if (params.tokens == 1) {
    return cudaLaunchKernelEx(&config, SplitKernel<X, S, kWarps, kGroups, 1, kMinBlocks>, params);
  }
  return cudaLaunchKernelEx(&config, SplitKernel<X, S, kWarps, kGroups, kMaxDecodeTokens, 1>,
                            params);
}

}  // namespace gdn::cuda::decode128

#endif  // KERNELS_CUDA_FUSED_DECODE_SPLIT_CUH_
