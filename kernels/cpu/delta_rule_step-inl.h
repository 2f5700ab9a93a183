// The recurrence on state rows for the current Highway target: a few tokens per visit of a row.
//
// With p = S k and r = S q taken from the old state, one pass reads it and one writes it:
//   u = beta (v - a p),   o = a r + (k.q) u,   S <- a S + u k^T
#include "hwy/cache_control.h"
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

// Two vectors of a row. BF16 pairs are the even and the odd elements, which a shift and a mask take
// apart; keys are then prepared in the same order, and sums do not care.
template <class D, class V>
HWY_INLINE void LoadPair(D d, const float* p, V& first, V& second) {
  first = hn::LoadU(d, p);
  second = hn::LoadU(d, p + hn::Lanes(d));
}

template <class D, class V>
HWY_INLINE void LoadPair(D d, const Bf16* p, V& even, V& odd) {
  const hn::Rebind<uint32_t, D> du;
  const auto bits = hn::LoadU(du, reinterpret_cast<const uint32_t*>(p));
  even = hn::BitCast(d, hn::ShiftLeft<16>(bits));
  odd = hn::BitCast(d, hn::And(bits, hn::Set(du, 0xffff0000u)));
}

template <class D, class V>
HWY_INLINE void StorePair(D d, V first, V second, float* p) {
  hn::StoreU(first, d, p);
  hn::StoreU(second, d, p + hn::Lanes(d));
}

template <class D, class V>
HWY_INLINE void StorePair(D d, V even, V odd, Bf16* p) {
  const hn::Rebind<uint32_t, D> du;
  // Nearest even in the upper half; a NaN becomes all ones.
  const auto round = [&](V x) HWY_ATTR {
    const auto bits = hn::BitCast(du, x);
    const auto last = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 1u));
    const auto rounded = hn::Add(hn::Add(bits, hn::Set(du, 0x7fffu)), last);
    return hn::Or(rounded, hn::BitCast(du, hn::VecFromMask(d, hn::IsNaN(x))));
  };
  const auto high = hn::And(round(odd), hn::Set(du, 0xffff0000u));
  const auto low = hn::ShiftRight<16>(round(even));
  hn::StoreU(hn::Or(high, low), du, reinterpret_cast<uint32_t*>(p));
}

// Whether rows are whole pairs, for all the rows of a call.
inline bool RowsArePairs(int64_t key_dim) {
  return key_dim % static_cast<int64_t>(2 * hn::Lanes(hn::ScalableTag<float>())) == 0;
}

// Reorders a prepared key as LoadPair does a BF16 row.
inline void SplitPairs(float* key, size_t dim) {
  const hn::ScalableTag<float> d;
  const size_t n = hn::Lanes(d);
  for (size_t i = 0; i < dim; i += 2 * n) {
    const auto low = hn::Load(d, key + i);
    const auto high = hn::Load(d, key + i + n);
    hn::Store(hn::ConcatEven(d, high, low), d, key + i);
    hn::Store(hn::ConcatOdd(d, high, low), d, key + i + n);
  }
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
      if (args.state_dtype == GDN_BF16 && RowsArePairs(args.key_dim)) {
        SplitPairs(keys.q[i], dim);
        SplitPairs(keys.k[i], dim);
      }
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

// Rows ahead that are asked for while a row is read: the rows of a head, and of the next head, lie
// behind each other, but four at a time is no pattern that hardware follows well.
inline constexpr int64_t kPrefetchRows = 16;

template <class D>
struct RowSums {
  hn::Vec<D> p[4];  // S k
  hn::Vec<D> r[4];  // S q
};

// One token on four state rows. k and q are zero beyond `dim`, so a partial last vector adds zeros.
template <bool kPairs, typename TIn, typename TOut>
HWY_INLINE void TokenRows4(const TIn* src, int64_t src_stride, TOut* dst, int64_t dst_stride,
                           size_t dim, const float* HWY_RESTRICT k, const float* HWY_RESTRICT q,
                           float kq, float decay, float beta, const float* v, float* o) {
  const hn::ScalableTag<float> d;
  const hn::FixedTag<float, 4> d4;
  using V = hn::Vec<decltype(d)>;
  const size_t n = hn::Lanes(d);
  RowSums<decltype(d)> sums;
  _Pragma("GCC unroll 4") for (int j = 0; j < 4; ++j) {
    sums.p[j] = hn::Zero(d);
    sums.r[j] = hn::Zero(d);
  }
  if constexpr (kPairs) {
    for (size_t i = 0; i < dim; i += 2 * n) {
      const V k0 = hn::Load(d, k + i), k1 = hn::Load(d, k + i + n);
      const V q0 = hn::Load(d, q + i), q1 = hn::Load(d, q + i + n);
      _Pragma("GCC unroll 4") for (int j = 0; j < 4; ++j) {
        V x0, x1;
        LoadPair(d, src + j * src_stride + i, x0, x1);
        hwy::Prefetch(src + (j + kPrefetchRows) * src_stride + i);
        sums.p[j] = hn::MulAdd(x1, k1, hn::MulAdd(x0, k0, sums.p[j]));
        sums.r[j] = hn::MulAdd(x1, q1, hn::MulAdd(x0, q0, sums.r[j]));
      }
    }
  } else {
    for (size_t i = 0; i < dim; i += n) {
      const V vk = hn::Load(d, k + i);
      const V vq = hn::Load(d, q + i);
      for (int j = 0; j < 4; ++j) {
        const TIn* row = src + j * src_stride + i;
        const V x = i + n <= dim ? LoadElements(d, row) : LoadElementsPart(d, row, dim - i);
        sums.p[j] = hn::MulAdd(x, vk, sums.p[j]);
        sums.r[j] = hn::MulAdd(x, vq, sums.r[j]);
      }
    }
  }
  const auto p = SumsOfLanes4(d, sums.p[0], sums.p[1], sums.p[2], sums.p[3]);
  const auto r = SumsOfLanes4(d, sums.r[0], sums.r[1], sums.r[2], sums.r[3]);
  const auto a4 = hn::Set(d4, decay);
  const auto u = hn::Mul(hn::Set(d4, beta), hn::NegMulAdd(a4, p, hn::LoadU(d4, v)));
  hn::StoreU(hn::MulAdd(hn::Set(d4, kq), u, hn::Mul(a4, r)), d4, o);
  alignas(16) float u_rows[4];
  hn::Store(u, d4, u_rows);

  const V a = hn::Set(d, decay);
  V vu[4];
  _Pragma("GCC unroll 4") for (int j = 0; j < 4; ++j) vu[j] = hn::Set(d, u_rows[j]);
  if constexpr (kPairs) {
    for (size_t i = 0; i < dim; i += 2 * n) {
      const V k0 = hn::Load(d, k + i), k1 = hn::Load(d, k + i + n);
      _Pragma("GCC unroll 4") for (int j = 0; j < 4; ++j) {
        V x0, x1;
        LoadPair(d, src + j * src_stride + i, x0, x1);
        x0 = hn::MulAdd(vu[j], k0, hn::Mul(a, x0));
        x1 = hn::MulAdd(vu[j], k1, hn::Mul(a, x1));
        StorePair(d, x0, x1, dst + j * dst_stride + i);
      }
    }
  } else {
    for (size_t i = 0; i < dim; i += n) {
      const V vk = hn::Load(d, k + i);
      for (int j = 0; j < 4; ++j) {
        const TIn* row = src + j * src_stride + i;
        TOut* out = dst + j * dst_stride + i;
        if (i + n <= dim) {
          StoreElements(d, hn::MulAdd(vu[j], vk, hn::Mul(a, LoadElements(d, row))), out);
        } else {
          const V x = LoadElementsPart(d, row, dim - i);
          StoreElementsPart(d, hn::MulAdd(vu[j], vk, hn::Mul(a, x)), out, dim - i);
        }
      }
    }
  }
}

// `count` tokens on all rows of one head; `src` and `dst` may be the same rows. V not a multiple of
// four: the last rows go through a copy of four rows.
template <bool kPairs, typename TIn, typename TOut>
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
      TokenRows4<kPairs>(from, from_stride, to, key_dim, dim, keys.k[t], keys.q[t], keys.kq[t],
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
