#include "gdn/kernels/l2_norm.h"

#include <cmath>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/l2_norm.cc"
#include "hwy/foreach_target.h"
// After foreach_target.h.
#include "gdn/kernels/cpu_pool.h"
#include "hwy/highway.h"
#include "kernels/common/row_groups.h"
#include "kernels/cpu/elements-inl.h"

HWY_BEFORE_NAMESPACE();
namespace gdn::cpu::HWY_NAMESPACE {

// Two accumulators in a fixed order: a row's result depends on the row alone.
template <typename T>
float SumOfSquares(const T* x, size_t dim) {
  const hn::ScalableTag<float> d;
  const size_t n = hn::Lanes(d);
  auto sum0 = hn::Zero(d);
  auto sum1 = hn::Zero(d);
  size_t i = 0;
  for (; i + 2 * n <= dim; i += 2 * n) {
    const auto a = LoadElements(d, x + i);
    const auto b = LoadElements(d, x + i + n);
    sum0 = hn::MulAdd(a, a, sum0);
    sum1 = hn::MulAdd(b, b, sum1);
  }
  for (; i < dim; i += n) {
    const auto a = i + n <= dim ? LoadElements(d, x + i) : LoadElementsPart(d, x + i, dim - i);
    sum0 = hn::MulAdd(a, a, sum0);
  }
  return hn::GetLane(hn::SumOfLanes(d, hn::Add(sum0, sum1)));
}

template <typename TX, typename TY>
void Rows(const gdn_l2_norm_args& args, int64_t begin, int64_t end) {
  const hn::ScalableTag<float> d;
  const size_t n = hn::Lanes(d);
  const auto dim = static_cast<size_t>(args.dim);
  for (int64_t row = begin; row < end; ++row) {
    const TX* x = static_cast<const TX*>(args.x) +
                  kernels::RowOffset(row, args.x_row_stride, args.group_rows, args.x_group_stride);
    TY* y = static_cast<TY*>(args.y) +
            kernels::RowOffset(row, args.y_row_stride, args.group_rows, args.y_group_stride);
    const float root = std::sqrt(SumOfSquares(x, dim) + args.eps);
    const float rstd = root == 0.0f ? 0.0f : 1.0f / root;
    const auto factor = hn::Set(d, rstd);
    const auto scale = hn::Set(d, args.scale);
    size_t i = 0;
    for (; i + n <= dim; i += n) {
      StoreElements(d, hn::Mul(hn::Mul(LoadElements(d, x + i), factor), scale), y + i);
    }
    if (i < dim) {
      const auto v = LoadElementsPart(d, x + i, dim - i);
      StoreElementsPart(d, hn::Mul(hn::Mul(v, factor), scale), y + i, dim - i);
    }
    if (args.rstd != nullptr) args.rstd[row] = rstd;
  }
}

void L2NormRange(const gdn_l2_norm_args& args, int64_t begin, int64_t end) {
  WithElementType(args.x_dtype, [&](auto x) HWY_ATTR {
    WithElementType(args.y_dtype,
                    [&](auto y) HWY_ATTR { Rows<decltype(x), decltype(y)>(args, begin, end); });
  });
}

}  // namespace gdn::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace gdn::cpu {

HWY_EXPORT(L2NormRange);

gdn_status L2Norm(const gdn_exec& exec, const gdn_l2_norm_args& args) {
  const int64_t grain = 1 + 16384 / args.dim;
  ParallelFor(exec.pool, args.rows, grain, [&](int64_t begin, int64_t end, int32_t) {
    HWY_DYNAMIC_DISPATCH(L2NormRange)(args, begin, end);
  });
  return GDN_OK;
}

}  // namespace gdn::cpu
#endif  // HWY_ONCE
