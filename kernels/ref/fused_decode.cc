#include "gdn/kernels/fused_decode.h"

#include <cmath>
#include <cstdint>
#include <vector>

#include "kernels/common/convert.h"

// Written from the formulas rather than composed of the other reference ops, so that a mistake in
// one of those shows as a difference.

namespace gdn::ref {

using kernels::Load;
using kernels::Store;

namespace {

double Round(gdn_dtype dtype, double value) {
  uint32_t bits = 0;
  Store(&bits, dtype, 0, static_cast<float>(value));
  return Load(&bits, dtype, 0);
}

double Sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }

// One row: the convolution outputs of its T tokens are formed first, then head after head.
class Row {
 public:
  Row(const gdn_fused_decode_args& args, int64_t row)
      : args_(args),
        row_(row),
        read_(args.read_index[row]),
        write_(args.write_index[row]),
        fresh_(args.fresh != nullptr && args.fresh[row] != 0),
        channels_(2 * args.key_heads * args.key_dim + args.value_heads * args.value_dim) {}

  void Run() {
    if (read_ < 0 || write_ < 0) {
      for (int64_t t = 0; t < args_.tokens; ++t) {
        for (int64_t i = 0; i < args_.value_heads * args_.value_dim; ++i) StoreY(t, i, 0.0);
      }
      return;
    }
    Convolve();
    for (int64_t hv = 0; hv < args_.value_heads; ++hv) Head(hv);
  }

 private:
  double LoadX(int64_t token, int64_t column) const {
    return Load(args_.x, args_.dtype,
                (row_ * args_.tokens + token) * args_.x_token_stride + column);
  }
  void StoreY(int64_t token, int64_t column, double value) const {
    Store(args_.y, args_.dtype, (row_ * args_.tokens + token) * args_.y_token_stride + column,
          static_cast<float>(value));
  }
  // Column of the projection buffer that feeds a channel of the convolution.
  int64_t Column(int64_t channel) const {
    const int64_t keys = args_.key_heads * args_.key_dim;
    if (channel < keys) return args_.q_offset + channel;
    if (channel < 2 * keys) return args_.k_offset + channel - keys;
    return args_.v_offset + channel - 2 * keys;
  }

  void Convolve() {
    const int64_t taps = args_.conv_width - 1;
    qkv_.assign(args_.tokens * channels_, 0.0);
    std::vector<double> line(taps + args_.tokens);
    for (int64_t c = 0; c < channels_; ++c) {
      for (int64_t j = 0; j < taps; ++j) {
        line[j] = fresh_ ? 0.0
                         : Load(args_.conv_state, args_.dtype,
                                read_ * args_.conv_slot_stride + j * channels_ + c);
      }
      for (int64_t t = 0; t < args_.tokens; ++t) line[taps + t] = LoadX(t, Column(c));
      for (int64_t t = 0; t < args_.tokens; ++t) {
        double sum = 0.0;
        for (int64_t j = 0; j <= taps; ++j) {
          sum += line[t + j] * args_.conv_weight[c * args_.conv_width + j];
        }
        qkv_[t * channels_ + c] = Round(args_.dtype, sum * Sigmoid(sum));
      }
      for (int64_t j = 0; j < taps; ++j) {
        Store(args_.conv_state, args_.dtype, write_ * args_.conv_slot_stride + j * channels_ + c,
              static_cast<float>(line[args_.tokens + j]));
      }
    }
  }

  // K elements of q or k of one token; returns 1 / norm, or 1.
  double InverseNorm(const double* values) const {
    if (args_.use_qk_l2norm == 0) return 1.0;
    double sum = 1e-6;
    for (int64_t i = 0; i < args_.key_dim; ++i) sum += values[i] * values[i];
    return 1.0 / std::sqrt(sum);
  }

  void Head(int64_t hv) {
    const int64_t K = args_.key_dim;
    const int64_t V = args_.value_dim;
    const int64_t keys = args_.key_heads * K;
    const int64_t h = hv / (args_.value_heads / args_.key_heads);
    const double scale = args_.scale != 0.0f ? static_cast<double>(args_.scale)
                                             : std::pow(static_cast<double>(K), -0.5);
    std::vector<double> state(V * K, 0.0);
    std::vector<double> o(V);
    const int64_t from = read_ * args_.state_slot_stride + hv * V * K;
    for (int64_t i = 0; i < V * K && !fresh_; ++i) {
      state[i] = Load(args_.state, args_.state_dtype, from + i);
    }
    for (int64_t t = 0; t < args_.tokens; ++t) {
      const double* q = &qkv_[t * channels_ + h * K];
      const double* k = q + keys;
      const double* v = &qkv_[t * channels_ + 2 * keys + hv * V];
      const double q_factor = InverseNorm(q) * scale;
      const double k_factor = InverseNorm(k);
      const double x = LoadX(t, args_.a_offset + hv) + args_.dt_bias[hv];
      const double softplus = x > 20.0 ? x : std::log1p(std::exp(x));
      const double decay = std::exp(-std::exp(static_cast<double>(args_.a_log[hv])) * softplus);
      const double beta = args_.beta_scale * Sigmoid(LoadX(t, args_.b_offset + hv));
      for (int64_t i = 0; i < V; ++i) {
        double* s = &state[i * K];
        double predicted = 0.0;
        for (int64_t j = 0; j < K; ++j) predicted += decay * s[j] * k[j] * k_factor;
        const double u = beta * (v[i] - predicted);
        o[i] = 0.0;
        for (int64_t j = 0; j < K; ++j) {
          s[j] = decay * s[j] + u * k[j] * k_factor;
          o[i] += s[j] * q[j] * q_factor;
        }
      }
      Normalise(t, hv, o);
    }
    const int64_t to = write_ * args_.state_slot_stride + hv * V * K;
    for (int64_t i = 0; i < V * K; ++i) {
      Store(args_.state, args_.state_dtype, to + i, static_cast<float>(state[i]));
    }
  }

  void Normalise(int64_t t, int64_t hv, std::vector<double>& o) const {
    double sum = 0.0;
    for (double& value : o) {
      if (args_.round_o != 0) value = Round(args_.dtype, value);
      sum += value * value;
    }
    const double rstd = 1.0 / std::sqrt(sum / static_cast<double>(args_.value_dim) + args_.eps);
    for (int64_t i = 0; i < args_.value_dim; ++i) {
      double n = o[i] * rstd * (args_.norm_weight[i] + (args_.zero_centered != 0 ? 1.0 : 0.0));
      if (args_.round_before_gate != 0) n = Round(args_.dtype, n);
      const double z = LoadX(t, args_.z_offset + hv * args_.value_dim + i);
      const double gate = args_.activation == GDN_GATE_SILU ? z * Sigmoid(z) : Sigmoid(z);
      StoreY(t, hv * args_.value_dim + i, n * gate);
    }
  }

  const gdn_fused_decode_args& args_;
  const int64_t row_;
  const int64_t read_;
  const int64_t write_;
  const bool fresh_;
  const int64_t channels_;
  std::vector<double> qkv_;  // [T][C], rounded to dtype.
};

}  // namespace

gdn_status FusedDecode(const gdn_exec&, const gdn_fused_decode_args& args) {
  for (int64_t row = 0; row < args.rows; ++row) Row(args, row).Run();
  return GDN_OK;
}

}  // namespace gdn::ref
