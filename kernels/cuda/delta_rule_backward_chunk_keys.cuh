// The last kernel of the chunked backward: see delta_rule_backward_chunk.cuh. A block takes a chunk
// of a key head and its value heads one after the other, in their order: what they give to q and k
// is summed in registers. Of its four warpgroups two form dq and A, the other two dk and B, each 64
// of the key columns. Tiles of the next head arrive as soon as this one no longer needs their
// place.
#ifndef KERNELS_CUDA_DELTA_RULE_BACKWARD_CHUNK_KEYS_CUH_
#define KERNELS_CUDA_DELTA_RULE_BACKWARD_CHUNK_KEYS_CUH_

#include "kernels/cuda/delta_rule_backward_chunk_keys_shared.cuh"

namespace gdn::cuda::chunk {

template <typename X, int kPanels>
class KeysBlock {
 public:
  using Shared = KeysShared<kPanels>;

  __device__ KeysBlock(const BackwardParams& p, Shared& shared)
      : p_(p),
        a_(p.args),
        shared_(shared),
        of_keys_(threadIdx.x >= kPanels * kGroup),
        panel_(static_cast<int>(threadIdx.x) / kGroup % kPanels) {}

  __device__ void Run() {
    if (threadIdx.x < 32) FindUnit(blockIdx.x, &shared_.unit[0]);
    __syncthreads();
    if (At().unit < 0) return;
    LoadKeys();
    LoadStates(At(), 0);
    LoadPairs(At(), 0);
    LoadGradients(At(), 0);
    CommitCopies();
    for (;;) {
#pragma unroll
      for (int i = 0; i < 32; ++i) sum_[i] = 0.0f;
      for (int r = 0; r < p_.ratio; ++r) Head(r);
      StoreKeys();
      current_ ^= 1;
      if (At().unit < 0) return;
      __syncthreads();
      LoadKeys();
      CommitCopies();
    }
  }

 private:
  static constexpr int kThreads = kKeysThreads<kPanels>;
  static constexpr int kParts = Shared::kParts;
  static constexpr int kColumns = kPanels * kPanelColumns;
  static constexpr int64_t kStateBytes = kPanels * kPanels * kTileBytes;

  // Formed anew by each user: see Opaque().
  __device__ static int Thread() {
    return static_cast<int>(static_cast<unsigned>(Opaque(static_cast<int>(threadIdx.x))) %
                            kThreads);
  }
  __device__ static int Lane() { return Thread() % 32; }
  __device__ static int Warp() { return Thread() % kGroup / 32; }  // Of the warpgroup.
  __device__ static int Row() { return 16 * Warp() + Lane() / 4; }

  // The first chunk at or after `unit`, for all threads after the next barrier. By one warp.
  __device__ void FindUnit(int64_t unit, KeysUnit* found) const {
    const int64_t units = ChunkSlots(a_.tokens, a_.sequences) * a_.key_heads;
    for (; unit < units; unit += gridDim.x) {
      const int64_t slot = unit / a_.key_heads;
      SlotChunk chunk;
      if (!ChunkOfSlot(a_.cu_seqlens, a_.sequences, slot, &chunk) || chunk.count == 0) continue;
      if (threadIdx.x == 0) *found = {unit, slot, unit - slot * a_.key_heads, chunk};
      return;
    }
    if (threadIdx.x == 0) found->unit = -1;
  }
  __device__ const KeysUnit& At() const { return shared_.unit[current_]; }

  __device__ void Head(int r) {
    const bool last = r + 1 == p_.ratio;
    if (last && threadIdx.x < 32) FindUnit(At().unit + gridDim.x, &shared_.unit[current_ ^ 1]);
    WaitForCopies<0>();
    FenceForBulk();
    __syncthreads();
    if (r == 0) FormGram();
    if (of_keys_) {
      AddToKeys();
    } else {
      AddToQueries();
    }
    __syncthreads();
    const KeysUnit& next = shared_.unit[last ? current_ ^ 1 : current_];
    const int next_head = last ? 0 : r + 1;
    const bool more = next.unit >= 0;
    if (more) LoadStates(next, next_head);
    FormPairs();
    FenceForBulk();
    __syncthreads();
    if (more) LoadPairs(next, next_head);
    if (of_keys_) {
      ProductFence();
      AddPairs<true>(shared_.a, shared_.q);
      AddPairs<false>(shared_.b, shared_.k);
      AddPairs<true>(shared_.b, shared_.k);
      CommitProducts();
    } else {
      ProductFence();
      AddPairs<false>(shared_.a, shared_.k);
      CommitProducts();
    }
    const float end_decay = shared_.scalars.decay[kChunk - 1];
    StoreValues(r);
    StoreStrengths(r);
    PrefixPassing();
    WaitForProducts<0>();
    Pin(sum_);
    __syncthreads();
    if (more) LoadGradients(next, next_head);
    CommitCopies();
    StoreDecays(r, end_decay);
  }

  __device__ int64_t ValueHead(const KeysUnit& at, int r) const {
    return at.key_head * p_.ratio + r;
  }
  __device__ int64_t TileAt(const KeysUnit& at, int r) const {
    return TileOf(a_, at.slot, ValueHead(at, r));
  }

  // The tile of a chunk's head, of 128 columns.
  __device__ void LoadTile(uint16_t (&panels)[kPanels][kPanelElements], const void* data,
                           int64_t stride, const KeysUnit& at, int64_t head) const {
    LoadRows<kThreads, kPanels>(
        panels, static_cast<const X*>(data) + at.chunk.begin * stride + head * kColumns, stride,
        at.chunk.count, Thread());
  }
  __device__ void LoadKeys() {
    LoadTile(shared_.q, a_.q, a_.q_token_stride, At(), At().key_head);
    LoadTile(shared_.k, a_.k, a_.k_token_stride, At(), At().key_head);
  }
  __device__ void LoadStates(const KeysUnit& at, int r) {
    const int64_t tile = TileAt(at, r) * kStateBytes;
    LoadBytes<kThreads, kStateBytes>(shared_.states, p_.workspace.states + tile, Thread());
    LoadBytes<kThreads, kStateBytes>(shared_.d_states, p_.workspace.d_states + tile, Thread());
    LoadTile(shared_.v, a_.v, a_.v_token_stride, at, ValueHead(at, r));
  }
  __device__ void LoadPairs(const KeysUnit& at, int r) {
    LoadTile(shared_.d_o, a_.d_o, a_.d_o_token_stride, at, ValueHead(at, r));
    LoadBytes<kThreads, kPanels * kTileBytes>(
        shared_.u, p_.workspace.u + TileAt(at, r) * kPanels * kTileBytes, Thread());
  }
  __device__ void LoadGradients(const KeysUnit& at, int r) {
    LoadBytes<kThreads, kPanels * kTileBytes>(
        shared_.d_r, p_.workspace.d_r + TileAt(at, r) * kPanels * kTileBytes, Thread());
    LoadBytes<kThreads, kScalarBytes>(
        &shared_.scalars, p_.workspace.scalars + TileAt(at, r) * kScalarBytes, Thread());
  }

  // Of a sum of 64 columns, a lone warpgroup works on all four pairs of groups, one of two on two,
  // so that both have as much of the triangle.
  template <typename Function>
  __device__ void ForGroups(const Function& function) const {
    if constexpr (kPanels == 1) {
      function.template operator()<0, 0>();
      function.template operator()<2, 1>();
      function.template operator()<4, 2>();
      function.template operator()<6, 3>();
    } else if (panel_ == 0) {
      function.template operator()<0, 0>();
      function.template operator()<6, 1>();
    } else {
      function.template operator()<2, 0>();
      function.template operator()<4, 1>();
    }
  }

  // This warpgroup's part of q.k or k.k.
  __device__ void FormGram() {
    float d[32];
    ProductFence();
    RowProducts<X>(of_keys_ ? shared_.k : shared_.q, shared_.k, d);
    CommitProducts();
    WaitForProducts<0>();
    Pin(d);
    ForGroups([&]<int kGroupPair, int kIndex>() {
#pragma unroll
      for (int i = 0; i < 8; ++i) gram_[8 * kIndex + i] = d[4 * kGroupPair + i];
    });
  }

  // A and B as operands, and Z.
  __device__ void FormPairs() {
    const int row = Row();
    const int lane = Lane();
    const int warp = Warp();
    float d[32];
    ProductFence();
    RowProducts<X>(of_keys_ ? shared_.d_r : shared_.d_o, shared_.u, d);
    CommitProducts();
    WaitForProducts<0>();
    Pin(d);
    const uint32_t panel = SharedAddress(of_keys_ ? shared_.b : shared_.a);
    const float log_decay[2] = {shared_.scalars.log_decay[row], shared_.scalars.log_decay[row + 8]};
    const float factor[2] = {of_keys_ ? -shared_.scalars.beta[row] : p_.scale,
                             of_keys_ ? -shared_.scalars.beta[row + 8] : p_.scale};
    // A has the diagonal, B and Z do not.
    const int diagonal = of_keys_ ? 0 : 1;
    float written[2] = {};
    ForGroups([&]<int kGroupPair, int kIndex>() {
      uint32_t word[4] = {};
      const bool above = kGroupPair > 2 * warp;
#pragma unroll
      for (int u = 0; u < 2; ++u) {
        const int column = 8 * (kGroupPair + u) + lane % 4 * 2;
        const float2 earlier = *reinterpret_cast<const float2*>(&shared_.scalars.log_decay[column]);
#pragma unroll
        for (int v = 0; v < 2; ++v) {
          const int i = row + 8 * v;
          auto& passing =
              *reinterpret_cast<float2*>(&shared_.passing[of_keys_][i * kPassingStride + column]);
          if (above) {
            passing = make_float2(0.0f, 0.0f);
            continue;
          }
          float pair[2];
          float below[2];
#pragma unroll
          for (int w = 0; w < 2; ++w) {
            const float decayed = d[4 * (kGroupPair + u) + 2 * v + w] *
                                  DecayBetween(log_decay[v], w == 0 ? earlier.x : earlier.y);
            const float product = decayed * gram_[8 * kIndex + 4 * u + 2 * v + w];
            below[w] = column + w < i ? product : 0.0f;
            pair[w] = column + w < i + diagonal ? factor[v] * decayed : 0.0f;
            written[v] += below[w];
          }
          passing = make_float2(factor[v] * below[0], factor[v] * below[1]);
          word[2 * u + v] = PackPair<X>(pair[0], pair[1]);
        }
      }
      StoreMatrices(PairOfGroups(panel, 16 * warp, kGroupPair, lane), word[0], word[1], word[2],
                    word[3]);
    });
#pragma unroll
    for (int v = 0; v < 2; ++v) {
      const float sum = QuadSum(written[v]);
      if (of_keys_ && lane % 4 == 0) shared_.written[panel_][row + 8 * v] = sum;
    }
  }

  // d = x S for 64 rows x of a tile and this warpgroup's key columns of a state.
  __device__ void RowsTimesState(const uint16_t (&tile)[kPanels][kPanelElements],
                                 const StateTile<kPanels>& states, float (&d)[32]) const {
    const uint64_t b = TileDescriptor(states[panel_]);
    ProductFence();
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel) {
      const uint64_t a = TileDescriptor(tile[panel]);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        Products<X>::template N64<false, true>(d, a + i * kNextColumns,
                                               b + (4 * panel + i) * kNextRows, panel + i > 0);
      }
    }
    CommitProducts();
  }
  // The sum += A x, or A^T x, for this warpgroup's columns of a tile x.
  template <bool kTranspose>
  __device__ void AddPairs(const uint16_t (&pairs)[kPanelElements],
                           const uint16_t (&tile)[kPanels][kPanelElements]) {
    const uint64_t a = TileDescriptor(pairs);
    const uint64_t b = TileDescriptor(tile[panel_]);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      Products<X>::template N64<kTranspose, true>(
          sum_, a + i * (kTranspose ? kNextRows : kNextColumns), b + i * kNextRows, true);
    }
  }

  // The sum += c d by rows; returns the products of d's rows with a tile's.
  __device__ void AddScaledRows(const float (&d)[32], const float (&c)[2],
                                const uint16_t (&tile)[kPanels][kPanelElements], float (&dot)[2]) {
    RowDots(d, tile, dot);
#pragma unroll
    for (int i = 0; i < 32; ++i) sum_[i] = fmaf(c[i / 2 % 2], d[i], sum_[i]);
  }
  __device__ void RowDots(const float (&d)[32], const uint16_t (&tile)[kPanels][kPanelElements],
                          float (&dot)[2]) const {
    const SumElements elements(tile[panel_], Row(), Lane());
    dot[0] = dot[1] = 0.0f;
#pragma unroll
    for (int t = 0; t < 8; ++t) {
      const float2 x = elements.template At<X, false>(t);
      const float2 y = elements.template At<X, true>(t);
      dot[0] = fmaf(d[4 * t + 1], x.y, fmaf(d[4 * t], x.x, dot[0]));
      dot[1] = fmaf(d[4 * t + 3], y.y, fmaf(d[4 * t + 2], y.x, dot[1]));
    }
    dot[0] = QuadSum(dot[0]);
    dot[1] = QuadSum(dot[1]);
  }
  // One of a row's sums, by its first lane.
  __device__ void PutRows(float (&to)[kChunk], float first, float second) const {
    const int row = Row();
    const int lane = Lane();
    if (lane % 4 != 0) return;
    to[row] = first;
    to[row + 8] = second;
  }

  __device__ void AddToQueries() {
    StoreValuedDots();
    StoreStatesDot();
    const int row = Row();
    const UnitScalars& s = shared_.scalars;
    float d[32];
    RowsTimesState(shared_.d_o, shared_.states, d);
    WaitForProducts<0>();
    Pin(d);
    const float query[2] = {p_.scale * s.decay[row], p_.scale * s.decay[row + 8]};
    float dot[2];
    AddScaledRows(d, query, shared_.q, dot);
    PutRows(shared_.taken[0][panel_], query[0] * dot[0], query[1] * dot[1]);
  }

  __device__ void AddToKeys() {
    const int row = Row();
    const UnitScalars& s = shared_.scalars;
    float d[32];
    float dot[2];
    RowsTimesState(shared_.u, shared_.d_states, d);
    WaitForProducts<0>();
    Pin(d);
    const float to_end[2] = {s.to_end[row], s.to_end[row + 8]};
    AddScaledRows(d, to_end, shared_.k, dot);
    PutRows(shared_.given[panel_], to_end[0] * dot[0], to_end[1] * dot[1]);
    RowsTimesState(shared_.d_r, shared_.states, d);
    WaitForProducts<0>();
    Pin(d);
    const float remembered[2] = {-s.remembered[row], -s.remembered[row + 8]};
    AddScaledRows(d, remembered, shared_.k, dot);
    PutRows(shared_.predicted[panel_], dot[0], dot[1]);
    PutRows(shared_.taken[1][panel_], remembered[0] * dot[0], remembered[1] * dot[1]);
  }

  // A row's diagonal element of a sum of 64 columns: that of the thread's row, then of the one 8
  // further; in the lane that holds them, see OnDiagonal().
  static __device__ void Diagonal(const float (&d)[32], float (&diagonal)[2]) {
    const int warp = Warp();
    const bool odd = Lane() / 4 % 2 != 0;
    diagonal[0] = diagonal[1] = 0.0f;
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      if (w != warp) continue;
      diagonal[0] = odd ? d[8 * w + 1] : d[8 * w];
      diagonal[1] = odd ? d[8 * w + 7] : d[8 * w + 6];
    }
  }
  static __device__ bool OnDiagonal() { return Lane() % 4 == Lane() / 8; }

  // dR.v over this warpgroup's value columns, as the diagonal of dR v^T.
  __device__ void StoreValuedDots() {
    float d[32];
    ProductFence();
    const uint64_t a = TileDescriptor(shared_.d_r[panel_]);
    const uint64_t b = TileDescriptor(shared_.v[panel_]);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      Products<X>::template N64<false, false>(d, a + i * kNextColumns, b + i * kNextColumns, i > 0);
    }
    CommitProducts();
    WaitForProducts<0>();
    Pin(d);
    float dot[2];
    Diagonal(d, dot);
    if (!OnDiagonal()) return;
    const int row = Row();
    shared_.valued[panel_][row] = dot[0];
    shared_.valued[panel_][row + 8] = dot[1];
  }
  // <dS, S> over this warpgroup's key columns, as the trace of dS^T S.
  __device__ void StoreStatesDot() {
    float d[32];
    ProductFence();
    const uint64_t a = TileDescriptor(shared_.d_states[panel_]);
    const uint64_t b = TileDescriptor(shared_.states[panel_]);
#pragma unroll
    for (int i = 0; i < 4 * kPanels; ++i) {
      Products<X>::template N64<true, true>(d, a + i * kNextRows, b + i * kNextRows, i > 0);
    }
    CommitProducts();
    WaitForProducts<0>();
    Pin(d);
    float dot[2];
    Diagonal(d, dot);
    const float sum = LaneSum(OnDiagonal() ? dot[0] + dot[1] : 0.0f);
    const int thread = Thread();
    if (thread % 32 == 0) shared_.states_dot[thread / 32] = sum;
  }

  // d_v = beta dR.
  __device__ void StoreValues(int r) const {
    const int thread = Thread();
    X* const to = static_cast<X*>(a_.d_v) + At().chunk.begin * a_.d_v_token_stride +
                  ValueHead(At(), r) * kColumns;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = thread / (8 * kPanels) + 32 * i;
      const int vector = thread % (8 * kPanels);
      if (row >= At().chunk.count) break;
      const uint4 x = *reinterpret_cast<const uint4*>(
          reinterpret_cast<const char*>(shared_.d_r[vector / 8]) + PanelOffset(row, vector % 8));
      const float beta = shared_.scalars.beta[row];
      uint32_t word[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 pair = UnpackPair<X>(word[j]);
        word[j] = PackPair<X>(beta * pair.x, beta * pair.y);
      }
      *reinterpret_cast<uint4*>(to + row * a_.d_v_token_stride + vector * 8) =
          make_uint4(word[0], word[1], word[2], word[3]);
    }
  }

  static __device__ float OverPanels(const float (&sums)[kPanels][kChunk], int i) {
    float sum = sums[0][i];
#pragma unroll
    for (int panel = 1; panel < kPanels; ++panel) sum += sums[panel][i];
    return sum;
  }

  // d_beta; and what the tokens before each give to the next state with what those from it on take
  // from S. By one warp.
  __device__ void StoreStrengths(int r) {
    const int lane = Thread();
    if (lane >= 32) return;
    float given[2];
    float taken[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = lane + 32 * half;
      taken[half] = OverPanels(shared_.taken[0], i) + OverPanels(shared_.taken[1], i);
      given[half] = OverPanels(shared_.given, i);
      const float error = fmaf(-shared_.scalars.decay[i], OverPanels(shared_.predicted, i),
                               OverPanels(shared_.valued, i));
      if (i >= At().chunk.count) continue;
      a_.d_beta[(At().chunk.begin + i) * a_.value_heads + ValueHead(At(), r)] =
          error - OverPanels(shared_.written, i);
    }
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float before = __shfl_up_sync(kFullMask, given[half], step);
        const float behind = __shfl_down_sync(kFullMask, taken[half], step);
        if (lane >= step) given[half] += before;
        if (lane + step < 32) taken[half] += behind;
      }
    }
    const float early = __shfl_sync(kFullMask, given[0], 31);
    taken[0] += __shfl_sync(kFullMask, taken[1], 0);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float before = __shfl_up_sync(kFullMask, given[half], 1);
      if (lane == 0) before = 0.0f;
      if (half == 1) before += early;
      shared_.edges[lane + 32 * half] = before + taken[half];
    }
  }

  // Z[i][t] becomes the sum of Z[i][j] over j < t; kParts threads a row.
  __device__ void PrefixPassing() {
    const int thread = Thread();
    constexpr int kPart = kChunk / kParts;
    const int row = thread / kParts;
    const int part = thread % kParts;
    float* const z = &shared_.passing[0][row * kPassingStride + part * kPart];
    const float* const more = &shared_.passing[1][row * kPassingStride + part * kPart];
    float prefix[kPart];
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < kPart; j += 4) {
      const float4 x = *reinterpret_cast<const float4*>(z + j);
      const float4 y = *reinterpret_cast<const float4*>(more + j);
      const float both[4] = {x.x + y.x, x.y + y.y, x.z + y.z, x.w + y.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        prefix[j + i] = sum;
        sum += both[i];
      }
    }
    float through = sum;  // Of this part and those before.
#pragma unroll
    for (int step = 1; step < kParts; step *= 2) {
      const float below = __shfl_up_sync(kFullMask, through, step, kParts);
      if (part >= step) through += below;
    }
    float before = __shfl_up_sync(kFullMask, through, 1, kParts);
    if (part == 0) before = 0.0f;
#pragma unroll
    for (int j = 0; j < kPart; j += 4) {
      *reinterpret_cast<float4*>(z + j) =
          make_float4(before + prefix[j], before + prefix[j + 1], before + prefix[j + 2],
                      before + prefix[j + 3]);
    }
  }

  __device__ void StoreDecays(int r, float end_decay) {
    const int thread = Thread();
    constexpr int kPart = kChunk / kParts;
    const int t = thread % kChunk;
    const int part = thread / kChunk;
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < kPart; ++j) {
      const int i = part * kPart + j;
      if (i >= t) sum += shared_.passing[0][i * kPassingStride + t];
    }
    shared_.parts[part][t] = sum;
    __syncthreads();
    if (thread >= At().chunk.count) return;
    float states_dot = 0.0f;
#pragma unroll
    for (int i = 0; i < kPanels * kGroup / 32; ++i) states_dot += shared_.states_dot[i];
    float d_g = fmaf(end_decay, states_dot, shared_.edges[thread]);
#pragma unroll
    for (int i = 0; i < kParts; ++i) d_g += shared_.parts[i][thread];
    a_.d_g[(At().chunk.begin + thread) * a_.value_heads + ValueHead(At(), r)] = d_g;
  }

  // The sum, through the norm, to the output.
  __device__ void StoreKeys() {
    const int row = Row();
    const int lane = Lane();
    const auto& tile = of_keys_ ? shared_.k : shared_.q;
    const auto& dots = shared_.tangent[of_keys_];
    const bool norm = a_.use_qk_l2norm != 0;
    if (norm) {
      float dot[2];
      RowDots(sum_, tile, dot);
      PutRows(shared_.tangent[of_keys_][panel_], dot[0], dot[1]);
      __syncthreads();
    }
    const float* const rstd = of_keys_ ? a_.k_rstd : a_.q_rstd;
    const int64_t stride = of_keys_ ? a_.d_k_token_stride : a_.d_q_token_stride;
    X* const out = static_cast<X*>(of_keys_ ? a_.d_k : a_.d_q) + At().key_head * kColumns +
                   panel_ * kPanelColumns + lane % 4 * 2;
    const SumElements elements(tile[panel_], row, lane);
    StoreRow<false>(elements, row, norm, dots, rstd, out, stride);
    StoreRow<true>(elements, row + 8, norm, dots, rstd, out, stride);
  }
  template <bool kNext>
  __device__ void StoreRow(const SumElements& elements, int i, bool norm,
                           const float (&dots)[kPanels][kChunk], const float* rstd, X* out,
                           int64_t stride) const {
    if (i >= At().chunk.count) return;
    const int64_t token = At().chunk.begin + i;
    const float factor = norm ? rstd[token * a_.key_heads + At().key_head] : 1.0f;
    const float dot = norm ? OverPanels(dots, i) : 0.0f;
    out += token * stride;
#pragma unroll
    for (int t = 0; t < 8; ++t) {
      const float2 x = elements.template At<X, kNext>(t);
      const int at = 4 * t + (kNext ? 2 : 0);
      *reinterpret_cast<uint32_t*>(out + 8 * t) =
          PackPair<X>(factor * fmaf(-x.x, dot, sum_[at]), factor * fmaf(-x.y, dot, sum_[at + 1]));
    }
  }

  const BackwardParams& p_;
  const gdn_delta_rule_backward_args& a_;
  Shared& shared_;
  const bool of_keys_;  // This warpgroup forms dk, else dq.
  const int panel_;     // Of the key columns.
  int current_ = 0;
  float gram_[32 / kPanels];
  float sum_[32];  // dq or dk
};

template <typename X, int kPanels>
__global__ void __launch_bounds__(kKeysThreads<kPanels>, 1)
    KeysKernel(const __grid_constant__ BackwardParams p) {
#ifdef GDN_WGMMA
  extern __shared__ char raw[];
  KeysBlock<X, kPanels>(p, AlignedShared<KeysShared<kPanels>>(raw)).Run();
#endif
}

}  // namespace gdn::cuda::chunk

#endif  // KERNELS_CUDA_DELTA_RULE_BACKWARD_CHUNK_KEYS_CUH_
