#include "gdn/kernels/gdn2_backward.h"

#include <algorithm>
#include <cmath>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/gdn2_backward.cc"
#include "hwy/foreach_target.h"
// After foreach_target.h.
#include "gdn/kernels/cpu_pool.h"
#include "hwy/highway.h"
#include "kernels/common/convert.h"
#include "kernels/cpu/activations-inl.h"
#include "kernels/cpu/elements-inl.h"
#include "kernels/cpu/key_rows-inl.h"

#ifndef KERNELS_CPU_GDN2_BACKWARD_ONCE_
#define KERNELS_CPU_GDN2_BACKWARD_ONCE_
namespace gdn::cpu {

// One of the widest vectors, so that rows need no tails on any target.
inline constexpr int64_t kGdn2BackwardAlign = 16;
inline constexpr int64_t kGdn2BackwardMaxKeyDim = 256;

inline int64_t Gdn2BackwardRoundUp(int64_t value) {
  return (value + kGdn2BackwardAlign - 1) / kGdn2BackwardAlign * kGdn2BackwardAlign;
}

// The rows of a state do not see each other, so one row's states of all tokens are held at once.
// Rows are zero beyond K.
struct Gdn2BackwardScratch {
  float* states;  // [T+1, Kp]
  float* q;       // [T, Kp], as are those below, but for u
  float* k;
  float* decay;
  float* erase;
  float* d_q;
  float* d_k;
  float* d_g;
  float* d_erase;
  float* u;  // [T]
};

// Lays the buffers out behind `base`; returns their size in floats. `base` may be NULL.
inline int64_t LayOut(const gdn2_backward_args& args, float* base, Gdn2BackwardScratch* s) {
  const int64_t row = Gdn2BackwardRoundUp(args.key_dim);
  int64_t used = 0;
  auto take = [&](int64_t floats) {
    float* buffer = base == nullptr ? nullptr : base + used;
    used += Gdn2BackwardRoundUp(floats);
    return buffer;
  };
  s->states = take((args.tokens + 1) * row);
  for (float** matrix :
       {&s->q, &s->k, &s->decay, &s->erase, &s->d_q, &s->d_k, &s->d_g, &s->d_erase}) {
    *matrix = take(args.tokens * row);
  }
  s->u = take(args.tokens);
  return used;
}

}  // namespace gdn::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace gdn::cpu::HWY_NAMESPACE {

using F32 = hn::ScalableTag<float>;

// One sequence and key head, with the gate and value heads that share it.
class Gdn2HeadBackward {
 public:
  Gdn2HeadBackward(const gdn2_backward_args& args, const Gdn2BackwardScratch& s, int64_t n,
                   int64_t h)
      : args_(args),
        s_(s),
        n_(n),
        h_(h),
        begin_(args.cu_seqlens[n]),
        length_(args.cu_seqlens[n + 1] - begin_),
        row_(static_cast<size_t>(Gdn2BackwardRoundUp(args.key_dim))),
        scale_(args.scale != 0.0f ? args.scale
                                  : 1.0f / std::sqrt(static_cast<float>(args.key_dim))) {}

  void Run() {
    const KeyRows rows{begin_, length_, args_.key_heads, h_, static_cast<size_t>(args_.key_dim),
                       row_};
    LoadKeyRows(rows, args_.q, args_.qkv_dtype, args_.q_token_stride, s_.q);
    LoadKeyRows(rows, args_.k, args_.qkv_dtype, args_.k_token_stride, s_.k);
    std::fill_n(s_.d_q, static_cast<size_t>(length_) * row_, 0.0f);
    std::fill_n(s_.d_k, static_cast<size_t>(length_) * row_, 0.0f);
    const int64_t gates = args_.gate_heads / args_.key_heads;  // of this key head
    for (int64_t gate = h_ * gates; gate < (h_ + 1) * gates; ++gate) GateHead(gate);
    const bool norm = args_.use_qk_l2norm != 0;
    StoreKeyGradients(rows, s_.q, s_.d_q, norm ? args_.q_rstd : nullptr, args_.d_q,
                      args_.d_qkv_dtype, args_.d_q_token_stride);
    StoreKeyGradients(rows, s_.k, s_.d_k, norm ? args_.k_rstd : nullptr, args_.d_k,
                      args_.d_qkv_dtype, args_.d_k_token_stride);
  }

 private:
  static size_t Lanes() { return hn::Lanes(F32()); }
  float* RowOf(float* matrix, int64_t t) const { return matrix + static_cast<size_t>(t) * row_; }
  int64_t WriteAt(int64_t t, int64_t column) const {
    return (begin_ + t) * args_.value_heads * args_.value_dim + column;
  }

  void LoadGates(const KeyRows& rows) const {
    const F32 d;
    const int64_t stride = args_.gate_heads * args_.key_dim;
    LoadKeyRows(rows, args_.g, GDN_F32, stride, s_.decay);
    LoadKeyRows(rows, args_.erase, args_.gate_dtype, stride, s_.erase);
    const size_t size = static_cast<size_t>(length_) * row_;
    for (size_t i = 0; i < size; i += Lanes()) {
      hn::Store(ExpOf(d, hn::Load(d, s_.decay + i)), d, s_.decay + i);
    }
    std::fill_n(s_.d_g, size, 0.0f);
    std::fill_n(s_.d_erase, size, 0.0f);
  }

  // The value heads that share one head of gates.
  void GateHead(int64_t gate) const {
    const auto K = static_cast<size_t>(args_.key_dim);
    LoadGates({begin_, length_, args_.gate_heads, gate, K, row_});
    const int64_t columns = args_.value_heads / args_.gate_heads * args_.value_dim;
    for (int64_t column = gate * columns; column < (gate + 1) * columns; ++column) Row(column);
    for (int64_t t = 0; t < length_; ++t) {
      const int64_t at = ((begin_ + t) * args_.gate_heads + gate) * args_.key_dim;
      std::copy_n(RowOf(s_.d_g, t), K, args_.d_g + at);
      std::copy_n(RowOf(s_.d_erase, t), K, args_.d_erase + at);
    }
  }

  // Row `column` of the states: forward for its states, then t downwards.
  void Row(int64_t column) const {
    const auto K = static_cast<size_t>(args_.key_dim);
    const int64_t at = (n_ * args_.value_heads * args_.value_dim + column) * args_.key_dim;
    std::fill_n(s_.states, row_, 0.0f);
    if (args_.initial_state != nullptr) std::copy_n(args_.initial_state + at, K, s_.states);
    const auto value = [&](int64_t t) {
      return kernels::Load(args_.v, args_.qkv_dtype, (begin_ + t) * args_.v_token_stride + column);
    };
    const auto write = [&](int64_t t) {
      return kernels::Load(args_.write, args_.gate_dtype, WriteAt(t, column));
    };
    for (int64_t t = 0; t < length_; ++t) s_.u[t] = Forward(t, write(t) * value(t));
    alignas(64) float d_state[kGdn2BackwardMaxKeyDim] = {};
    if (args_.d_final_state != nullptr) std::copy_n(args_.d_final_state + at, K, d_state);
    for (int64_t t = length_ - 1; t >= 0; --t) {
      const float d_o =
          kernels::Load(args_.d_o, args_.d_o_dtype, (begin_ + t) * args_.d_o_token_stride + column);
      const float d_u = Backward(t, scale_ * d_o, d_state);
      args_.d_write[WriteAt(t, column)] = d_u * value(t);
      kernels::Store(args_.d_v, args_.d_qkv_dtype, (begin_ + t) * args_.d_v_token_stride + column,
                     d_u * write(t));
    }
    if (args_.d_initial_state != nullptr) std::copy_n(d_state, K, args_.d_initial_state + at);
  }

  // Writes the state after token t; returns u.
  HWY_INLINE float Forward(int64_t t, float written) const {
    const F32 d;
    const float* before = RowOf(s_.states, t);
    float* after = RowOf(s_.states, t + 1);
    const float* k = RowOf(s_.k, t);
    const float* decay = RowOf(s_.decay, t);
    const float* erase = RowOf(s_.erase, t);
    auto erased = hn::Zero(d);
    for (size_t i = 0; i < row_; i += Lanes()) {
      const auto decayed = hn::Mul(hn::Load(d, decay + i), hn::Load(d, before + i));
      const auto erased_k = hn::Mul(hn::Load(d, erase + i), hn::Load(d, k + i));
      erased = hn::MulAdd(decayed, erased_k, erased);
      hn::Store(decayed, d, after + i);
    }
    const float u = written - hn::GetLane(hn::SumOfLanes(d, erased));
    for (size_t i = 0; i < row_; i += Lanes()) {
      const auto k_lanes = hn::Load(d, k + i);
      hn::Store(hn::MulAdd(hn::Set(d, u), k_lanes, hn::Load(d, after + i)), d, after + i);
    }
    return u;
  }

  // d_o has been scaled. Takes d_state across token t and returns d_u.
  HWY_INLINE float Backward(int64_t t, float d_o, float* d_state) const {
    const F32 d;
    const float* after = RowOf(s_.states, t + 1);
    const float* q = RowOf(s_.q, t);
    const float* k = RowOf(s_.k, t);
    float* d_q = RowOf(s_.d_q, t);
    const auto d_o_lanes = hn::Set(d, d_o);
    auto d_u_lanes = hn::Zero(d);
    for (size_t i = 0; i < row_; i += Lanes()) {
      hn::Store(hn::MulAdd(hn::Load(d, after + i), d_o_lanes, hn::Load(d, d_q + i)), d, d_q + i);
      const auto s = hn::MulAdd(hn::Load(d, q + i), d_o_lanes, hn::Load(d, d_state + i));
      hn::Store(s, d, d_state + i);
      d_u_lanes = hn::MulAdd(s, hn::Load(d, k + i), d_u_lanes);
    }
    const float d_u = hn::GetLane(hn::SumOfLanes(d, d_u_lanes));
    BackwardChannels(t, d_u, d_state);
    return d_u;
  }

  HWY_INLINE void BackwardChannels(int64_t t, float d_u, float* d_state) const {
    const F32 d;
    const auto u = hn::Set(d, s_.u[t]);
    const auto minus_d_u = hn::Set(d, -d_u);
    const size_t first = static_cast<size_t>(t) * row_;
    for (size_t c = 0; c < row_; c += Lanes()) {
      const size_t i = first + c;
      const auto k = hn::Load(d, s_.k + i);
      const auto erase = hn::Load(d, s_.erase + i);
      const auto decay = hn::Load(d, s_.decay + i);
      const auto old = hn::Load(d, s_.states + i);
      auto s = hn::Load(d, d_state + c);
      const auto d_erased_k = hn::Mul(hn::Mul(decay, old), minus_d_u);
      hn::Store(hn::MulAdd(d_erased_k, k, hn::Load(d, s_.d_erase + i)), d, s_.d_erase + i);
      const auto d_k = hn::MulAdd(s, u, hn::Load(d, s_.d_k + i));
      hn::Store(hn::MulAdd(d_erased_k, erase, d_k), d, s_.d_k + i);
      s = hn::Mul(hn::MulAdd(hn::Mul(erase, k), minus_d_u, s), decay);
      hn::Store(s, d, d_state + c);
      hn::Store(hn::MulAdd(s, old, hn::Load(d, s_.d_g + i)), d, s_.d_g + i);
    }
  }

  const gdn2_backward_args& args_;
  const Gdn2BackwardScratch& s_;
  const int64_t n_;
  const int64_t h_;
  const int64_t begin_;
  const int64_t length_;
  const size_t row_;
  const float scale_;
};

// Tasks are (sequence, key head), heads fastest.
void Gdn2BackwardRange(const gdn2_backward_args& args, const Gdn2BackwardScratch& scratch,
                       int64_t begin, int64_t end) {
  for (int64_t task = begin; task < end; ++task) {
    Gdn2HeadBackward(args, scratch, task / args.key_heads, task % args.key_heads).Run();
  }
}

}  // namespace gdn::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace gdn::cpu {

HWY_EXPORT(Gdn2BackwardRange);

size_t Gdn2BackwardWorkspace(const gdn_exec& exec, const gdn2_backward_args& args) {
  Gdn2BackwardScratch scratch{};
  return static_cast<size_t>(gdn_cpu_pool_threads(exec.pool)) *
         static_cast<size_t>(LayOut(args, nullptr, &scratch)) * sizeof(float);
}

gdn_status Gdn2Backward(const gdn_exec& exec, const gdn2_backward_args& args) {
  ParallelFor(exec.pool, args.sequences * args.key_heads, 1,
              [&](int64_t begin, int64_t end, int32_t worker) {
                Gdn2BackwardScratch scratch{};
                const int64_t size = LayOut(args, nullptr, &scratch);
                LayOut(args, static_cast<float*>(exec.workspace) + worker * size, &scratch);
                HWY_DYNAMIC_DISPATCH(Gdn2BackwardRange)(args, scratch, begin, end);
              });
  return GDN_OK;
}

}  // namespace gdn::cpu
#endif  // HWY_ONCE
