#include "kernels/cpu/sampling_scan.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>

#include "kernels/common/philox.h"
#include "kernels/common/sampling_math.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/sampling_scan.cc"
#include "hwy/foreach_target.h"
// After foreach_target.h.
#include "hwy/highway.h"
#include "kernels/cpu/dense_vec-inl.h"

HWY_BEFORE_NAMESPACE();
namespace gdn::cpu::HWY_NAMESPACE {

using U32 = hn::ScalableTag<uint32_t>;
using U32Vec = hn::Vec<U32>;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
// Vectors summed in FP32 before the sum moves to FP64.
constexpr int64_t kSumBlock = 16;

int64_t NumLanes() { return static_cast<int64_t>(hn::Lanes(F32())); }

// Logits from i on; lanes behind the end are -inf, which no scan counts.
HWY_INLINE F32Vec LoadLogits(const float* logits, int64_t i, int64_t count) {
  const F32 d;
  const int64_t lanes = NumLanes();
  if (HWY_LIKELY(i + lanes <= count)) return hn::LoadU(d, logits + i);
  HWY_ALIGN float padded[hn::MaxLanes(F32())];
  for (int64_t j = 0; j < lanes; ++j) padded[j] = i + j < count ? logits[i + j] : -kInfinity;
  return hn::Load(d, padded);
}

float Max(const float* logits, int64_t count) {
  const F32 d;
  auto max = hn::Set(d, -kInfinity);
  auto nan = hn::Zero(d);
  for (int64_t i = 0; i < count; i += NumLanes()) {
    const auto v = LoadLogits(logits, i, count);
    max = hn::Max(max, v);
    nan = hn::Or(nan, hn::VecFromMask(d, hn::IsNaN(v)));
  }
  if (!hn::AllFalse(d, hn::MaskFromVec(nan))) return std::numeric_limits<float>::quiet_NaN();
  return hn::GetLane(hn::MaxOfLanes(d, max));
}

int64_t Find(const float* logits, int64_t count, float value) {
  const F32 d;
  const auto wanted = hn::Set(d, value);
  int64_t i = 0;
  for (; i + NumLanes() <= count; i += NumLanes()) {
    const auto lane = hn::FindFirstTrue(d, hn::Eq(hn::LoadU(d, logits + i), wanted));
    if (lane >= 0) return i + static_cast<int64_t>(lane);
  }
  while (i < count && logits[i] != value) ++i;
  return i;
}

double SumExp(const float* logits, int64_t count, float max) {
  const F32 d;
  const auto shift = hn::Set(d, max);
  double total = 0.0;
  for (int64_t i = 0; i < count;) {
    auto sum = hn::Zero(d);
    for (int64_t j = 0; j < kSumBlock && i < count; ++j, i += NumLanes()) {
      sum = hn::Add(sum, hn::Exp(d, hn::Sub(LoadLogits(logits, i, count), shift)));
    }
    total += static_cast<double>(hn::GetLane(hn::SumOfLanes(d, sum)));
  }
  return total;
}

double Masses(const float* logits, int64_t count, float max, float temperature, float* mass,
              const std::array<float, kNumMassLevels>& levels,
              std::array<double, kNumMassLevels>* level_sums) {
  const F32 d;
  const auto shift = hn::Set(d, max);
  const auto scale = hn::Set(d, temperature);
  double total = 0.0;
  level_sums->fill(0.0);
  for (int64_t i = 0; i < count;) {
    auto sum = hn::Zero(d);
    F32Vec above[kNumMassLevels];
    for (auto& level : above) level = hn::Zero(d);
    for (int64_t j = 0; j < kSumBlock && i < count; ++j, i += NumLanes()) {
      const auto l = LoadLogits(logits, i, count);
      const auto p = hn::Exp(d, hn::Div(hn::Sub(l, shift), scale));
      StoreVec(d, p, mass, GDN_F32, i, count - i);
      sum = hn::Add(sum, p);
      for (size_t level = 0; level < kNumMassLevels; ++level) {
        above[level] =
            hn::Add(above[level], hn::IfThenElseZero(hn::Gt(l, hn::Set(d, levels[level])), p));
      }
    }
    total += static_cast<double>(hn::GetLane(hn::SumOfLanes(d, sum)));
    for (size_t level = 0; level < kNumMassLevels; ++level) {
      (*level_sums)[level] += static_cast<double>(hn::GetLane(hn::SumOfLanes(d, above[level])));
    }
  }
  return total;
}

int64_t Collect(const float* logits, int64_t count, float threshold, int64_t* next, int32_t* ids,
                int64_t size, int64_t capacity) {
  const F32 d;
  const int64_t lanes = NumLanes();
  const auto limit = hn::Set(d, threshold);
  int64_t i = *next;
  for (; i < count && size + lanes <= capacity; i += lanes) {
    const auto above = hn::Gt(LoadLogits(logits, i, count), limit);
    if (hn::AllFalse(d, above)) continue;
    for (int64_t j = i; j < std::min(count, i + lanes); ++j) {
      ids[size] = static_cast<int32_t>(j);
      size += logits[j] > threshold ? 1 : 0;
    }
  }
  *next = i;
  return size;
}

#if HWY_TARGET != HWY_SCALAR
// High and low halves of the 64-bit products with a constant.
HWY_INLINE void MulWide(U32Vec v, uint32_t factor, U32Vec& high, U32Vec& low) {
  const U32 d;
  const hn::RepartitionToWide<U32> dw;
  const auto f = hn::Set(d, factor);
  const auto even = hn::MulEven(v, f);
  const auto odd = hn::MulEven(hn::BitCast(d, hn::ShiftRight<32>(hn::BitCast(dw, v))), f);
  low = hn::OddEven(hn::BitCast(d, hn::ShiftLeft<32>(odd)), hn::BitCast(d, even));
  high = hn::OddEven(hn::BitCast(d, odd), hn::BitCast(d, hn::ShiftRight<32>(even)));
}

// SamplingWord() of each lane's id.
HWY_INLINE U32Vec Words(uint64_t seed, int64_t position, U32Vec ids) {
  const U32 d;
  const auto p = static_cast<uint64_t>(position);
  auto key0 = static_cast<uint32_t>(seed);
  auto key1 = static_cast<uint32_t>(seed >> 32);
  auto c0 = ids;
  auto c1 = hn::Zero(d);
  auto c2 = hn::Set(d, static_cast<uint32_t>(p));
  auto c3 = hn::Set(d, static_cast<uint32_t>(p >> 32));
  for (int round = 0; round < kernels::kPhiloxRounds; ++round) {
    U32Vec high0, low0, high1, low1;
    MulWide(c0, kernels::kPhiloxMul0, high0, low0);
    MulWide(c2, kernels::kPhiloxMul1, high1, low1);
    c0 = hn::Xor(hn::Xor(high1, c1), hn::Set(d, key0));
    c1 = low1;
    c2 = hn::Xor(hn::Xor(high0, c3), hn::Set(d, key1));
    c3 = low0;
    key0 += kernels::kPhiloxWeyl0;
    key1 += kernels::kPhiloxWeyl1;
  }
  return c0;
}

#else
HWY_INLINE U32Vec Words(uint64_t seed, int64_t position, U32Vec ids) {
  return hn::Set(U32(), kernels::SamplingWord(seed, position, static_cast<int32_t>(ids.raw)));
}
#endif  // HWY_TARGET != HWY_SCALAR

// (word + 0.5) / 2^32, rounded once: small words keep their relative precision.
HWY_INLINE F32Vec UnitInterval(U32Vec words) {
  const F32 d;
  const U32 du;
  const hn::RebindToSigned<U32> di;
  const auto high = hn::ConvertTo(d, hn::BitCast(di, hn::ShiftRight<16>(words)));
  const auto low = hn::ConvertTo(d, hn::BitCast(di, hn::And(words, hn::Set(du, 0xffffu))));
  const auto value = hn::MulAdd(high, hn::Set(d, 65536.0f), hn::Add(low, hn::Set(d, 0.5f)));
  return hn::Mul(value, hn::Set(d, 0x1p-32f));
}

// GumbelFromWord() to within 1e-5 from 1 - u: log1p where u is near 1, log where it is near 0.
HWY_INLINE F32Vec Gumbel(U32Vec words, F32Vec complement) {
  const F32 d;
  const auto u = UnitInterval(hn::Not(words));
  const auto near_one = hn::Lt(complement, hn::Set(d, 0.5f));
  const auto log_u = hn::IfThenElse(
      near_one, hn::Log1p(d, hn::IfThenElseZero(near_one, hn::Neg(complement))), hn::Log(d, u));
  return hn::Neg(hn::Log(d, hn::Neg(log_u)));
}

// FP32 scores only rule candidates out; whoever could win is scored again in FP64, so the choice is
// that of the definition.
int32_t Draw(const GumbelDraw& draw, const int32_t* ids, int64_t count, int32_t first) {
  const F32 d;
  const U32 du;
  const int64_t lanes = NumLanes();
  // Bounds the FP32 error of l / t + G where it can win, that is for l / t > -27.
  constexpr float kTolerance = 1e-4f;
  auto score = [&](int32_t id) {
    return kernels::GumbelScore(draw.logits[id], draw.max_logit, draw.temperature, draw.seed,
                                draw.position, id);
  };
  int32_t best_id = first;
  double best = score(first);
  const auto shift = hn::Set(d, draw.max_logit);
  const auto scale = hn::Set(d, draw.temperature);
  HWY_ALIGN float lane_logits[hn::MaxLanes(F32())];
  HWY_ALIGN uint32_t lane_ids[hn::MaxLanes(U32())];
  HWY_ALIGN float lane_scores[hn::MaxLanes(F32())];
  for (int64_t i = 0; i < count; i += lanes) {
    F32Vec logits;
    if (ids == nullptr) {
      logits = LoadLogits(draw.logits, i, count);
    } else {
      for (int64_t j = 0; j < lanes; ++j) {
        lane_ids[j] = i + j < count ? static_cast<uint32_t>(ids[i + j]) : 0u;
        lane_logits[j] = i + j < count ? draw.logits[lane_ids[j]] : -kInfinity;
      }
      logits = hn::Load(d, lane_logits);
    }
    const auto z = hn::Div(hn::Sub(logits, shift), scale);
    const float beaten = static_cast<float>(best) - kTolerance;
    if (hn::AllTrue(d, hn::Lt(z, hn::Set(d, beaten - kernels::kGumbelMax)))) continue;
    const auto id_lanes =
        ids == nullptr ? hn::Iota(du, static_cast<uint32_t>(i)) : hn::Load(du, lane_ids);
    const auto words = Words(draw.seed, draw.position, id_lanes);
    const auto complement = UnitInterval(words);
    // -log(u) >= 1 - u, so z + G reaches `beaten` only where 1 - u <= exp(z - beaten).
    const auto reach = hn::Exp(d, hn::Min(hn::Sub(z, hn::Set(d, beaten)), hn::Zero(d)));
    if (hn::AllTrue(d, hn::Gt(complement, hn::Mul(reach, hn::Set(d, 1.001f))))) continue;
    const auto scores = hn::Add(z, Gumbel(words, complement));
    const auto contenders = hn::Ge(scores, hn::Set(d, beaten));
    if (hn::AllFalse(d, contenders)) continue;
    hn::Store(scores, d, lane_scores);
    for (int64_t j = 0; j < std::min(lanes, count - i); ++j) {
      if (!(lane_scores[j] >= beaten)) continue;
      const int32_t id = ids == nullptr ? static_cast<int32_t>(i + j) : ids[i + j];
      const double exact = score(id);
      if (exact > best || (exact == best && id < best_id)) {
        best = exact;
        best_id = id;
      }
    }
  }
  return best_id;
}

const SamplingScans* GetScans() {
  static const SamplingScans scans = {NumLanes(), &Max, &Find, &SumExp, &Masses, &Collect, &Draw};
  return &scans;
}

}  // namespace gdn::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace gdn::cpu {

HWY_EXPORT(GetScans);

const SamplingScans& BestSamplingScans() { return *HWY_DYNAMIC_DISPATCH(GetScans)(); }

}  // namespace gdn::cpu
#endif  // HWY_ONCE
