// The state role of the fused prefill's walk: see fused_prefill_walk.cuh. S lies in registers,
// transposed, as FP32: rows are value columns.
#ifndef KERNELS_CUDA_FUSED_PREFILL_WALK_STATE_CUH_
#define KERNELS_CUDA_FUSED_PREFILL_WALK_STATE_CUH_

#include "kernels/cuda/delta_rule_chunk_state.cuh"
#include "kernels/cuda/fused_prefill_walk.cuh"

namespace gdn::cuda::chunk {

template <Form kForm>
class WalkState {
 public:
  __device__ WalkState(const WalkParams& p, WalkShared& shared, int thread)
      : p_(p), shared_(shared), thread_(thread) {
    place_.value = thread / 32 * 16 + thread % 32 / 4;
    place_.column = thread % 4 * 2;
  }

  __device__ void Run() {
    const WalkUnit first = UnitFinder(p_).Next();
    if (first.length == 0) return;
    float s[64];
    ReadSlot(p_.args, first.read, place_, s);
    Walk(first.length, s);
  }

 private:
  // Stores a chunk's output, and gives back all of the chunk that is not overwritten by it.
  __device__ void StoreOutput(uint32_t n, const float (&o)[32]) {
    shared_.keys_done[n % kSlots].Arrive();
    const uint32_t row =
        shared_.slots[n % kSlots].Output() + static_cast<uint32_t>(place_.column) * kOutputRow * 4;
#pragma unroll
    for (int v = 0; v < 2; ++v) {
      const uint32_t to =
          row + static_cast<uint32_t>(OutputPlace(place_.column, place_.value + 8 * v)) * 4;
#pragma unroll
      for (int t = 0; t < 8; ++t) {
#pragma unroll
        for (int u = 0; u < 2; ++u) {
          asm volatile("st.shared.f32 [%0], %1;" ::"r"(to + (8 * t + u) * kOutputRow * 4),
                       "f"(o[4 * t + 2 * v + u])
                       : "memory");
        }
      }
    }
  }
  __device__ void HandOver(uint32_t n) { shared_.output[n % kSlots].Arrive(); }

  __device__ const WalkUnit& Current() const { return shared_.units[unit_ % kUnits]; }
  __device__ const WalkUnit& Next() const { return shared_.units[(unit_ + 1) % kUnits]; }

  // Changes the unit's state for the next one's, which is in shared memory.
  __device__ void Exchange(float (&s)[64]) {
    shared_.state_here.Wait(unit_ % 2);
    if (p_.args.state_dtype == GDN_F32) {
      ExchangeAs<float>(s);
    } else {
      ExchangeAs<Bf16>(s);
    }
    shared_.state_left.Arrive();
  }
  template <typename S>
  __device__ void ExchangeAs(float (&s)[64]) {
    char* const pairs = shared_.state + place_.value * kStagedRow<S> + place_.column * sizeof(S);
#pragma unroll
    for (int t = 0; t < 16; ++t) {
#pragma unroll
      for (int v = 0; v < 2; ++v) {
        char* const pair = pairs + v * 8 * kStagedRow<S> + 8 * t * sizeof(S);
        float* const x = &s[4 * t + 2 * v];
        float2 next;
        if constexpr (sizeof(S) == 4) {
          next = *reinterpret_cast<const float2*>(pair);
          *reinterpret_cast<float2*>(pair) = make_float2(x[0], x[1]);
        } else {
          next = UnpackPair<S>(*reinterpret_cast<const uint32_t*>(pair));
          *reinterpret_cast<uint32_t*>(pair) = PackPair<S>(x[0], x[1]);
        }
        x[0] = next.x;
        x[1] = next.y;
      }
    }
  }

  // The chunks of all units, of which the first has `left` tokens and begins in s.
  __device__ void Walk(int left, float (&s)[64]) {
    float o[32];
    float d[32];
#pragma unroll
    for (int i = 0; i < 32; ++i) o[i] = d[i] = 0.0f;
    uint32_t operand[8][4];
    ToOperand<0>(s, operand);
    left = Uniform(left);
#pragma unroll 1
    for (uint32_t n = 0;; ++n) {
      WalkSlot& slot = shared_.slots[n % kSlots];
      const WalkScalars& scalars = shared_.scalars[n % kSlots];

      // d = S k and o = S q.
      WaitFor(shared_.keys_loaded, n);
      ProductFence();
      ReadState<0, 8>(slot.k, operand, d);
      CommitProducts();
      // Coefficients for what follows on the products, whose waits they would lengthen.
      uint32_t remembered[8];
      uint32_t to_end[8];
#pragma unroll
      for (int t = 0; t < 8; ++t) {
        remembered[t] = PairAt(scalars.remembered, t);
        to_end[t] = PairAt(scalars.to_end, t);
      }
      // In the shadow of that the last chunk's output makes room for this one's, half of whose
      // first product then covers for the forming of R, the other half for that of U. It is handed
      // over early: its norm takes as long as a chunk here.
      WaitForProducts<1>();  // For the compiler, which does not see that the others are done.
      Pin(o);
      Pin(s);
      if (n > 0) StoreOutput(n - 1, o);
      WaitFor(shared_.rest_loaded, n);
      ProductFence();
      ReadState<0, 4>(slot.q, operand, o);
      CommitProducts();
      if (n > 0) HandOver(n - 1);
      if constexpr (kForm == Form::kConvolved) WaitFor(shared_.values_ready, n);
      uint32_t written[4][4];  // beta v
      const uint32_t values =
          ColumnsOf(SharedAddress(shared_.values[n % kValueSlots].rows), thread_);
#pragma unroll
      for (int t = 0; t < 4; ++t) {
        LoadMatricesTransposed(values + t * 16 * kPanelRowBytes, written[t]);
      }

      // d = U = T R. As FP16, R takes the prediction as FP16 too.
      WaitForProducts<1>();
      Pin(d);
      uint32_t r[4][4];
#pragma unroll
      for (int t = 0; t < 8; ++t) {
        const __half2 factor = AsHalves(remembered[t]);
#pragma unroll
        for (int v = 0; v < 2; ++v) {
          const uint32_t w = written[t / 2][t % 2 * 2 + v];
          const __half2 predicted = __floats2half2_rn(d[4 * t + 2 * v], d[4 * t + 2 * v + 1]);
          r[t / 2][t % 2 * 2 + v] = AsWord(__hfma2(__hneg2(factor), predicted, AsHalves(w)));
        }
      }
      ProductFence();
#pragma unroll
      for (int i = 0; i < 4; ++i) ProductN64(d, r[i], slot.t.Columns(i), i > 0);
      CommitProducts();
      ReadState<4, 8>(slot.q, operand, o);
      CommitProducts();
      const float decay = scalars.end;
#pragma unroll
      for (int i = 0; i < 64; ++i) s[i] *= decay;

      // S = exp(G_63) S + U k^T, and o = exp(G) S q + P U.
      WaitForProducts<1>();
      Pin(d);
      uint32_t decayed[4][4];
#pragma unroll
      for (int t = 0; t < 8; ++t) {
        const __half2 factor = AsHalves(to_end[t]);
#pragma unroll
        for (int v = 0; v < 2; ++v) {
          const __half2 u = __floats2half2_rn(d[4 * t + 2 * v], d[4 * t + 2 * v + 1]);
          r[t / 2][t % 2 * 2 + v] = AsWord(u);
          decayed[t / 2][t % 2 * 2 + v] = AsWord(__hmul2(u, factor));
        }
      }
      ProductFence();
      const uint64_t k_panels = PanelDescriptor(SharedAddress(slot.k[0]), sizeof(slot.k[0]));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        ProductN128Transposed(s, decayed[i], k_panels + i * kNextRows, true);
      }
      CommitProducts();
      WaitForProducts<1>();
      Pin(o);
#pragma unroll
      for (int t = 0; t < 8; ++t) {
        const float2 query = chunk::PairAt(scalars.query, t, place_);
        o[4 * t] *= query.x;
        o[4 * t + 1] *= query.y;
        o[4 * t + 2] *= query.x;
        o[4 * t + 3] *= query.y;
      }
      ProductFence();
#pragma unroll
      for (int i = 0; i < 4; ++i) ProductN64(o, r[i], slot.p.Columns(i), true);
      CommitProducts();
      WaitForProducts<1>();
      Pin(s);
      if (p_.checkpoints.every != 0 && left >= kChunk) StoreCheckpoint(left, s);
      left -= kChunk;
      bool more = true;
      if (left <= 0) {
        const WalkUnit& next = Next();
        left = Uniform(next.length);
        more = left > 0;
        if (more && p_.moves) {
          Exchange(s);
        } else {
          WriteSlot(p_.args, Current().write, place_, s);
          if (more) ReadSlot(p_.args, next.read, place_, s);
        }
        ++unit_;
      }
      ToOperand<0>(s, operand);
      WaitForProducts<0>();
      Pin(o);
      if (!more) {
        StoreOutput(n, o);
        HandOver(n);
        return;
      }
    }
  }

  // After a chunk before which `left` tokens were left.
  __device__ void StoreCheckpoint(int left, const float (&s)[64]) {
    const WalkUnit& unit = Current();
    const int64_t slot = p_.checkpoints.SlotAfter(unit.sequence, (unit.length - left) / kChunk + 1);
    if (slot < 0) return;
    WriteSlot(p_.args, slot * p_.args.state_slot_stride + RowsOf(unit.head), place_, s);
  }

  // Tells the compiler that all lanes have the same value: addresses of operands that follow from a
  // loop's turns are then formed once for a warp.
  __device__ static int Uniform(int value) { return __shfl_sync(kFullMask, value, 0); }

  // Of the two neighbouring tokens of group t.
  __device__ uint32_t PairAt(const __half (&coefficients)[kChunk], int t) const {
    return *reinterpret_cast<const uint32_t*>(&coefficients[8 * t + place_.column]);
  }
  __device__ static uint32_t AsWord(__half2 pair) {
    return *reinterpret_cast<const uint32_t*>(&pair);
  }
  __device__ static __half2 AsHalves(uint32_t word) {
    return *reinterpret_cast<const __half2*>(&word);
  }

  const WalkParams& p_;
  WalkShared& shared_;
  const int thread_;
  Place place_;
  uint32_t unit_ = 0;  // Index of the current one.
};

}  // namespace gdn::cuda::chunk

#endif  // KERNELS_CUDA_FUSED_PREFILL_WALK_STATE_CUH_
