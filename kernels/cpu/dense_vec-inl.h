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

template <typename T>
HWY_INLINE F32Vec LoadTyped(F32 d, const void* data, int64_t index, int64_t count) {
  const T* p = static_cast<const T*>(data) + index;
  if (HWY_LIKELY(count >= static_cast<int64_t>(hn::Lanes(d)))) return LoadElements(d, p);
  return LoadElementsPart(d, p, static_cast<size_t>(count));
}

template <typename T>
HWY_INLINE void StoreTyped(F32 d, F32Vec v, void* data, int64_t index, int64_t count) {
  T* p = static_cast<T*>(data) + index;
  if (HWY_LIKELY(count >= static_cast<int64_t>(hn::Lanes(d)))) {
    StoreElements(d, v, p);
  } else {
    StoreElementsPart(d, v, p, static_cast<size_t>(count));
  }
}

template <typename T>
HWY_INLINE F32Vec RoundTyped(F32 d, F32Vec v) {
  alignas(64) T lanes[hn::MaxLanes(F32())];
  StoreElements(d, v, lanes);
  return LoadElements(d, lanes);
}

// Up to Lanes(d) of the `count` > 0 elements from `index` on; missing lanes are zero. The type is
// the same for all vectors of a row, so its branch predicts.
HWY_INLINE F32Vec LoadVec(F32 d, const void* data, gdn_dtype dtype, int64_t index, int64_t count) {
  if (HWY_LIKELY(dtype == GDN_F32)) return LoadTyped<float>(d, data, index, count);
  if (dtype == GDN_BF16) return LoadTyped<Bf16>(d, data, index, count);
  return LoadTyped<F16>(d, data, index, count);
}

HWY_INLINE void StoreVec(F32 d, F32Vec v, void* data, gdn_dtype dtype, int64_t index,
                         int64_t count) {
  if (HWY_LIKELY(dtype == GDN_F32)) return StoreTyped<float>(d, v, data, index, count);
  if (dtype == GDN_BF16) return StoreTyped<Bf16>(d, v, data, index, count);
  return StoreTyped<F16>(d, v, data, index, count);
}

// v rounded to the type and widened again.
HWY_INLINE F32Vec RoundTo(F32 d, F32Vec v, gdn_dtype dtype) {
  if (dtype == GDN_F32) return v;
  return dtype == GDN_BF16 ? RoundTyped<Bf16>(d, v) : RoundTyped<F16>(d, v);
}

// 1 / sqrt(mean(x^2) + eps), in one order whatever the caller. Four partial sums hide the latency
// of the addition and slow the growth of the error.
HWY_INLINE float InverseRms(F32 d, const void* x, gdn_dtype dtype, int64_t offset, int64_t dim,
                            float eps) {
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  auto sum0 = hn::Zero(d), sum1 = sum0, sum2 = sum0, sum3 = sum0;
  int64_t i = 0;
  for (; i + 4 * lanes <= dim; i += 4 * lanes) {
    const auto v0 = LoadVec(d, x, dtype, offset + i, lanes);
    const auto v1 = LoadVec(d, x, dtype, offset + i + lanes, lanes);
    const auto v2 = LoadVec(d, x, dtype, offset + i + 2 * lanes, lanes);
    const auto v3 = LoadVec(d, x, dtype, offset + i + 3 * lanes, lanes);
    sum0 = hn::MulAdd(v0, v0, sum0);
    sum1 = hn::MulAdd(v1, v1, sum1);
    sum2 = hn::MulAdd(v2, v2, sum2);
    sum3 = hn::MulAdd(v3, v3, sum3);
  }
  for (; i < dim; i += lanes) {
    const auto v = LoadVec(d, x, dtype, offset + i, dim - i);
    sum0 = hn::MulAdd(v, v, sum0);
  }
  const auto sum = hn::Add(hn::Add(sum0, sum1), hn::Add(sum2, sum3));
  return 1.0f / std::sqrt(hn::GetLane(hn::SumOfLanes(d, sum)) / static_cast<float>(dim) + eps);
}

}  // namespace gdn::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
