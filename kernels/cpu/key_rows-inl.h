// One head of q or k of a sequence as FP32 rows of whole vectors, for the backward passes of the
// current Highway target; and its gradient back through the norm.
#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "gdn/kernels/types.h"
#include "hwy/highway.h"
#include "kernels/cpu/element_types.h"
#include "kernels/cpu/elements-inl.h"

#if defined(KERNELS_CPU_KEY_ROWS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KERNELS_CPU_KEY_ROWS_INL_H_
#undef KERNELS_CPU_KEY_ROWS_INL_H_
#else
#define KERNELS_CPU_KEY_ROWS_INL_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace gdn::cpu::HWY_NAMESPACE {

struct KeyRows {
  int64_t begin;  // first token
  int64_t length;
  int64_t heads;
  int64_t head;
  size_t dim;
  size_t row;  // dim rounded up to whole vectors
};

// Zero beyond dim.
inline void LoadKeyRows(const KeyRows& r, const void* x, gdn_dtype dtype, int64_t token_stride,
                        float* out) {
  const hn::ScalableTag<float> d;
  WithElementType(dtype, [&](auto element) HWY_ATTR {
    const auto* head =
        static_cast<const decltype(element)*>(x) + r.head * static_cast<int64_t>(r.dim);
    for (int64_t t = 0; t < r.length; ++t) {
      const auto* in = head + (r.begin + t) * token_stride;
      float* to = out + static_cast<size_t>(t) * r.row;
      std::fill_n(to, r.row, 0.0f);
      for (size_t i = 0; i < r.dim; i += hn::Lanes(d)) {
        hn::Store(LoadLanes(d, in + i, std::min(hn::Lanes(d), r.dim - i)), d, to + i);
      }
    }
  });
}

// rstd * (d_x_hat - x_hat * sum(d_x_hat * x_hat)), or d_x_hat where rstd is NULL.
inline void StoreKeyGradients(const KeyRows& r, const float* x_hat, const float* d_x_hat,
                              const float* rstd, void* out, gdn_dtype dtype, int64_t token_stride) {
  const hn::ScalableTag<float> d;
  WithElementType(dtype, [&](auto element) HWY_ATTR {
    auto* head = static_cast<decltype(element)*>(out) + r.head * static_cast<int64_t>(r.dim);
    for (int64_t t = 0; t < r.length; ++t) {
      const float* y = x_hat + static_cast<size_t>(t) * r.row;
      const float* d_y = d_x_hat + static_cast<size_t>(t) * r.row;
      auto dot = hn::Zero(d);
      auto factor = hn::Set(d, 1.0f);
      if (rstd != nullptr) {
        for (size_t i = 0; i < r.row; i += hn::Lanes(d)) {
          dot = hn::MulAdd(hn::Load(d, y + i), hn::Load(d, d_y + i), dot);
        }
        dot = hn::SumOfLanes(d, dot);
        factor = hn::Set(d, rstd[(r.begin + t) * r.heads + r.head]);
      }
      for (size_t i = 0; i < r.dim; i += hn::Lanes(d)) {
        const auto tangent = hn::NegMulAdd(hn::Load(d, y + i), dot, hn::Load(d, d_y + i));
        StoreLanes(d, hn::Mul(factor, tangent), head + (r.begin + t) * token_stride + i,
                   std::min(hn::Lanes(d), r.dim - i));
      }
    }
  });
}

}  // namespace gdn::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
