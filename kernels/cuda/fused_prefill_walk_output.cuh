// The output role of the fused prefill's walk: the gated norm of what the states hand over. Eight
// lanes share the 64 columns of a token's half head; of the other half they get the sum of squares
// from their neighbours, or, where a block has but a half, from the other block of the cluster.
#ifndef KERNELS_CUDA_FUSED_PREFILL_WALK_OUTPUT_CUH_
#define KERNELS_CUDA_FUSED_PREFILL_WALK_OUTPUT_CUH_

#include "kernels/cuda/async_copy.cuh"
#include "kernels/cuda/cluster.cuh"
#include "kernels/cuda/fused_prefill_math.cuh"
#include "kernels/cuda/fused_prefill_walk.cuh"
#include "kernels/cuda/vector.cuh"

namespace gdn::cuda::chunk {

// kPlain: the gate is SiLU, and nothing is rounded before y.
template <typename X, int kStates, bool kPlain>
class WalkOutput {
 public:
  __device__ WalkOutput(const WalkParams& p, WalkShared<kStates>& shared, int thread)
      : p_(p),
        a_(p.layer),
        shared_(shared),
        thread_(thread),
        lane_(thread % 32),
        row_(thread / (8 * kStates)),
        half_(kStates == 2 ? lane_ / 8 % 2 : 0) {}

  __device__ void Run() {
    // A block takes the same part of all of its heads.
    column_ = (kStates == 2 ? half_ : static_cast<int>(blockIdx.x) % kParts) * kPanelColumns +
              lane_ % 8 * kVectorElements;
#pragma unroll
    for (int e = 0; e < kVectorElements; ++e) {
      weight_[e] = a_.norm_weight[column_ + e] + (a_.zero_centered != 0 ? 1.0f : 0.0f);
    }
    Cursor at;
    const int step = static_cast<int>(gridDim.x);
    for (int unit = static_cast<int>(blockIdx.x); Enter<kParts>(p_, unit, &at); unit += step) {
      Cursor next;
      if (Enter<kParts>(p_, unit + step, &next)) PrefetchGates(next, 0);
      if (at.length == 0) continue;
      if (IsPadding(p_.args, at.sequence)) {
        StoreZeros(at);
      } else {
        Walk(at);
      }
    }
  }

 private:
  static constexpr int kParts = 2 / kStates;
  static constexpr int kThreads = kOutputs<kStates> * kGroup;
  static constexpr int kRowsAtOnce = kThreads / (8 * kStates);
  // Rows of a lane at once, which cover for each other's waits.
  static constexpr int kTurns = kStates == 2 ? 4 : 2;
  static constexpr int kBatch = kTurns * kRowsAtOnce;
  static_assert(kRowsAtOnce % 8 == 0);  // OutputPlace is that of the lane's first row.

  __device__ const X* Gates(const Cursor& at) const {
    return static_cast<const X*>(a_.x) + (int64_t{at.begin} + row_) * a_.x_token_stride +
           a_.z_offset + int64_t{at.head} * kDim + column_;
  }
  __device__ X* Lines(const Cursor& at) const {
    return static_cast<X*>(a_.y) + (int64_t{at.begin} + row_) * a_.y_token_stride +
           int64_t{at.head} * kDim + column_;
  }

  __device__ void StoreZeros(const Cursor& at) const {
    X* line = Lines(at);
    for (int token = row_; token < at.length; token += kRowsAtOnce) {
      StoreVector(line, Vector<X>{});
      line += kRowsAtOnce * a_.y_token_stride;
    }
  }

  // The gate of a row `turn` turns after `line`, or anything past the sequence's end.
  __device__ uint4 LoadGate(const X* line, int turn, int left) const {
    if (turn * kRowsAtOnce >= left) return make_uint4(0, 0, 0, 0);
    return *reinterpret_cast<const uint4*>(line + turn * kRowsAtOnce * a_.x_token_stride);
  }

  // Brings a chunk's gates to the L2, a line of 128 bytes a thread.
  __device__ void PrefetchGates(const Cursor& at, int first) const {
    const int token = first + thread_ / kStates;
    if (token >= at.length || thread_ >= kChunk * kStates) return;
    const int part = kStates == 2 ? thread_ % 2 : at.part;
    PrefetchToL2(static_cast<const X*>(a_.x) + (int64_t{at.begin} + token) * a_.x_token_stride +
                 a_.z_offset + int64_t{at.head} * kDim + part * kPanelColumns);
  }

  // All chunks of a unit, a batch of rows at a time; the gates are loaded a batch ahead.
  __device__ void Walk(const Cursor& at) {
    const X* gates = Gates(at);
    X* lines = Lines(at);
    int left = at.length - row_;
    uint4 gate[kTurns];
#pragma unroll
    for (int i = 0; i < kTurns; ++i) gate[i] = LoadGate(gates, i, left);
    for (int first = 0; first < at.length; first += kChunk, ++n_) {
      PrefetchGates(at, first + kChunk);
      WaitFor(shared_.output, n_);
#pragma unroll 1
      for (int rows = 0; rows < kChunk; rows += kBatch) {
        gates += kBatch * a_.x_token_stride;
        float o[kTurns][kVectorElements];
        float sums[kTurns];
#pragma unroll
        for (int i = 0; i < kTurns; ++i) Load(rows + i * kRowsAtOnce, o[i]);
#pragma unroll
        for (int i = 0; i < kTurns; ++i) sums[i] = Squares(o[i]);
        SumOverLanes(sums);
        if (rows + kBatch == kChunk) {
          // All of the output is in registers.
          FenceForBulk();
          shared_.rest_done[n_ % kSlots].Arrive();
        }
        if constexpr (kStates == 1) Exchange(sums);
#pragma unroll
        for (int i = 0; i < kTurns; ++i) {
          const uint4 y = Norm(o[i], sums[i], gate[i]);
          gate[i] = LoadGate(gates, i, left - kBatch);
          if (i * kRowsAtOnce < left) {
            *reinterpret_cast<uint4*>(lines + i * kRowsAtOnce * a_.y_token_stride) = y;
          }
        }
        lines += kBatch * a_.y_token_stride;
        left -= kBatch;
      }
    }
  }

  // The lane's columns of a row.
  __device__ void Load(int row, float (&o)[kVectorElements]) const {
    const uint32_t from = shared_.slots[n_ % kSlots].Output(half_) +
                          static_cast<uint32_t>(row_ + row) * kOutputRow * 4;
    const int first = lane_ % 8 * kVectorElements;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float* const to = o + 4 * i;
      const uint32_t at = from + static_cast<uint32_t>(OutputPlace(row_, first + 4 * i)) * 4;
      asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                   : "=f"(to[0]), "=f"(to[1]), "=f"(to[2]), "=f"(to[3])
                   : "r"(at)
                   : "memory");
    }
  }

  __device__ float Squares(float (&o)[kVectorElements]) const {
    float sums[2] = {};
#pragma unroll
    for (int e = 0; e < kVectorElements; e += 2) {
      if (!kPlain && a_.round_o != 0) RoundPair<X>(&o[e]);
      sums[0] = fmaf(o[e], o[e], sums[0]);
      sums[1] = fmaf(o[e + 1], o[e + 1], sums[1]);
    }
    return sums[0] + sums[1];
  }

  // Sums over a half head's lanes, then over the block's halves of a row.
  __device__ static void SumOverLanes(float (&sums)[kTurns]) {
#pragma unroll
    for (int bit = 1; bit < 8 * kStates; bit *= 2) {
      float other[kTurns];
#pragma unroll
      for (int i = 0; i < kTurns; ++i) other[i] = __shfl_xor_sync(kFullMask, sums[i], bit);
#pragma unroll
      for (int i = 0; i < kTurns; ++i) sums[i] += other[i];
    }
  }

  // Adds the other half's sums of squares, which the other block has.
  __device__ void Exchange(float (&sums)[kTurns]) {
    static_assert(kTurns == 2);
    OtherHalf& other = shared_.other;
    const uint32_t phase = n_ % 2;
    // Each of two lanes sends one of the sums that all eight have.
    const int turn = lane_ % 8;
    if (turn < kTurns) {
      SendFloat(&other.squares[phase][row_ + turn * kRowsAtOnce], ClusterRank() ^ 1,
                turn == 0 ? sums[0] : sums[1], &other.arrived[phase]);
    }
    if (row_ == 0 && turn == 0) other.arrived[phase].ArriveExpecting(kChunk * sizeof(float));
    other.arrived[phase].Wait(n_ / 2 % 2);
#pragma unroll
    for (int i = 0; i < kTurns; ++i) sums[i] += other.squares[phase][row_ + i * kRowsAtOnce];
    __syncwarp();  // Before the warp sends the sums that let the other block overwrite these.
  }

  // The lane's columns of a row of y.
  __device__ uint4 Norm(const float (&o)[kVectorElements], float sum, const uint4& gate) const {
    const float rstd = rsqrtf(sum / float{kDim} + a_.eps);
    const uint32_t gates[4] = {gate.x, gate.y, gate.z, gate.w};
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float n[2] = {o[2 * i] * rstd * weight_[2 * i], o[2 * i + 1] * rstd * weight_[2 * i + 1]};
      if (!kPlain && a_.round_before_gate != 0) RoundPair<X>(n);
      const float2 z = UnpackPair<X>(gates[i]);
      float factor[2] = {FastSigmoid(z.x), FastSigmoid(z.y)};
      if (kPlain || a_.activation == GDN_GATE_SILU) {
        factor[0] *= z.x;
        factor[1] *= z.y;
      }
      words[i] = PackPair<X>(n[0] * factor[0], n[1] * factor[1]);
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
  }

  const WalkParams& p_;
  const gdn_fused_decode_args& a_;
  WalkShared<kStates>& shared_;
  const int thread_;
  const int lane_;
  const int row_;   // The first of the lane's rows.
  const int half_;  // Of the block's columns.
  int column_ = 0;  // Within the head.
  float weight_[kVectorElements];
  uint32_t n_ = 0;  // Chunks so far.
};

}  // namespace gdn::cuda::chunk

#endif  // KERNELS_CUDA_FUSED_PREFILL_WALK_OUTPUT_CUH_
