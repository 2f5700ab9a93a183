// exp and sigmoid on FP32 vectors for the current Highway target: a few ULP over the whole range,
// NaN in, NaN out.
#include "hwy/highway.h"
// After highway.h.
#include "hwy/contrib/math/math-inl.h"

#if defined(KERNELS_CPU_ACTIVATIONS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KERNELS_CPU_ACTIVATIONS_INL_H_
#undef KERNELS_CPU_ACTIVATIONS_INL_H_
#else
#define KERNELS_CPU_ACTIVATIONS_INL_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace gdn::cpu::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// x <= 88: Highway's own turns a NaN into 0, which would hide a damaged input.
template <class D>
HWY_INLINE hn::Vec<D> ExpOf(D d, hn::Vec<D> x) {
  return hn::IfThenElse(hn::IsNaN(x), x, hn::Exp(d, x));
}

// From exp(-|x|), which neither overflows nor cancels.
template <class D>
HWY_INLINE hn::Vec<D> SigmoidOf(D d, hn::Vec<D> x) {
  const auto one = hn::Set(d, 1.0f);
  const auto e = ExpOf(d, hn::Neg(hn::Abs(x)));
  const auto numerator = hn::IfThenElse(hn::Lt(x, hn::Zero(d)), e, one);
  return hn::Div(numerator, hn::Add(one, e));
}

// exp(x) for x <= 0 within 2 ULP; below -87 it stays at exp(-87), about 1e-38. x must not be NaN.
template <class D>
HWY_INLINE hn::Vec<D> ExpOfNegative(D d, hn::Vec<D> x) {
  const hn::Rebind<int32_t, D> di;
  x = hn::Max(x, hn::Set(d, -87.0f));
  const auto n = hn::Round(hn::Mul(x, hn::Set(d, 1.44269504f)));
  auto r = hn::MulAdd(n, hn::Set(d, -0.693145752f), x);
  r = hn::MulAdd(n, hn::Set(d, -1.42860677e-6f), r);
  auto p = hn::MulAdd(hn::Set(d, 1.98527618e-4f), r, hn::Set(d, 1.39304355e-3f));
  p = hn::MulAdd(p, r, hn::Set(d, 8.33336078e-3f));
  p = hn::MulAdd(p, r, hn::Set(d, 4.16664854e-2f));
  p = hn::MulAdd(p, r, hn::Set(d, 1.66666672e-1f));
  p = hn::MulAdd(p, r, hn::Set(d, 0.5f));
  p = hn::MulAdd(hn::Mul(p, r), r, r);
  p = hn::Add(p, hn::Set(d, 1.0f));
  const auto exponent = hn::ShiftLeft<23>(hn::ConvertTo(di, n));
  return hn::BitCast(d, hn::Add(hn::BitCast(di, p), exponent));
}

// A NaN comes through the outer factor, which must not outgrow the exp that stays at exp(-87).
template <class D>
HWY_INLINE hn::Vec<D> SiluOf(D d, hn::Vec<D> x) {
  const auto one = hn::Set(d, 1.0f);
  const auto least = hn::Set(d, -87.0f);
  const auto e = ExpOfNegative(d, hn::Neg(hn::Abs(x)));
  const auto numerator = hn::IfThenElse(hn::Lt(x, hn::Zero(d)), e, one);
  const auto factor = hn::IfThenElse(hn::Lt(x, least), least, x);
  return hn::Mul(factor, hn::Div(numerator, hn::Add(one, e)));
}

}  // namespace gdn::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
