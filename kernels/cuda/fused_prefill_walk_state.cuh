// The state role of the fused prefill's walk: see fused_prefill_walk.cuh. S lies in registers,
// transposed, as FP32: rows are value columns, which are independent, so one or two of these
// warpgroups in a block give the same bits.
#ifndef KERNELS_CUDA_FUSED_PREFILL_WALK_STATE_CUH_
#define KERNELS_CUDA_FUSED_PREFILL_WALK_STATE_CUH_

#include "kernels/cuda/delta_rule_chunk_state.cuh"
#include "kernels/cuda/fused_prefill_walk.cuh"

namespace gdn::cuda::chunk {

template <int kStates>
class WalkState {
 public:
  __device__ WalkState(const WalkParams& p, WalkShared<kStates>& shared, int which, int thread)
      : p_(p), shared_(shared), which_(which), thread_(thread) {
    place_.value = thread / 32 * 16 + thread % 32 / 4;
    place_.column = thread % 4 * 2;
  }

  __device__ void Run() {
    const gdn_delta_rule_args& a = p_.args;
    Cursor at;
    for (int unit = static_cast<int>(blockIdx.x); Enter<kParts>(p_, unit, &at);
         unit += static_cast<int>(gridDim.x)) {
      const int64_t read = a.read_index[at.sequence];
      const int64_t write = a.write_index[at.sequence];
      const bool fresh = a.fresh != nullptr && a.fresh[at.sequence] != 0;
      if (read < 0 || write < 0) continue;
      if (at.length == 0 && read == write) continue;
      const int64_t rows = (at.head * 2 + (kStates == 2 ? which_ : at.part)) * kHalfHead;
      float s[64];
      ReadSlot(a, fresh ? -1 : read * a.state_slot_stride + rows, place_, s);
      Walk(at, rows, s);
      WriteSlot(a, write * a.state_slot_stride + rows, place_, s);
    }
  }

 private:
  static constexpr int kParts = 2 / kStates;
  // Two roles have no registers for all values of a chunk, and cover for each other's waits.
  static constexpr bool kAhead = kStates == 1;
  static constexpr int64_t kHalfHead = int64_t{kPanelColumns} * kDim;

  // Hands a chunk's output over, and gives back all of the chunk that is not overwritten by it.
  __device__ void Finish(uint32_t n, const float (&o)[32]) {
    shared_.keys_done[n % kSlots].Arrive();
    if constexpr (kStates > 1) WaitFor(shared_.rest_read, n);
    const uint32_t row = shared_.slots[n % kSlots].Output(which_) +
                         static_cast<uint32_t>(place_.column) * kOutputRow * 4;
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
    FenceForBulk();
    shared_.output[n % kSlots].Arrive();
  }

  // All chunks of a unit, whose rows of the state begin at `rows` of a slot.
  __device__ void Walk(const Cursor& at, int64_t rows, float (&s)[64]) {
    const int chunks = (at.length + kChunk - 1) / kChunk;
    float o[32];
    float d[32];
#pragma unroll
    for (int i = 0; i < 32; ++i) o[i] = d[i] = 0.0f;
    uint32_t operand[8][4];
    ToOperand<0>(s, operand);
#pragma unroll 1
    for (int c = 0; c < chunks; ++c, ++n_) {
      const uint32_t n = n_;
      WalkSlot<kStates>& slot = shared_.slots[n % kSlots];
      const WalkScalars& scalars = shared_.scalars[n % kSlots];

      // d = S k and o = S q.
      WaitFor(shared_.keys_loaded, n);
      ProductFence();
      ReadState<0, 8>(slot.k, operand, d);
      CommitProducts();
      // Coefficients for what follows on the products, whose waits they would lengthen.
      uint32_t remembered[kAhead ? 8 : 1];
      uint32_t to_end[kAhead ? 8 : 1];
      if constexpr (kAhead) {
#pragma unroll
        for (int t = 0; t < 8; ++t) {
          remembered[t] = PairAt(scalars.remembered, t);
          to_end[t] = PairAt(scalars.to_end, t);
        }
      }
      WaitForProducts<1>();  // For the compiler, which does not see that the others are done.
      Pin(o);
      Pin(s);
      if (c > 0) Finish(n - 1, o);
      WaitFor(shared_.rest_loaded, n);
      ProductFence();
      ReadState<0, 8>(slot.q, operand, o);
      CommitProducts();
      uint32_t written[kAhead ? 4 : 1][4];  // beta v
      const uint32_t values = ColumnsOf(SharedAddress(slot.values[which_]), thread_);
      if constexpr (kAhead) {
#pragma unroll
        for (int t = 0; t < 4; ++t) {
          LoadMatricesTransposed(values + t * 16 * kPanelRowBytes, written[t]);
        }
      }

      // d = U = T R. As FP16, R takes the prediction as FP16 too.
      WaitForProducts<kAhead ? 1 : 0>();
      Pin(d);
      if constexpr (!kAhead) Pin(o);
      uint32_t r[4][4];
#pragma unroll
      for (int t = 0; t < 8; ++t) {
        if (!kAhead && t % 2 == 0) {
          LoadMatricesTransposed(values + t * 8 * kPanelRowBytes, written[0]);
        }
        if constexpr (!kAhead) remembered[0] = PairAt(scalars.remembered, t);
        const __half2 factor = AsHalves(remembered[kAhead ? t : 0]);
#pragma unroll
        for (int v = 0; v < 2; ++v) {
          const uint32_t w = written[kAhead ? t / 2 : 0][t % 2 * 2 + v];
          const __half2 predicted = __floats2half2_rn(d[4 * t + 2 * v], d[4 * t + 2 * v + 1]);
          r[t / 2][t % 2 * 2 + v] = AsWord(__hfma2(__hneg2(factor), predicted, AsHalves(w)));
        }
      }
      ProductFence();
#pragma unroll
      for (int i = 0; i < 4; ++i) ProductN64(d, r[i], slot.t.Columns(i), i > 0);
      CommitProducts();
      const float decay = scalars.end;
#pragma unroll
      for (int i = 0; i < 64; ++i) s[i] *= decay;

      // S = exp(G_63) S + U k^T, and o = exp(G) S q + P U.
      WaitForProducts<0>();
      Pin(d);
      Pin(o);
      if constexpr (kStates > 1) shared_.rest_read[n % kSlots].Arrive();
      uint32_t decayed[4][4];
#pragma unroll
      for (int t = 0; t < 8; ++t) {
        if constexpr (!kAhead) to_end[0] = PairAt(scalars.to_end, t);
        const __half2 factor = AsHalves(to_end[kAhead ? t : 0]);
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
      ToOperand<0>(s, operand);
      WaitForProducts<0>();
      Pin(o);
      if (p_.checkpoints.every != 0 && (c + 1) * kChunk <= at.length) {
        const int64_t to = p_.checkpoints.SlotAfter(at.sequence, c + 1);
        if (to >= 0) WriteSlot(p_.args, to * p_.args.state_slot_stride + rows, place_, s);
      }
    }
    if (chunks > 0) Finish(n_ - 1, o);
  }

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
  WalkShared<kStates>& shared_;
  const int which_;
  const int thread_;
  Place place_;
  uint32_t n_ = 0;  // Chunks walked so far.
};

}  // namespace gdn::cuda::chunk

#endif  // KERNELS_CUDA_FUSED_PREFILL_WALK_STATE_CUH_
