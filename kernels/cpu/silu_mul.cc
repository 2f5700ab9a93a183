#include "gdn/kernels/silu_mul.h"

#include <algorithm>
#include <cstdint>

#include "gdn/kernels/cpu_pool.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/silu_mul.cc"
#include "hwy/foreach_target.h"
// After foreach_target.h.
#include "hwy/highway.h"
#include "kernels/cpu/dense_vec-inl.h"

HWY_BEFORE_NAMESPACE();
namespace gdn::cpu::HWY_NAMESPACE {

// Elements [begin, end) of the flattened [rows, dim], so that one long row is shared by the
// threads.
void SiluMulRange(const gdn_silu_mul_args& args, int64_t begin, int64_t end) {
  const F32 d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  while (begin < end) {
    const int64_t row = begin / args.dim;
    const int64_t stop = std::min(end, (row + 1) * args.dim) - row * args.dim;
    const int64_t x0 = row * args.row_stride;
    const int64_t y0 = row * args.y_row_stride;
    for (int64_t i = begin - row * args.dim; i < stop; i += lanes) {
      const auto gate = LoadVec(d, args.gate, args.dtype, x0 + i, stop - i);
      const auto up = LoadVec(d, args.up, args.dtype, x0 + i, stop - i);
      StoreVec(d, hn::Mul(SiluOf(d, gate), up), args.y, args.y_dtype, y0 + i, stop - i);
    }
    begin = row * args.dim + stop;
  }
}

}  // namespace gdn::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace gdn::cpu {

HWY_EXPORT(SiluMulRange);

gdn_status SiluMul(const gdn_exec& exec, const gdn_silu_mul_args& args) {
  constexpr int64_t kGrainElements = 4096;
  const auto run = HWY_DYNAMIC_DISPATCH(SiluMulRange);
  ParallelFor(exec.pool, args.rows * args.dim, kGrainElements,
              [&](int64_t begin, int64_t end, int32_t) { run(args, begin, end); });
  return GDN_OK;
}

}  // namespace gdn::cpu
#endif  // HWY_ONCE
