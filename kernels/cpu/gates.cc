#include "gdn/kernels/gates.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/gates.cc"
#include "hwy/foreach_target.h"
// After foreach_target.h.
#include "gdn/kernels/cpu_pool.h"
#include "hwy/highway.h"
#include "kernels/cpu/activations-inl.h"
#include "kernels/cpu/elements-inl.h"

HWY_BEFORE_NAMESPACE();
namespace gdn::cpu::HWY_NAMESPACE {

// softplus(a + bias). The rounding error of the sum is carried along: at x = -20 it alone would
// change exp(x) by 1e-6.
template <class D>
HWY_INLINE hn::Vec<D> SoftplusOfSum(D d, hn::Vec<D> a, hn::Vec<D> bias) {
  const auto one = hn::Set(d, 1.0f);
  const auto x = hn::Add(a, bias);
  const auto a_part = hn::Sub(x, bias);
  const auto rounding = hn::Add(hn::Sub(a, a_part), hn::Sub(bias, hn::Sub(x, a_part)));
  const auto error = hn::IfThenElseZero(hn::IsFinite(x), rounding);
  const auto e = ExpOf(d, hn::Min(x, hn::Set(d, 20.0f)));
  const auto slope = hn::Div(e, hn::Add(one, e));
  const auto small = hn::MulAdd(error, slope, hn::Log1p(d, e));
  return hn::IfThenElse(hn::Le(x, hn::Set(d, 20.0f)), small, x);
}

template <class D>
HWY_INLINE void GatesOf(D d, hn::Vec<D> a, hn::Vec<D> b, hn::Vec<D> a_log, hn::Vec<D> bias,
                        float beta_scale, hn::Vec<D>& g, hn::Vec<D>& beta) {
  g = hn::Neg(hn::Mul(ExpOf(d, a_log), SoftplusOfSum(d, a, bias)));
  beta = hn::Mul(hn::Set(d, beta_scale), SigmoidOf(d, b));
}

template <typename T>
void Tokens(const gdn_gates_args& args, int64_t begin, int64_t end) {
  const hn::ScalableTag<float> d;
  const auto n = static_cast<int64_t>(hn::Lanes(d));
  const int64_t heads = args.value_heads;
  for (int64_t t = begin; t < end; ++t) {
    const T* a = static_cast<const T*>(args.a) + t * args.a_token_stride;
    const T* b = static_cast<const T*>(args.b) + t * args.b_token_stride;
    float* g_out = args.g + t * heads;
    float* beta_out = args.beta + t * heads;
    hn::Vec<decltype(d)> g;
    hn::Vec<decltype(d)> beta;
    int64_t h = 0;
    for (; h + n <= heads; h += n) {
      GatesOf(d, LoadElements(d, a + h), LoadElements(d, b + h), hn::LoadU(d, args.a_log + h),
              hn::LoadU(d, args.dt_bias + h), args.beta_scale, g, beta);
      hn::StoreU(g, d, g_out + h);
      hn::StoreU(beta, d, beta_out + h);
    }
    if (h < heads) {
      const auto rest = static_cast<size_t>(heads - h);
      GatesOf(d, LoadElementsPart(d, a + h, rest), LoadElementsPart(d, b + h, rest),
              LoadElementsPart(d, args.a_log + h, rest),
              LoadElementsPart(d, args.dt_bias + h, rest), args.beta_scale, g, beta);
      StoreElementsPart(d, g, g_out + h, rest);
      StoreElementsPart(d, beta, beta_out + h, rest);
    }
  }
}

void GatesRange(const gdn_gates_args& args, int64_t begin, int64_t end) {
  WithElementType(args.dtype,
                  [&](auto element) HWY_ATTR { Tokens<decltype(element)>(args, begin, end); });
}

}  // namespace gdn::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace gdn::cpu {

HWY_EXPORT(GatesRange);

gdn_status Gates(const gdn_exec& exec, const gdn_gates_args& args) {
  const int64_t grain = 1 + 4096 / args.value_heads;
  ParallelFor(exec.pool, args.tokens, grain, [&](int64_t begin, int64_t end, int32_t) {
    HWY_DYNAMIC_DISPATCH(GatesRange)(args, begin, end);
  });
  return GDN_OK;
}

}  // namespace gdn::cpu
#endif  // HWY_ONCE
