// The output role of the fused prefill's walk: the gated norm of what the states hand over. Eight
// lanes share the 64 columns of a token's half head; of the other half they get the sum of squares
// from the other block of the cluster.
#ifndef KERNELS_CUDA_FUSED_PREFILL_WALK_OUTPUT_CUH_
#define KERNELS_CUDA_FUSED_PREFILL_WALK_OUTPUT_CUH_

#include "kernels/cuda/async_copy.cuh"
#include "kernels/cuda/cluster.cuh"
#include "kernels/cuda/fused_prefill_math.cuh"
#include "kernels/cuda/fused_prefill_walk.cuh"
#include "kernels/cuda/vector.cuh"

namespace gdn::cuda::chunk {

// kPlain: the gate is SiLU, and nothing is rounded before y.
template <typename X, bool kPlain>
class WalkOutput {
 public:
  __device__ WalkOutput(const WalkParams& p, WalkShared& shared, int thread)
      : p_(p),
        a_(p.layer),
        shared_(shared),
        thread_(thread),
        lane_(thread % 32),
        row_(thread / 8),
        column_(PartOfBlock() * kPanelColumns + lane_ % 8 * kVectorElements) {}

  __device__ void Run() {
#pragma unroll
    for (int e = 0; e < kVectorElements; ++e) {
      weight_[e] = a_.norm_weight[column_ + e] + (a_.zero_centered != 0 ? 1.0f : 0.0f);
    }
    WithoutChunks();
    Walk();
  }

 private:
  static constexpr int kRowsAtOnce = kOutputs * kGroup / 8;
  // Rows of a lane, which cover for each other's waits.
  static constexpr int kTurns = kChunk / kRowsAtOnce;
  static_assert(kRowsAtOnce % 8 == 0);  // OutputPlace is that of the lane's first row.

  __device__ const X* Gates(const WalkUnit& unit) const {
    return static_cast<const X*>(a_.x) + (int64_t{unit.begin} + row_) * a_.x_token_stride +
           a_.z_offset + int64_t{unit.head} * kDim + column_;
  }
  __device__ X* Lines(const WalkUnit& unit) const {
    return static_cast<X*>(a_.y) + (int64_t{unit.begin} + row_) * a_.y_token_stride +
           int64_t{unit.head} * kDim + column_;
  }

  // The block's units that have no chunks: padding, whose output is zeros, and empty sequences,
  // whose state may move. Each warp looks at 32 at once.
  __device__ void WithoutChunks() const {
    const int64_t step = gridDim.x;
    for (int64_t first = blockIdx.x + thread_ / 32 * 32 * step; first < p_.units;
         first += kOutputs * kGroup * step) {
      Cursor at;
      const int64_t unit = first + lane_ * step;
      bool found = false;
      if (unit < p_.units && Enter<kParts>(p_, static_cast<int>(unit), &at)) {
        found = IsPadding(p_.args, at.sequence)
                    ? at.length > 0
                    : at.length == 0 &&
                          p_.args.read_index[at.sequence] != p_.args.write_index[at.sequence];
      }
      for (uint32_t left = __ballot_sync(kFullMask, found); left != 0; left &= left - 1) {
        Enter<kParts>(p_, static_cast<int>(first + (__ffs(static_cast<int>(left)) - 1) * step),
                      &at);
        if (at.length > 0) {
          StoreZeros(at);
        } else if (p_.args.state_dtype == GDN_F32) {
          MoveState<float2>(at);
        } else {
          MoveState<uint32_t>(at);
        }
      }
    }
  }

  // By a warp.
  __device__ void StoreZeros(const Cursor& at) const {
    constexpr int kRows = 32 / 8;
    const int row = lane_ / 8;
    X* line = static_cast<X*>(a_.y) + (int64_t{at.begin} + row) * a_.y_token_stride +
              int64_t{at.head} * kDim + column_;
    for (int token = row; token < at.length; token += kRows) {
      StoreVector(line, Vector<X>{});
      line += kRows * a_.y_token_stride;
    }
  }

  // By a warp: from the slot read to the slot written, in pairs of elements.
  template <typename Pair>
  __device__ void MoveState(const Cursor& at) const {
    constexpr int kPairs = kPanelColumns * kDim / 2;
    const gdn_delta_rule_args& a = p_.args;
    Pair* const pool = static_cast<Pair*>(a.state) + RowsOf(at.head) / 2 + lane_;
    const int64_t stride = a.state_slot_stride / 2;
    const Pair* const from = pool + a.read_index[at.sequence] * stride;
    Pair* const to = pool + a.write_index[at.sequence] * stride;
    const bool fresh = a.fresh != nullptr && a.fresh[at.sequence] != 0;
#pragma unroll 8
    for (int i = 0; i < kPairs; i += 32) to[i] = fresh ? Pair{} : from[i];
  }

  // The gate of a row `turn` turns after `line`, or anything past the sequence's end.
  __device__ uint4 LoadGate(const X* line, int turn, int left) const {
    if (turn * kRowsAtOnce >= left) return make_uint4(0, 0, 0, 0);
    return *reinterpret_cast<const uint4*>(line + turn * kRowsAtOnce * a_.x_token_stride);
  }

  // Brings a chunk's gates to the L2, a line of 128 bytes a thread.
  __device__ void PrefetchGates(const WalkUnit& unit, int first) const {
    const int token = first + thread_;
    if (token >= unit.length || thread_ >= kChunk) return;
    PrefetchToL2(static_cast<const X*>(a_.x) + (int64_t{unit.begin} + token) * a_.x_token_stride +
                 a_.z_offset + int64_t{unit.head} * kDim + PartOfBlock() * kPanelColumns);
  }

  // All chunks; the gates are loaded a chunk ahead, those of a unit's first with the last of the
  // unit before.
  __device__ void Walk() {
    WalkUnit unit = UnitFinder(p_).Next();
    const X* gates = Gates(unit);
    X* lines = Lines(unit);
    int left = unit.length - row_;
    uint4 gate[kTurns];
#pragma unroll
    for (int i = 0; i < kTurns; ++i) gate[i] = LoadGate(gates, i, left);
    for (uint32_t u = 1; unit.length > 0; ++u) {
      const WalkUnit& next = shared_.units[u % kUnits];
      for (int first = 0; first < unit.length; first += kChunk, ++n_) {
        PrefetchGates(unit, first + kChunk);
        WaitFor(shared_.output, n_);
        if (first == 0) PrefetchGates(next, 0);
        float o[kTurns][kVectorElements];
        float sums[kTurns];
#pragma unroll
        for (int i = 0; i < kTurns; ++i) Load(row_ + i * kRowsAtOnce, o[i]);
#pragma unroll
        for (int i = 0; i < kTurns; ++i) sums[i] = Squares(o[i]);
        SumOverLanes(sums);
        // All of the output is in registers.
        FenceForBulk();
        shared_.rest_done[n_ % kSlots].Arrive();
        Exchange(sums);
        const bool last = first + kChunk >= unit.length;
        gates = last ? Gates(next) : gates + kChunk * a_.x_token_stride;
        const int ahead = last ? next.length - row_ : left - kChunk;
#pragma unroll
        for (int i = 0; i < kTurns; ++i) {
          const uint4 y = Norm(o[i], sums[i], gate[i]);
          gate[i] = LoadGate(gates, i, ahead);
          if (i * kRowsAtOnce < left) {
            *reinterpret_cast<uint4*>(lines + i * kRowsAtOnce * a_.y_token_stride) = y;
          }
        }
        lines = last ? Lines(next) : lines + kChunk * a_.y_token_stride;
        left = ahead;
      }
      unit = next;
    }
  }

  // The lane's columns of a row.
  __device__ void Load(int row, float (&o)[kVectorElements]) const {
    const uint32_t from =
        shared_.slots[n_ % kSlots].Output() + static_cast<uint32_t>(row) * kOutputRow * 4;
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

  // Sums over a row's lanes.
  __device__ static void SumOverLanes(float (&sums)[kTurns]) {
#pragma unroll
    for (int bit = 1; bit < 8; bit *= 2) {
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
  WalkShared& shared_;
  const int thread_;
  const int lane_;
  const int row_;     // The first of the lane's rows.
  const int column_;  // The first of the lane's, within the head.
  float weight_[kVectorElements];
  uint32_t n_ = 0;  // Chunks so far.
};

}  // namespace gdn::cuda::chunk

#endif  // KERNELS_CUDA_FUSED_PREFILL_WALK_OUTPUT_CUH_
