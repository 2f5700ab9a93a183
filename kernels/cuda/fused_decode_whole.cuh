// The fused decode step for K = V = 128, W = 4 and one token at larger batches: bound by memory.
//
// A block works for one value head of one batch row. All of the head's state is asked for before
// anything is computed: the last kSharedGroups of each warp's groups of eight rows by bulk copies
// into shared memory, which needs sm_90, the others into registers. A barrier divides these loads
// from the stores, since the memory prefers long runs of either. Blocks are many and small, so that
// the device hands them out evenly and the last ones end together.
//
// The first blocks on the device get x all at once, when the kernel before has finished, and then
// compute all at once, while nothing is asked of the memory. With kAhead each of them then brings
// half a head of those that come next to the L2 (of whole heads, or asked for before x is final,
// much would be read twice), and later blocks let the next kernel start at once. BF16 heads gain
// from it; FP32 heads do where decode steps follow each other, but lose 1 % between the products of
// an engine's step.
//
// What all warps need is prepared by few threads and shared: q, k and v pass the convolution in
// pairs of channels, one thread computes the gates, and o leaves in pairs. Small requests and
// instructions are as scarce as bytes here.
//
// The r = HV/H blocks of a key head form a cluster, for the columns of q and k in the convolution
// state, as in fused_decode_split.cuh. The order of every sum is that of the other kernels, and so
// are the bits.
#ifndef KERNELS_CUDA_FUSED_DECODE_WHOLE_CUH_
#define KERNELS_CUDA_FUSED_DECODE_WHOLE_CUH_

#include <algorithm>

#include "kernels/cuda/async_copy.cuh"
#include "kernels/cuda/bulk_copy.cuh"
#include "kernels/cuda/cluster.cuh"
#include "kernels/cuda/decode_step.cuh"
#include "kernels/cuda/launch.h"

namespace gdn::cuda::decode128 {

// Two neighbouring channels of the convolution.
template <typename X>
struct ChannelPair {
  using Raw = typename Pair<X>::Raw;

  int32_t channel;
  int32_t column;
  Raw taps[kTaps];
  Raw x;
  float4 weight[2];

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
  __device__ void LoadWeight(const float* weights) {
    weight[0] = reinterpret_cast<const float4*>(weights)[channel];
    weight[1] = reinterpret_cast<const float4*>(weights)[channel + 1];
  }
};

// Shared memory of a multiprocessor of sm_90, and less than a block has besides its tiles.
constexpr size_t kMultiprocessorShared = 228 * 1024;
constexpr size_t kOtherShared = 3 * 1024;

// kBlocks: how many of them run on a multiprocessor at once. With four BF16 tiles there its memory
// has enough to do; more would only wait for each other.
template <typename X, typename S, int kWarps, int kGroups, int kBlocks, int kSharedGroups,
          bool kAhead>
__global__ void __launch_bounds__(32 * kWarps, kBlocks)
    WholeKernel(const __grid_constant__ DecodeParams p) {
  using Tile = SplitTile<S>;
  using Raw = typename Piece<S>::Raw;
  using PairRaw = typename Pair<X>::Raw;
  static_assert(kWarps * kGroups == kPartials);
  constexpr bool kShared = kSharedGroups > 0;
  constexpr int kRegGroups = kGroups - kSharedGroups;
  constexpr int kGroupBytes = kTileRows * kDim * sizeof(S);
  constexpr int kGroupPieces = Tile::kAccesses * 32;  // Of 16 bytes.
  constexpr int kVec = Piece<S>::kVec;
  constexpr int kThreads = 32 * kWarps;
  // Pairs of q|k: threads [0, 128). Of v and of the output: the threads after those, or, where
  // there are none, the two halves again.
  constexpr int kPairs = kThreads == kDim ? 2 : 1;
  constexpr int kFirstV = kPairs == 2 ? 0 : kDim;
  constexpr int kFirstOut = kFirstV + kDim / 2;

  __shared__ alignas(16) float qk[2 * kDim];
  __shared__ alignas(16) float v[kDim];
  __shared__ alignas(16) float outputs[kDim];
  __shared__ alignas(16) float squares[kPartials];
  __shared__ float2 gates;
  __shared__ ArrivalBarrier arrived[kShared ? kWarps * kSharedGroups : 1];
  extern __shared__ __align__(128) char tile[];

  asm volatile("" ::"l"(p.read_index), "l"(p.conv_weight), "l"(p.norm_weight), "f"(p.eps));
  if constexpr (kShared) {
    if (threadIdx.x % 32 == 0) {
#pragma unroll
      for (int g = 0; g < kSharedGroups; ++g) {
        arrived[threadIdx.x / 32 * kSharedGroups + g].Init();
      }
      ArrivalBarrier::FenceInit();
    }
    __syncwarp();
  }
  const int64_t row = blockIdx.y + blockIdx.z * kMaxGridY;
  if (row >= p.rows) return;
  if (kAhead && p.early_start != 0 && row >= p.first_rows) {  // The kernel before has finished.
    WaitForPreviousKernel();
    AllowNextKernel();
  }
  const int64_t read = p.read_index[row];
  const int64_t write = p.write_index[row];
  const uint8_t fresh = p.fresh != nullptr ? p.fresh[row] : uint8_t{0};
  int64_t next_read = -1;  // The slot of the row that this block's place comes to next.
  if (kAhead && row < p.first_rows && threadIdx.x == 0) {
    const int64_t next = row + p.first_rows;
    if (next < p.rows && (p.fresh == nullptr || p.fresh[next] == 0) && p.write_index[next] >= 0) {
      next_read = p.read_index[next];
    }
  }

  const bool early = p.early_start != 0;
  const int tid = static_cast<int>(threadIdx.x);
  const int lane = tid % 32;
  const int warp = tid / 32;
  const int rank = static_cast<int>(ClusterRank());
  const int key_head = static_cast<int>(ClusterX());
  const int head = key_head * p.ratio + rank;
  const int keys = static_cast<int>(p.key_heads) * kDim;
  const bool is_qk = tid < kDim;
  const bool is_v = tid >= kFirstV && tid < kFirstV + kDim / 2;
  const bool is_out = tid >= kFirstOut && tid < kFirstOut + kDim / 2;
  const int out = 2 * (tid - kFirstOut);

  ChannelPair<X> pairs[kPairs];
  const auto has_pair = [&](int i) { return kPairs == 2 ? (i == 0 || is_v) : is_qk || is_v; };
  const auto is_v_pair = [&](int i) { return kPairs == 2 ? i == 1 : !is_qk; };
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    const bool is_key = tid >= kDim / 2;
    const int in_part =
        is_v_pair(i) ? head * kDim + 2 * (tid - kFirstV) : key_head * kDim + 2 * (tid % (kDim / 2));
    pairs[i].channel = in_part + (is_v_pair(i) ? 2 * keys : is_key ? keys : 0);
    pairs[i].column = in_part + (is_v_pair(i) ? p.v_offset : is_key ? p.k_offset : p.q_offset);
  }
  const X* const x = static_cast<const X*>(p.x) + row * p.x_token_stride;
  PairRaw z;
  X a_x;
  X b_x;
  const auto load_x = [&] {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      if (has_pair(i)) pairs[i].x = *reinterpret_cast<const PairRaw*>(x + pairs[i].column);
    }
    if (is_out) {
      z = *reinterpret_cast<const PairRaw*>(x + p.z_offset + head * kDim + out);
      a_x = x[p.a_offset + head];
      b_x = x[p.b_offset + head];
    }
  };
  if (!early) load_x();

  const auto prefetch_next = [&] {
    if (next_read < 0) return;
    PrefetchBulk(static_cast<const S*>(p.state) + next_read * p.state_slot_stride +
                     int64_t{head} * (kDim * kDim),
                 kDim * kDim * sizeof(S) / 2);
  };

  X* const y = static_cast<X*>(p.y) + row * p.y_token_stride + head * kDim + out;
  if (read < 0 || write < 0) {  // The same for the whole cluster.
    if (early && (!kAhead || row < p.first_rows)) {
      WaitForPreviousKernel();
      AllowNextKernel();
    }
    if (is_out) *reinterpret_cast<PairRaw*>(y) = Pair<X>::Zero();
    return;
  }

  // The warp's rows, and this lane's part of them.
  const int64_t warp_offset = int64_t{head} * (kDim * kDim) + warp * kGroups * (kTileRows * kDim);
  const int64_t lane_offset = warp_offset + Tile::FirstRow(lane) * kDim + Tile::Column(lane);
  Raw raw[kRegGroups > 0 ? kRegGroups : 1][Tile::kAccesses];
  char* const own_tile = tile + warp * kSharedGroups * kGroupBytes;
  if (fresh != 0) {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) pairs[i].ZeroTaps();
    if constexpr (kShared) {
      for (int i = lane; i < kSharedGroups * kGroupPieces; i += 32) {
        reinterpret_cast<Raw*>(own_tile)[i] = Piece<S>::Zero();
      }
      __syncwarp();
      if (lane < kSharedGroups) arrived[warp * kSharedGroups + lane].Arrive();
    }
#pragma unroll
    for (int g = 0; g < kRegGroups; ++g) {
#pragma unroll
      for (int i = 0; i < Tile::kAccesses; ++i) raw[g][i] = Piece<S>::Zero();
    }
  } else {
    const S* const state = static_cast<const S*>(p.state) + read * p.state_slot_stride;
    if constexpr (kShared) {
      if (lane == 0) {
#pragma unroll
        for (int g = 0; g < kSharedGroups; ++g) {
          ArrivalBarrier& barrier = arrived[warp * kSharedGroups + g];
          barrier.ArriveExpecting(kGroupBytes);
          BulkLoad(own_tile + g * kGroupBytes,
                   state + warp_offset + (kRegGroups + g) * (kTileRows * kDim), kGroupBytes,
                   &barrier);
        }
      }
    }
    const X* conv = static_cast<const X*>(p.conv_state) + read * p.conv_slot_stride;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      if (has_pair(i)) pairs[i].LoadTaps(conv, p.channels);
    }
#pragma unroll
    for (int g = 0; g < kRegGroups; ++g) {
#pragma unroll
      for (int i = 0; i < Tile::kAccesses; ++i) {
        raw[g][i] = *reinterpret_cast<const Raw*>(state + lane_offset +
                                                  (g * kTileRows + i * Tile::kAccessRows) * kDim);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    if (has_pair(i)) pairs[i].LoadWeight(p.conv_weight);
  }
  float2 norm_weight;
  float a_log;
  float dt_bias;
  if (is_out) {
    norm_weight = *reinterpret_cast<const float2*>(p.norm_weight + out);
    a_log = p.a_log[head];
    dt_bias = p.dt_bias[head];
  }
  if (early) {
    if (row < p.first_rows) {
      // x is not final yet, but its lines may come to the L2, where all writes meet.
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        if (has_pair(i)) PrefetchToL2(x + pairs[i].column);
      }
      if (is_out) PrefetchToL2(x + p.z_offset + head * kDim + out);
      if (tid == kFirstOut) {
        PrefetchToL2(x + p.a_offset + head);
        PrefetchToL2(x + p.b_offset + head);
      }
    }
    if (!kAhead || row < p.first_rows) {
      WaitForPreviousKernel();
      AllowNextKernel();
    }
    // In one place for all blocks: from branches of its own the compiler let x wait for the taps.
    prefetch_next();
    load_x();
  } else {
    prefetch_next();
  }

#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    if (has_pair(i)) {
      float* const to = is_v_pair(i) ? &v[2 * (tid - kFirstV)] : &qk[2 * tid];
      *reinterpret_cast<float2*>(to) =
          ConvolvePair<X>(pairs[i].taps, pairs[i].x, pairs[i].weight[0], pairs[i].weight[1]);
    }
  }
  if (tid == kFirstOut) {
    gates = make_float2(expf(LogDecay(Widen(a_x), dt_bias, a_log)),
                        WriteStrength(Widen(b_x), p.beta_scale));
  }
  __syncthreads();
  const bool in_cluster = p.ratio > 1;
  if (in_cluster) ClusterArrive();  // This block has used the q and k columns.

  {
    float q[kVec];
    float k[kVec];
    float qq = 0.0f;
    float kk = 0.0f;
    float kq = 0.0f;
#pragma unroll
    for (int i = 0; i < kVec; i += 4) {
      const float* const from = &qk[Tile::Column(lane) + i];
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
    const float decay = gates.x;
    const float beta = gates.y;
    S* const state = static_cast<S*>(p.state) + write * p.state_slot_stride + lane_offset;
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const int shared_group = g - kRegGroups;
      if (shared_group >= 0) arrived[warp * kSharedGroups + shared_group].Wait(0);
      float held[Tile::kAccesses][kVec];
      float with_k[Tile::kAccesses];
      float with_q[Tile::kAccesses];
#pragma unroll
      for (int i = 0; i < Tile::kAccesses; ++i) {
        if (shared_group >= 0) {
          const int piece = shared_group * kGroupPieces + i * 32 + lane;
          Piece<S>::Unpack(reinterpret_cast<const Raw*>(own_tile)[piece], held[i]);
        } else {
          Piece<S>::Unpack(raw[g][i], held[i]);
        }
        with_k[i] = 0.0f;
        with_q[i] = 0.0f;
#pragma unroll
        for (int c = 0; c < kVec; ++c) {
          with_k[i] = fmaf(held[i][c], k[c], with_k[i]);
          with_q[i] = fmaf(held[i][c], q[c], with_q[i]);
        }
      }
      const float2 sums = ReduceRows<S>(with_k, with_q, lane);
      const int own_row = (warp * kGroups + g) * kTileRows + Tile::OwnRow(lane);
      const RowStep step = StepRow(factors, decay, beta, v[own_row], sums.x, sums.y);
      const float o = p.round_o != 0 ? RoundTo<X>(step.o) : step.o;
      const float sum = Tile::SumRows(o * o);
      if (IsRowWriter(lane)) outputs[own_row] = o;
      if (lane == 0) squares[warp * kGroups + g] = sum;
#pragma unroll
      for (int i = 0; i < Tile::kAccesses; ++i) {
        const float row_uk = __shfl_sync(kFullMask, step.uk, Tile::Owner(i, lane));
#pragma unroll
        for (int c = 0; c < kVec; ++c) {
          held[i][c] = UpdateElement(held[i][c], k[c], decay, row_uk);
        }
        *reinterpret_cast<Raw*>(state + (g * kTileRows + i * Tile::kAccessRows) * kDim) =
            Piece<S>::Pack(held[i]);
      }
    }
  }

  X* const conv = static_cast<X*>(p.conv_state) + write * p.conv_slot_stride;
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    if (has_pair(i) && (is_v_pair(i) || !in_cluster)) pairs[i].StoreTaps(conv, p.channels);
  }
  __syncthreads();
  if (is_out) {
    const float rstd = InverseRms(squares, p.eps);
    const float2 o = *reinterpret_cast<const float2*>(&outputs[out]);
    const float2 gate = Pair<X>::Widen(z);
    PairRaw pair;
    pair.x = NormaliseAndGate<X>(p, o.x, rstd, NormWeight(p, norm_weight.x), gate.x);
    pair.y = NormaliseAndGate<X>(p, o.y, rstd, NormWeight(p, norm_weight.y), gate.y);
    *reinterpret_cast<PairRaw*>(y) = pair;
  }
  if (in_cluster && rank == 0) {
    ClusterWait();  // Nobody needs the old columns any more.
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      if (has_pair(i) && !is_v_pair(i)) pairs[i].StoreTaps(conv, p.channels);
    }
  }
}

template <typename X, typename S, int kWarps, int kGroups, int kBlocks, int kSharedGroups,
          bool kAhead>
cudaError_t LaunchWhole(DecodeParams params, cudaStream_t stream) {
  const uint32_t heads = params.key_heads * params.ratio;
  params.first_rows = (params.multiprocessors * kBlocks + heads - 1) / heads;
  const int64_t rows = params.rows;
  cudaLaunchAttribute attributes[2];
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(heads, static_cast<unsigned>(std::min(rows, kMaxGridY)),
                        static_cast<unsigned>((rows + kMaxGridY - 1) / kMaxGridY));
  config.blockDim = dim3(32 * kWarps);
  config.stream = stream;
  config.attrs = attributes;
  if (params.ratio > 1) {
    attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
    attributes[config.numAttrs].val.clusterDim = {static_cast<unsigned>(params.ratio), 1, 1};
    ++config.numAttrs;
  }
  if (params.early_start != 0) {
    attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[config.numAttrs].val.programmaticStreamSerializationAllowed = 1;
    ++config.numAttrs;
  }
  constexpr auto kKernel = WholeKernel<X, S, kWarps, kGroups, kBlocks, kSharedGroups, kAhead>;
  if constexpr (kSharedGroups > 0) {
    constexpr size_t kTileBytes = kWarps * kSharedGroups * kTileRows * kDim * sizeof(S);
    // Where registers do not keep a further block away, what a block asks for does.
    constexpr size_t kShare = kMultiprocessorShared / (kBlocks + 1) - kOtherShared;
    config.dynamicSmemBytes = kSharedGroups == kGroups ? std::max(kTileBytes, kShare) : kTileBytes;
    const cudaError_t error =
        AllowSharedMemory<kKernel>(config.dynamicSmemBytes, kSharedGroups == kGroups);
    if (error != cudaSuccess) return error;
  }
  return cudaLaunchKernelEx(&config, kKernel, params);
}

}  // namespace gdn::cuda::decode128

#endif  // KERNELS_CUDA_FUSED_DECODE_WHOLE_CUH_
