// The fused decode step for K = V = 128, W = 4 and one token at larger batches, where one wave of
// these blocks takes all the work: their copies run further ahead than those of whole heads
// (fused_decode_whole.cuh), but more waves would end raggedly.
//
// A block works for one key head of one or two batch rows; a row's r = HV/H value heads are its
// tiles, 128x128 of state each. What belongs to a key head of a row belongs to one block, so no
// other block reads or writes its columns of the convolution state, and the norm's sum stays within
// the block: no cluster is needed.
//
// State passes through a ring of 4 KiB places that each warp has for itself: neighbouring rows of a
// tile, brought by one bulk copy and taken back by another, for which only this warp waits. A place
// is filled again one part after it was emptied, when its bytes have long left. FP32 tiles are two
// parts of the ring, BF16 tiles one. Projections, convolution states and weights come ahead of
// their tile too.
//
// Requests to the L2 are as scarce as bytes: small stores are gathered into whole lines.
//
// Per tile: [for each part: state arrives; sums, update, store; the copies of a later part start]
// barrier [norm and output; beside it, convolution and gates of the next tile] barrier. The
// arithmetic and its order are those of state_tile.cuh and decode_step.cuh.
#ifndef KERNELS_CUDA_FUSED_DECODE_STREAM_CUH_
#define KERNELS_CUDA_FUSED_DECODE_STREAM_CUH_

#include <algorithm>
#include <cstdint>

#include "kernels/cuda/async_copy.cuh"
#include "kernels/cuda/bulk_copy.cuh"
#include "kernels/cuda/cluster.cuh"
#include "kernels/cuda/decode_step.cuh"
#include "kernels/cuda/launch.h"

namespace gdn::cuda::decode128 {

constexpr int kQkThreads = kDim;       // Threads [0, 128): a pair of q|k each.
constexpr int kVThreads = kDim / 2;    // [128, 192): a pair of v.
constexpr int kOutThreads = kDim / 2;  // [192, 256): a pair of z and of y.

// What a tile needs besides its state and the weights. Pairs of channels: q 64, k 64, v 64.
struct TileInputs {
  alignas(16) float4 v_weight[kDim];
  uint32_t taps[kTaps][kQkThreads + kVThreads];
  uint32_t x[kQkThreads + kVThreads];
  uint32_t z[kOutThreads];
  uint32_t a;  // The aligned word that holds the element.
  uint32_t b;
  float a_log;
  float dt_bias;
  int64_t row;  // -1: there is no further tile.
  int64_t write;
  int32_t in_key_head;  // Which of the r value heads.
};

constexpr int kStreamWarps = 8;
constexpr int kStreamThreads = 32 * kStreamWarps;
static_assert(kStreamThreads == kQkThreads + kVThreads + kOutThreads);
constexpr int kPlaces = 3;  // Of the ring.
constexpr int kPlaceBytes = 4096;

template <typename S>
struct StreamShared {
  alignas(128) char state[kStreamWarps][kPlaces][kPlaceBytes];
  float qk[2 * kDim];  // In the order of QkPlace.
  float v[kDim];
  float o[kDim];
  float squares[kPartials];
  TileInputs inputs[2];
  ArrivalBarrier arrived[kStreamWarps][kPlaces];
  float decay;
  float beta;
  alignas(16) float4 qk_weight[2 * kDim];
};

// Place of channel c of q or k in shared memory. A lane takes kVec neighbours in pieces of four;
// for kVec 8 all first pieces come before all second ones, so that eight lanes hit different banks.
template <typename S>
__device__ inline int QkPlace(int c) {
  if constexpr (Piece<S>::kVec == 4) return c;
  return (c & 4) << 4 | (c >> 3) << 2 | (c & 3);
}

// One token per row.
template <typename X, typename S>
class Streamer {
 public:
  using Layout = StreamTile<S>;
  using Raw = typename Piece<S>::Raw;
  using PairRaw = typename Pair<X>::Raw;
  using Shared = StreamShared<S>;
  static constexpr int kPlaceRows = kPlaceBytes / (kDim * static_cast<int>(sizeof(S)));
  static constexpr int kGroups = kPlaceRows / kTileRows;
  static constexpr int kParts = kDim / (kStreamWarps * kPlaceRows);

  // The tile in work, once its inputs are used up.
  struct Tile {
    int64_t row;
    int64_t write;
    int head;
    uint32_t z;  // Of the output threads.
  };

  __device__ Streamer(const DecodeParams& params, Shared& shared)
      : p(params),
        s(shared),
        tid(static_cast<int>(threadIdx.x)),
        lane(tid % 32),
        warp(tid / 32),
        key_head(static_cast<int>(blockIdx.x)),
        keys(static_cast<int>(params.key_heads) * kDim) {}

  __device__ void Run() {
    if (lane == 0) {
#pragma unroll
      for (int i = 0; i < kPlaces; ++i) s.arrived[warp][i].Init();
      ArrivalBarrier::FenceInit();
    }
    __syncwarp();
    next_row = blockIdx.y;
    PeekIndices();
    Enter();
    // Before the kernel ahead has finished: everything but x. What follows comes after the wait.
    StartState();
    StartTaps();
    StartQkWeights();
    if (p.early_start != 0) {
      WaitForPreviousKernel();
      AllowNextKernel();
    }
    StartX();
    Advance();
    CommitCopies();
#pragma unroll
    for (int i = 1; i < kPlaces - 1; ++i) Prefetch();
    if (IsOut()) norm_weight = reinterpret_cast<const float2*>(p.norm_weight)[OutPair()];

    WaitForCopies<kPlaces - 2>();
    __syncthreads();
    if (s.inputs[0].row >= 0) {
      Tile tile = Prepare(s.inputs[0]);
      __syncthreads();
      for (uint32_t next = 1;; next ^= 1) {
        Work(tile);
        WaitForCopies<kPlaces - 3>();
        __syncthreads();  // o is there; so are the next inputs; q, k and v are free.
        if (IsOut()) Output(tile);
        if (s.inputs[next].row < 0) break;
        tile = Prepare(s.inputs[next]);
        Prefetch();
        __syncthreads();  // q, k, v and the gates are there.
      }
    }
    // Shared memory must outlive the stores that read it.
    if (lane == 0) WaitForBulkReads<0>();
  }

 private:
  // Starts loading the indices of next_row, for a later Enter().
  __device__ void PeekIndices() {
    if (next_row >= p.rows) return;
    next_read = p.read_index[next_row];
    next_write = p.write_index[next_row];
    next_fresh = p.fresh != nullptr ? p.fresh[next_row] : uint8_t{0};
  }

  // Makes next_row the current one, or the first after it that is no padding; pads those between.
  __device__ void Enter() {
    in_key_head = 0;
    part = 0;
    for (;;) {
      row = next_row;
      if (row >= p.rows) return;
      read = next_read;
      write = next_write;
      fresh = next_fresh;
      next_row += gridDim.y;
      PeekIndices();
      if (read >= 0 && write >= 0) return;
      if (p.early_start != 0) WaitForPreviousKernel();
      const int count = p.ratio * kDim;
      X* const y = static_cast<X*>(p.y) + row * p.y_token_stride + int64_t{key_head} * count;
      for (int i = tid; i < count; i += kStreamThreads) y[i] = Narrow<X>(0.0f);
    }
  }

  __device__ void Advance() {
    fill_place = fill_place + 1 == kPlaces ? 0 : fill_place + 1;
    if (row >= p.rows || ++part < kParts) return;
    part = 0;
    fill_inputs ^= 1;
    if (++in_key_head >= p.ratio) Enter();
  }

  __device__ int Head() const { return key_head * p.ratio + in_key_head; }
  // The pair's first channel within q, k or v.
  __device__ int InPart() const {
    return tid < kQkThreads ? key_head * kDim + 2 * (tid % (kDim / 2))
                            : Head() * kDim + 2 * (tid - kQkThreads);
  }
  __device__ bool IsKey() const { return tid >= kDim / 2; }  // Of the threads for q|k.
  // q and k are copied with the first tile of a row only.
  __device__ bool HasPair() const {
    return tid < kQkThreads ? in_key_head == 0 : tid < kQkThreads + kVThreads;
  }
  __device__ bool IsOut() const { return tid >= kQkThreads + kVThreads; }
  __device__ int OutPair() const { return tid - kQkThreads - kVThreads; }

  // Starts the copy of this warp's rows of the current part.
  __device__ void StartState() {
    if (row >= p.rows) return;
    char* const place = s.state[warp][fill_place];
    ArrivalBarrier& arrived = s.arrived[warp][fill_place];
    // All stores but the last have left their places, and with them the one to be filled.
    if (lane == 0) WaitForBulkReads<1>();
    if (fresh != 0) {
      __syncwarp();
      for (int i = lane; i < kPlaceBytes / 16; i += 32) {
        reinterpret_cast<Raw*>(place)[i] = Piece<S>::Zero();
      }
      __syncwarp();
      if (lane == 0) arrived.Arrive();
    } else if (lane == 0) {
      const S* const from = static_cast<const S*>(p.state) + read * p.state_slot_stride +
                            (int64_t{Head()} * kDim + FirstRow(part)) * kDim;
      arrived.ArriveExpecting(kPlaceBytes);
      BulkLoad(place, from, kPlaceBytes, &arrived);
    }
  }

  // With a tile's first part, the copies of its other inputs: first those besides x.
  __device__ void StartTaps() {
    if (part != 0) return;
    TileInputs& in = s.inputs[fill_inputs];
    if (row >= p.rows) {
      if (tid == 0) in.row = -1;
      return;
    }
    if (tid == 0) {
      in.row = row;
      in.write = write;
      in.in_key_head = in_key_head;
      CopyAsync<4>(&in.a_log, p.a_log + Head());
      CopyAsync<4>(&in.dt_bias, p.dt_bias + Head());
    }
    if (tid < kDim) {
      CopyAsync<16>(&in.v_weight[tid], reinterpret_cast<const float4*>(p.conv_weight) + 2 * keys +
                                           Head() * kDim + tid);
    }
    if (HasPair()) {
      const int channel = InPart() + (tid >= kQkThreads ? 2 * keys : IsKey() ? keys : 0);
      const X* const conv =
          static_cast<const X*>(p.conv_state) + read * p.conv_slot_stride + channel;
#pragma unroll
      for (int j = 0; j < kTaps; ++j) {
        if (fresh != 0) {
          in.taps[j][tid] = 0;
        } else {
          CopyAsync<4>(&in.taps[j][tid], conv + j * p.channels);
        }
      }
    }
  }

  __device__ void StartX() {
    if (part != 0 || row >= p.rows) return;
    TileInputs& in = s.inputs[fill_inputs];
    const X* const x = static_cast<const X*>(p.x) + row * p.x_token_stride;
    if (HasPair()) {
      CopyAsync<4>(&in.x[tid], x + InPart() +
                                   (tid >= kQkThreads ? p.v_offset
                                    : IsKey()         ? p.k_offset
                                                      : p.q_offset));
    }
    if (IsOut()) CopyAsync<4>(&in.z[OutPair()], x + p.z_offset + Head() * kDim + 2 * OutPair());
    // An element of a line may sit in either half of an aligned word.
    if (tid == 0) {
      CopyAsync<4>(&in.a, x + ((p.a_offset + Head()) & ~1));
      CopyAsync<4>(&in.b, x + ((p.b_offset + Head()) & ~1));
    }
  }

  __device__ void Prefetch() {
    StartState();
    StartTaps();
    StartX();
    Advance();
    CommitCopies();
  }

  __device__ void StartQkWeights() {
    CopyAsync<16>(&s.qk_weight[tid], reinterpret_cast<const float4*>(p.conv_weight) +
                                         key_head * kDim + tid + (tid < kDim ? 0 : keys - kDim));
  }

  __device__ static PairRaw AsPair(const uint32_t& word) {
    return *reinterpret_cast<const PairRaw*>(&word);
  }
  __device__ static float Half(const uint32_t& word, int offset) {
    return Widen(reinterpret_cast<const X*>(&word)[offset & 1]);
  }

  // q, k, v and gates of the tile, into shared memory; the new convolution state, into its slot.
  __device__ Tile Prepare(const TileInputs& in) {
    const int head = key_head * p.ratio + in.in_key_head;
    if (tid < kQkThreads + kVThreads && (tid >= kQkThreads || in.in_key_head == 0)) {
      const bool is_v = tid >= kQkThreads;
      const float4* const weight =
          is_v ? &in.v_weight[2 * (tid - kQkThreads)] : &s.qk_weight[2 * tid];
      PairRaw taps[kTaps] = {AsPair(in.taps[0][tid]), AsPair(in.taps[1][tid]),
                             AsPair(in.taps[2][tid])};
      float* const out = is_v ? &s.v[2 * (tid - kQkThreads)]
                              : &s.qk[QkPlace<S>(2 * tid % kDim) + (IsKey() ? kDim : 0)];
      *reinterpret_cast<float2*>(out) =
          ConvolvePair<X>(taps, AsPair(in.x[tid]), weight[0], weight[1]);
      const int channel = is_v ? 2 * keys + head * kDim + 2 * (tid - kQkThreads)
                               : key_head * kDim + 2 * tid + (IsKey() ? keys - kDim : 0);
      X* const conv = static_cast<X*>(p.conv_state) + in.write * p.conv_slot_stride + channel;
#pragma unroll
      for (int j = 0; j < kTaps; ++j) {
        *reinterpret_cast<PairRaw*>(conv + j * p.channels) = taps[j];
      }
    }
    if (tid == 0) {
      const float a = Half(in.a, p.a_offset + head);
      const float b = Half(in.b, p.b_offset + head);
      s.decay = expf(LogDecay(a, in.dt_bias, in.a_log));
      s.beta = WriteStrength(b, p.beta_scale);
    }
    return {in.row, in.write, head, IsOut() ? in.z[OutPair()] : 0u};
  }

  __device__ int FirstRow(int of_part) const {
    return (of_part * kStreamWarps + warp) * kPlaceRows;
  }
  __device__ Raw* At(int g, int i, int piece) const {
    return reinterpret_cast<Raw*>(
        s.state[warp][work_place] +
        ((g * kTileRows + Layout::Row(i, lane)) * kDim + Layout::Column(piece, lane)) *
            static_cast<int>(sizeof(S)));
  }

  // The tile's state; o and the sums of its squares go to shared memory.
  __device__ void Work(const Tile& tile) {
    float q[Layout::kPieces][Layout::kVec];
    float k[Layout::kPieces][Layout::kVec];
    float norms[3];
    {
      float qq[Layout::kPieces] = {};
      float kk[Layout::kPieces] = {};
      float kq[Layout::kPieces] = {};
#pragma unroll
      for (int j = 0; j < Layout::kPieces; ++j) {
#pragma unroll
        for (int c = 0; c < Layout::kVec; c += 4) {
          const float* const from = &s.qk[QkPlace<S>(Layout::Column(j, lane) + c)];
          *reinterpret_cast<float4*>(&q[j][c]) = *reinterpret_cast<const float4*>(from);
          *reinterpret_cast<float4*>(&k[j][c]) = *reinterpret_cast<const float4*>(from + kDim);
        }
#pragma unroll
        for (int c = 0; c < Layout::kVec; ++c) {
          qq[j] = fmaf(q[j][c], q[j][c], qq[j]);
          kk[j] = fmaf(k[j][c], k[j][c], kk[j]);
          kq[j] = fmaf(k[j][c], q[j][c], kq[j]);
        }
      }
      norms[0] = Layout::Combine(qq);
      norms[1] = Layout::Combine(kk);
      norms[2] = Layout::Combine(kq);
#pragma unroll
      for (int bit = 4; bit > 0; bit >>= 1) {
#pragma unroll
        for (float& sum : norms) sum += __shfl_xor_sync(kFullMask, sum, bit);
      }
    }
    const KeyFactors factors = MakeFactors(p, norms[0], norms[1], norms[2]);
    const float decay = s.decay;
    const float beta = s.beta;

#pragma unroll
    for (int of_part = 0; of_part < kParts; ++of_part) {
      s.arrived[warp][work_place].Wait(work_parity);
      float held[kGroups][Layout::kRows][Layout::kPieces][Layout::kVec];
      float sk[kGroups][Layout::kRows];
      float sq[kGroups][Layout::kRows];
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
#pragma unroll
        for (int i = 0; i < Layout::kRows; ++i) {
          float with_k[Layout::kPieces] = {};
          float with_q[Layout::kPieces] = {};
#pragma unroll
          for (int j = 0; j < Layout::kPieces; ++j) {
            Piece<S>::Unpack(*At(g, i, j), held[g][i][j]);
#pragma unroll
            for (int c = 0; c < Layout::kVec; ++c) {
              with_k[j] = fmaf(held[g][i][j][c], k[j][c], with_k[j]);
              with_q[j] = fmaf(held[g][i][j][c], q[j][c], with_q[j]);
            }
          }
          sk[g][i] = Layout::Combine(with_k);
          sq[g][i] = Layout::Combine(with_q);
        }
      }
      // All sums advance together: each level is one exchange's latency, not one per sum.
#pragma unroll
      for (int bit = 4; bit > 0; bit >>= 1) {
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
#pragma unroll
          for (int i = 0; i < Layout::kRows; ++i) {
            sk[g][i] += __shfl_xor_sync(kFullMask, sk[g][i], bit);
            sq[g][i] += __shfl_xor_sync(kFullMask, sq[g][i], bit);
          }
        }
      }
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        float o[Layout::kRows];
#pragma unroll
        for (int i = 0; i < Layout::kRows; ++i) {
          const int tile_row = FirstRow(of_part) + g * kTileRows + Layout::Row(i, lane);
          const RowStep step = StepRow(factors, decay, beta, s.v[tile_row], sk[g][i], sq[g][i]);
          o[i] = p.round_o != 0 ? RoundTo<X>(step.o) : step.o;
          if ((lane & 7) == 0) s.o[tile_row] = o[i];
#pragma unroll
          for (int j = 0; j < Layout::kPieces; ++j) {
#pragma unroll
            for (int c = 0; c < Layout::kVec; ++c) {
              held[g][i][j][c] = UpdateElement(held[g][i][j][c], k[j][c], decay, step.uk);
            }
            *At(g, i, j) = Piece<S>::Pack(held[g][i][j]);
          }
        }
        const float sum = SumOverLanes<8, 16>(o[0] * o[0] + o[1] * o[1]);
        if (lane == 0) s.squares[FirstRow(of_part) / kTileRows + g] = sum;
      }
      FenceForBulk();
      __syncwarp();
      if (lane == 0) {
        S* const to = static_cast<S*>(p.state) + tile.write * p.state_slot_stride +
                      (int64_t{tile.head} * kDim + FirstRow(of_part)) * kDim;
        BulkStore(to, s.state[warp][work_place], kPlaceBytes);
      }
      if (++work_place == kPlaces) {
        work_place = 0;
        work_parity ^= 1;
      }
      // The tile's last part waits for the barrier after it: its prefetch may start a tile, whose
      // inputs take the place of those that were prepared there.
      if (of_part + 1 < kParts) Prefetch();
    }
  }

  __device__ void Output(const Tile& tile) {
    X* const y =
        static_cast<X*>(p.y) + tile.row * p.y_token_stride + tile.head * kDim + 2 * OutPair();
    const float rstd = InverseRms(s.squares, p.eps);
    const float2 o = *reinterpret_cast<const float2*>(&s.o[2 * OutPair()]);
    const float2 gate = Pair<X>::Widen(AsPair(tile.z));
    PairRaw pair;
    pair.x = NormaliseAndGate<X>(p, o.x, rstd, NormWeight(p, norm_weight.x), gate.x);
    pair.y = NormaliseAndGate<X>(p, o.y, rstd, NormWeight(p, norm_weight.y), gate.y);
    *reinterpret_cast<PairRaw*>(y) = pair;
  }

  const DecodeParams& p;
  Shared& s;
  const int tid;
  const int lane;
  const int warp;
  const int key_head;
  const int keys;  // Channels of q, and of k.
  float2 norm_weight = {0.0f, 0.0f};

  // The place of the part in work, and the parity of its arrivals.
  int work_place = 0;
  uint32_t work_parity = 0;

  // The part whose copies are started next, and where to.
  int fill_place = 0;
  uint32_t fill_inputs = 0;
  uint32_t row = 0;
  int32_t in_key_head = 0;
  int32_t part = 0;
  int64_t read = 0;
  int64_t write = 0;
  uint8_t fresh = 0;
  // The row after it, and its indices.
  uint32_t next_row = 0;
  int64_t next_read = 0;
  int64_t next_write = 0;
  uint8_t next_fresh = 0;
};

constexpr int kStreamBlocks = 2;  // Per multiprocessor.

template <typename X, typename S>
__global__ void __launch_bounds__(kStreamThreads, kStreamBlocks)
    StreamKernel(const __grid_constant__ DecodeParams p) {
  extern __shared__ __align__(128) char memory[];
  Streamer<X, S>(p, *reinterpret_cast<StreamShared<S>*>(memory)).Run();
}

template <typename X, typename S>
cudaError_t LaunchStream(const DecodeParams& params, cudaStream_t stream) {
  constexpr auto kKernel = StreamKernel<X, S>;
  const cudaError_t error = AllowSharedMemory<kKernel>(sizeof(StreamShared<S>), true);
  if (error != cudaSuccess) return error;
  // Two tiles or more per block, so that one is on its way while one is worked on; no more than
  // that, since blocks get unequal shares of the bandwidth and the device hands out small ones more
  // evenly.
  const uint32_t blocks = params.ratio > 1 ? params.rows : (params.rows + 1) / 2;
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(params.key_heads, std::min(blocks, static_cast<uint32_t>(kMaxGridY)));
  config.blockDim = dim3(kStreamThreads);
  config.dynamicSmemBytes = sizeof(StreamShared<S>);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = params.early_start != 0 ? 1 : 0;
  return cudaLaunchKernelEx(&config, kKernel, params);
}

}  // namespace gdn::cuda::decode128

#endif  // KERNELS_CUDA_FUSED_DECODE_STREAM_CUH_
