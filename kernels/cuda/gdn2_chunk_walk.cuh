// The second kernel of chunked GDN2: see gdn2_chunk.cuh. A warpgroup keeps 64 value columns of S in
// registers, transposed, as FP32, and walks over the chunks; value columns are independent, so that
// one or two warpgroups in a block give the same bits. One more has the copy engine bring the
// chunks' tiles.
#ifndef KERNELS_CUDA_GDN2_CHUNK_WALK_CUH_
#define KERNELS_CUDA_GDN2_CHUNK_WALK_CUH_

#include "kernels/cuda/delta_rule_chunk_state.cuh"
#include "kernels/cuda/gdn2_chunk.cuh"

namespace gdn::cuda::gdn2 {

// kGroups: warpgroups that walk, in a block.
template <int kGroups>
constexpr int kWalkThreads = (kGroups + 1) * kGroup;

template <int kGroups>
struct WalkShared {
  static constexpr int kStages = kGroups == 1 ? 3 : 2;  // As many as there is room for.
  struct Stage {
    ChunkTile tile;
    uint16_t values[kGroups][kPanelElements];
  };
  Stage stage[kStages];
  ArrivalBarrier full[kStages];   // The tiles have arrived.
  ArrivalBarrier empty[kStages];  // The walkers need them no longer.
};

// A block's work.
struct WalkPlace {
  int64_t sequence;
  int64_t head;
  int64_t begin;  // First token of the sequence.
  int32_t length;
  int32_t panel;  // First one of the head's two panels of value columns.

  template <int kGroups>
  static __device__ WalkPlace Of(const gdn2_args& a) {
    constexpr int kParts = 2 / kGroups;
    const int64_t unit = blockIdx.x / kParts;
    WalkPlace at;
    at.sequence = unit / a.value_heads;
    at.head = unit % a.value_heads;
    at.begin = a.cu_seqlens[at.sequence];
    at.length = static_cast<int32_t>(a.cu_seqlens[at.sequence + 1] - at.begin);
    at.panel = static_cast<int32_t>(blockIdx.x % kParts);
    return at;
  }
  __device__ int Chunks() const { return (length + kChunk - 1) / kChunk; }
};

// Brings the chunks' tiles; by one thread.
template <int kGroups>
__device__ inline void BringTiles(const Params& p, const WalkPlace& at,
                                  WalkShared<kGroups>& shared) {
  using Shared = WalkShared<kGroups>;
  for (int n = 0; n < at.Chunks(); ++n) {
    const int i = n % Shared::kStages;
    const int turn = n / Shared::kStages;
    if (turn > 0) shared.empty[i].Wait((turn - 1) % 2);
    const int64_t slot = ChunkSlot(at.begin, at.sequence, n);
    auto& stage = shared.stage[i];
    shared.full[i].ArriveExpecting(sizeof(stage.tile) + sizeof(stage.values));
    BulkLoad(&stage.tile, p.tiles + slot * p.args.gate_heads + at.head / p.gate_ratio,
             sizeof(stage.tile), &shared.full[i]);
    BulkLoad(stage.values, p.values[slot * p.args.value_heads + at.head][at.panel],
             sizeof(stage.values), &shared.full[i]);
  }
}

template <int kGroups>
class Walker {
 public:
  using Shared = WalkShared<kGroups>;

  // group: of the block's walking warpgroups; thread: of the warpgroup.
  __device__ Walker(const Params& p, const WalkPlace& at, Shared& shared, int group, int thread)
      : a_(p.args), at_(at), shared_(shared), group_(group), thread_(thread) {
    place_.value = thread / 32 * 16 + thread % 32 / 4;
    place_.column = thread % 4 * 2;
  }

  __device__ void Run() {
    const bool fresh = a_.fresh != nullptr && a_.fresh[at_.sequence] != 0;
    float s[64];
    ReadSlot(a_, fresh ? -1 : StateOffset(a_.read_index[at_.sequence]), place_, s);
    float d[32];
    float o[32];
#pragma unroll
    for (int i = 0; i < 32; ++i) d[i] = o[i] = 0.0f;
    const int chunks = at_.Chunks();
    for (int n = 0; n < chunks; ++n) {
      const int i = n % Shared::kStages;
      shared_.full[i].Wait(n / Shared::kStages % 2);
      Chunk(shared_.stage[i], s, d, o);
      StoreOutput(n * kChunk, shared_.stage[i].tile.query, o);
      shared_.empty[i].Arrive();
    }
    WriteSlot(a_, StateOffset(a_.write_index[at_.sequence]), place_, s);
  }

 private:
  __device__ int Panel() const { return at_.panel + group_; }
  __device__ int64_t StateOffset(int64_t slot) const {
    return slot * a_.state_slot_stride + (at_.head * 2 + Panel()) * int64_t{kPanelColumns * kDim};
  }

  // Takes s over a chunk, and leaves in o its output but for the queries' sizes. d: scratch.
  __device__ void Chunk(const typename Shared::Stage& stage, float (&s)[64], float (&d)[32],
                        float (&o)[32]) const {
    const ChunkTile& tile = stage.tile;
    // d = S (exp(G) e k) and o = S (exp(G) q).
    uint32_t operand[8][4];
    ToOperand<0>(s, operand);
    ProductFence();
    ReadState<0, 8>(tile.erased, operand, d);
    CommitProducts();
    ReadState<0, 8>(tile.queries, operand, o);
    CommitProducts();

    // d = T R.
    WaitForProducts<1>();
    Pin(d);
    Pin(s);
    const uint32_t values = ColumnsOf(SharedAddress(stage.values[group_]), thread_);
    uint32_t r[4][4];
#pragma unroll
    for (int t = 0; t < 8; t += 2) {
      uint32_t words[4];
      LoadMatricesTransposed(values + t * 8 * kPanelRowBytes, words);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 size = PairAt(tile.size, t + i / 2, place_);
        const float2 written = UnpackPair<F16>(words[i]);
        const float* const read = &d[4 * (t + i / 2) + i % 2 * 2];
        r[t / 2][i] =
            PackHalves(fmaf(-size.x, read[0], written.x), fmaf(-size.y, read[1], written.y));
      }
    }
    ProductFence();
    const uint64_t t_panel = PanelDescriptor(SharedAddress(tile.t));
#pragma unroll
    for (int i = 0; i < 4; ++i) ProductN64(d, r[i], t_panel + i * kNextColumns, i > 0);
    CommitProducts();
#pragma unroll
    for (int t = 0; t < 16; ++t) {
      const float2 decay = *reinterpret_cast<const float2*>(&tile.decay[8 * t + place_.column]);
      s[4 * t] *= decay.x;
      s[4 * t + 1] *= decay.y;
      s[4 * t + 2] *= decay.x;
      s[4 * t + 3] *= decay.y;
    }
    WaitForProducts<0>();
    Pin(d);
    Pin(o);

    // S += U (exp(G_63 - G) k)^T and o += P U.
    uint32_t u[4][4];
#pragma unroll
    for (int t = 0; t < 8; ++t) {
      const float2 size = PairAt(tile.size, t, place_);
#pragma unroll
      for (int v = 0; v < 2; ++v) {
        u[t / 2][t % 2 * 2 + v] =
            PackHalves(size.x * d[4 * t + 2 * v], size.y * d[4 * t + 2 * v + 1]);
      }
    }
    ProductFence();
    const uint64_t keys = PanelDescriptor(SharedAddress(tile.keys[0]), sizeof(tile.keys[0]));
#pragma unroll
    for (int i = 0; i < 4; ++i) ProductN128Transposed(s, u[i], keys + i * kNextRows, true);
    CommitProducts();
    const uint64_t p_panel = PanelDescriptor(SharedAddress(tile.p));
#pragma unroll
    for (int i = 0; i < 4; ++i) ProductN64(o, u[i], p_panel + i * kNextColumns, true);
    CommitProducts();
    WaitForProducts<0>();
    Pin(s);
    Pin(o);
  }

  __device__ void StoreOutput(int first, const float* query, const float (&o)[32]) const {
    const int64_t offset =
        (at_.begin + first) * a_.o_token_stride + at_.head * kDim + Panel() * kPanelColumns;
    const int count = at_.length - first;
    if (a_.o_dtype == GDN_F32) {
      StoreRows(static_cast<float*>(a_.o) + offset, a_.o_token_stride, count, query, place_, o);
    } else if (a_.o_dtype == GDN_BF16) {
      StoreRows(static_cast<Bf16*>(a_.o) + offset, a_.o_token_stride, count, query, place_, o);
    } else {
      StoreRows(static_cast<F16*>(a_.o) + offset, a_.o_token_stride, count, query, place_, o);
    }
  }

  const gdn2_args& a_;
  const WalkPlace& at_;
  Shared& shared_;
  const int group_;
  const int thread_;
  Place place_;
};

// Output rows of a padding sequence.
template <int kGroups>
__device__ inline void StoreZeros(const gdn2_args& a, const WalkPlace& at, int thread) {
  constexpr int kColumns = kGroups * kPanelColumns;
  const int column = static_cast<int>(at.head) * kDim + at.panel * kPanelColumns;
  for (int64_t i = thread; i < int64_t{at.length} * kColumns; i += kWalkThreads<kGroups>) {
    StoreAs(a.o, a.o_dtype, (at.begin + i / kColumns) * a.o_token_stride + column + i % kColumns,
            0.0f);
  }
}

template <int kGroups>
__global__ void __launch_bounds__(kWalkThreads<kGroups>, 1)
    WalkKernel(const __grid_constant__ Params p) {
#ifdef GDN_WGMMA
  extern __shared__ char raw[];
  auto& shared = AlignedShared<WalkShared<kGroups>>(raw);
  const gdn2_args& a = p.args;
  const auto at = WalkPlace::Of<kGroups>(a);
  const int thread = static_cast<int>(threadIdx.x);
  if (IsPadding(a, at.sequence)) return StoreZeros<kGroups>(a, at, thread);
  if (at.length == 0 && a.read_index[at.sequence] == a.write_index[at.sequence]) return;
  if (thread == 0) {
    for (int i = 0; i < WalkShared<kGroups>::kStages; ++i) {
      shared.full[i].Init();
      shared.empty[i].Init(kGroups * kGroup);
    }
    ArrivalBarrier::FenceInit();
  }
  __syncthreads();
  const int group = thread / kGroup;
  if (group == kGroups) {
    if constexpr (kGroups == 2) ShrinkRegisters<40>();
    if (thread % kGroup == 0) BringTiles(p, at, shared);
  } else {
    // With three warpgroups a thread would have 168.
    if constexpr (kGroups == 2) GrowRegisters<232>();
    Walker<kGroups>(p, at, shared, group, thread % kGroup).Run();
  }
#endif
}

}  // namespace gdn::cuda::gdn2

#endif  // KERNELS_CUDA_GDN2_CHUNK_WALK_CUH_
