#include "gdn/kernels/l2_norm_backward.h"

#include "gdn/kernels/cpu_pool.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/l2_norm_backward.cc"
#include "hwy/foreach_target.h"
// After foreach_target.h.
#include "hwy/highway.h"
#include "kernels/cpu/dense_vec-inl.h"

HWY_BEFORE_NAMESPACE();
namespace gdn::cpu::HWY_NAMESPACE {

// Two partial sums in a fixed order: a row's result depends on the row alone. In place is safe: the
// second pass reads each vector before it writes it.
void L2NormBackwardRows(const gdn_l2_norm_backward_args& args, int64_t begin, int64_t end) {
  const F32 d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  const auto scale = hn::Set(d, args.scale);
  for (int64_t row = begin; row < end; ++row) {
    const int64_t y0 = row * args.y_row_stride;
    const int64_t dy0 = row * args.dy_row_stride;
    const int64_t dx0 = row * args.dx_row_stride;
    auto sum0 = hn::Zero(d);
    auto sum1 = hn::Zero(d);
    for (int64_t i = 0; i < args.dim; i += 2 * lanes) {
      const int64_t rest = args.dim - i;
      sum0 = hn::MulAdd(LoadVec(d, args.y, args.y_dtype, y0 + i, rest),
                        LoadVec(d, args.dy, args.dy_dtype, dy0 + i, rest), sum0);
      if (rest <= lanes) break;
      sum1 = hn::MulAdd(LoadVec(d, args.y, args.y_dtype, y0 + i + lanes, rest - lanes),
                        LoadVec(d, args.dy, args.dy_dtype, dy0 + i + lanes, rest - lanes), sum1);
    }
    const float sum = hn::GetLane(hn::SumOfLanes(d, hn::Add(sum0, sum1)));
    const auto c = hn::Set(d, sum / args.scale);
    const auto rstd = hn::Set(d, args.rstd[row]);
    for (int64_t i = 0; i < args.dim; i += lanes) {
      const int64_t rest = args.dim - i;
      const auto y = LoadVec(d, args.y, args.y_dtype, y0 + i, rest);
      const auto dy = hn::Mul(scale, LoadVec(d, args.dy, args.dy_dtype, dy0 + i, rest));
      StoreVec(d, hn::Mul(rstd, hn::NegMulAdd(y, c, dy)), args.dx, args.dx_dtype, dx0 + i, rest);
    }
  }
}

}  // namespace gdn::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace gdn::cpu {

HWY_EXPORT(L2NormBackwardRows);

gdn_status L2NormBackward(const gdn_exec& exec, const gdn_l2_norm_backward_args& args) {
  const auto run = HWY_DYNAMIC_DISPATCH(L2NormBackwardRows);
  ParallelFor(exec.pool, args.rows, 1 + 8192 / args.dim,
              [&](int64_t begin, int64_t end, int32_t) { run(args, begin, end); });
  return GDN_OK;
}

}  // namespace gdn::cpu
#endif  // HWY_ONCE
