// The last kernel of the chunked backward: see delta_rule_backward_chunk.cuh. A block takes a chunk
// of a key head and its value heads one after the other, in their order: what they give to q and k
// is summed in registers. Of its two warpgroups the first forms A, the second B; then each takes 64
// of the key columns of all else.
#ifndef KERNELS_CUDA_DELTA_RULE_BACKWARD_CHUNK_KEYS_CUH_
#define KERNELS_CUDA_DELTA_RULE_BACKWARD_CHUNK_KEYS_CUH_

#include "kernels/cuda/delta_rule_backward_chunk.cuh"
#include "kernels/cuda/delta_rule_backward_chunk_prepare.cuh"

namespace gdn::cuda::chunk {

constexpr int kKeysThreads = 2 * kGroup;
constexpr int kPassingStride = kChunk + 1;  // Rows in different banks.

struct KeysShared {
  uint16_t q[2][kPanelElements];
  uint16_t k[2][kPanelElements];
  uint16_t d_o[2][kPanelElements];
  uint16_t u[2][kPanelElements];
  uint16_t d_r[2][kPanelElements];
  uint16_t v[2][kPanelElements];
  uint16_t states[2][kStatePanelElements];
  uint16_t d_states[2][kStatePanelElements];
  uint16_t a[kPanelElements];
  uint16_t b[kPanelElements];
  float passing[2][kChunk * kPassingStride];  // Z, by warpgroup.
  UnitScalars scalars;
  // Sums over a row, by warpgroup: over its half of the columns.
  float taken[2][kChunk];      // What a token takes from S: of d_g.
  float given[2][kChunk];      // What it gives to the next state: of d_g.
  float predicted[2][kChunk];  // k.(dR S)
  float valued[2][kChunk];     // dR.v
  float written[kChunk];       // sum_j exp(G_i - G_j) k_i.k_j X[i][j]
  float states_dot[2 * kGroup / 32];
  float quarters[4][kChunk];
  float tangent[2][2][kChunk];  // dq.q and dk.k
};

// The sum over a row of a warp's sum, of which four neighbouring lanes hold parts.
__device__ inline float QuadSum(float x) { return LaneSum<3>(x); }

// Two neighbouring elements of group t in a panel of a tile, in the layout of a sum.
template <typename X>
__device__ inline float2 ElementsAt(const uint16_t (&panel)[kPanelElements], int row, int t,
                                    int lane) {
  const char* const at = reinterpret_cast<const char*>(panel) + PanelOffset(row, t) + lane % 4 * 4;
  return UnpackPair<X>(*reinterpret_cast<const uint32_t*>(at));
}

template <typename X>
class KeysBlock {
 public:
  __device__ KeysBlock(const BackwardParams& p, KeysShared& shared, const SlotChunk& chunk)
      : p_(p),
        a_(p.args),
        shared_(shared),
        chunk_(chunk),
        slot_(blockIdx.x),
        key_head_(blockIdx.y),
        thread_(static_cast<int>(threadIdx.x)),
        group_(thread_ / kGroup),
        warp_(thread_ % kGroup / 32),
        lane_(thread_ % 32),
        row_(16 * warp_ + lane_ / 4) {}

  __device__ void Run() {
    LoadKeys();
    LoadHead(0);
#pragma unroll
    for (int i = 0; i < 32; ++i) d_q_[i] = d_k_[i] = 0.0f;
    for (int r = 0; r < p_.ratio; ++r) {
      WaitForCopies<1>();
      FenceForBulk();
      __syncthreads();
      if (r == 0) FormGram();
      FormPairs();
      WaitForCopies<0>();
      FenceForBulk();
      __syncthreads();
      AddHead();
      __syncthreads();
      const float end_decay = shared_.scalars.decay[kChunk - 1];
      StoreValues(r);
      StoreStrengths(r);
      PrefixPassing();
      __syncthreads();
      if (r + 1 < p_.ratio) LoadHead(r + 1);
      StoreDecays(r, end_decay);
    }
    StoreKeys();
  }

 private:
  template <typename T>
  __device__ const T* Rows(const void* data, int64_t stride, int64_t column) const {
    return static_cast<const T*>(data) + chunk_.begin * stride + column;
  }
  __device__ int64_t Head(int r) const { return key_head_ * p_.ratio + r; }

  __device__ void LoadKeys() {
    LoadRows<kKeysThreads, 2>(shared_.q, Rows<X>(a_.q, a_.q_token_stride, key_head_ * kDim),
                              a_.q_token_stride, chunk_.count, thread_);
    LoadRows<kKeysThreads, 2>(shared_.k, Rows<X>(a_.k, a_.k_token_stride, key_head_ * kDim),
                              a_.k_token_stride, chunk_.count, thread_);
  }
  // In two groups: what FormPairs() needs, then the rest.
  __device__ void LoadHead(int r) {
    const int64_t tile = TileOf(a_, slot_, Head(r));
    LoadRows<kKeysThreads, 2>(shared_.d_o, Rows<X>(a_.d_o, a_.d_o_token_stride, Head(r) * kDim),
                              a_.d_o_token_stride, chunk_.count, thread_);
    LoadBytes<kKeysThreads, 2 * kTileBytes>(shared_.u, p_.workspace.u + tile * 2 * kTileBytes,
                                            thread_);
    LoadBytes<kKeysThreads, 2 * kTileBytes>(shared_.d_r, p_.workspace.d_r + tile * 2 * kTileBytes,
                                            thread_);
    LoadBytes<kKeysThreads, kScalarBytes>(&shared_.scalars,
                                          p_.workspace.scalars + tile * kScalarBytes, thread_);
    CommitCopies();
    LoadBytes<kKeysThreads, 4 * kTileBytes>(shared_.states,
                                            p_.workspace.states + tile * 4 * kTileBytes, thread_);
    LoadBytes<kKeysThreads, 4 * kTileBytes>(shared_.d_states,
                                            p_.workspace.d_states + tile * 4 * kTileBytes, thread_);
    LoadRows<kKeysThreads, 2>(shared_.v, Rows<X>(a_.v, a_.v_token_stride, Head(r) * kDim),
                              a_.v_token_stride, chunk_.count, thread_);
    CommitCopies();
  }

  // q.k in the first warpgroup, k.k in the second.
  __device__ void FormGram() {
    ProductFence();
    RowProducts<X>(group_ == 0 ? shared_.q : shared_.k, shared_.k, gram_);
    CommitProducts();
    WaitForProducts<0>();
    Pin(gram_);
  }

  // A and B as operands, and Z.
  __device__ void FormPairs() {
    float d[32];
    ProductFence();
    RowProducts<X>(group_ == 0 ? shared_.d_o : shared_.d_r, shared_.u, d);
    CommitProducts();
    WaitForProducts<0>();
    Pin(d);
    const uint32_t panel = SharedAddress(group_ == 0 ? shared_.a : shared_.b);
    const float log_decay[2] = {shared_.scalars.log_decay[row_],
                                shared_.scalars.log_decay[row_ + 8]};
    const float factor[2] = {group_ == 0 ? p_.scale : -shared_.scalars.beta[row_],
                             group_ == 0 ? p_.scale : -shared_.scalars.beta[row_ + 8]};
    float written[2] = {};
#pragma unroll
    for (int t = 0; t < 8; t += 2) {
      uint32_t word[4] = {};
#pragma unroll
      for (int u = 0; u < 2; ++u) {
        const int column = 8 * (t + u) + lane_ % 4 * 2;
        const float2 earlier = *reinterpret_cast<const float2*>(&shared_.scalars.log_decay[column]);
#pragma unroll
        for (int v = 0; v < 2; ++v) {
          const int i = row_ + 8 * v;
          const int at = 4 * (t + u) + 2 * v;
          float pair[2];
          float* const passing = &shared_.passing[group_][i * kPassingStride + column];
#pragma unroll
          for (int w = 0; w < 2; ++w) {
            // A has the diagonal, B and Z do not.
            const bool below = column + w < i;
            const bool inside = below || (group_ == 0 && column + w == i);
            const float decayed =
                d[at + w] * DecayBetween(log_decay[v], w == 0 ? earlier.x : earlier.y);
            const float product = decayed * gram_[at + w];
            pair[w] = inside ? factor[v] * decayed : 0.0f;
            passing[w] = below ? factor[v] * product : 0.0f;
            if (below) written[v] += product;
          }
          word[2 * u + v] = PackPair<X>(pair[0], pair[1]);
        }
      }
      StoreMatrices(PairOfGroups(panel, 16 * warp_, t, lane_), word[0], word[1], word[2], word[3]);
    }
#pragma unroll
    for (int v = 0; v < 2; ++v) {
      const float sum = QuadSum(written[v]);
      if (group_ == 1 && lane_ % 4 == 0) shared_.written[row_ + 8 * v] = sum;
    }
  }

  // d = x S for 64 rows x of a tile and this warpgroup's key columns of a state.
  __device__ void RowsTimesState(const uint16_t (&tile)[2][kPanelElements],
                                 const uint16_t (&states)[2][kStatePanelElements],
                                 float (&d)[32]) const {
    const uint64_t b = PanelDescriptor(SharedAddress(states[group_]));
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint64_t a = PanelDescriptor(SharedAddress(tile[i / 4])) + i % 4 * kNextColumns;
      Products<X>::template N64<false, true>(d, a, b + i * kNextRows, i > 0);
    }
  }
  // d += A x, or A^T x, for this warpgroup's columns of a tile x.
  template <bool kTranspose>
  __device__ void AddPairs(const uint16_t (&pairs)[kPanelElements],
                           const uint16_t (&tile)[2][kPanelElements], float (&d)[32]) const {
    const uint64_t a = PanelDescriptor(SharedAddress(pairs));
    const uint64_t b = PanelDescriptor(SharedAddress(tile[group_]));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      Products<X>::template N64<kTranspose, true>(
          d, a + i * (kTranspose ? kNextRows : kNextColumns), b + i * kNextRows, true);
    }
  }

  // sum += c d by rows; returns the products of d's rows with a tile's.
  __device__ void AddScaledRows(const float (&d)[32], const float (&c)[2],
                                const uint16_t (&tile)[2][kPanelElements], float (&sum)[32],
                                float (&dot)[2]) const {
#pragma unroll
    for (int v = 0; v < 2; ++v) {
      float row = 0.0f;
#pragma unroll
      for (int t = 0; t < 8; ++t) {
        const float2 x = ElementsAt<X>(tile[group_], row_ + 8 * v, t, lane_);
        const int i = 4 * t + 2 * v;
        row = fmaf(d[i], x.x, row);
        row = fmaf(d[i + 1], x.y, row);
        sum[i] = fmaf(c[v], d[i], sum[i]);
        sum[i + 1] = fmaf(c[v], d[i + 1], sum[i + 1]);
      }
      dot[v] = QuadSum(row);
    }
  }

  __device__ void AddHead() {
    const UnitScalars& s = shared_.scalars;
    float first[32];
    float second[32];
    ProductFence();
    RowsTimesState(shared_.d_o, shared_.states, first);
    CommitProducts();
    RowsTimesState(shared_.u, shared_.d_states, second);
    CommitProducts();
    const float states_dot = StatesDot();
    float valued[2];
    ValuedDots(valued);
    WaitForProducts<1>();
    Pin(first);
    const float query[2] = {p_.scale * s.decay[row_], p_.scale * s.decay[row_ + 8]};
    float queried[2];
    AddScaledRows(first, query, shared_.q, d_q_, queried);
    ProductFence();
    RowsTimesState(shared_.d_r, shared_.states, first);
    CommitProducts();
    WaitForProducts<1>();
    Pin(second);
    const float to_end[2] = {s.to_end[row_], s.to_end[row_ + 8]};
    float given[2];
    AddScaledRows(second, to_end, shared_.k, d_k_, given);
    WaitForProducts<0>();
    Pin(first);
    const float remembered[2] = {-s.remembered[row_], -s.remembered[row_ + 8]};
    float predicted[2];
    AddScaledRows(first, remembered, shared_.k, d_k_, predicted);
    ProductFence();
    AddPairs<false>(shared_.a, shared_.k, d_q_);
    AddPairs<true>(shared_.a, shared_.q, d_k_);
    AddPairs<false>(shared_.b, shared_.k, d_k_);
    AddPairs<true>(shared_.b, shared_.k, d_k_);
    CommitProducts();
    if (lane_ % 4 == 0) {
#pragma unroll
      for (int v = 0; v < 2; ++v) {
        const int i = row_ + 8 * v;
        shared_.taken[group_][i] = fmaf(query[v], queried[v], remembered[v] * predicted[v]);
        shared_.given[group_][i] = to_end[v] * given[v];
        shared_.predicted[group_][i] = predicted[v];
        shared_.valued[group_][i] = valued[v];
      }
    }
    if (lane_ == 0) shared_.states_dot[thread_ / 32] = states_dot;
    WaitForProducts<0>();
    Pin(d_q_);
    Pin(d_k_);
  }

  // dR.v over this warpgroup's value columns.
  __device__ void ValuedDots(float (&dot)[2]) const {
#pragma unroll
    for (int v = 0; v < 2; ++v) {
      float row = 0.0f;
#pragma unroll
      for (int t = 0; t < 8; ++t) {
        const float2 x = ElementsAt<X>(shared_.d_r[group_], row_ + 8 * v, t, lane_);
        const float2 y = ElementsAt<X>(shared_.v[group_], row_ + 8 * v, t, lane_);
        row = fmaf(x.x, y.x, row);
        row = fmaf(x.y, y.y, row);
      }
      dot[v] = QuadSum(row);
    }
  }
  // <dS, S> over this warp's part.
  __device__ float StatesDot() const {
    const int row = thread_ % kGroup;
    const char* const s = reinterpret_cast<const char*>(shared_.states[group_]);
    const char* const d_s = reinterpret_cast<const char*>(shared_.d_states[group_]);
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint4 x = *reinterpret_cast<const uint4*>(s + PanelOffset(row, i));
      const uint4 y = *reinterpret_cast<const uint4*>(d_s + PanelOffset(row, i));
      const uint32_t xs[4] = {x.x, x.y, x.z, x.w};
      const uint32_t ys[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 left = UnpackPair<X>(xs[j]);
        const float2 right = UnpackPair<X>(ys[j]);
        sum = fmaf(left.x, right.x, sum);
        sum = fmaf(left.y, right.y, sum);
      }
    }
    return LaneSum(sum);
  }

  // d_v = beta dR.
  __device__ void StoreValues(int r) const {
    X* const to = static_cast<X*>(a_.d_v) + chunk_.begin * a_.d_v_token_stride + Head(r) * kDim;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = thread_ / 16 + 16 * i;
      const int vector = thread_ % 16;
      if (row >= chunk_.count) break;
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

  __device__ void StoreStrengths(int r) const {
    const int i = thread_;
    if (i >= chunk_.count) return;
    const float predicted = shared_.predicted[0][i] + shared_.predicted[1][i];
    const float error =
        fmaf(-shared_.scalars.decay[i], predicted, shared_.valued[0][i] + shared_.valued[1][i]);
    a_.d_beta[(chunk_.begin + i) * a_.value_heads + Head(r)] = error - shared_.written[i];
  }

  // Z[i][t] becomes the sum of Z[i][j] over j < t; four threads a row.
  __device__ void PrefixPassing() {
    constexpr int kPart = kChunk / 4;
    const int row = thread_ / 4;
    const int first = thread_ % 4 * kPart;
    float* const z = &shared_.passing[0][row * kPassingStride + first];
    const float* const more = &shared_.passing[1][row * kPassingStride + first];
    float prefix[kPart];
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < kPart; ++j) {
      prefix[j] = sum;
      sum += z[j] + more[j];
    }
    float before = 0.0f;
#pragma unroll
    for (int part = 0; part < 3; ++part) {
      const float of_part = __shfl_sync(kFullMask, sum, lane_ / 4 * 4 + part);
      if (part < thread_ % 4) before += of_part;
    }
#pragma unroll
    for (int j = 0; j < kPart; ++j) z[j] = before + prefix[j];
  }

  __device__ void StoreDecays(int r, float end_decay) {
    constexpr int kPart = kChunk / 4;
    const int t = thread_ % kChunk;
    const int part = thread_ / kChunk;
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < kPart; ++j) {
      const int i = part * kPart + j;
      sum += i >= t ? shared_.passing[0][i * kPassingStride + t] +
                          (shared_.taken[0][i] + shared_.taken[1][i])
                    : shared_.given[0][i] + shared_.given[1][i];
    }
    shared_.quarters[part][t] = sum;
    __syncthreads();
    if (thread_ >= chunk_.count) return;
    float states_dot = 0.0f;
#pragma unroll
    for (int i = 0; i < kKeysThreads / 32; ++i) states_dot += shared_.states_dot[i];
    float d_g = end_decay * states_dot;
#pragma unroll
    for (int i = 0; i < 4; ++i) d_g += shared_.quarters[i][thread_];
    a_.d_g[(chunk_.begin + thread_) * a_.value_heads + Head(r)] = d_g;
  }

  // Through the norm, to the outputs.
  __device__ void StoreKeys() {
    if (a_.use_qk_l2norm != 0) {
      TangentDots(d_q_, shared_.q, shared_.tangent[0]);
      TangentDots(d_k_, shared_.k, shared_.tangent[1]);
      __syncthreads();
    }
    StoreRows(d_q_, shared_.q, shared_.tangent[0], a_.q_rstd, a_.d_q, a_.d_q_token_stride);
    StoreRows(d_k_, shared_.k, shared_.tangent[1], a_.k_rstd, a_.d_k, a_.d_k_token_stride);
  }
  __device__ void TangentDots(const float (&d)[32], const uint16_t (&tile)[2][kPanelElements],
                              float (&dots)[2][kChunk]) const {
#pragma unroll
    for (int v = 0; v < 2; ++v) {
      float dot = 0.0f;
#pragma unroll
      for (int t = 0; t < 8; ++t) {
        const float2 x = ElementsAt<X>(tile[group_], row_ + 8 * v, t, lane_);
        dot = fmaf(d[4 * t + 2 * v], x.x, dot);
        dot = fmaf(d[4 * t + 2 * v + 1], x.y, dot);
      }
      dot = QuadSum(dot);
      if (lane_ % 4 == 0) dots[group_][row_ + 8 * v] = dot;
    }
  }
  __device__ void StoreRows(const float (&d)[32], const uint16_t (&tile)[2][kPanelElements],
                            const float (&dots)[2][kChunk], const float* rstd, void* out,
                            int64_t stride) const {
    const bool norm = a_.use_qk_l2norm != 0;
#pragma unroll
    for (int v = 0; v < 2; ++v) {
      const int i = row_ + 8 * v;
      if (i >= chunk_.count) continue;
      const int64_t token = chunk_.begin + i;
      const float factor = norm ? rstd[token * a_.key_heads + key_head_] : 1.0f;
      const float dot = norm ? dots[0][i] + dots[1][i] : 0.0f;
      X* const to = static_cast<X*>(out) + token * stride + key_head_ * kDim +
                    group_ * kPanelColumns + lane_ % 4 * 2;
#pragma unroll
      for (int t = 0; t < 8; ++t) {
        const float2 x = ElementsAt<X>(tile[group_], i, t, lane_);
        const float* const from = &d[4 * t + 2 * v];
        *reinterpret_cast<uint32_t*>(to + 8 * t) =
            PackPair<X>(factor * fmaf(-x.x, dot, from[0]), factor * fmaf(-x.y, dot, from[1]));
      }
    }
  }

  const BackwardParams& p_;
  const gdn_delta_rule_backward_args& a_;
  KeysShared& shared_;
  const SlotChunk& chunk_;
  const int64_t slot_;
  const int64_t key_head_;
  const int thread_;
  const int group_;
  const int warp_;
  const int lane_;
  const int row_;
  float gram_[32];
  float d_q_[32];
  float d_k_[32];
};

template <typename X>
__global__ void __launch_bounds__(kKeysThreads, 1)
    KeysKernel(const __grid_constant__ BackwardParams p) {
#ifdef GDN_WGMMA
  extern __shared__ char raw[];
  KeysShared& shared = AlignedShared<KeysShared>(raw);
  SlotChunk chunk;
  const int64_t slot = blockIdx.x;
  if (!ChunkOfSlot(p.args.cu_seqlens, p.args.sequences, slot, &chunk) || chunk.count == 0) return;
  KeysBlock<X>(p, shared, chunk).Run();
#endif
}

}  // namespace gdn::cuda::chunk

#endif  // KERNELS_CUDA_DELTA_RULE_BACKWARD_CHUNK_KEYS_CUH_
