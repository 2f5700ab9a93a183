// The backward of the delta rule and of GDN2 for any shape and type, token by token in FP32.
//
// A block takes a sequence's value head and its states kTile rows at a time, four rows a warp, a
// lane every 32nd column of them. The rows do not see each other. Forward over the sequence, which
// leaves the states at the chunks' starts; then chunk by chunk from the last one: its states again,
// and down its tokens. What sums over the rows is summed over a warp's rows, then over the warps,
// then over the tiles, in this order, into one vector per token and value head (`partials`);
// rule_backward_keys.cuh sums those over the heads.
#ifndef KERNELS_CUDA_RULE_BACKWARD_WALK_CUH_
#define KERNELS_CUDA_RULE_BACKWARD_WALK_CUH_

#include <cstdint>

#include "kernels/cuda/chunk_slots.cuh"
#include "kernels/cuda/element.cuh"
#include "kernels/cuda/math.cuh"

namespace gdn::cuda::walk {

using chunk::ChunkSlot;
using chunk::ChunkSlots;
using chunk::kChunk;

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kRows = 4;  // Of a warp.
constexpr int kTile = kWarps * kRows;
constexpr int kMaxBlocks = 264;  // Bounds the scratch; two on each of 132 multiprocessors.

// A block's place in the workspace. Sizes in floats.
struct Scratch {
  float* checkpoints;  // [slot][HV][kTile][K], states at the chunks' starts.
  float* states;       // [block][kChunk][kTile][K], states before each token of a chunk.
  float* partials;     // [vectors][T][HV][K].
};
template <typename Args>
int64_t CheckpointSize(const Args& a) {
  return ChunkSlots(a.tokens, a.sequences) * a.value_heads * kTile * a.key_dim;
}
template <typename Args>
int64_t Blocks(const Args& a) {
  const int64_t units = a.sequences * a.value_heads;
  return units < kMaxBlocks ? units : kMaxBlocks;
}
template <typename Args>
int64_t StatesSize(const Args& a) {
  return Blocks(a) * kChunk * kTile * a.key_dim;
}
template <typename Args>
__host__ __device__ int64_t PartialSize(const Args& a) {
  return a.tokens * a.value_heads * a.key_dim;
}
template <typename Args>
size_t WorkspaceBytes(const Args& a, int vectors) {
  return static_cast<size_t>(CheckpointSize(a) + StatesSize(a) + vectors * PartialSize(a)) *
         sizeof(float);
}
template <typename Args>
Scratch LayOut(const Args& a, void* workspace) {
  Scratch s;
  s.checkpoints = static_cast<float*>(workspace);
  s.states = s.checkpoints + CheckpointSize(a);
  s.partials = s.states + StatesSize(a);
  return s;
}

// Rule: Params { args, scale, ratio, scratch }; kVectors and kScalars, what a token sums over rows;
// Token<kPerLane>, a token's inputs and its step forward and backward of one row.
template <typename Rule, int kPerLane>
class Walk {
 public:
  using Params = typename Rule::Params;
  using Token = typename Rule::template Token<kPerLane>;
  using Sums = typename Rule::template Sums<kPerLane>;

  __device__ Walk(const Params& p, int64_t unit)
      : p_(p),
        n_(unit / p.args.value_heads),
        head_(unit % p.args.value_heads),
        begin_(p.args.cu_seqlens[n_]),
        length_(p.args.cu_seqlens[n_ + 1] - begin_),
        K_(static_cast<int>(p.args.key_dim)),
        V_(static_cast<int>(p.args.value_dim)),
        lane_(static_cast<int>(threadIdx.x) % 32),
        warp_(static_cast<int>(threadIdx.x) / 32) {}

  __device__ void Run() {
    for (first_ = 0; first_ < V_; first_ += kTile) Tile();
  }

 private:
  using Rows = float[kRows][kPerLane];

  __device__ int Row(int r) const { return first_ + warp_ * kRows + r; }
  __device__ bool Inside(int r, int c) const { return Row(r) < V_ && lane_ + 32 * c < K_; }

  // The warp's rows of a tile in the workspace, or of a head's state in memory.
  __device__ void Load(const float* tile, Rows& s) const {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int c = 0; c < kPerLane; ++c) {
        s[r][c] = tile != nullptr && Inside(r, c)
                      ? tile[(warp_ * kRows + r) * int64_t{K_} + lane_ + 32 * c]
                      : 0.0f;
      }
    }
  }
  __device__ void Store(const Rows& s, float* tile) const {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int c = 0; c < kPerLane; ++c) {
        if (Inside(r, c)) tile[(warp_ * kRows + r) * int64_t{K_} + lane_ + 32 * c] = s[r][c];
      }
    }
  }
  // This tile in [N, HV, V, K] states.
  template <typename T>
  __device__ T* InStates(T* states) const {
    if (states == nullptr) return nullptr;
    return states + ((n_ * p_.args.value_heads + head_) * V_ + first_) * int64_t{K_};
  }
  __device__ float* Checkpoint(int chunk) const {
    const int64_t slot = ChunkSlot(begin_, n_, chunk);
    return p_.scratch.checkpoints + (slot * p_.args.value_heads + head_) * kTile * K_;
  }
  __device__ float* StateBefore(int i) const {
    return p_.scratch.states + (int64_t{blockIdx.x} * kChunk + i) * kTile * K_;
  }

  __device__ void Forward(const Token& token, Rows& s, float (&error)[kRows]) const {
#pragma unroll
    for (int r = 0; r < kRows; ++r) error[r] = token.Forward(Row(r), V_, s[r]);
  }

  __device__ void Tile() {
    const int chunks = static_cast<int>((length_ + kChunk - 1) / kChunk);
    Rows s;
    float error[kRows];
    Load(InStates(p_.args.initial_state), s);
    for (int chunk = 0; chunk < chunks; ++chunk) {
      Store(s, Checkpoint(chunk));
      if (chunk + 1 == chunks) break;
      for (int i = 0; i < kChunk; ++i) {
        Forward(Token(p_, begin_ + chunk * kChunk + i, head_, lane_), s, error);
      }
    }
    Rows d_s;
    Load(InStates(p_.args.d_final_state), d_s);
    for (int chunk = chunks - 1; chunk >= 0; --chunk) Chunk(chunk, d_s);
    if (p_.args.d_initial_state != nullptr) Store(d_s, InStates(p_.args.d_initial_state));
  }

  __device__ void Chunk(int chunk, Rows& d_s) {
    __shared__ float errors[kChunk][kTile];
    const int64_t first = begin_ + int64_t{chunk} * kChunk;
    const int64_t left = length_ - int64_t{chunk} * kChunk;
    const int count = static_cast<int>(left < kChunk ? left : kChunk);
    {
      Rows s;
      float error[kRows];
      Load(Checkpoint(chunk), s);
      for (int i = 0; i < count; ++i) {
        Store(s, StateBefore(i));
        Forward(Token(p_, first + i, head_, lane_), s, error);
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          if (lane_ == r) errors[i][warp_ * kRows + r] = error[r];
        }
      }
      __syncwarp();
    }
    for (int i = count - 1; i >= 0; --i) {
      const Token token(p_, first + i, head_, lane_);
      Rows before;
      Load(StateBefore(i), before);
      Sums sums;
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        token.Backward(Row(r), V_, errors[i][warp_ * kRows + r], before[r], d_s[r], &sums);
      }
      AddToPartials(first + i, token, sums);
    }
    __syncwarp();  // The next chunk's errors take their place.
  }

  // Sums over the warps, then over the tiles so far.
  __device__ void AddToPartials(int64_t t, const Token& token, const Sums& sums) {
    constexpr int kColumns = 32 * kPerLane;
    __shared__ float vectors[Rule::kVectors][kWarps][kColumns];
    __shared__ float scalars[Rule::kScalars > 0 ? Rule::kScalars : 1][kWarps];
#pragma unroll
    for (int x = 0; x < Rule::kVectors; ++x) {
#pragma unroll
      for (int c = 0; c < kPerLane; ++c) vectors[x][warp_][lane_ + 32 * c] = sums.vector[x][c];
    }
    if constexpr (Rule::kScalars > 0) {
#pragma unroll
      for (int x = 0; x < Rule::kScalars; ++x) {
        const float sum = LaneSum(sums.scalar[x]);
        if (lane_ == 0) scalars[x][warp_] = sum;
      }
    }
    __syncthreads();
    for (int i = static_cast<int>(threadIdx.x); i < Rule::kVectors * kColumns; i += kThreads) {
      const int x = i / kColumns;
      const int column = i % kColumns;
      if (column >= K_) continue;
      float* const to = p_.scratch.partials + x * PartialSize(p_.args) +
                        (t * p_.args.value_heads + head_) * K_ + column;
      float sum = first_ > 0 ? *to : 0.0f;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) sum += vectors[x][w][column];
      *to = sum;
    }
    if constexpr (Rule::kScalars > 0) {
      if (threadIdx.x < Rule::kScalars) {
        const int x = static_cast<int>(threadIdx.x);
        float sum = 0.0f;
#pragma unroll
        for (int w = 0; w < kWarps; ++w) sum += scalars[x][w];
        Rule::AddScalar(p_, x, t * p_.args.value_heads + head_, first_ == 0, token, sum);
      }
    }
    __syncthreads();
  }

  const Params& p_;
  const int64_t n_;
  const int64_t head_;
  const int64_t begin_;
  const int64_t length_;
  const int K_;
  const int V_;
  const int lane_;
  const int warp_;
  int first_ = 0;  // Row of the tile.
};

template <typename Rule, int kPerLane>
__global__ void __launch_bounds__(kThreads)
    Kernel(const __grid_constant__ typename Rule::Params p) {
  const int64_t units = p.args.sequences * p.args.value_heads;
  for (int64_t unit = blockIdx.x; unit < units; unit += gridDim.x) {
    Walk<Rule, kPerLane>(p, unit).Run();
  }
}

template <typename Rule>
void Launch(const typename Rule::Params& params, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(Blocks(params.args));
  if (params.args.key_dim <= 128) {
    Kernel<Rule, 4><<<blocks, kThreads, 0, stream>>>(params);
  } else {
    Kernel<Rule, 8><<<blocks, kThreads, 0, stream>>>(params);
  }
}

// A lane's part of a vector of K, zeros beyond it.
template <int kPerLane>
__device__ inline void LoadLanes(const void* data, gdn_dtype dtype, int64_t offset, int K, int lane,
                                 float (&out)[kPerLane]) {
#pragma unroll
  for (int c = 0; c < kPerLane; ++c) {
    const int i = lane + 32 * c;
    out[c] = i < K ? LoadAs(data, dtype, offset + i) : 0.0f;
  }
}

}  // namespace gdn::cuda::walk

#endif  // KERNELS_CUDA_RULE_BACKWARD_WALK_CUH_
