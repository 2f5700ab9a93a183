// The values role of the fused prefill's walk: where a chunk's have arrived, it turns them in place
// into what the state takes, beta SiLU(conv(v)), v rounded to X as the op's contract says, then to
// FP16. A lane has four columns of eight tokens.
#ifndef KERNELS_CUDA_FUSED_PREFILL_WALK_VALUES_CUH_
#define KERNELS_CUDA_FUSED_PREFILL_WALK_VALUES_CUH_

#include "kernels/cuda/fused_prefill_math.cuh"
#include "kernels/cuda/fused_prefill_walk.cuh"

namespace gdn::cuda::chunk {

// The convolution's state of v's channels is carried here; no two blocks share a channel.
template <typename X>
class WalkValues {
 public:
  __device__ WalkValues(const WalkParams& p, WalkShared& shared, int thread)
      : p_(p), shared_(shared), warp_(thread / 32), lane_(thread % 32) {
    const int vector = lane_ % kLanes / 2;
    offset_ = static_cast<uint32_t>(PanelOffset(Row(), vector) + lane_ % 2 * 8);
  }

  __device__ void Run() {
    if (UnitFinder(p_).Next().length == 0) return;
    for (uint32_t u = 0;; ++u) {
      const WalkUnit& unit = shared_.units[u % kUnits];
      if (u == 0) WaitFor(shared_.values_loaded, 0);  // The unit is known with them.
      if (unit.length == 0) return;
      for (int first = 0; first < unit.length; first += kChunk, ++n_) Convolve(unit, first);
    }
  }

 private:
  static constexpr int kColumns = 4;
  static constexpr int kRows = 8;
  static constexpr int kLanes = kPanelColumns / kColumns;  // Of a row.
  static_assert(kGroup == kLanes * kChunk / kRows && kRows % 8 == 0);

  __device__ void Convolve(const WalkUnit& unit, int first) {
    ValueSlot& slot = shared_.values[n_ % kValueSlots];
    WaitFor(shared_.values_loaded, n_);
    const int left = unit.length - first;
    PrefetchGates<X>(p_.layer, unit, first, warp_ * 32 + lane_);
    if (first == 0) LoadTaps(slot);
    uint2 x[kPast + kRows];
    const uint32_t rows = SharedAddress(slot.rows) + offset_;
#pragma unroll
    for (int i = 0; i < kPast + kRows; ++i) x[i] = LoadWords(At(rows, i));
    if (first == 0 && Row() == 0) {
#pragma unroll
      for (int i = 0; i < kPast; ++i) x[i] = Past(unit, slot, i);
    }
    if (left <= kChunk || p_.checkpoints.every != 0) Carry(unit, slot, first);
    __syncwarp();
    NamedBarrier(1, kGroup);  // Others have loaded what this warp overwrites.
    uint2 v[kRows];
    ConvolveColumns<0>(x, v);
    ConvolveColumns<1>(x, v);
    WaitFor(shared_.keys_loaded, n_);
    const uint32_t betas = SharedAddress(&shared_.scalars[n_ % kSlots].beta[Row()]);
#pragma unroll
    for (int i = 0; i < kRows; i += 4) {
      float beta[4];
      LoadFour(betas + 4 * i, beta);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        v[i + j] = make_uint2(Scaled(v[i + j].x, beta[j]), Scaled(v[i + j].y, beta[j]));
      }
    }
    if (left < kChunk) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        if (Row() + i >= left) v[i] = make_uint2(0, 0);
      }
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) StoreWords(At(rows, i), v[i]);
    shared_.values_ready[n_ % kValueSlots].Arrive();
  }

  // The lane's first token.
  __device__ int Row() const { return warp_ * (2 * kRows) + lane_ / kLanes * kRows; }
  // Row i from the lane's first on, which is a multiple of eight.
  __device__ static uint32_t At(uint32_t rows, int i) {
    return (rows ^ static_cast<uint32_t>((i & 7) << 4)) + static_cast<uint32_t>(i * kPanelRowBytes);
  }

  __device__ static uint2 LoadWords(uint32_t address) {
    uint2 words;
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];"
                 : "=r"(words.x), "=r"(words.y)
                 : "r"(address)
                 : "memory");
    return words;
  }
  __device__ static void StoreWords(uint32_t address, uint2 words) {
    asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(address), "r"(words.x), "r"(words.y)
                 : "memory");
  }
  __device__ static void LoadFour(uint32_t address, float (&x)[4]) {
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3])
                 : "r"(address)
                 : "memory");
  }

  __device__ void LoadTaps(const ValueSlot& slot) {
#pragma unroll
    for (int e = 0; e < kColumns; ++e) {
      LoadFour(SharedAddress(&slot.taps[lane_ % kLanes * kColumns + e]), taps_[e]);
#pragma unroll
      for (float& tap : taps_[e]) tap *= kSiluScale;
    }
  }

  // The lane's columns of input j of those before a sequence.
  __device__ uint2 Past(const WalkUnit& unit, const ValueSlot& slot, int j) const {
    if (unit.read < 0) return make_uint2(0, 0);
    return LoadWords(SharedAddress(&slot.past[j][lane_ % kLanes * kColumns]));
  }

  // What the sequence carries after this chunk, if it ends or there is a checkpoint: its last
  // inputs, a row each of three warps.
  __device__ void Carry(const WalkUnit& unit, const ValueSlot& slot, int first) const {
    const int left = unit.length - first;
    if (warp_ >= kPast || lane_ >= kLanes) return;
    const int row = (left < kChunk ? left : kChunk) + warp_;
    const uint32_t at = static_cast<uint32_t>(PanelOffset(row, lane_ / 2) + lane_ % 2 * 8);
    const uint2 input = first == 0 && row < kPast ? Past(unit, slot, row)
                                                  : LoadWords(SharedAddress(slot.rows) + at);
    const gdn_fused_decode_args& a = p_.layer;
    const int64_t channel =
        (2 * a.key_heads + unit.head) * kDim + PartOfBlock() * kPanelColumns + lane_ * kColumns;
    const auto store = [&](int64_t to) {
      *reinterpret_cast<uint2*>(ConvState(a, to, warp_, channel)) = input;
    };
    if (left <= kChunk) store(unit.write_slot);
    if (p_.checkpoints.every == 0 || left < kChunk) return;
    const int64_t to = p_.checkpoints.SlotAfter(unit.sequence, first / kChunk + 1);
    if (to >= 0) store(to);
  }

  // Columns 2 kPair and the next of the lane's.
  template <int kPair>
  __device__ void ConvolveColumns(const uint2 (&x)[kPast + kRows], uint2 (&v)[kRows]) const {
    const float(&low)[4] = taps_[2 * kPair];
    const float(&high)[4] = taps_[2 * kPair + 1];
    float2 in[kPast + kRows];
#pragma unroll
    for (int i = 0; i < kPast + kRows; ++i) in[i] = WidenPair<X>(kPair == 0 ? x[i].x : x[i].y);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      float t[2] = {low[0] * in[i].x, high[0] * in[i].y};
#pragma unroll
      for (int j = 1; j <= kPast; ++j) {
        t[0] = fmaf(low[j], in[i + j].x, t[0]);
        t[1] = fmaf(high[j], in[i + j].y, t[1]);
      }
      (kPair == 0 ? v[i].x : v[i].y) = PackPair<X>(SiluOfScaled(t[0]), SiluOfScaled(t[1]));
    }
  }

  __device__ static uint32_t Scaled(uint32_t pair, float factor) {
    const float2 v = WidenPair<X>(pair);
    return PackHalves(v.x * factor, v.y * factor);
  }

  const WalkParams& p_;
  WalkShared& shared_;
  const int warp_;
  const int lane_;
  uint32_t offset_;                  // Of the lane's words of its first row, in a panel.
  float taps_[kColumns][kPast + 1];  // Times kSiluScale.
  uint32_t n_ = 0;                   // Chunks so far.
};

}  // namespace gdn::cuda::chunk

#endif  // KERNELS_CUDA_FUSED_PREFILL_WALK_VALUES_CUH_
