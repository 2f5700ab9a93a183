#include "gdn/kernels/delta_rule_backward.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "kernels/common/convert.h"
#include "kernels/common/rule_args.h"

namespace gdn::ref {

using kernels::Load;
using kernels::Store;

namespace {

constexpr int64_t kMaxKeyDim = 256;

// The rows of a state do not see each other, so one row's states of all tokens are held at once.
struct Scratch {
  double* states;  // [T+1, K]
  double* q;       // [T, K], as are the three below
  double* k;
  double* d_q;
  double* d_k;
  double* e;  // [T], as are the two below
  double* d_g;
  double* d_beta;

  Scratch(void* workspace, int64_t tokens, int64_t K) {
    auto* next = static_cast<double*>(workspace);
    auto take = [&](int64_t size) {
      double* begin = next;
      next += size;
      return begin;
    };
    states = take((tokens + 1) * K);
    for (double** matrix : {&q, &k, &d_q, &d_k}) *matrix = take(tokens * K);
    for (double** vector : {&e, &d_g, &d_beta}) *vector = take(tokens);
  }
};

struct Sequence {
  const gdn_delta_rule_backward_args& args;
  const Scratch& s;
  int64_t n;

  int64_t begin() const { return args.cu_seqlens[n]; }
  int64_t length() const { return args.cu_seqlens[n + 1] - begin(); }
  double scale() const { return kernels::RuleScale(args.scale, args.key_dim); }
  int64_t Gate(int64_t t, int64_t hv) const { return (begin() + t) * args.value_heads + hv; }

  // Row v of value head hv: forward for its states, then t downwards.
  void Row(int64_t hv, int64_t v) const {
    const int64_t K = args.key_dim;
    const int64_t row = ((n * args.value_heads + hv) * args.value_dim + v) * K;
    for (int64_t i = 0; i < K; ++i) {
      s.states[i] =
          args.initial_state != nullptr ? static_cast<double>(args.initial_state[row + i]) : 0.0;
    }
    for (int64_t t = 0; t < length(); ++t) {
      const double decay = std::exp(static_cast<double>(args.g[Gate(t, hv)]));
      const double* before = s.states + t * K;
      double* after = s.states + (t + 1) * K;
      double predicted = 0.0;
      for (int64_t i = 0; i < K; ++i) {
        after[i] = decay * before[i];
        predicted += after[i] * s.k[t * K + i];
      }
      s.e[t] =
          static_cast<double>(Load(args.v, args.qkv_dtype,
                                   (begin() + t) * args.v_token_stride + hv * args.value_dim + v)) -
          predicted;
      const double u = static_cast<double>(args.beta[Gate(t, hv)]) * s.e[t];
      for (int64_t i = 0; i < K; ++i) after[i] += u * s.k[t * K + i];
    }
    std::array<double, kMaxKeyDim> d_state{};
    for (int64_t i = 0; i < K && args.d_final_state != nullptr; ++i) {
      d_state[i] = args.d_final_state[row + i];
    }
    for (int64_t t = length() - 1; t >= 0; --t) Token(hv, v, t, d_state.data());
    for (int64_t i = 0; i < K && args.d_initial_state != nullptr; ++i) {
      args.d_initial_state[row + i] = static_cast<float>(d_state[i]);
    }
  }

  void Token(int64_t hv, int64_t v, int64_t t, double* d_state) const {
    const int64_t K = args.key_dim;
    const double decay = std::exp(static_cast<double>(args.g[Gate(t, hv)]));
    const double beta = args.beta[Gate(t, hv)];
    const double d_o =
        scale() *
        static_cast<double>(Load(args.d_o, args.d_o_dtype,
                                 (begin() + t) * args.d_o_token_stride + hv * args.value_dim + v));
    const double* before = s.states + t * K;
    const double* after = before + K;
    const double* k = s.k + t * K;
    double d_u = 0.0;
    for (int64_t i = 0; i < K; ++i) {
      s.d_q[t * K + i] += after[i] * d_o;
      d_state[i] += s.q[t * K + i] * d_o;
      d_u += d_state[i] * k[i];
    }
    const double u = beta * s.e[t];
    const double d_predicted = -beta * d_u;
    s.d_beta[t] += d_u * s.e[t];
    Store(args.d_v, args.d_qkv_dtype,
          (begin() + t) * args.d_v_token_stride + hv * args.value_dim + v,
          static_cast<float>(beta * d_u));
    double d_decay = 0.0;
    for (int64_t i = 0; i < K; ++i) {
      s.d_k[t * K + i] += d_state[i] * u + decay * before[i] * d_predicted;
      d_state[i] += k[i] * d_predicted;
      d_decay += d_state[i] * before[i];
      d_state[i] *= decay;
    }
    s.d_g[t] += decay * d_decay;
  }

  // d_x_hat of head h, through the norm, to the output.
  void StoreKeyGradient(int64_t h, const double* x_hat, const double* d_x_hat, const float* rstd,
                        void* out, int64_t token_stride) const {
    const int64_t K = args.key_dim;
    for (int64_t t = 0; t < length(); ++t) {
      const double* y = x_hat + t * K;
      const double* d_y = d_x_hat + t * K;
      double dot = 0.0;
      double factor = 1.0;
      if (args.use_qk_l2norm != 0) {
        for (int64_t i = 0; i < K; ++i) dot += d_y[i] * y[i];
        factor = rstd[(begin() + t) * args.key_heads + h];
      }
      for (int64_t i = 0; i < K; ++i) {
        Store(out, args.d_qkv_dtype, (begin() + t) * token_stride + h * K + i,
              static_cast<float>(factor * (d_y[i] - y[i] * dot)));
      }
    }
  }

  void KeyHead(int64_t h) const {
    const int64_t K = args.key_dim;
    for (int64_t t = 0; t < length(); ++t) {
      for (int64_t i = 0; i < K; ++i) {
        const int64_t token = begin() + t;
        s.q[t * K + i] = Load(args.q, args.qkv_dtype, token * args.q_token_stride + h * K + i);
        s.k[t * K + i] = Load(args.k, args.qkv_dtype, token * args.k_token_stride + h * K + i);
      }
    }
    std::fill_n(s.d_q, length() * K, 0.0);
    std::fill_n(s.d_k, length() * K, 0.0);
    const int64_t ratio = args.value_heads / args.key_heads;
    for (int64_t hv = h * ratio; hv < (h + 1) * ratio; ++hv) {
      std::fill_n(s.d_g, length(), 0.0);
      std::fill_n(s.d_beta, length(), 0.0);
      for (int64_t v = 0; v < args.value_dim; ++v) Row(hv, v);
      for (int64_t t = 0; t < length(); ++t) {
        args.d_g[Gate(t, hv)] = static_cast<float>(s.d_g[t]);
        args.d_beta[Gate(t, hv)] = static_cast<float>(s.d_beta[t]);
      }
    }
    StoreKeyGradient(h, s.q, s.d_q, args.q_rstd, args.d_q, args.d_q_token_stride);
    StoreKeyGradient(h, s.k, s.d_k, args.k_rstd, args.d_k, args.d_k_token_stride);
  }
};

}  // namespace

size_t DeltaRuleBackwardWorkspace(const gdn_delta_rule_backward_args& args) {
  return static_cast<size_t>((args.tokens + 1) * (5 * args.key_dim + 3)) * sizeof(double);
}

gdn_status DeltaRuleBackward(const gdn_exec& exec, const gdn_delta_rule_backward_args& args) {
  const Scratch scratch(exec.workspace, args.tokens, args.key_dim);
  for (int64_t n = 0; n < args.sequences; ++n) {
    for (int64_t h = 0; h < args.key_heads; ++h) Sequence{args, scratch, n}.KeyHead(h);
  }
  return GDN_OK;
}

}  // namespace gdn::ref
