// The state role of the chunked delta rule: see delta_rule_chunk.cuh.
#ifndef KERNELS_CUDA_DELTA_RULE_CHUNK_STATE_CUH_
#define KERNELS_CUDA_DELTA_RULE_CHUNK_STATE_CUH_

#include "kernels/cuda/delta_rule_chunk.cuh"

namespace gdn::cuda::chunk {

// The thread's place in a sum of 64 value columns (rows of the sum): see wgmma.cuh.
struct Place {
  int value;   // 16 w + g; the other one is 8 further.
  int column;  // 2 c; the other one is the next.
};

template <typename S>
__device__ inline void LoadState(const S* from, const Place& place, float (&s)[64]) {
#pragma unroll
  for (int t = 0; t < 16; ++t) {
#pragma unroll
    for (int v = 0; v < 2; ++v) {
      const S* const pair = from + (place.value + 8 * v) * kDim + 8 * t + place.column;
      if constexpr (sizeof(S) == 4) {
        const float2 x = *reinterpret_cast<const float2*>(pair);
        s[4 * t + 2 * v] = x.x;
        s[4 * t + 2 * v + 1] = x.y;
      } else {
        const float2 x = Pair<S>::Widen(*reinterpret_cast<const typename Pair<S>::Raw*>(pair));
        s[4 * t + 2 * v] = x.x;
        s[4 * t + 2 * v + 1] = x.y;
      }
    }
  }
}
template <typename S>
__device__ inline void StoreState(S* to, const Place& place, const float (&s)[64]) {
#pragma unroll
  for (int t = 0; t < 16; ++t) {
#pragma unroll
    for (int v = 0; v < 2; ++v) {
      S* const pair = to + (place.value + 8 * v) * kDim + 8 * t + place.column;
      const float x = s[4 * t + 2 * v];
      const float y = s[4 * t + 2 * v + 1];
      if constexpr (sizeof(S) == 4) {
        *reinterpret_cast<float2*>(pair) = make_float2(x, y);
      } else {
        *reinterpret_cast<typename Pair<S>::Raw*>(pair) = __floats2bfloat162_rn(x, y);
      }
    }
  }
}

// The thread's part of 64 rows of the pool, from an offset in elements on; zeros where it is
// negative.
template <typename Args>
__device__ inline void ReadSlot(const Args& a, int64_t offset, const Place& place, float (&s)[64]) {
  if (offset < 0) {
#pragma unroll
    for (int i = 0; i < 64; ++i) s[i] = 0.0f;
  } else if (a.state_dtype == GDN_F32) {
    LoadState(static_cast<const float*>(a.state) + offset, place, s);
  } else {
    LoadState(static_cast<const Bf16*>(a.state) + offset, place, s);
  }
}
template <typename Args>
__device__ inline void WriteSlot(const Args& a, int64_t offset, const Place& place,
                                 const float (&s)[64]) {
  if (a.state_dtype == GDN_F32) {
    StoreState(static_cast<float*>(a.state) + offset, place, s);
  } else {
    StoreState(static_cast<Bf16*>(a.state) + offset, place, s);
  }
}

// Rows of o from their transposed sum; eight lanes write neighbouring elements.
template <typename O>
__device__ inline void StoreRows(O* to, int64_t stride, int count, const float* query,
                                 const Place& place, const float (&o)[32]) {
  to += place.column * stride + place.value;
  const bool all = count >= kChunk;
#pragma unroll
  for (int t = 0; t < 8; ++t) {
    const int token = 8 * t + place.column;
    const float2 scale = *reinterpret_cast<const float2*>(query + token);
    if (all || token < count) {
      to[0] = Narrow<O>(o[4 * t] * scale.x);
      to[8] = Narrow<O>(o[4 * t + 2] * scale.x);
    }
    if (all || token + 1 < count) {
      to[stride] = Narrow<O>(o[4 * t + 1] * scale.y);
      to[stride + 8] = Narrow<O>(o[4 * t + 3] * scale.y);
    }
    to += 8 * stride;
  }
}

// The two neighbouring tokens of group t.
__device__ inline float2 PairAt(const float (&coefficients)[kChunk], int t, const Place& place) {
  return *reinterpret_cast<const float2*>(&coefficients[8 * t + place.column]);
}

// Steps of 16 columns of the state, from kFirst on, as an operand.
template <int kFirst, int kSteps>
__device__ inline void ToOperand(const float (&s)[64], uint32_t (&operand)[kSteps][4]) {
#pragma unroll
  for (int i = 0; i < 4 * kSteps; ++i) {
    operand[i / 4][i % 4] = PackHalves(s[8 * kFirst + 2 * i], s[8 * kFirst + 2 * i + 1]);
  }
}

// Steps [kFirst, kLast) of d = S x for the 64 rows x of a tile.
template <int kFirst, int kLast, int kSteps>
__device__ inline void ReadState(const uint16_t (&tile)[2][kPanelElements],
                                 const uint32_t (&operand)[kSteps][4], float (&d)[32]) {
#pragma unroll
  for (int i = kFirst; i < kLast; ++i) {
    const uint64_t b = PanelDescriptor(SharedAddress(tile[i / 4]));
    ProductN64(d, operand[i % kSteps], b + i % 4 * kNextColumns, i > 0);
  }
}

template <typename X, int kStates>
class StateRole {
 public:
  __device__ StateRole(const Params& p, Shared<kStates>& shared, int which, int thread)
      : p_(p), a_(p.args), shared_(shared), which_(which), thread_(thread) {
    place_.value = thread / 32 * 16 + thread % 32 / 4;
    place_.column = thread % 4 * 2;
  }

  __device__ void Run() {
    Cursor at;
    for (int unit = static_cast<int>(blockIdx.x); Enter<kParts>(p_, unit, &at);
         unit += static_cast<int>(gridDim.x)) {
      const int64_t read = a_.read_index[at.sequence];
      const int64_t write = a_.write_index[at.sequence];
      const bool fresh = a_.fresh != nullptr && a_.fresh[at.sequence] != 0;
      if (read < 0 || write < 0) {
        StoreZeros(at);
        continue;
      }
      if (at.length == 0 && read == write) continue;
      float s[64];
      ReadSlot(a_, fresh ? -1 : StateOffset(at, read), place_, s);
      Walk(at, s);
      WriteSlot(a_, StateOffset(at, write), place_, s);
    }
  }

 private:
  static constexpr int kParts = 2 / kStates;
  // One state role keeps the whole state as an operand, and writes a chunk's output during the
  // first product of the next one. Two have no registers for that, and cover for each other's
  // waits. The order of every sum is the same.
  static constexpr bool kAllAtOnce = kStates == 1;
  static constexpr int kSteps = kAllAtOnce ? 8 : 4;

  __device__ int Panel(const Cursor& at) const { return kStates == 2 ? which_ : at.part; }

  __device__ int64_t StateOffset(const Cursor& at, int64_t slot) const {
    return slot * a_.state_slot_stride + (at.head * 2 + Panel(at)) * int64_t{kChunk * kDim};
  }
  __device__ int64_t OutputOffset(const Cursor& at) const {
    return (int64_t{at.begin} + at.first) * a_.o_token_stride + at.head * kDim +
           Panel(at) * kPanelColumns;
  }

  __device__ void StoreZeros(const Cursor& at) const {
    int64_t offset = OutputOffset(at) + thread_ % 64 + thread_ / 64 * a_.o_token_stride;
    for (int t = thread_ / 64; t < at.length; t += 2) {
      StoreAs(a_.o, a_.o_dtype, offset, 0.0f);
      offset += 2 * a_.o_token_stride;
    }
  }

  // Writes what o holds of chunk n, and gives the chunk back.
  __device__ void Finish(const Cursor& at, uint32_t n, const float (&o)[32]) const {
    const int64_t offset = OutputOffset(at);
    const int count = at.length - at.first;
    const float* const query = shared_.scalars[n % kSlots].query;
    if (a_.o_dtype == GDN_F32) {
      StoreRows(static_cast<float*>(a_.o) + offset, a_.o_token_stride, count, query, place_, o);
    } else if (a_.o_dtype == GDN_BF16) {
      StoreRows(static_cast<Bf16*>(a_.o) + offset, a_.o_token_stride, count, query, place_, o);
    } else {
      StoreRows(static_cast<F16*>(a_.o) + offset, a_.o_token_stride, count, query, place_, o);
    }
    __syncwarp();
    if (thread_ % 32 == 0) shared_.done[n % kSlots].Arrive();
  }

  // All chunks of a unit.
  __device__ void Walk(const Cursor& unit, float (&s)[64]) {
    Cursor at = unit;
    float o[32];
    float d[32];
#pragma unroll
    for (int i = 0; i < 32; ++i) o[i] = d[i] = 0.0f;
    uint32_t operand[kSteps][4];
    ToOperand<0>(s, operand);
    for (; at.first < at.length; at.first += kChunk, ++n_) {
      const uint32_t n = n_;
      const Keys& keys = shared_.keys[n % kSlots];
      const Mix& mix = shared_.mix[n % kSlots];
      const Scalars& scalars = shared_.scalars[n % kSlots];
      WaitFor(shared_.ready, n);

      // d = S k and o = S q.
      if constexpr (kAllAtOnce) {
        ProductFence();
        ReadState<0, 8>(keys.k, operand, d);
        CommitProducts();
        WaitForProducts<1>();
        Pin(o);
        Pin(s);
        if (at.first > 0) {
          Cursor before = at;
          before.first -= kChunk;
          Finish(before, n - 1, o);
        }
        ProductFence();
        ReadState<0, 8>(keys.q, operand, o);
        CommitProducts();
      } else {
        ProductFence();
        ReadState<0, 4>(keys.k, operand, d);
        ReadState<0, 4>(keys.q, operand, o);
        CommitProducts();
        WaitForProducts<0>();
        Pin(d);
        Pin(o);
        Pin(s);
        ToOperand<4>(s, operand);
        ProductFence();
        ReadState<4, 8>(keys.k, operand, d);
        CommitProducts();
        ReadState<4, 8>(keys.q, operand, o);
        CommitProducts();
      }

      const float decay = scalars.decay[kChunk - 1];
#pragma unroll
      for (int i = 0; i < 64; ++i) s[i] *= decay;
      const uint32_t values = Values(n);
      float written[kAllAtOnce ? 32 : 8];  // beta v
      if constexpr (kAllAtOnce) {
#pragma unroll
        for (int t = 0; t < 8; t += 2) {
          WrittenValues(values + t * 8 * kPanelRowBytes, scalars, t, &written[4 * t]);
        }
      }

      // d = U = T R.
      WaitForProducts<1>();
      Pin(d);
      uint32_t r[4][4];
#pragma unroll
      for (int t = 0; t < 8; ++t) {
        if constexpr (!kAllAtOnce) {
          if (t % 2 == 0) WrittenValues(values + t * 8 * kPanelRowBytes, scalars, t, written);
        }
        const float2 remembered = PairAt(scalars.remembered, t, place_);
        const float* const w = &written[kAllAtOnce ? 4 * t : t % 2 * 4];
#pragma unroll
        for (int v = 0; v < 2; ++v) {
          r[t / 2][t % 2 * 2 + v] =
              PackHalves(fmaf(-remembered.x, d[4 * t + 2 * v], w[2 * v]),
                         fmaf(-remembered.y, d[4 * t + 2 * v + 1], w[2 * v + 1]));
        }
      }
      ProductFence();
      const uint64_t t_panel = PanelDescriptor(SharedAddress(mix.t));
#pragma unroll
      for (int i = 0; i < 4; ++i) ProductN64(d, r[i], t_panel + i * kNextColumns, i > 0);
      CommitProducts();

      // o = exp(G) S q + P U and S = exp(G_63) S + U k^T.
      WaitForProducts<1>();
      Pin(o);
#pragma unroll
      for (int t = 0; t < 8; ++t) {
        const float2 from_start = PairAt(scalars.decay, t, place_);
        o[4 * t] *= from_start.x;
        o[4 * t + 1] *= from_start.y;
        o[4 * t + 2] *= from_start.x;
        o[4 * t + 3] *= from_start.y;
      }
      WaitForProducts<0>();
      Pin(d);
      uint32_t decayed[4][4];
#pragma unroll
      for (int t = 0; t < 8; ++t) {
        const float2 to_end = PairAt(scalars.to_end, t, place_);
#pragma unroll
        for (int v = 0; v < 2; ++v) {
          decayed[t / 2][t % 2 * 2 + v] =
              PackHalves(d[4 * t + 2 * v] * to_end.x, d[4 * t + 2 * v + 1] * to_end.y);
        }
      }
      ProductFence();
      const uint64_t k_panels = PanelDescriptor(SharedAddress(keys.k[0]), sizeof(keys.k[0]));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        ProductN128Transposed(s, decayed[i], k_panels + i * kNextRows, true);
      }
      CommitProducts();
#pragma unroll
      for (int t = 0; t < 8; ++t) {
#pragma unroll
        for (int v = 0; v < 2; ++v) {
          r[t / 2][t % 2 * 2 + v] = PackHalves(d[4 * t + 2 * v], d[4 * t + 2 * v + 1]);
        }
      }
      ProductFence();
      const uint64_t p_panel = PanelDescriptor(SharedAddress(mix.p));
#pragma unroll
      for (int i = 0; i < 4; ++i) ProductN64(o, r[i], p_panel + i * kNextColumns, true);
      CommitProducts();
      WaitForProducts<1>();
      Pin(s);
      ToOperand<0>(s, operand);
      WaitForProducts<0>();
      Pin(o);
      if (!kAllAtOnce) Finish(at, n, o);
    }
    if (kAllAtOnce && at.first > 0) {
      at.first -= kChunk;
      Finish(at, n_ - 1, o);
    }
  }

  // beta v of the 16 tokens of groups t and t + 1.
  __device__ void WrittenValues(uint32_t address, const Scalars& scalars, int t,
                                float* written) const {
    uint32_t words[4];
    LoadMatricesTransposed(address, words);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 beta = PairAt(scalars.beta, t + i / 2, place_);
      const float2 x = UnpackPair<X>(words[i]);
      written[2 * i] = beta.x * x.x;
      written[2 * i + 1] = beta.y * x.y;
    }
  }

  // Where this lane finds the first 16 tokens of the chunk's values, in the layout of a sum.
  __device__ uint32_t Values(uint32_t n) const {
    return ColumnsOf(SharedAddress(shared_.values[n % kSlots][which_]), thread_);
  }

  const Params& p_;
  const gdn_delta_rule_args& a_;
  Shared<kStates>& shared_;
  const int which_;
  const int thread_;
  Place place_;
  uint32_t n_ = 0;  // Chunks walked so far.
};

}  // namespace gdn::cuda::chunk

#endif  // KERNELS_CUDA_DELTA_RULE_CHUNK_STATE_CUH_
