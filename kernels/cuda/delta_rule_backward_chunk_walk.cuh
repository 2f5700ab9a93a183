// The two kernels of the chunked backward that walk over a sequence's chunks: see
// delta_rule_backward_chunk.cuh. A warpgroup keeps 64 value columns of S, or of its gradient, in
// registers, transposed, as FP32; it needs nothing of the other columns, so that one or two of them
// in a block give the same bits. A chunk's tiles arrive while the one before is worked on.
#ifndef KERNELS_CUDA_DELTA_RULE_BACKWARD_CHUNK_WALK_CUH_
#define KERNELS_CUDA_DELTA_RULE_BACKWARD_CHUNK_WALK_CUH_

#include "kernels/cuda/delta_rule_backward_chunk.cuh"
#include "kernels/cuda/delta_rule_chunk_state.cuh"

namespace gdn::cuda::chunk {

// Where the copy engine takes a chunk's results from.
template <int kPanels>
struct WalkResults {
  Tile<kPanels> state;            // S or dS, 64 value columns of it.
  uint16_t rows[kPanelElements];  // U or dR, transposed: rows are tokens.
};

// The warpgroup's place in a walk.
template <int kPanels>
struct WalkPlace {
  static constexpr int kColumns = kPanels * kPanelColumns;

  int64_t sequence;
  int64_t head;
  int64_t begin;  // First token of the sequence.
  int32_t length;
  int32_t panel;   // Of the head's value columns.
  int32_t group;   // Of the block.
  int32_t thread;  // Of the warpgroup.

  // kGroups: of a block.
  template <int kGroups>
  static __device__ WalkPlace Of(const gdn_delta_rule_backward_args& a) {
    WalkPlace at;
    constexpr int kParts = kPanels / kGroups;
    const int64_t unit = blockIdx.x / kParts;
    at.group = static_cast<int>(threadIdx.x) / kGroup;
    at.thread = static_cast<int>(threadIdx.x) % kGroup;
    at.panel = kParts == 1 ? at.group : static_cast<int>(blockIdx.x % kParts);
    at.sequence = unit / a.value_heads;
    at.head = unit % a.value_heads;
    at.begin = a.cu_seqlens[at.sequence];
    at.length = static_cast<int32_t>(a.cu_seqlens[at.sequence + 1] - at.begin);
    return at;
  }
  __device__ int Chunks() const { return (length + kChunk - 1) / kChunk; }
  __device__ int Count(int chunk) const { return length - chunk * kChunk; }
  __device__ int64_t Tile(const gdn_delta_rule_backward_args& a, int chunk) const {
    return TileOf(a, ChunkSlot(begin, sequence, chunk), head);
  }
  // These value columns of the sequence's head in [N, HV, V, K].
  __device__ int64_t StateOffset(const gdn_delta_rule_backward_args& a) const {
    return ((sequence * a.value_heads + head) * kPanels + panel) *
           int64_t{kPanelColumns * kColumns};
  }
  __device__ Place OfSum() const { return {thread / 32 * 16 + thread % 32 / 4, thread % 4 * 2}; }
  __device__ int Warp() const { return thread / 32; }
  __device__ int Lane() const { return thread % 32; }
  // A barrier of the warpgroup.
  __device__ void Meet() const { NamedBarrier(1 + group, kGroup); }
};

template <int kPanels>
__device__ inline void LoadOrZero(const float* states, const WalkPlace<kPanels>& at,
                                  const gdn_delta_rule_backward_args& a, float (&s)[32 * kPanels]) {
  const Place place = at.OfSum();
  if (states != nullptr) states += at.StateOffset(a) + place.value * at.kColumns + place.column;
#pragma unroll
  for (int i = 0; i < 16 * kPanels; ++i) {
    const float2 pair =
        states != nullptr
            ? *reinterpret_cast<const float2*>(states + i % 2 * 8 * at.kColumns + i / 2 * 8)
            : make_float2(0.0f, 0.0f);
    s[2 * i] = pair.x;
    s[2 * i + 1] = pair.y;
  }
}
template <int kPanels>
__device__ inline void StoreFloats(const float (&s)[32 * kPanels], const WalkPlace<kPanels>& at,
                                   const gdn_delta_rule_backward_args& a, float* states) {
  const Place place = at.OfSum();
  states += at.StateOffset(a) + place.value * at.kColumns + place.column;
#pragma unroll
  for (int i = 0; i < 16 * kPanels; ++i) {
    *reinterpret_cast<float2*>(states + i % 2 * 8 * at.kColumns + i / 2 * 8) =
        make_float2(s[2 * i], s[2 * i + 1]);
  }
}

template <typename X, int kSteps>
__device__ inline void PackState(const float (&s)[8 * kSteps], uint32_t (&operand)[kSteps][4]) {
#pragma unroll
  for (int i = 0; i < 4 * kSteps; ++i) operand[i / 4][i % 4] = PackPair<X>(s[2 * i], s[2 * i + 1]);
}
// A sum of 64 columns as an operand, its columns multiplied.
template <typename X>
__device__ inline void PackScaled(const float (&d)[32], const float (&scale)[kChunk],
                                  const Place& place, float sign, uint32_t (&operand)[4][4]) {
#pragma unroll
  for (int t = 0; t < 8; ++t) {
    const float2 c = PairAt(scale, t, place);
#pragma unroll
    for (int v = 0; v < 2; ++v) {
      operand[t / 2][t % 2 * 2 + v] =
          PackPair<X>(sign * c.x * d[4 * t + 2 * v], sign * c.y * d[4 * t + 2 * v + 1]);
    }
  }
}
template <typename X>
__device__ inline void PackSum(const float (&d)[32], uint32_t (&operand)[4][4]) {
#pragma unroll
  for (int i = 0; i < 16; ++i) operand[i / 4][i % 4] = PackPair<X>(d[2 * i], d[2 * i + 1]);
}

// Has the copy engine write the state's operand to the workspace.
template <int kPanels>
__device__ inline void StoreStateTile(const WalkPlace<kPanels>& at,
                                      const uint32_t (&operand)[4 * kPanels][4],
                                      WalkResults<kPanels>* results, char* tile) {
#pragma unroll
  for (int i = 0; i < 4 * kPanels; ++i) {
    const uint32_t panel = SharedAddress(results->state[i / 4]);
    StoreMatrices(PairOfGroups(panel, 16 * at.Warp(), i % 4 * 2, at.Lane()), operand[i][0],
                  operand[i][1], operand[i][2], operand[i][3]);
  }
  FenceForBulk();
  at.Meet();
  if (at.thread != 0) return;
#pragma unroll
  for (int panel = 0; panel < kPanels; ++panel) {
    BulkStore(tile + (panel * kPanels + at.panel) * kTileBytes, results->state[panel], kTileBytes);
  }
}
// The same of the rows of a sum's operand.
template <int kPanels>
__device__ inline void StoreRowsTile(const WalkPlace<kPanels>& at, const uint32_t (&operand)[4][4],
                                     WalkResults<kPanels>* results, char* tile) {
  const uint32_t panel = SharedAddress(results->rows);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    StoreMatricesTransposed(PairOfGroupsTransposed(panel, 16 * at.Warp(), 2 * i, at.Lane()),
                            operand[i][0], operand[i][1], operand[i][2], operand[i][3]);
  }
  FenceForBulk();
  at.Meet();
  if (at.thread == 0) BulkStore(tile + at.panel * kTileBytes, results->rows, kTileBytes);
}

// d = S x for the 64 rows x of a tile.
template <typename X, int kPanels>
__device__ inline void StateTimesRows(const uint32_t (&operand)[4 * kPanels][4],
                                      const uint16_t (&tile)[kPanels][kPanelElements],
                                      float (&d)[32]) {
#pragma unroll
  for (int i = 0; i < 4 * kPanels; ++i) {
    const uint64_t b = PanelDescriptor(SharedAddress(tile[i / 4]));
    Products<X>::template N64<false>(d, operand[i], b + i % 4 * kNextColumns, i > 0);
  }
}
// S += operand x.
template <typename X>
__device__ inline void AddOuter(const uint32_t (&operand)[4][4], const Tile<2>& tile,
                                float (&s)[64]) {
  const uint64_t b = PanelDescriptor(SharedAddress(tile[0]), sizeof(tile[0]));
#pragma unroll
  for (int i = 0; i < 4; ++i) Products<X>::N128Transposed(s, operand[i], b + i * kNextRows);
}
template <typename X>
__device__ inline void AddOuter(const uint32_t (&operand)[4][4], const Tile<1>& tile,
                                float (&s)[32]) {
  const uint64_t b = PanelDescriptor(SharedAddress(tile[0]));
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    Products<X>::template N64<true>(s, operand[i], b + i * kNextRows, true);
  }
}

template <int kPanels, int kGroups>
struct StatesShared {
  struct Stage {
    Tile<kPanels> k;
    uint16_t t[kPanelElements];
    uint16_t v[kGroups][kPanelElements];
  };
  Stage stage[2];
  WalkResults<kPanels> results[kGroups];
  UnitScalars scalars[2];
};

template <typename X, int kPanels, int kGroups>
__device__ inline void LoadStage(const BackwardParams& p, const WalkPlace<kPanels>& at, int chunk,
                                 StatesShared<kPanels, kGroups>& shared) {
  constexpr int kThreads = kGroups * kGroup;
  const gdn_delta_rule_backward_args& a = p.args;
  const int thread = static_cast<int>(threadIdx.x);
  auto& stage = shared.stage[chunk % 2];
  const int64_t token = at.begin + int64_t{chunk} * kChunk;
  const int count = at.Count(chunk);
  const int64_t tile = at.Tile(a, chunk);
  LoadRows<kThreads, kPanels>(
      stage.k,
      static_cast<const X*>(a.k) + token * a.k_token_stride + at.head / p.ratio * at.kColumns,
      a.k_token_stride, count, thread);
  LoadRows<kThreads, kGroups>(stage.v,
                              static_cast<const X*>(a.v) + token * a.v_token_stride +
                                  at.head * at.kColumns +
                                  (kGroups == kPanels ? 0 : at.panel * kPanelColumns),
                              a.v_token_stride, count, thread);
  LoadBytes<kThreads, kTileBytes>(stage.t, p.workspace.t + tile * kTileBytes, thread);
  LoadBytes<kThreads, kScalarBytes>(&shared.scalars[chunk % 2],
                                    p.workspace.scalars + tile * kScalarBytes, thread);
}

template <typename X, int kPanels, int kGroups>
__global__ void __launch_bounds__(kGroups* kGroup)
    StatesKernel(const __grid_constant__ BackwardParams p) {
#ifdef GDN_WGMMA
  extern __shared__ char raw[];
  auto& shared = AlignedShared<StatesShared<kPanels, kGroups>>(raw);
  const gdn_delta_rule_backward_args& a = p.args;
  const auto at = WalkPlace<kPanels>::template Of<kGroups>(a);
  const Place place = at.OfSum();
  const int chunks = at.Chunks();
  if (chunks == 0) return;
  auto& results = shared.results[at.group];
  LoadStage<X>(p, at, 0, shared);
  CommitCopies();
  float s[32 * kPanels];
  LoadOrZero(a.initial_state, at, a, s);
  for (int chunk = 0; chunk < chunks; ++chunk) {
    WaitForCopies<0>();
    FenceForBulk();
    if (at.thread == 0) WaitForBulkReads<0>();
    __syncthreads();
    if (chunk + 1 < chunks) LoadStage<X>(p, at, chunk + 1, shared);
    CommitCopies();
    const auto& stage = shared.stage[chunk % 2];
    const UnitScalars& scalars = shared.scalars[chunk % 2];
    const int64_t tile = at.Tile(a, chunk);

    float d[32];
    uint32_t operand[4 * kPanels][4];
    PackState<X>(s, operand);
    const float decay = scalars.decay[kChunk - 1];
#pragma unroll
    for (int i = 0; i < 32 * kPanels; ++i) s[i] *= decay;
    ProductFence();
    StateTimesRows<X>(operand, stage.k, d);
    CommitProducts();
    StoreStateTile(at, operand, &results,
                   p.workspace.states + tile * kPanels * kPanels * kTileBytes);
    WaitForProducts<0>();
    Pin(d);

    // d = U = T R.
    uint32_t r[4][4];
    const uint32_t values = ColumnsOf(SharedAddress(stage.v[at.group]), at.thread);
#pragma unroll
    for (int t = 0; t < 8; t += 2) {
      uint32_t words[4];
      LoadMatricesTransposed(values + t * 8 * kPanelRowBytes, words);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 beta = PairAt(scalars.beta, t + i / 2, place);
        const float2 remembered = PairAt(scalars.remembered, t + i / 2, place);
        const float2 v = UnpackPair<X>(words[i]);
        const float* const sk = &d[4 * (t + i / 2) + i % 2 * 2];
        r[t / 2][i] = PackPair<X>(fmaf(-remembered.x, sk[0], beta.x * v.x),
                                  fmaf(-remembered.y, sk[1], beta.y * v.y));
      }
    }
    ProductFence();
    const uint64_t t_panel = PanelDescriptor(SharedAddress(stage.t));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      Products<X>::template N64<false>(d, r[i], t_panel + i * kNextColumns, i > 0);
    }
    CommitProducts();
    WaitForProducts<0>();
    Pin(d);

    // S = exp(G_63) S + U k^T.
    PackScaled<X>(d, scalars.to_end, place, 1.0f, r);
    ProductFence();
    AddOuter<X>(r, stage.k, s);
    CommitProducts();
    uint32_t u[4][4];
    PackSum<X>(d, u);
    StoreRowsTile(at, u, &results, p.workspace.u + tile * kPanels * kTileBytes);
    WaitForProducts<0>();
    Pin(s);
  }
  if (at.thread == 0) WaitForBulkReads<0>();
#endif
}

template <int kPanels, int kGroups>
struct StateGradientsShared {
  struct Stage {
    Tile<kPanels> k;
    Tile<kPanels> q;
    uint16_t t[kPanelElements];
    uint16_t p[kPanelElements];
    uint16_t d_o[kGroups][kPanelElements];
  };
  Stage stage[2];
  WalkResults<kPanels> results[kGroups];
  UnitScalars scalars[2];
};

template <typename X, int kPanels, int kGroups>
__device__ inline void LoadStage(const BackwardParams& p, const WalkPlace<kPanels>& at, int chunk,
                                 StateGradientsShared<kPanels, kGroups>& shared) {
  constexpr int kThreads = kGroups * kGroup;
  const gdn_delta_rule_backward_args& a = p.args;
  const int thread = static_cast<int>(threadIdx.x);
  auto& stage = shared.stage[chunk % 2];
  const int64_t token = at.begin + int64_t{chunk} * kChunk;
  const int count = at.Count(chunk);
  const int64_t tile = at.Tile(a, chunk);
  const int64_t column = at.head / p.ratio * at.kColumns;
  LoadRows<kThreads, kPanels>(stage.k,
                              static_cast<const X*>(a.k) + token * a.k_token_stride + column,
                              a.k_token_stride, count, thread);
  LoadRows<kThreads, kPanels>(stage.q,
                              static_cast<const X*>(a.q) + token * a.q_token_stride + column,
                              a.q_token_stride, count, thread);
  LoadRows<kThreads, kGroups>(stage.d_o,
                              static_cast<const X*>(a.d_o) + token * a.d_o_token_stride +
                                  at.head * at.kColumns +
                                  (kGroups == kPanels ? 0 : at.panel * kPanelColumns),
                              a.d_o_token_stride, count, thread);
  LoadBytes<kThreads, kTileBytes>(stage.t, p.workspace.t + tile * kTileBytes, thread);
  LoadBytes<kThreads, kTileBytes>(stage.p, p.workspace.p + tile * kTileBytes, thread);
  LoadBytes<kThreads, kScalarBytes>(&shared.scalars[chunk % 2],
                                    p.workspace.scalars + tile * kScalarBytes, thread);
}

template <typename X, int kPanels, int kGroups>
__global__ void __launch_bounds__(kGroups* kGroup)
    StateGradientsKernel(const __grid_constant__ BackwardParams p) {
#ifdef GDN_WGMMA
  extern __shared__ char raw[];
  auto& shared = AlignedShared<StateGradientsShared<kPanels, kGroups>>(raw);
  const gdn_delta_rule_backward_args& a = p.args;
  const auto at = WalkPlace<kPanels>::template Of<kGroups>(a);
  const Place place = at.OfSum();
  const int chunks = at.Chunks();
  auto& results = shared.results[at.group];
  if (chunks > 0) LoadStage<X>(p, at, chunks - 1, shared);
  CommitCopies();
  float s[32 * kPanels];  // dS
  LoadOrZero(a.d_final_state, at, a, s);
  for (int chunk = chunks - 1; chunk >= 0; --chunk) {
    WaitForCopies<0>();
    FenceForBulk();
    if (at.thread == 0) WaitForBulkReads<0>();
    __syncthreads();
    if (chunk > 0) LoadStage<X>(p, at, chunk - 1, shared);
    CommitCopies();
    const auto& stage = shared.stage[chunk % 2];
    const UnitScalars& scalars = shared.scalars[chunk % 2];
    const int64_t tile = at.Tile(a, chunk);

    // d = dS k.
    float d[32];
    uint32_t d_o[4][4];
    {
      uint32_t operand[4 * kPanels][4];
      PackState<X>(s, operand);
      const float decay = scalars.decay[kChunk - 1];
#pragma unroll
      for (int i = 0; i < 32 * kPanels; ++i) s[i] *= decay;
      ProductFence();
      StateTimesRows<X>(operand, stage.k, d);
      CommitProducts();
      StoreStateTile(at, operand, &results,
                     p.workspace.d_states + tile * kPanels * kPanels * kTileBytes);
      const uint32_t columns = ColumnsOf(SharedAddress(stage.d_o[at.group]), at.thread);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        LoadMatricesTransposed(columns + i * 16 * kPanelRowBytes, d_o[i]);
      }
      WaitForProducts<0>();
      Pin(d);
    }

    // d = dU = E (dS k) + D^T P.
#pragma unroll
    for (int t = 0; t < 8; ++t) {
      const float2 to_end = PairAt(scalars.to_end, t, place);
      d[4 * t] *= to_end.x;
      d[4 * t + 1] *= to_end.y;
      d[4 * t + 2] *= to_end.x;
      d[4 * t + 3] *= to_end.y;
    }
    ProductFence();
    const uint64_t p_panel = PanelDescriptor(SharedAddress(stage.p));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      Products<X>::template N64<true>(d, d_o[i], p_panel + i * kNextRows, true);
    }
    CommitProducts();
    // dS += D^T q, scaled.
    uint32_t scaled[4][4];
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const float2 from_start = PairAt(scalars.decay, i / 2, place);
      const float2 x = UnpackPair<X>(d_o[i / 4][i % 4]);
      scaled[i / 4][i % 4] =
          PackPair<X>(p.scale * from_start.x * x.x, p.scale * from_start.y * x.y);
    }
    ProductFence();
    AddOuter<X>(scaled, stage.q, s);
    CommitProducts();
    WaitForProducts<1>();
    Pin(d);

    // d = dR = T^T dU.
    uint32_t r[4][4];
    PackSum<X>(d, r);
    ProductFence();
    const uint64_t t_panel = PanelDescriptor(SharedAddress(stage.t));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      Products<X>::template N64<true>(d, r[i], t_panel + i * kNextRows, i > 0);
    }
    CommitProducts();
    WaitForProducts<0>();
    Pin(d);
    Pin(s);

    // dS -= beta exp(G) dR k^T.
    uint32_t d_r[4][4];
    PackSum<X>(d, d_r);
    PackScaled<X>(d, scalars.remembered, place, -1.0f, r);
    ProductFence();
    AddOuter<X>(r, stage.k, s);
    CommitProducts();
    StoreRowsTile(at, d_r, &results, p.workspace.d_r + tile * kPanels * kTileBytes);
    WaitForProducts<0>();
    Pin(s);
  }
  if (a.d_initial_state != nullptr) {
    StoreFloats(s, at, a, a.d_initial_state);
  }
  if (at.thread == 0) WaitForBulkReads<0>();
#endif
}

}  // namespace gdn::cuda::chunk

#endif  // KERNELS_CUDA_DELTA_RULE_BACKWARD_CHUNK_WALK_CUH_
