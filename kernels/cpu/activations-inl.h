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

template <class D>
HWY_INLINE hn::Vec<D> SiluOf(D d, hn::Vec<D> x) {
  return hn::Mul(x, SigmoidOf(d, x));
}

}  // namespace gdn::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
