#include "gdn/kernels/gdn2_backward.h"

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
constexpr int64_t kMatrices = 8;  // [T, K] each, behind the states

// The rows of a state do not see each other, so one row's states of all tokens are held at once.
struct Scratch {
  double* states;  // [T+1, K]
  double* q;       // [T, K], as are those below, but for u
  double* k;
  double* decay;
  double* erase;
  double* d_q;
  double* d_k;
  double* d_g;
  double* d_erase;
  double* u;  // [T]

  Scratch(void* workspace, int64_t tokens, int64_t K) {
    states = static_cast<double*>(workspace);
    double* next = states + (tokens + 1) * K;
    for (double** matrix : {&q, &k, &decay, &erase, &d_q, &d_k, &d_g, &d_erase}) {
      *matrix = next;
      next += tokens * K;
    }
    u = next;
  }
};

struct Sequence {
  const gdn2_backward_args& args;
  const Scratch& s;
  int64_t n;

  int64_t begin() const { return args.cu_seqlens[n]; }
  int64_t length() const { return args.cu_seqlens[n + 1] - begin(); }
  double scale() const { return kernels::RuleScale(args.scale, args.key_dim); }
  double Value(int64_t t, int64_t column) const {
    return Load(args.v, args.qkv_dtype, (begin() + t) * args.v_token_stride + column);
  }
  int64_t WriteAt(int64_t t, int64_t column) const {
    return (begin() + t) * args.value_heads * args.value_dim + column;
  }

  // Row `column` of the states of all value heads: forward for its states, then t downwards.
  void Row(int64_t column) const {
    const int64_t K = args.key_dim;
    const int64_t row = (n * args.value_heads * args.value_dim + column) * K;
    for (int64_t i = 0; i < K; ++i) {
      s.states[i] =
          args.initial_state != nullptr ? static_cast<double>(args.initial_state[row + i]) : 0.0;
    }
    for (int64_t t = 0; t < length(); ++t) {
      const double* before = s.states + t * K;
      double* after = s.states + (t + 1) * K;
      double erased = 0.0;
      for (int64_t i = 0; i < K; ++i) {
        after[i] = s.decay[t * K + i] * before[i];
        erased += after[i] * s.erase[t * K + i] * s.k[t * K + i];
      }
      const double write = Load(args.write, args.gate_dtype, WriteAt(t, column));
      s.u[t] = write * Value(t, column) - erased;
      for (int64_t i = 0; i < K; ++i) after[i] += s.u[t] * s.k[t * K + i];
    }
    std::array<double, kMaxKeyDim> d_state{};
    for (int64_t i = 0; i < K && args.d_final_state != nullptr; ++i) {
      d_state[i] = args.d_final_state[row + i];
    }
    for (int64_t t = length() - 1; t >= 0; --t) Token(column, t, d_state.data());
    for (int64_t i = 0; i < K && args.d_initial_state != nullptr; ++i) {
      args.d_initial_state[row + i] = static_cast<float>(d_state[i]);
    }
  }

  void Token(int64_t column, int64_t t, double* d_state) const {
    const int64_t K = args.key_dim;
    const double d_o =
        scale() * static_cast<double>(Load(args.d_o, args.d_o_dtype,
                                           (begin() + t) * args.d_o_token_stride + column));
    const double* before = s.states + t * K;
    const double* after = before + K;
    double d_u = 0.0;
    for (int64_t i = t * K; i < (t + 1) * K; ++i) {
      const int64_t c = i - t * K;
      s.d_q[i] += after[c] * d_o;
      d_state[c] += s.q[i] * d_o;
      d_u += d_state[c] * s.k[i];
    }
    const int64_t at = WriteAt(t, column);
    args.d_write[at] = static_cast<float>(d_u * Value(t, column));
    const double write = Load(args.write, args.gate_dtype, at);
    Store(args.d_v, args.d_qkv_dtype, (begin() + t) * args.d_v_token_stride + column,
          static_cast<float>(d_u * write));
    for (int64_t i = t * K; i < (t + 1) * K; ++i) {
      const int64_t c = i - t * K;
      const double d_erased_key = -s.decay[i] * before[c] * d_u;
      s.d_erase[i] += d_erased_key * s.k[i];
      s.d_k[i] += d_state[c] * s.u[t] + d_erased_key * s.erase[i];
      d_state[c] -= s.erase[i] * s.k[i] * d_u;
      d_state[c] *= s.decay[i];
      s.d_g[i] += d_state[c] * before[c];
    }
  }

  void LoadGates(int64_t gate_head) const {
    const int64_t K = args.key_dim;
    for (int64_t t = 0; t < length(); ++t) {
      const int64_t gate = ((begin() + t) * args.gate_heads + gate_head) * K;
      for (int64_t i = 0; i < K; ++i) {
        s.decay[t * K + i] = std::exp(static_cast<double>(args.g[gate + i]));
        s.erase[t * K + i] = Load(args.erase, args.gate_dtype, gate + i);
      }
    }
    std::fill_n(s.d_g, length() * K, 0.0);
    std::fill_n(s.d_erase, length() * K, 0.0);
  }

  void StoreGates(int64_t gate_head) const {
    const int64_t K = args.key_dim;
    for (int64_t t = 0; t < length(); ++t) {
      const int64_t gate = ((begin() + t) * args.gate_heads + gate_head) * K;
      for (int64_t i = 0; i < K; ++i) {
        args.d_g[gate + i] = static_cast<float>(s.d_g[t * K + i]);
        args.d_erase[gate + i] = static_cast<float>(s.d_erase[t * K + i]);
      }
    }
  }

  // d_x_hat of head h, through the norm, to the output.
  void StoreKeyGradient(int64_t h, const double* x_hat, const double* d_x_hat, const float* rstd,
                        void* out, int64_t token_stride) const {
    const int64_t K = args.key_dim;
    for (int64_t t = 0; t < length(); ++t) {
      double dot = 0.0;
      double factor = 1.0;
      if (args.use_qk_l2norm != 0) {
        for (int64_t i = t * K; i < (t + 1) * K; ++i) dot += d_x_hat[i] * x_hat[i];
        factor = rstd[(begin() + t) * args.key_heads + h];
      }
      for (int64_t i = 0; i < K; ++i) {
        const double d_x = factor * (d_x_hat[t * K + i] - x_hat[t * K + i] * dot);
        Store(out, args.d_qkv_dtype, (begin() + t) * token_stride + h * K + i,
              static_cast<float>(d_x));
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
    const int64_t gates = args.gate_heads / args.key_heads;  // of this key head
    const int64_t columns = args.value_heads / args.gate_heads * args.value_dim;
    for (int64_t gate = h * gates; gate < (h + 1) * gates; ++gate) {
      LoadGates(gate);
      for (int64_t column = gate * columns; column < (gate + 1) * columns; ++column) Row(column);
      StoreGates(gate);
    }
    StoreKeyGradient(h, s.q, s.d_q, args.q_rstd, args.d_q, args.d_q_token_stride);
    StoreKeyGradient(h, s.k, s.d_k, args.k_rstd, args.d_k, args.d_k_token_stride);
  }
};

}  // namespace

size_t Gdn2BackwardWorkspace(const gdn2_backward_args& args) {
  return static_cast<size_t>((args.tokens + 1) * ((kMatrices + 1) * args.key_dim + 1)) *
         sizeof(double);
}

gdn_status Gdn2Backward(const gdn_exec& exec, const gdn2_backward_args& args) {
  const Scratch scratch(exec.workspace, args.tokens, args.key_dim);
  for (int64_t n = 0; n < args.sequences; ++n) {
    for (int64_t h = 0; h < args.key_heads; ++h) Sequence{args, scratch, n}.KeyHead(h);
  }
  return GDN_OK;
}

}  // namespace gdn::ref
