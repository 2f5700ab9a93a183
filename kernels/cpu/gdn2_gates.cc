#include "gdn/kernels/gdn2_gates.h"

#include <algorithm>
#include <cmath>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/gdn2_gates.cc"
#include "hwy/foreach_target.h"
// After foreach_target.h.
#include "gdn/kernels/cpu_pool.h"
#include "hwy/highway.h"
#include "kernels/cpu/activations-inl.h"
#include "kernels/cpu/elements-inl.h"

#ifndef KERNELS_CPU_GDN2_GATES_ONCE_
#define KERNELS_CPU_GDN2_GATES_ONCE_
namespace gdn::cpu {

inline constexpr size_t kGdn2GatesMaxKeyDim = 256;
// Tokens summed in one FP32 accumulator before it is added to the total.
inline constexpr int64_t kGdn2GatesRun = 64;

}  // namespace gdn::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace gdn::cpu::HWY_NAMESPACE {

using F32 = hn::ScalableTag<float>;
using V32 = hn::Vec<F32>;

HWY_INLINE V32 SigmoidSlope(F32 d, V32 x) {
  // sigmoid(-x) is 1 - sigmoid(x) without its cancellation.
  return hn::Mul(SigmoidOf(d, x), SigmoidOf(d, hn::Neg(x)));
}

// g at x = f + dt_bias, and its slope by x.
HWY_INLINE void DecayOf(F32 d, const gdn2_gates_args& args, V32 rate, V32 x, V32* g, V32* slope) {
  if (args.decay == GDN2_DECAY_BOUNDED) {
    const auto bound = hn::Set(d, args.lower_bound);
    const auto z = hn::Mul(rate, x);
    *g = hn::Mul(bound, SigmoidOf(d, z));
    *slope = hn::Mul(hn::Mul(bound, SigmoidSlope(d, z)), rate);
    return;
  }
  const auto limit = hn::Set(d, 20.0f);
  const auto linear = hn::Gt(x, limit);
  const auto softplus = hn::IfThenElse(linear, x, hn::Log1p(d, ExpOf(d, hn::Min(x, limit))));
  *g = hn::Neg(hn::Mul(rate, softplus));
  *slope = hn::Neg(hn::Mul(rate, hn::IfThenElse(linear, hn::Set(d, 1.0f), SigmoidOf(d, x))));
}

HWY_INLINE V32 RateOf(F32 d, const gdn2_gates_args& args, int64_t h) {
  return args.a_log == nullptr ? hn::Set(d, 1.0f) : ExpOf(d, hn::Set(d, args.a_log[h]));
}

HWY_INLINE V32 BiasOf(F32 d, const gdn2_gates_args& args, int64_t channel, size_t n) {
  return args.dt_bias == nullptr ? hn::Zero(d) : LoadLanes(d, args.dt_bias + channel, n);
}

template <typename T, typename TGate>
void ForwardToken(const gdn2_gates_args& args, int64_t t) {
  const F32 d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  const int64_t width = args.gate_heads * args.key_dim;
  const T* f = static_cast<const T*>(args.f) + t * args.f_token_stride;
  const T* b = static_cast<const T*>(args.b) + t * args.b_token_stride;
  const T* w = static_cast<const T*>(args.w) + t * args.w_token_stride;
  TGate* erase = static_cast<TGate*>(args.erase) + t * width;
  TGate* write = static_cast<TGate*>(args.write) + t * args.write_width;
  for (int64_t h = 0; h < args.gate_heads; ++h) {
    const auto rate = RateOf(d, args, h);
    const int64_t end = (h + 1) * args.key_dim;
    for (int64_t i = h * args.key_dim; i < end; i += lanes) {
      const auto n = static_cast<size_t>(std::min(lanes, end - i));
      V32 g, slope;
      DecayOf(d, args, rate, hn::Add(LoadLanes(d, f + i, n), BiasOf(d, args, i, n)), &g, &slope);
      StoreLanes(d, g, args.g + t * width + i, n);
      const auto s = SigmoidOf(d, LoadLanes(d, b + i, n));
      StoreLanes(d, hn::Mul(hn::Set(d, args.erase_scale), s), erase + i, n);
    }
  }
  for (int64_t j = 0; j < args.write_width; j += lanes) {
    const auto n = static_cast<size_t>(std::min(lanes, args.write_width - j));
    StoreLanes(d, SigmoidOf(d, LoadLanes(d, w + j, n)), write + j, n);
  }
}

void Gdn2GatesRange(const gdn2_gates_args& args, int64_t begin, int64_t end) {
  WithElementType(args.fbw_dtype, [&](auto element) HWY_ATTR {
    WithElementType(args.gate_dtype, [&](auto gate) HWY_ATTR {
      for (int64_t t = begin; t < end; ++t)
        ForwardToken<decltype(element), decltype(gate)>(args, t);
    });
  });
}

// Channels [i, i + n) of one head over all tokens; the lane sums of d_a_log come back.
template <typename T>
V32 BackwardChannels(const gdn2_gates_backward_args& args, int64_t h, int64_t i, size_t n) {
  const F32 d;
  const gdn2_gates_args& in = args.forward;
  const int64_t width = in.gate_heads * in.key_dim;
  const auto rate = RateOf(d, in, h);
  const auto bias = BiasOf(d, in, i, n);
  const auto scale = hn::Set(d, in.erase_scale);
  auto d_a_log = hn::Zero(d), d_bias = hn::Zero(d);
  for (int64_t t0 = 0; t0 < in.tokens; t0 += kGdn2GatesRun) {
    auto run_a_log = hn::Zero(d), run_bias = hn::Zero(d);
    for (int64_t t = t0; t < std::min(t0 + kGdn2GatesRun, in.tokens); ++t) {
      const T* f = static_cast<const T*>(in.f) + t * in.f_token_stride + i;
      const T* b = static_cast<const T*>(in.b) + t * in.b_token_stride + i;
      const int64_t at = t * width + i;
      const auto x = hn::Add(LoadLanes(d, f, n), bias);
      const auto d_g = LoadLanes(d, args.d_g + at, n);
      V32 g, slope;
      DecayOf(d, in, rate, x, &g, &slope);
      const auto d_f = hn::Mul(d_g, slope);
      run_bias = hn::Add(run_bias, d_f);
      run_a_log = in.decay == GDN2_DECAY_BOUNDED ? hn::MulAdd(d_f, x, run_a_log)
                                                 : hn::MulAdd(d_g, g, run_a_log);
      StoreLanes(d, d_f, static_cast<T*>(args.d_f) + at, n);
      const auto d_erase = hn::Mul(LoadLanes(d, args.d_erase + at, n), scale);
      StoreLanes(d, hn::Mul(d_erase, SigmoidSlope(d, LoadLanes(d, b, n))),
                 static_cast<T*>(args.d_b) + at, n);
    }
    d_a_log = hn::Add(d_a_log, run_a_log);
    d_bias = hn::Add(d_bias, run_bias);
  }
  if (args.d_dt_bias != nullptr) StoreLanes(d, d_bias, args.d_dt_bias + i, n);
  return d_a_log;
}

// A worker owns heads: the sums over tokens then have one order.
void Gdn2GatesBackwardHeads(const gdn2_gates_backward_args& args, int64_t begin, int64_t end) {
  const F32 d;
  const auto K = static_cast<size_t>(args.forward.key_dim);
  WithElementType(args.forward.fbw_dtype, [&](auto element) HWY_ATTR {
    for (int64_t h = begin; h < end; ++h) {
      alignas(64) float sums[kGdn2GatesMaxKeyDim];
      for (size_t i = 0; i < K; i += hn::Lanes(d)) {
        const size_t n = std::min(hn::Lanes(d), K - i);
        const auto sum = BackwardChannels<decltype(element)>(
            args, h, h * args.forward.key_dim + static_cast<int64_t>(i), n);
        hn::Store(sum, d, sums + i);
      }
      float total = 0.0f;
      for (size_t i = 0; i < K; ++i) total += sums[i];
      if (args.d_a_log != nullptr) args.d_a_log[h] = total;
    }
  });
}

void Gdn2GatesBackwardWrites(const gdn2_gates_backward_args& args, int64_t begin, int64_t end) {
  const F32 d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  const gdn2_gates_args& in = args.forward;
  WithElementType(in.fbw_dtype, [&](auto element) HWY_ATTR {
    using T = decltype(element);
    for (int64_t t = begin; t < end; ++t) {
      const T* w = static_cast<const T*>(in.w) + t * in.w_token_stride;
      for (int64_t j = 0; j < in.write_width; j += lanes) {
        const auto n = static_cast<size_t>(std::min(lanes, in.write_width - j));
        const int64_t at = t * in.write_width + j;
        const auto slope = SigmoidSlope(d, LoadLanes(d, w + j, n));
        StoreLanes(d, hn::Mul(LoadLanes(d, args.d_write + at, n), slope),
                   static_cast<T*>(args.d_w) + at, n);
      }
    }
  });
}

}  // namespace gdn::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace gdn::cpu {

HWY_EXPORT(Gdn2GatesRange);
HWY_EXPORT(Gdn2GatesBackwardHeads);
HWY_EXPORT(Gdn2GatesBackwardWrites);

gdn_status Gdn2Gates(const gdn_exec& exec, const gdn2_gates_args& args) {
  ParallelFor(exec.pool, args.tokens, 1, [&](int64_t begin, int64_t end, int32_t) {
    HWY_DYNAMIC_DISPATCH(Gdn2GatesRange)(args, begin, end);
  });
  return GDN_OK;
}

gdn_status Gdn2GatesBackward(const gdn_exec& exec, const gdn2_gates_backward_args& args) {
  ParallelFor(exec.pool, args.forward.gate_heads, 1, [&](int64_t begin, int64_t end, int32_t) {
    HWY_DYNAMIC_DISPATCH(Gdn2GatesBackwardHeads)(args, begin, end);
  });
  ParallelFor(exec.pool, args.forward.tokens, 1, [&](int64_t begin, int64_t end, int32_t) {
    HWY_DYNAMIC_DISPATCH(Gdn2GatesBackwardWrites)(args, begin, end);
  });
  return GDN_OK;
}

}  // namespace gdn::cpu
#endif  // HWY_ONCE
