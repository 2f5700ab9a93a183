#include "gdn/kernels/delta_rule_backward.h"

#include <algorithm>
#include <cmath>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/delta_rule_backward.cc"
#include "hwy/foreach_target.h"
// After foreach_target.h.
#include "gdn/kernels/cpu_pool.h"
#include "hwy/highway.h"
#include "kernels/common/convert.h"
#include "kernels/cpu/elements-inl.h"
#include "kernels/cpu/key_rows-inl.h"

#ifndef KERNELS_CPU_DELTA_RULE_BACKWARD_ONCE_
#define KERNELS_CPU_DELTA_RULE_BACKWARD_ONCE_
namespace gdn::cpu {

// One of the widest vectors, so that rows need no tails on any target.
inline constexpr int64_t kBackwardAlign = 16;
inline constexpr int64_t kBackwardMaxKeyDim = 256;

inline int64_t BackwardRoundUp(int64_t value) {
  return (value + kBackwardAlign - 1) / kBackwardAlign * kBackwardAlign;
}

// The rows of a state do not see each other, so one row's states of all tokens are held at once.
// Rows are zero beyond K.
struct BackwardScratch {
  float* states;  // [T+1, Kp]
  float* q;       // [T, Kp], as are the three below
  float* k;
  float* d_q;
  float* d_k;
  float* error;  // [T], as are those below
  float* decay;
  float* d_g;
  float* d_beta;
};

// Lays the buffers out behind `base`; returns their size in floats. `base` may be NULL.
inline int64_t LayOut(const gdn_delta_rule_backward_args& args, float* base, BackwardScratch* s) {
  const int64_t row = BackwardRoundUp(args.key_dim);
  int64_t used = 0;
  auto take = [&](int64_t floats) {
    float* buffer = base == nullptr ? nullptr : base + used;
    used += BackwardRoundUp(floats);
    return buffer;
  };
  s->states = take((args.tokens + 1) * row);
  for (float** matrix : {&s->q, &s->k, &s->d_q, &s->d_k}) *matrix = take(args.tokens * row);
  for (float** vector : {&s->error, &s->decay, &s->d_g, &s->d_beta}) *vector = take(args.tokens);
  return used;
}

}  // namespace gdn::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace gdn::cpu::HWY_NAMESPACE {

using F32 = hn::ScalableTag<float>;

// One sequence and key head, with the value heads that share it.
class HeadBackward {
 public:
  HeadBackward(const gdn_delta_rule_backward_args& args, const BackwardScratch& s, int64_t n,
               int64_t h)
      : args_(args),
        s_(s),
        n_(n),
        h_(h),
        begin_(args.cu_seqlens[n]),
        length_(args.cu_seqlens[n + 1] - begin_),
        row_(static_cast<size_t>(BackwardRoundUp(args.key_dim))),
        scale_(args.scale != 0.0f ? args.scale
                                  : 1.0f / std::sqrt(static_cast<float>(args.key_dim))) {}

  void Run() {
    const KeyRows rows{begin_, length_, args_.key_heads, h_, static_cast<size_t>(args_.key_dim),
                       row_};
    LoadKeyRows(rows, args_.q, args_.qkv_dtype, args_.q_token_stride, s_.q);
    LoadKeyRows(rows, args_.k, args_.qkv_dtype, args_.k_token_stride, s_.k);
    std::fill_n(s_.d_q, static_cast<size_t>(length_) * row_, 0.0f);
    std::fill_n(s_.d_k, static_cast<size_t>(length_) * row_, 0.0f);
    const int64_t ratio = args_.value_heads / args_.key_heads;
    for (int64_t hv = h_ * ratio; hv < (h_ + 1) * ratio; ++hv) ValueHead(hv);
    const bool norm = args_.use_qk_l2norm != 0;
    StoreKeyGradients(rows, s_.q, s_.d_q, norm ? args_.q_rstd : nullptr, args_.d_q,
                      args_.d_qkv_dtype, args_.d_q_token_stride);
    StoreKeyGradients(rows, s_.k, s_.d_k, norm ? args_.k_rstd : nullptr, args_.d_k,
                      args_.d_qkv_dtype, args_.d_k_token_stride);
  }

 private:
  static size_t Lanes() { return hn::Lanes(F32()); }
  float* RowOf(float* matrix, int64_t t) const { return matrix + static_cast<size_t>(t) * row_; }
  int64_t Gate(int64_t t, int64_t hv) const { return (begin_ + t) * args_.value_heads + hv; }

  void ValueHead(int64_t hv) const {
    for (int64_t t = 0; t < length_; ++t) s_.decay[t] = std::exp(args_.g[Gate(t, hv)]);
    std::fill_n(s_.d_g, length_, 0.0f);
    std::fill_n(s_.d_beta, length_, 0.0f);
    for (int64_t i = 0; i < args_.value_dim; ++i) Row(hv, hv * args_.value_dim + i);
    for (int64_t t = 0; t < length_; ++t) {
      args_.d_g[Gate(t, hv)] = s_.decay[t] * s_.d_g[t];
      args_.d_beta[Gate(t, hv)] = s_.d_beta[t];
    }
  }

  // Row `column` of the states: forward for its states, then t downwards.
  void Row(int64_t hv, int64_t column) const {
    const auto K = static_cast<size_t>(args_.key_dim);
    const int64_t at = (n_ * args_.value_heads * args_.value_dim + column) * args_.key_dim;
    std::fill_n(s_.states, row_, 0.0f);
    if (args_.initial_state != nullptr) std::copy_n(args_.initial_state + at, K, s_.states);
    for (int64_t t = 0; t < length_; ++t) {
      const float v =
          kernels::Load(args_.v, args_.qkv_dtype, (begin_ + t) * args_.v_token_stride + column);
      s_.error[t] = Forward(t, args_.beta[Gate(t, hv)], v);
    }
    alignas(64) float d_state[kBackwardMaxKeyDim] = {};
    if (args_.d_final_state != nullptr) std::copy_n(args_.d_final_state + at, K, d_state);
    for (int64_t t = length_ - 1; t >= 0; --t) {
      const float beta = args_.beta[Gate(t, hv)];
      const float d_o =
          kernels::Load(args_.d_o, args_.d_o_dtype, (begin_ + t) * args_.d_o_token_stride + column);
      const float d_u = Backward(t, beta, scale_ * d_o, d_state);
      kernels::Store(args_.d_v, args_.d_qkv_dtype, (begin_ + t) * args_.d_v_token_stride + column,
                     beta * d_u);
    }
    if (args_.d_initial_state != nullptr) std::copy_n(d_state, K, args_.d_initial_state + at);
  }

  // Writes the state after token t; returns v - S1 k.
  HWY_INLINE float Forward(int64_t t, float beta, float value) const {
    const F32 d;
    const float* before = RowOf(s_.states, t);
    float* after = RowOf(s_.states, t + 1);
    const float* k = RowOf(s_.k, t);
    const auto decay = hn::Set(d, s_.decay[t]);
    auto predicted = hn::Zero(d);
    for (size_t i = 0; i < row_; i += Lanes()) {
      const auto decayed = hn::Mul(decay, hn::Load(d, before + i));
      predicted = hn::MulAdd(decayed, hn::Load(d, k + i), predicted);
      hn::Store(decayed, d, after + i);
    }
    const float error = value - hn::GetLane(hn::SumOfLanes(d, predicted));
    const auto u = hn::Set(d, beta * error);
    for (size_t i = 0; i < row_; i += Lanes()) {
      hn::Store(hn::MulAdd(u, hn::Load(d, k + i), hn::Load(d, after + i)), d, after + i);
    }
    return error;
  }

  // d_o has been scaled. Takes d_state across token t and returns d_u.
  HWY_INLINE float Backward(int64_t t, float beta, float d_o, float* d_state) const {
    const F32 d;
    const float* before = RowOf(s_.states, t);
    const float* after = RowOf(s_.states, t + 1);
    const float* q = RowOf(s_.q, t);
    const float* k = RowOf(s_.k, t);
    float* d_q = RowOf(s_.d_q, t);
    float* d_k = RowOf(s_.d_k, t);
    const auto d_o_lanes = hn::Set(d, d_o);
    auto d_u_lanes = hn::Zero(d);
    for (size_t i = 0; i < row_; i += Lanes()) {
      hn::Store(hn::MulAdd(hn::Load(d, after + i), d_o_lanes, hn::Load(d, d_q + i)), d, d_q + i);
      const auto s = hn::MulAdd(hn::Load(d, q + i), d_o_lanes, hn::Load(d, d_state + i));
      hn::Store(s, d, d_state + i);
      d_u_lanes = hn::MulAdd(s, hn::Load(d, k + i), d_u_lanes);
    }
    const float d_u = hn::GetLane(hn::SumOfLanes(d, d_u_lanes));
    s_.d_beta[t] += d_u * s_.error[t];
    const auto u = hn::Set(d, beta * s_.error[t]);
    const auto d_predicted = hn::Set(d, -beta * d_u);
    const auto decay = hn::Set(d, s_.decay[t]);
    auto d_decay = hn::Zero(d);
    for (size_t i = 0; i < row_; i += Lanes()) {
      auto s = hn::Load(d, d_state + i);
      const auto old = hn::Load(d, before + i);
      const auto through_u = hn::MulAdd(s, u, hn::Load(d, d_k + i));
      hn::Store(hn::MulAdd(hn::Mul(decay, old), d_predicted, through_u), d, d_k + i);
      s = hn::MulAdd(hn::Load(d, k + i), d_predicted, s);
      d_decay = hn::MulAdd(s, old, d_decay);
      hn::Store(hn::Mul(s, decay), d, d_state + i);
    }
    s_.d_g[t] += hn::GetLane(hn::SumOfLanes(d, d_decay));
    return d_u;
  }

  const gdn_delta_rule_backward_args& args_;
  const BackwardScratch& s_;
  const int64_t n_;
  const int64_t h_;
  const int64_t begin_;
  const int64_t length_;
  const size_t row_;
  const float scale_;
};

// Tasks are (sequence, key head), heads fastest.
void DeltaRuleBackwardRange(const gdn_delta_rule_backward_args& args,
                            const BackwardScratch& scratch, int64_t begin, int64_t end) {
  for (int64_t task = begin; task < end; ++task) {
    HeadBackward(args, scratch, task / args.key_heads, task % args.key_heads).Run();
  }
}

}  // namespace gdn::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace gdn::cpu {

HWY_EXPORT(DeltaRuleBackwardRange);

size_t DeltaRuleBackwardWorkspace(const gdn_exec& exec, const gdn_delta_rule_backward_args& args) {
  BackwardScratch scratch{};
  return static_cast<size_t>(gdn_cpu_pool_threads(exec.pool)) *
         static_cast<size_t>(LayOut(args, nullptr, &scratch)) * sizeof(float);
}

gdn_status DeltaRuleBackward(const gdn_exec& exec, const gdn_delta_rule_backward_args& args) {
  ParallelFor(exec.pool, args.sequences * args.key_heads, 1,
              [&](int64_t begin, int64_t end, int32_t worker) {
                BackwardScratch scratch{};
                const int64_t size = LayOut(args, nullptr, &scratch);
                LayOut(args, static_cast<float*>(exec.workspace) + worker * size, &scratch);
                HWY_DYNAMIC_DISPATCH(DeltaRuleBackwardRange)(args, scratch, begin, end);
              });
  return GDN_OK;
}

}  // namespace gdn::cpu
#endif  // HWY_ONCE
