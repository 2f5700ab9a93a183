// The recurrence on state rows for the current Highway target: a few tokens per visit of a row.
//
// With p = S k and r = S q taken from the old state, one pass reads it and one writes it:
//   u = beta (v - a p),   o = a r + (k.q) u,   S <- a S + u k^T
#include "hwy/highway.h"
#include "kernels/cpu/delta_rule_common.h"
#include "kernels/cpu/elements-inl.h"

#if defined(KERNELS_CPU_DELTA_RULE_STEP_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KERNELS_CPU_DELTA_RULE_STEP_INL_H_
#undef KERNELS_CPU_DELTA_RULE_STEP_INL_H_
#else
#define KERNELS_CPU_DELTA_RULE_STEP_INL_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace gdn::cpu::HWY_NAMESPACE {

// out[0, dim) <- x * factor, with the L2 norm in `factor` on request, then zeros up to a vector.
template <typename T>
void PrepareKey(const T* x, size_t dim, bool normalize, float scale, float* out) {
  const hn::ScalableTag<float> d;
  const size_t n = hn::Lanes(d);
  auto sum = hn::Zero(d);
  for (size_t i = 0; i < dim; i += n) {
    const auto v = i + n <= dim ? LoadElements(d, x + i) : LoadElementsPart(d, x + i, dim - i);
    sum = hn::MulAdd(v, v, sum);
    hn::Store(v, d, out + i);
  }
  float factor = scale;
  if (normalize) factor *= 1.0f / std::sqrt(hn::GetLane(hn::SumOfLanes(d, sum)) + 1e-6f);
  const auto vfactor = hn::Set(d, factor);
  for (size_t i = 0; i < dim; i += n) {
    hn::Store(hn::Mul(hn::Load(d, out + i), vfactor), d, out + i);
  }
}

inline float PaddedDot(const float* a, const float* b, size_t dim) {
  const hn::ScalableTag<float> d;
  auto sum = hn::Zero(d);
  for (size_t i = 0; i < dim; i += hn::Lanes(d)) {
    sum = hn::MulAdd(hn::Load(d, a + i), hn::Load(d, b + i), sum);
  }
  return hn::GetLane(hn::SumOfLanes(d, sum));
}

// q and k of key head h, tokens [begin, begin + count).
inline void PrepareKeys(const gdn_delta_rule_args& args, int64_t begin, int64_t count, int64_t h,
                        KeyTokens& keys) {
  const auto dim = static_cast<size_t>(args.key_dim);
  const bool normalize = args.use_qk_l2norm != 0;
  WithElementType(args.qkv_dtype, [&](auto element) HWY_ATTR {
    using T = decltype(element);
    for (int64_t i = 0; i < count; ++i) {
      const T* q = static_cast<const T*>(args.q) + (begin + i) * args.q_token_stride;
      const T* k = static_cast<const T*>(args.k) + (begin + i) * args.k_token_stride;
      PrepareKey(q + h * args.key_dim, dim, normalize, QueryScale(args), keys.q[i]);
      PrepareKey(k + h * args.key_dim, dim, normalize, 1.0f, keys.k[i]);
      keys.kq[i] = PaddedDot(keys.k[i], keys.q[i], dim);
    }
  });
}

template <typename T>
void CopyToFloat(const T* x, size_t count, float* out) {
  const hn::ScalableTag<float> d;
  const size_t n = hn::Lanes(d);
  size_t i = 0;
  for (; i + n <= count; i += n) hn::StoreU(LoadElements(d, x + i), d, out + i);
  for (; i < count; ++i) out[i] = ToFloat(x[i]);
}

template <typename T>
void CopyFromFloat(const float* x, size_t count, T* out) {
  const hn::ScalableTag<float> d;
  const size_t n = hn::Lanes(d);
  size_t i = 0;
  for (; i + n <= count; i += n) StoreElements(d, hn::LoadU(d, x + i), out + i);
  for (; i < count; ++i) FromFloat(x[i], out + i);
}

// v and the gates of value head hv, tokens [begin, begin + count).
inline void PrepareValues(const gdn_delta_rule_args& args, int64_t begin, int64_t count, int64_t hv,
                          ValueTokens& values) {
  WithElementType(args.qkv_dtype, [&](auto element) HWY_ATTR {
    using T = decltype(element);
    for (int64_t i = 0; i < count; ++i) {
      const T* v = static_cast<const T*>(args.v) + (begin + i) * args.v_token_stride;
      CopyToFloat(v + hv * args.value_dim, static_cast<size_t>(args.value_dim), values.v[i]);
      const int64_t gate = (begin + i) * args.value_heads + hv;
      values.decay[i] = std::exp(args.g[gate]);
      values.beta[i] = args.beta[gate];
    }
  });
}

inline void StoreOutputs(const gdn_delta_rule_args& args, int64_t begin, int64_t count, int64_t hv,
                         const ValueTokens& values) {
  WithElementType(args.o_dtype, [&](auto element) HWY_ATTR {
    using T = decltype(element);
    for (int64_t i = 0; i < count; ++i) {
      T* o = static_cast<T*>(args.o) + (begin + i) * args.o_token_stride;
      CopyFromFloat(values.o[i], static_cast<size_t>(args.value_dim), o + hv * args.value_dim);
    }
  });
}

// The sums of four vectors' lanes, as one vector of four.
template <class D, class V>
HWY_INLINE hn::Vec<hn::FixedTag<float, 4>> SumsOfLanes4(D d, V a, V b, V c, V e) {
  const hn::RepartitionToWide<D> dw;
  const auto ab = hn::Add(hn::InterleaveLower(d, a, b), hn::InterleaveUpper(d, a, b));
  const auto ce = hn::Add(hn::InterleaveLower(d, c, e), hn::InterleaveUpper(d, c, e));
  const auto lower = hn::InterleaveLower(dw, hn::BitCast(dw, ab), hn::BitCast(dw, ce));
  const auto upper = hn::InterleaveUpper(dw, hn::BitCast(dw, ab), hn::BitCast(dw, ce));
  const auto sum = hn::Add(hn::BitCast(d, lower), hn::BitCast(d, upper));
  if constexpr (hn::MaxLanes(D()) == 4) {
    return sum;
  } else {
    const hn::Half<D> dh;
    const auto half = hn::Add(hn::LowerHalf(dh, sum), hn::UpperHalf(dh, sum));
    if constexpr (hn::MaxLanes(dh) == 4) {
      return half;
    } else {
      const hn::Half<decltype(dh)> dq;
      return hn::Add(hn::LowerHalf(dq, half), hn::UpperHalf(dq, half));
    }
  }
}

// One token on four state rows. k and q are zero beyond `dim`, so a partial last vector adds zeros.
template <typename TIn, typename TOut>
HWY_INLINE void TokenRows4(const TIn* src, int64_t src_stride, TOut* dst, int64_t dst_stride,
                           size_t dim, const float* HWY_RESTRICT k, const float* HWY_RESTRICT q,
                           float kq, float decay, float beta, const float* v, float* o) {
  const hn::ScalableTag<float> d;
  const hn::FixedTag<float, 4> d4;
  const size_t n = hn::Lanes(d);
  const size_t whole = dim - dim % n;
  const TIn* s0 = src;
  const TIn* s1 = src + src_stride;
  const TIn* s2 = src + 2 * src_stride;
  const TIn* s3 = src + 3 * src_stride;
  auto p0 = hn::Zero(d), p1 = p0, p2 = p0, p3 = p0;
  auto r0 = p0, r1 = p0, r2 = p0, r3 = p0;
  for (size_t i = 0; i < whole; i += n) {
    const auto vk = hn::Load(d, k + i);
    const auto vq = hn::Load(d, q + i);
    const auto x0 = LoadElements(d, s0 + i);
    p0 = hn::MulAdd(x0, vk, p0);
    r0 = hn::MulAdd(x0, vq, r0);
    const auto x1 = LoadElements(d, s1 + i);
    p1 = hn::MulAdd(x1, vk, p1);
    r1 = hn::MulAdd(x1, vq, r1);
    const auto x2 = LoadElements(d, s2 + i);
    p2 = hn::MulAdd(x2, vk, p2);
    r2 = hn::MulAdd(x2, vq, r2);
    const auto x3 = LoadElements(d, s3 + i);
    p3 = hn::MulAdd(x3, vk, p3);
    r3 = hn::MulAdd(x3, vq, r3);
  }
  const size_t rest = dim - whole;
  if (HWY_UNLIKELY(rest != 0)) {
    const auto vk = hn::Load(d, k + whole);
    const auto vq = hn::Load(d, q + whole);
    const auto x0 = LoadElementsPart(d, s0 + whole, rest);
    const auto x1 = LoadElementsPart(d, s1 + whole, rest);
    const auto x2 = LoadElementsPart(d, s2 + whole, rest);
    const auto x3 = LoadElementsPart(d, s3 + whole, rest);
    p0 = hn::MulAdd(x0, vk, p0);
    r0 = hn::MulAdd(x0, vq, r0);
    p1 = hn::MulAdd(x1, vk, p1);
    r1 = hn::MulAdd(x1, vq, r1);
    p2 = hn::MulAdd(x2, vk, p2);
    r2 = hn::MulAdd(x2, vq, r2);
    p3 = hn::MulAdd(x3, vk, p3);
    r3 = hn::MulAdd(x3, vq, r3);
  }
  const auto p = SumsOfLanes4(d, p0, p1, p2, p3);
  const auto r = SumsOfLanes4(d, r0, r1, r2, r3);
  const auto a4 = hn::Set(d4, decay);
  const auto u = hn::Mul(hn::Set(d4, beta), hn::NegMulAdd(a4, p, hn::LoadU(d4, v)));
  hn::StoreU(hn::MulAdd(hn::Set(d4, kq), u, hn::Mul(a4, r)), d4, o);
  alignas(16) float us[4];
  hn::Store(u, d4, us);

  const auto a = hn::Set(d, decay);
  const auto u0 = hn::Set(d, us[0]), u1 = hn::Set(d, us[1]);
  const auto u2 = hn::Set(d, us[2]), u3 = hn::Set(d, us[3]);
  TOut* t0 = dst;
  TOut* t1 = dst + dst_stride;
  TOut* t2 = dst + 2 * dst_stride;
  TOut* t3 = dst + 3 * dst_stride;
  for (size_t i = 0; i < whole; i += n) {
    const auto vk = hn::Load(d, k + i);
    StoreElements(d, hn::MulAdd(u0, vk, hn::Mul(a, LoadElements(d, s0 + i))), t0 + i);
    StoreElements(d, hn::MulAdd(u1, vk, hn::Mul(a, LoadElements(d, s1 + i))), t1 + i);
    StoreElements(d, hn::MulAdd(u2, vk, hn::Mul(a, LoadElements(d, s2 + i))), t2 + i);
    StoreElements(d, hn::MulAdd(u3, vk, hn::Mul(a, LoadElements(d, s3 + i))), t3 + i);
  }
  if (HWY_UNLIKELY(rest != 0)) {
    const auto vk = hn::Load(d, k + whole);
    const auto update = [&](const TIn* from, TOut* to, hn::Vec<decltype(d)> uv) HWY_ATTR {
      const auto x = LoadElementsPart(d, from + whole, rest);
      StoreElementsPart(d, hn::MulAdd(uv, vk, hn::Mul(a, x)), to + whole, rest);
    };
    update(s0, t0, u0);
    update(s1, t1, u1);
    update(s2, t2, u2);
    update(s3, t3, u3);
  }
}

// `count` tokens on all rows of one head; `src` and `dst` may be the same rows. V not a multiple of
// four: the last rows go through a copy of four rows.
template <typename TIn, typename TOut>
void TokensOnHead(const KeyTokens& keys, ValueTokens& values, int64_t count, int64_t key_dim,
                  int64_t value_dim, const TIn* src, int64_t src_stride, TOut* dst) {
  const auto dim = static_cast<size_t>(key_dim);
  alignas(64) float tile[4 * kMaxKeyDim];
  alignas(64) TIn last_in[4 * kMaxKeyDim];
  alignas(64) TOut last_out[4 * kMaxKeyDim];
  const int64_t last = count - 1;
  for (int64_t row = 0; row < value_dim; row += 4) {
    const TIn* in = src + row * src_stride;
    int64_t in_stride = src_stride;
    TOut* out = dst + row * key_dim;
    const int64_t rows = value_dim - row < 4 ? value_dim - row : 4;
    if (HWY_UNLIKELY(rows < 4)) {
      for (int64_t i = 0; i < 4; ++i) {
        for (int64_t j = 0; j < key_dim; ++j) {
          last_in[i * key_dim + j] = i < rows ? in[i * src_stride + j] : TIn{};
        }
      }
      in = last_in;
      in_stride = key_dim;
      out = last_out;
    }
    auto token = [&](int64_t t, const auto* from, int64_t from_stride, auto* to) HWY_ATTR {
      TokenRows4(from, from_stride, to, key_dim, dim, keys.k[t], keys.q[t], keys.kq[t],
                 values.decay[t], values.beta[t], values.v[t] + row, values.o[t] + row);
    };
    if (count == 1) {
      token(0, in, in_stride, out);
    } else {
      token(0, in, in_stride, tile);
      for (int64_t t = 1; t < last; ++t) token(t, tile, key_dim, tile);
      token(last, tile, key_dim, out);
    }
    if (HWY_UNLIKELY(rows < 4)) {
      for (int64_t i = 0; i < rows * key_dim; ++i) dst[row * key_dim + i] = last_out[i];
    }
  }
}

}  // namespace gdn::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
