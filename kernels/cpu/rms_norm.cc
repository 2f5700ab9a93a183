#include "gdn/kernels/rms_norm.h"

#include <algorithm>
#include <cstdint>

#include "gdn/kernels/cpu_pool.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/rms_norm.cc"
#include "hwy/foreach_target.h"
// After foreach_target.h.
#include "hwy/highway.h"
#include "kernels/cpu/dense_vec-inl.h"

HWY_BEFORE_NAMESPACE();
namespace gdn::cpu::HWY_NAMESPACE {

void RmsNormRows(const gdn_rms_norm_args& args, int64_t begin, int64_t end) {
  const F32 d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  const auto offset = hn::Set(d, args.zero_centered ? 1.0f : 0.0f);
  for (int64_t row = begin; row < end; ++row) {
    const int64_t x0 = row * args.x_row_stride;
    const int64_t y0 = row * args.y_row_stride;
    const auto rstd = hn::Set(d, InverseRms(d, args.x, args.x_dtype, x0, args.dim, args.eps));
    for (int64_t i = 0; i < args.dim; i += lanes) {
      const int64_t rest = args.dim - i;
      const auto weight = hn::Add(LoadVec(d, args.weight, GDN_F32, i, rest), offset);
      const auto x = LoadVec(d, args.x, args.x_dtype, x0 + i, rest);
      StoreVec(d, hn::Mul(hn::Mul(x, rstd), weight), args.y, args.y_dtype, y0 + i, rest);
    }
  }
}

}  // namespace gdn::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace gdn::cpu {

HWY_EXPORT(RmsNormRows);

gdn_status RmsNorm(const gdn_exec& exec, const gdn_rms_norm_args& args) {
  constexpr int64_t kGrainElements = 8192;
  const auto run = HWY_DYNAMIC_DISPATCH(RmsNormRows);
  ParallelFor(exec.pool, args.rows, std::max<int64_t>(1, kGrainElements / args.dim),
              [&](int64_t begin, int64_t end, int32_t) { run(args, begin, end); });
  return GDN_OK;
}

}  // namespace gdn::cpu
#endif  // HWY_ONCE
