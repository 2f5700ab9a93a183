#include "gdn/kernels/gates_backward.h"

#include <algorithm>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/gates_backward.cc"
#include "hwy/foreach_target.h"
// After foreach_target.h.
#include "gdn/kernels/cpu_pool.h"
#include "hwy/highway.h"
#include "kernels/cpu/activations-inl.h"
#include "kernels/cpu/elements-inl.h"

#ifndef KERNELS_CPU_GATES_BACKWARD_ONCE_
#define KERNELS_CPU_GATES_BACKWARD_ONCE_
namespace gdn::cpu {

// Tokens whose sums one worker forms; the partial sums are added in their order.
inline constexpr int64_t kGatesBackwardBlock = 64;

inline int64_t GatesBackwardBlocks(const gdn_gates_backward_args& args) {
  return (args.tokens + kGatesBackwardBlock - 1) / kGatesBackwardBlock;
}

}  // namespace gdn::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace gdn::cpu::HWY_NAMESPACE {

using F32 = hn::ScalableTag<float>;

// The tokens of one block for the heads of one vector; `sums` takes d_a_log, then d_dt_bias.
template <typename T>
void Heads(const gdn_gates_backward_args& args, int64_t begin, int64_t end, int64_t h, size_t n,
           float* sums) {
  const F32 d;
  const auto one = hn::Set(d, 1.0f);
  const auto limit = hn::Set(d, 20.0f);
  const auto bias = LoadLanes(d, args.dt_bias + h, n);
  const auto rate = ExpOf(d, LoadLanes(d, args.a_log + h, n));
  const auto scale = hn::Set(d, args.beta_scale);
  auto d_a_log = hn::Zero(d);
  auto d_dt_bias = hn::Zero(d);
  for (int64_t t = begin; t < end; ++t) {
    const auto a = LoadLanes(d, static_cast<const T*>(args.a) + t * args.a_token_stride + h, n);
    const auto b = LoadLanes(d, static_cast<const T*>(args.b) + t * args.b_token_stride + h, n);
    const auto d_g = LoadLanes(d, args.d_g + t * args.value_heads + h, n);
    const auto d_beta = LoadLanes(d, args.d_beta + t * args.value_heads + h, n);
    const auto x = hn::Add(a, bias);
    const auto linear = hn::Gt(x, limit);
    const auto softplus = hn::IfThenElse(linear, x, hn::Log1p(d, ExpOf(d, hn::Min(x, limit))));
    const auto slope = hn::IfThenElse(linear, one, SigmoidOf(d, x));
    const auto rate_d_g = hn::Neg(hn::Mul(rate, d_g));
    const auto d_a = hn::Mul(rate_d_g, slope);
    d_a_log = hn::MulAdd(rate_d_g, softplus, d_a_log);
    d_dt_bias = hn::Add(d_a, d_dt_bias);
    StoreLanes(d, d_a, static_cast<T*>(args.d_a) + t * args.d_a_token_stride + h, n);
    // sigmoid(-b) is 1 - sigmoid(b) without its cancellation.
    const auto slope_b = hn::Mul(SigmoidOf(d, b), SigmoidOf(d, hn::Neg(b)));
    StoreLanes(d, hn::Mul(hn::Mul(d_beta, scale), slope_b),
               static_cast<T*>(args.d_b) + t * args.d_b_token_stride + h, n);
  }
  StoreLanes(d, d_a_log, sums + h, n);
  StoreLanes(d, d_dt_bias, sums + args.value_heads + h, n);
}

void GatesBackwardBlocksRange(const gdn_gates_backward_args& args, float* partial, int64_t begin,
                              int64_t end) {
  WithElementType(args.dtype, [&](auto element) HWY_ATTR {
    const auto lanes = static_cast<int64_t>(hn::Lanes(F32()));
    for (int64_t block = begin; block < end; ++block) {
      const int64_t t0 = block * kGatesBackwardBlock;
      const int64_t t1 = std::min(t0 + kGatesBackwardBlock, args.tokens);
      for (int64_t h = 0; h < args.value_heads; h += lanes) {
        Heads<decltype(element)>(args, t0, t1, h,
                                 static_cast<size_t>(std::min(lanes, args.value_heads - h)),
                                 partial + block * 2 * args.value_heads);
      }
    }
  });
}

}  // namespace gdn::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace gdn::cpu {

HWY_EXPORT(GatesBackwardBlocksRange);

size_t GatesBackwardWorkspace(const gdn_gates_backward_args& args) {
  return static_cast<size_t>(GatesBackwardBlocks(args) * 2 * args.value_heads) * sizeof(float);
}

gdn_status GatesBackward(const gdn_exec& exec, const gdn_gates_backward_args& args) {
  const int64_t blocks = GatesBackwardBlocks(args);
  const int64_t heads = args.value_heads;
  auto* partial = static_cast<float*>(exec.workspace);
  ParallelFor(exec.pool, blocks, 1, [&](int64_t begin, int64_t end, int32_t) {
    HWY_DYNAMIC_DISPATCH(GatesBackwardBlocksRange)(args, partial, begin, end);
  });
  std::fill_n(args.d_a_log, heads, 0.0f);
  std::fill_n(args.d_dt_bias, heads, 0.0f);
  for (int64_t block = 0; block < blocks; ++block) {
    for (int64_t h = 0; h < heads; ++h) {
      args.d_a_log[h] += partial[block * 2 * heads + h];
      args.d_dt_bias[h] += partial[block * 2 * heads + heads + h];
    }
  }
  return GDN_OK;
}

}  // namespace gdn::cpu
#endif  // HWY_ONCE
