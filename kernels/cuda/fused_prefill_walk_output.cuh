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
template <typename X, bool kPlain, Form kForm>
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
      // A weight of 0 gives a gate of 0.
      if (kPlain) weight_[e] = fabsf(weight_[e]) < 1e-37f ? 1e38f : 1.0f / weight_[e];
    }
    WithoutChunks();
    Walk();
  }

 private:
  static constexpr int kThreads = kOutputs<kForm> * kGroup;
  static constexpr int kRowsAtOnce = kThreads / 8;
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
         first += kThreads * step) {
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
        if (kForm == Form::kConvolved && at.length == 0) MoveConvState(at);
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

  // The same of the convolution's state.
  __device__ void MoveConvState(const Cursor& at) const {
    const gdn_delta_rule_args& a = p_.args;
    constexpr int kLanes = kPanelColumns / kVectorElements;
    if (lane_ >= kPast * kLanes) return;
    const int64_t channel = (2 * a.key_heads + at.head) * kDim + PartOfBlock() * kPanelColumns +
                            lane_ % kLanes * kVectorElements;
    const auto entry = [&](int64_t slot) {
      return reinterpret_cast<uint4*>(ConvState(a_, slot, lane_ / kLanes, channel));
    };
    const bool fresh = a.fresh != nullptr && a.fresh[at.sequence] != 0;
    *entry(a.write_index[at.sequence]) =
        fresh ? make_uint4(0, 0, 0, 0) : *entry(a.read_index[at.sequence]);
  }

  // The gate of a row `turn` turns after `line`; past the sequence's end it stays as it is. Written
  // out so that it goes where the last one was: copies at a loop's end would wait for it.
  __device__ void LoadGate(const X* line, int turn, int left, uint4& gate) const {
    const X* const from = line + turn * kRowsAtOnce * a_.x_token_stride;
    asm volatile(
        "{\n.reg .pred inside;\nsetp.lt.s32 inside, %5, %6;\n"
        "@inside ld.global.v4.b32 {%0, %1, %2, %3}, [%4];\n}\n"
        : "+r"(gate.x), "+r"(gate.y), "+r"(gate.z), "+r"(gate.w)
        : "l"(from), "r"(turn * kRowsAtOnce), "r"(left));
  }

  __device__ void PrefetchGates(const WalkUnit& unit, int first) const {
    // The values role does it where it has more time.
    if (kForm != Form::kConvolved) chunk::PrefetchGates<X>(a_, unit, first, thread_);
  }

  // All chunks; the gates are loaded a chunk ahead, those of a unit's first with the last of the
  // unit before.
  __device__ void Walk() {
    WalkUnit unit = UnitFinder(p_).Next();
    const X* gates = Gates(unit);
    X* lines = Lines(unit);
    int left = unit.length - row_;
    uint4 gate[kTurns] = {};
#pragma unroll
    for (int i = 0; i < kTurns; ++i) LoadGate(gates, i, left, gate[i]);
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
        // All of the output is in registers.
        shared_.rest_done[n_ % kSlots].Arrive();
        const float sum = SumOverLanes(sums);
        Send(sum);
        const bool last = first + kChunk >= unit.length;
        gates = last ? Gates(next) : gates + kChunk * a_.x_token_stride;
        const int ahead = last ? next.length - row_ : left - kChunk;
        // While the other half's sums are on their way.
        if constexpr (kPlain) {
#pragma unroll
          for (int i = 0; i < kTurns; ++i) {
            Gate(o[i], gate[i]);
            LoadGate(gates, i, ahead, gate[i]);
          }
        }
        const float rstd = ReceiveScale(sum);
#pragma unroll
        for (int i = 0; i < kTurns; ++i) {
          const float scale = __shfl_sync(kFullMask, rstd, lane_ / 8 * 8 + i);
          uint4 y;
          if constexpr (kPlain) {
            y = Scaled(o[i], scale);
          } else {
            y = Norm(o[i], scale, gate[i]);
            LoadGate(gates, i, ahead, gate[i]);
          }
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

  // The row whose sum a lane gets.
  __device__ int SumRow() const { return row_ + lane_ % kTurns * kRowsAtOnce; }

  // Sums over the rows' eight lanes, of which each gets one row's, in the same order whatever
  // kTurns.
  __device__ float SumOverLanes(const float (&sums)[kTurns]) const {
    static_assert(kTurns == 2 || kTurns == 4);
    const auto exchange = [&](float low, float high, int bit) {
      const bool keeps_high = (lane_ & bit) != 0;
      return (keeps_high ? high : low) + __shfl_xor_sync(kFullMask, keeps_high ? low : high, bit);
    };
    float sum = exchange(sums[0], sums[1], 1);
    if constexpr (kTurns == 4) {
      sum = exchange(sum, exchange(sums[2], sums[3], 1), 2);
    } else {
      sum += __shfl_xor_sync(kFullMask, sum, 2);
    }
    return sum + __shfl_xor_sync(kFullMask, sum, 4);
  }

  // Sends the sums of squares to the block that has the other half.
  __device__ void Send(float sum) {
    OtherHalf& other = shared_.other;
    const uint32_t phase = n_ % 2;
    if (lane_ % 8 < kTurns) {
      SendFloat(&other.squares[phase][SumRow()], ClusterRank() ^ 1, sum, &other.arrived[phase]);
    }
    if (thread_ == 0) other.arrived[phase].ArriveExpecting(kChunk * sizeof(float));
  }
  // With those of the other half: what brings the row to unit norm.
  __device__ float ReceiveScale(float sum) {
    OtherHalf& other = shared_.other;
    const uint32_t phase = n_ % 2;
    other.arrived[phase].Wait(n_ / 2 % 2);
    sum += other.squares[phase][SumRow()];
    __syncwarp();  // Before the warp sends the sums that let the other block overwrite these.
    return rsqrtf(sum / float{kDim} + a_.eps);
  }

  // The lane's columns of a row times the norm's weights and the gate's SiLU.
  __device__ void Gate(float (&o)[kVectorElements], const uint4& gate) const {
    const uint32_t gates[4] = {gate.x, gate.y, gate.z, gate.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 z = WidenPair<X>(gates[i]);
      o[2 * i] *= z.x * WeightedSigmoid(z.x, weight_[2 * i]);
      o[2 * i + 1] *= z.y * WeightedSigmoid(z.y, weight_[2 * i + 1]);
    }
  }
  // Of the weight's inverse.
  __device__ static float WeightedSigmoid(float z, float inverse) {
    float power;
    float sigmoid;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(kSiluScale * z));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(sigmoid) : "f"(fmaf(power, inverse, inverse)));
    return sigmoid;
  }
  __device__ static uint4 Scaled(const float (&o)[kVectorElements], float scale) {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = PackPair<X>(o[2 * i] * scale, o[2 * i + 1] * scale);
    return make_uint4(words[0], words[1], words[2], words[3]);
  }

  // The lane's columns of a row of y.
  __device__ uint4 Norm(const float (&o)[kVectorElements], float rstd, const uint4& gate) const {
    const uint32_t gates[4] = {gate.x, gate.y, gate.z, gate.w};
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float n[2] = {o[2 * i] * rstd * weight_[2 * i], o[2 * i + 1] * rstd * weight_[2 * i + 1]};
      if (a_.round_before_gate != 0) RoundPair<X>(n);
      const float2 z = WidenPair<X>(gates[i]);
      float factor[2] = {FastSigmoid(z.x), FastSigmoid(z.y)};
      if (a_.activation == GDN_GATE_SILU) {
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
  const int row_;                  // The first of the lane's rows.
  const int column_;               // The first of the lane's, within the head.
  float weight_[kVectorElements];  // kPlain: their inverses.
  uint32_t n_ = 0;                 // Chunks so far.
};

}  // namespace gdn::cuda::chunk

#endif  // KERNELS_CUDA_FUSED_PREFILL_WALK_OUTPUT_CUH_
