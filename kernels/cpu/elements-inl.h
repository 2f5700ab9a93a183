// Loads and stores of F32, BF16 and F16 elements as FP32 vectors, for the current Highway target.
// Any tag of float lanes will do. The *Part functions take n < Lanes(d) elements, read or write no
// byte beyond them, and see zeros in the other lanes.
#include <cstddef>
#include <cstdint>

#include "gdn/kernels/types.h"
#include "hwy/highway.h"
#include "kernels/common/convert.h"
#include "kernels/cpu/element_types.h"

#if defined(KERNELS_CPU_ELEMENTS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KERNELS_CPU_ELEMENTS_INL_H_
#undef KERNELS_CPU_ELEMENTS_INL_H_
#else
#define KERNELS_CPU_ELEMENTS_INL_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace gdn::cpu::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

template <class D>
HWY_INLINE hn::Vec<D> LoadElements([[maybe_unused]] D d, const float* p) {
  return hn::LoadU(d, p);
}

template <class D>
HWY_INLINE hn::Vec<D> LoadElements([[maybe_unused]] D d, const Bf16* p) {
  const hn::Rebind<uint32_t, D> du32;
  const hn::Rebind<uint16_t, D> du16;
  const auto bits = hn::LoadU(du16, reinterpret_cast<const uint16_t*>(p));
  return hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(du32, bits)));
}

template <class D>
HWY_INLINE hn::Vec<D> LoadElements([[maybe_unused]] D d, const F16* p) {
#if HWY_TARGET == HWY_SSE4  // No conversion instruction; Highway's replacement flushes infinities.
  alignas(64) float lanes[hn::MaxLanes(D())];
  for (size_t i = 0; i < hn::Lanes(d); ++i) lanes[i] = ToFloat(p[i]);
  return hn::Load(d, lanes);
#else
  const hn::Rebind<hwy::float16_t, D> df16;
  return hn::PromoteTo(d, hn::LoadU(df16, reinterpret_cast<const hwy::float16_t*>(p)));
#endif
}

template <class D>
HWY_INLINE void StoreElements([[maybe_unused]] D d, hn::Vec<D> v, float* p) {
  hn::StoreU(v, d, p);
}

// Round to nearest even; Highway's own conversion truncates.
template <class D>
HWY_INLINE void StoreElements([[maybe_unused]] D d, hn::Vec<D> v, Bf16* p) {
  const hn::Rebind<uint32_t, D> du32;
  const hn::Rebind<uint16_t, D> du16;
  const auto bits = hn::BitCast(du32, v);
  const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(du32, 1u));
  const auto rounded = hn::Add(hn::Add(bits, hn::Set(du32, 0x7fffu)), odd);
  const auto quiet = hn::Or(bits, hn::Set(du32, 0x400000u));
  const auto chosen = hn::IfThenElse(hn::RebindMask(du32, hn::IsNaN(v)), quiet, rounded);
  hn::StoreU(hn::TruncateTo(du16, hn::ShiftRight<16>(chosen)), du16,
             reinterpret_cast<uint16_t*>(p));
}

template <class D>
HWY_INLINE void StoreElements([[maybe_unused]] D d, hn::Vec<D> v, F16* p) {
#if HWY_TARGET == HWY_SSE4
  alignas(64) float lanes[hn::MaxLanes(D())];
  hn::Store(v, d, lanes);
  for (size_t i = 0; i < hn::Lanes(d); ++i) FromFloat(lanes[i], p + i);
#else
  const hn::Rebind<hwy::float16_t, D> df16;
  hn::StoreU(hn::DemoteTo(df16, v), df16, reinterpret_cast<hwy::float16_t*>(p));
#endif
}

template <class D, typename T>
HWY_NOINLINE hn::Vec<D> LoadElementsPart([[maybe_unused]] D d, const T* p, size_t n) {
  alignas(64) float lanes[hn::MaxLanes(D())] = {};
  for (size_t i = 0; i < n; ++i) lanes[i] = ToFloat(p[i]);
  return hn::Load(d, lanes);
}

template <class D, typename T>
HWY_NOINLINE void StoreElementsPart([[maybe_unused]] D d, hn::Vec<D> v, T* p, size_t n) {
  alignas(64) float lanes[hn::MaxLanes(D())];
  hn::Store(v, d, lanes);
  for (size_t i = 0; i < n; ++i) FromFloat(lanes[i], p + i);
}

// The first n <= Lanes(d) elements.
template <class D, typename T>
HWY_INLINE hn::Vec<D> LoadLanes(D d, const T* p, size_t n) {
  return n == hn::Lanes(d) ? LoadElements(d, p) : LoadElementsPart(d, p, n);
}

template <class D, typename T>
HWY_INLINE void StoreLanes(D d, hn::Vec<D> v, T* p, size_t n) {
  n == hn::Lanes(d) ? StoreElements(d, v, p) : StoreElementsPart(d, v, p, n);
}

}  // namespace gdn::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
