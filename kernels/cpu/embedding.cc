#include "gdn/kernels/embedding.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "gdn/kernels/cpu_pool.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/embedding.cc"
#include "hwy/foreach_target.h"
// After foreach_target.h.
#include "hwy/highway.h"
#include "kernels/cpu/dense_vec-inl.h"

HWY_BEFORE_NAMESPACE();
namespace gdn::cpu::HWY_NAMESPACE {

void EmbeddingRows(const gdn_embedding_args& args, int64_t begin, int64_t end) {
  const F32 d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  for (int64_t row = begin; row < end; ++row) {
    const int64_t table0 = args.ids[row] * args.dim;
    const int64_t y0 = row * args.y_row_stride;
    if (args.table_dtype == args.y_dtype) {
      const auto size = static_cast<size_t>(kernels::SizeOf(args.y_dtype));
      std::memcpy(static_cast<char*>(args.y) + static_cast<size_t>(y0) * size,
                  static_cast<const char*>(args.table) + static_cast<size_t>(table0) * size,
                  static_cast<size_t>(args.dim) * size);
      continue;
    }
    for (int64_t i = 0; i < args.dim; i += lanes) {
      const auto value = LoadVec(d, args.table, args.table_dtype, table0 + i, args.dim - i);
      StoreVec(d, value, args.y, args.y_dtype, y0 + i, args.dim - i);
    }
  }
}

}  // namespace gdn::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace gdn::cpu {

HWY_EXPORT(EmbeddingRows);

gdn_status Embedding(const gdn_exec& exec, const gdn_embedding_args& args) {
  constexpr int64_t kGrainElements = 16384;
  const auto run = HWY_DYNAMIC_DISPATCH(EmbeddingRows);
  ParallelFor(exec.pool, args.rows, std::max<int64_t>(1, kGrainElements / args.dim),
              [&](int64_t begin, int64_t end, int32_t) { run(args, begin, end); });
  return GDN_OK;
}

}  // namespace gdn::cpu
#endif  // HWY_ONCE
