// What the dense ops add to elements-inl.h: element types chosen at run time, and the RMS.
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "gdn/kernels/types.h"
#include "hwy/highway.h"
#include "kernels/cpu/activations-inl.h"
#include "kernels/cpu/element_types.h"
#include "kernels/cpu/elements-inl.h"

#if defined(KERNELS_CPU_DENSE_VEC_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KERNELS_CPU_DENSE_VEC_INL_H_
#undef KERNELS_CPU_DENSE_VEC_INL_H_
#else
#define KERNELS_CPU_DENSE_VEC_INL_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace gdn::cpu::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

using F32 = hn::ScalableTag<float>;
using F32Vec = hn::Vec<F32>;

// `count` <= Lanes(d) elements from `index` on; missing lanes are zero. The type is the same for
// all vectors of a row, so its branch predicts.
HWY_INLINE F32Vec LoadVec(F32 d, const void* data, gdn_dtype dtype, int64_t index, int64_t count) {
  F32Vec v = hn::Zero(d);
  WithElementType(dtype, [&](auto element) HWY_ATTR {
    const auto* p = static_cast<const decltype(element)*>(data) + index;
    v = count >= static_cast<int64_t>(hn::Lanes(d))
            ? LoadElements(d, p)
            : LoadElementsPart(d, p, static_cast<size_t>(count));
  });
  return v;
}

HWY_INLINE void StoreVec(F32 d, F32Vec v, void* data, gdn_dtype dtype, int64_t index,
                         int64_t count) {
  WithElementType(dtype, [&](auto element) HWY_ATTR {
    auto* p = static_cast<decltype(element)*>(data) + index;
    if (count >= static_cast<int64_t>(hn::Lanes(d))) {
      StoreElements(d, v, p);
    } else {
      StoreElementsPart(d, v, p, static_cast<size_t>(count));
    }
  });
}

// v rounded to the type and widened again.
HWY_INLINE F32Vec RoundTo(F32 d, F32Vec v, gdn_dtype dtype) {
  WithElementType(dtype, [&](auto element) HWY_ATTR {
    alignas(64) decltype(element) lanes[hn::MaxLanes(F32())];
    StoreElements(d, v, lanes);
    v = LoadElements(d, lanes);
  });
  return v;
}

// 1 / sqrt(mean(x^2) + eps), in one order whatever the caller. Four partial sums hide the latency
// of the addition and slow the growth of the error.
HWY_INLINE float InverseRms(F32 d, const void* x, gdn_dtype dtype, int64_t offset, int64_t dim,
                            float eps) {
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  F32Vec sums[4] = {hn::Zero(d), hn::Zero(d), hn::Zero(d), hn::Zero(d)};
  int64_t i = 0;
  for (; i + 4 * lanes <= dim; i += 4 * lanes) {
    for (int j = 0; j < 4; ++j) {
      const auto v = LoadVec(d, x, dtype, offset + i + j * lanes, lanes);
      sums[j] = hn::MulAdd(v, v, sums[j]);
    }
  }
  for (; i < dim; i += lanes) {
    const auto v = LoadVec(d, x, dtype, offset + i, dim - i);
    sums[0] = hn::MulAdd(v, v, sums[0]);
  }
  const auto sum = hn::Add(hn::Add(sums[0], sums[1]), hn::Add(sums[2], sums[3]));
  return 1.0f / std::sqrt(hn::GetLane(hn::SumOfLanes(d, sum)) / static_cast<float>(dim) + eps);
}

}  // namespace gdn::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
