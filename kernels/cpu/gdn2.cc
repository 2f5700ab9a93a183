#include "gdn/kernels/gdn2.h"

#include <algorithm>
#include <cmath>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/gdn2.cc"
#include "hwy/foreach_target.h"
// After foreach_target.h.
#include "gdn/kernels/cpu_pool.h"
#include "hwy/highway.h"
#include "kernels/cpu/activations-inl.h"
#include "kernels/cpu/elements-inl.h"

#ifndef KERNELS_CPU_GDN2_ONCE_
#define KERNELS_CPU_GDN2_ONCE_
namespace gdn::cpu {

inline constexpr int64_t kGdn2MaxKeyDim = 256;
// State rows of a task: with the token's vectors they stay in the L1 cache.
inline constexpr int64_t kGdn2Rows = 32;

// Zero beyond K, so that rows need no tails.
struct Gdn2Scratch {
  alignas(64) float state[kGdn2Rows][kGdn2MaxKeyDim];
  alignas(64) float q[kGdn2MaxKeyDim];
  alignas(64) float k[kGdn2MaxKeyDim];
  alignas(64) float decay[kGdn2MaxKeyDim];
  alignas(64) float erased_k[kGdn2MaxKeyDim];  // erase * k
  float kq;
};

inline int64_t Gdn2Blocks(const gdn2_args& args) {
  return (args.value_dim + kGdn2Rows - 1) / kGdn2Rows;
}

}  // namespace gdn::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace gdn::cpu::HWY_NAMESPACE {

using F32 = hn::ScalableTag<float>;

HWY_INLINE size_t RestOf(size_t K, size_t i) { return std::min(hn::Lanes(F32()), K - i); }

template <typename T>
void Prepare(const gdn2_args& args, const T* x, float scale, float* out) {
  const F32 d;
  const auto K = static_cast<size_t>(args.key_dim);
  auto sum = hn::Zero(d);
  for (size_t i = 0; i < K; i += hn::Lanes(d)) {
    const auto value = LoadLanes(d, x + i, RestOf(K, i));
    hn::Store(value, d, out + i);
    sum = hn::MulAdd(value, value, sum);
  }
  float factor = scale;
  if (args.use_qk_l2norm != 0) {
    factor *= 1.0f / std::sqrt(hn::GetLane(hn::SumOfLanes(d, sum)) + 1e-6f);
  }
  for (size_t i = 0; i < K; i += hn::Lanes(d)) {
    hn::Store(hn::Mul(hn::Load(d, out + i), hn::Set(d, factor)), d, out + i);
  }
}

// The vectors of token t that the rows of value head hv share.
void PrepareToken(const gdn2_args& args, int64_t t, int64_t hv, Gdn2Scratch& s) {
  const F32 d;
  const auto K = static_cast<size_t>(args.key_dim);
  const int64_t h = hv / (args.value_heads / args.key_heads);
  const int64_t gate_head = hv / (args.value_heads / args.gate_heads);
  const int64_t gate = (t * args.gate_heads + gate_head) * args.key_dim;
  const float scale =
      args.scale != 0.0f ? args.scale : 1.0f / std::sqrt(static_cast<float>(args.key_dim));
  WithElementType(args.qkv_dtype, [&](auto element) HWY_ATTR {
    using T = decltype(element);
    Prepare(args, static_cast<const T*>(args.q) + t * args.q_token_stride + h * args.key_dim, scale,
            s.q);
    Prepare(args, static_cast<const T*>(args.k) + t * args.k_token_stride + h * args.key_dim, 1.0f,
            s.k);
  });
  auto kq = hn::Zero(d);
  WithElementType(args.gate_dtype, [&](auto element) HWY_ATTR {
    const auto* erase = static_cast<const decltype(element)*>(args.erase) + gate;
    for (size_t i = 0; i < K; i += hn::Lanes(d)) {
      const auto k = hn::Load(d, s.k + i);
      const auto g = LoadLanes(d, args.g + gate + i, RestOf(K, i));
      hn::Store(ExpOf(d, g), d, s.decay + i);
      hn::Store(hn::Mul(LoadLanes(d, erase + i, RestOf(K, i)), k), d, s.erased_k + i);
      kq = hn::MulAdd(k, hn::Load(d, s.q + i), kq);
    }
  });
  s.kq = hn::GetLane(hn::SumOfLanes(d, kq));
}

// One row of the state takes one token; returns o. `written` is write * v.
HWY_INLINE float RowToken(const Gdn2Scratch& s, size_t K, float written, float* row) {
  const F32 d;
  auto erased = hn::Zero(d);
  auto read = hn::Zero(d);
  for (size_t i = 0; i < K; i += hn::Lanes(d)) {
    const auto decayed = hn::Mul(hn::Load(d, row + i), hn::Load(d, s.decay + i));
    hn::Store(decayed, d, row + i);
    erased = hn::MulAdd(decayed, hn::Load(d, s.erased_k + i), erased);
    read = hn::MulAdd(decayed, hn::Load(d, s.q + i), read);
  }
  const float u = written - hn::GetLane(hn::SumOfLanes(d, erased));
  const auto u_lanes = hn::Set(d, u);
  for (size_t i = 0; i < K; i += hn::Lanes(d)) {
    hn::Store(hn::MulAdd(u_lanes, hn::Load(d, s.k + i), hn::Load(d, row + i)), d, row + i);
  }
  return hn::GetLane(hn::SumOfLanes(d, read)) + u * s.kq;
}

template <typename TState>
void MoveRows(const TState* from, int64_t rows, size_t K, Gdn2Scratch& s) {
  const F32 d;
  for (int64_t r = 0; r < rows; ++r) {
    for (size_t i = 0; i < K; i += hn::Lanes(d)) {
      const auto value = from == nullptr
                             ? hn::Zero(d)
                             : LoadLanes(d, from + static_cast<size_t>(r) * K + i, RestOf(K, i));
      hn::Store(value, d, s.state[r] + i);
    }
  }
}

// Rows [v0, v0 + rows) of one head over the tokens [begin, end).
template <typename TState>
void Block(const gdn2_args& args, int64_t sequence, int64_t begin, int64_t end, int64_t hv,
           int64_t v0, int64_t rows, Gdn2Scratch& s) {
  const F32 d;
  const auto K = static_cast<size_t>(args.key_dim);
  const int64_t column = hv * args.value_dim + v0;
  auto* state = static_cast<TState*>(args.state) + column * args.key_dim;
  const bool fresh = args.fresh != nullptr && args.fresh[sequence] != 0;
  MoveRows<TState>(fresh ? nullptr : state + args.read_index[sequence] * args.state_slot_stride,
                   rows, K, s);
  for (int64_t t = begin; t < end; ++t) {
    PrepareToken(args, t, hv, s);
    WithElementType(args.qkv_dtype, [&](auto v_element) HWY_ATTR {
      WithElementType(args.gate_dtype, [&](auto gate_element) HWY_ATTR {
        WithElementType(args.o_dtype, [&](auto o_element) HWY_ATTR {
          const auto* v =
              static_cast<const decltype(v_element)*>(args.v) + t * args.v_token_stride + column;
          const auto* write = static_cast<const decltype(gate_element)*>(args.write) +
                              t * args.value_heads * args.value_dim + column;
          auto* o = static_cast<decltype(o_element)*>(args.o) + t * args.o_token_stride + column;
          for (int64_t r = 0; r < rows; ++r) {
            FromFloat(RowToken(s, K, ToFloat(write[r]) * ToFloat(v[r]), s.state[r]), o + r);
          }
        });
      });
    });
  }
  TState* to = state + args.write_index[sequence] * args.state_slot_stride;
  for (int64_t r = 0; r < rows; ++r) {
    for (size_t i = 0; i < K; i += hn::Lanes(d)) {
      StoreLanes(d, hn::Load(d, s.state[r] + i), to + static_cast<size_t>(r) * K + i, RestOf(K, i));
    }
  }
}

void ZeroOutputs(const gdn2_args& args, int64_t begin, int64_t end, int64_t column, int64_t rows) {
  WithElementType(args.o_dtype, [&](auto element) HWY_ATTR {
    auto* o = static_cast<decltype(element)*>(args.o) + column;
    for (int64_t t = begin; t < end; ++t) std::fill_n(o + t * args.o_token_stride, rows, element);
  });
}

// Tasks are (sequence, value head, block of rows), blocks fastest.
void Gdn2Range(const gdn2_args& args, bool step, int64_t first, int64_t last) {
  Gdn2Scratch scratch;
  const int64_t blocks = Gdn2Blocks(args);
  for (int64_t task = first; task < last; ++task) {
    const int64_t sequence = task / (blocks * args.value_heads);
    const int64_t hv = task / blocks % args.value_heads;
    const int64_t v0 = task % blocks * kGdn2Rows;
    const int64_t rows = std::min(kGdn2Rows, args.value_dim - v0);
    const int64_t begin = step ? sequence : args.cu_seqlens[sequence];
    const int64_t end = step ? sequence + 1 : args.cu_seqlens[sequence + 1];
    const int64_t read = args.read_index[sequence];
    const int64_t write = args.write_index[sequence];
    if (read < 0 || write < 0) {
      ZeroOutputs(args, begin, end, hv * args.value_dim + v0, rows);
    } else if (begin == end && read == write) {
      continue;
    } else if (args.state_dtype == GDN_F32) {
      Block<float>(args, sequence, begin, end, hv, v0, rows, scratch);
    } else {
      Block<Bf16>(args, sequence, begin, end, hv, v0, rows, scratch);
    }
  }
}

}  // namespace gdn::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace gdn::cpu {

HWY_EXPORT(Gdn2Range);

namespace {

gdn_status Run(const gdn_exec& exec, const gdn2_args& args, bool step) {
  ParallelFor(exec.pool, args.sequences * args.value_heads * Gdn2Blocks(args), 1,
              [&](int64_t begin, int64_t end, int32_t) {
                HWY_DYNAMIC_DISPATCH(Gdn2Range)(args, step, begin, end);
              });
  return GDN_OK;
}

}  // namespace

gdn_status Gdn2Step(const gdn_exec& exec, const gdn2_args& args) { return Run(exec, args, true); }
gdn_status Gdn2Prefill(const gdn_exec& exec, const gdn2_args& args) {
  return Run(exec, args, false);
}

}  // namespace gdn::cpu
#endif  // HWY_ONCE
