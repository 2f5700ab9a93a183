#include "tests/golden/reference_stack.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>

#include "gdn/kernels/causal_conv.h"
#include "gdn/kernels/delta_rule.h"
#include "gdn/kernels/gated_rms_norm.h"
#include "gdn/kernels/gates.h"
#include "gdn/kernels/gdn2.h"
#include "gdn/kernels/gdn2_gates.h"
#include "gdn/kernels/l2_norm.h"

namespace gdn::golden {
namespace {

using Rows = std::vector<double>;  // [T, width]
using Floats = std::vector<float>;

Floats ToFloats(const Rows& rows) { return {rows.begin(), rows.end()}; }

double Element(const model::MatrixView& m, int64_t i) {
  if (m.type == model::ElementType::kF32) {
    float value = 0;
    std::memcpy(&value, m.data + 4 * i, sizeof(value));
    return value;
  }
  EXPECT_EQ(m.type, model::ElementType::kBF16);
  uint16_t bits = 0;
  std::memcpy(&bits, m.data + 2 * i, sizeof(bits));
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

// Rows [first, first + count) of the matrix times every row of x.
Rows Times(const Rows& x, const model::MatrixView& m, int64_t first, int64_t count) {
  const size_t cols = static_cast<size_t>(m.cols);
  const size_t tokens = x.size() / cols;
  Rows y(tokens * static_cast<size_t>(count));
  std::vector<double> row(cols);
  for (int64_t n = 0; n < count; ++n) {
    for (int64_t c = 0; c < m.cols; ++c) {
      row[static_cast<size_t>(c)] = Element(m, (first + n) * m.cols + c);
    }
    for (size_t t = 0; t < tokens; ++t) {
      double sum = 0;
      for (size_t c = 0; c < cols; ++c) sum += x[t * cols + c] * row[c];
      y[t * static_cast<size_t>(count) + static_cast<size_t>(n)] = sum;
    }
  }
  return y;
}

Rows Times(const Rows& x, const model::MatrixView& m) { return Times(x, m, 0, m.rows); }

Rows Normed(const Rows& x, const Floats& weight, double eps) {
  const size_t width = weight.size();
  Rows y(x.size());
  for (size_t first = 0; first < x.size(); first += width) {
    double squares = 0;
    for (size_t i = 0; i < width; ++i) squares += x[first + i] * x[first + i];
    const double rstd = 1.0 / std::sqrt(squares / static_cast<double>(width) + eps);
    for (size_t i = 0; i < width; ++i) y[first + i] = x[first + i] * rstd * double{weight[i]};
  }
  return y;
}

void Add(const Rows& from, Rows* to) {
  for (size_t i = 0; i < from.size(); ++i) (*to)[i] += from[i];
}

// One layer's way from its normed input to its contribution to the residual stream.
class Mixer {
 public:
  Mixer(const model::ModelSpec& spec, const model::GdnLayerWeights& w, const Rows& normed)
      : spec_(spec),
        dims_(spec.gdn),
        w_(w),
        normed_(normed),
        tokens_(static_cast<int64_t>(normed.size()) / spec.hidden_size),
        cu_seqlens_{0, static_cast<int32_t>(tokens_)},
        recurrent_(static_cast<size_t>(dims_.recurrent_elements())),
        conv_(static_cast<size_t>(dims_.conv_elements())) {}

  // Appends the states to those of the layers before.
  Rows Run(ReferenceRun* run) {
    const bool gdn2 = w_.type == model::LayerType::kGdn2;
    const int64_t qkv_width = dims_.conv_channels();
    const Rows qkv = Times(normed_, gdn2 ? w_.in_proj : w_.qkv, 0, qkv_width);
    const Rows z =
        gdn2 ? Times(normed_, w_.in_proj, qkv_width, dims_.value_size()) : Times(normed_, w_.z);
    Convolve(ToFloats(qkv));
    o_.resize(static_cast<size_t>(tokens_ * dims_.value_size()));
    if (gdn2) {
      Gdn2();
    } else {
      Gdn();
    }
    run->recurrent.insert(run->recurrent.end(), recurrent_.begin(), recurrent_.end());
    run->conv.insert(run->conv.end(), conv_.begin(), conv_.end());
    return Times(OutputNorm(ToFloats(z)), w_.out);
  }

 private:
  void Convolve(const Floats& qkv) {
    Floats out(qkv.size());
    const int64_t channels = dims_.conv_channels();
    gdn_causal_conv_args args{};
    args.sequences = 1;
    args.cu_seqlens = cu_seqlens_;
    args.channels = channels;
    args.width = dims_.conv_width;
    args.silu = 1;
    args.x = qkv.data();
    args.x_token_stride = channels;
    args.weight = w_.conv.data();
    args.y = out.data();
    args.y_token_stride = channels;
    args.state = conv_.data();
    args.state_slot_stride = dims_.conv_elements();
    args.read_index = &slot_;
    args.write_index = &slot_;
    args.fresh = &fresh_;
    EXPECT_EQ(gdn_causal_conv(&exec_, &args), GDN_OK) << gdn_last_error();
    for (int64_t t = 0; t < tokens_; ++t) {
      const float* row = out.data() + t * channels;
      q_.insert(q_.end(), row, row + dims_.key_size());
      k_.insert(k_.end(), row + dims_.key_size(), row + 2 * dims_.key_size());
      v_.insert(v_.end(), row + 2 * dims_.key_size(), row + channels);
    }
  }

  void Gdn2() {
    const int64_t keys = dims_.key_size();
    const int64_t values = dims_.value_size();
    const int64_t at = dims_.conv_channels() + values;
    const Floats f = ToFloats(Times(normed_, w_.in_proj, at, keys));
    const Floats b = ToFloats(Times(normed_, w_.in_proj, at + keys, keys));
    const Floats w = ToFloats(Times(normed_, w_.in_proj, at + 2 * keys, values));
    EXPECT_EQ(w_.in_proj.rows, at + 2 * keys + values);
    Floats g(f.size());
    Floats erase(b.size());
    Floats write(w.size());
    gdn2_gates_args gates{};
    gates.tokens = tokens_;
    gates.gate_heads = dims_.key_heads;
    gates.key_dim = dims_.key_dim;
    gates.write_width = values;
    gates.f = f.data();
    gates.b = b.data();
    gates.w = w.data();
    gates.f_token_stride = gates.b_token_stride = keys;
    gates.w_token_stride = values;
    const bool bounded = spec_.decay_gate == model::DecayGate::kBounded;
    gates.decay = bounded ? GDN2_DECAY_BOUNDED : GDN2_DECAY_SOFTPLUS;
    gates.lower_bound = spec_.decay_lower_bound;
    gates.a_log = w_.a_log.data();
    gates.dt_bias = w_.dt_bias.data();
    gates.erase_scale = spec_.beta_scale;
    gates.g = g.data();
    gates.erase = erase.data();
    gates.write = write.data();
    EXPECT_EQ(gdn_gdn2_gates(&exec_, &gates), GDN_OK) << gdn_last_error();
    Normalise(&q_);
    Normalise(&k_);
    gdn2_args rule{};
    rule.tokens = tokens_;
    rule.sequences = 1;
    rule.cu_seqlens = cu_seqlens_;
    rule.key_heads = rule.gate_heads = dims_.key_heads;
    rule.value_heads = dims_.value_heads;
    rule.key_dim = dims_.key_dim;
    rule.value_dim = dims_.value_dim;
    rule.q = q_.data();
    rule.k = k_.data();
    rule.v = v_.data();
    rule.q_token_stride = rule.k_token_stride = keys;
    rule.v_token_stride = rule.o_token_stride = values;
    rule.g = g.data();
    rule.erase = erase.data();
    rule.write = write.data();
    rule.state = recurrent_.data();
    rule.state_slot_stride = dims_.recurrent_elements();
    rule.read_index = &slot_;
    rule.write_index = &slot_;
    rule.fresh = &fresh_;
    rule.o = o_.data();
    EXPECT_EQ(gdn_gdn2_prefill(&exec_, &rule), GDN_OK) << gdn_last_error();
  }

  // GDN2 normalises outside of its rule.
  void Normalise(Floats* rows) {
    gdn_l2_norm_args args{};
    args.rows = tokens_ * dims_.key_heads;
    args.dim = args.x_row_stride = args.y_row_stride = dims_.key_dim;
    args.x = args.y = rows->data();
    args.eps = 1e-6f;
    args.scale = 1.0f;
    EXPECT_EQ(gdn_l2_norm(&exec_, &args), GDN_OK) << gdn_last_error();
  }

  void Gdn() {
    const Floats a = ToFloats(Times(normed_, w_.a));
    const Floats b = ToFloats(Times(normed_, w_.b));
    Floats g(a.size());
    Floats beta(b.size());
    gdn_gates_args gates{};
    gates.tokens = tokens_;
    gates.value_heads = dims_.value_heads;
    gates.a = a.data();
    gates.b = b.data();
    gates.a_token_stride = gates.b_token_stride = dims_.value_heads;
    gates.a_log = w_.a_log.data();
    gates.dt_bias = w_.dt_bias.data();
    gates.beta_scale = spec_.beta_scale;
    gates.g = g.data();
    gates.beta = beta.data();
    EXPECT_EQ(gdn_gates(&exec_, &gates), GDN_OK) << gdn_last_error();
    gdn_delta_rule_args rule{};
    rule.sequences = 1;
    rule.cu_seqlens = cu_seqlens_;
    rule.key_heads = dims_.key_heads;
    rule.value_heads = dims_.value_heads;
    rule.key_dim = dims_.key_dim;
    rule.value_dim = dims_.value_dim;
    rule.q = q_.data();
    rule.k = k_.data();
    rule.v = v_.data();
    rule.q_token_stride = rule.k_token_stride = dims_.key_size();
    rule.v_token_stride = rule.o_token_stride = dims_.value_size();
    rule.g = g.data();
    rule.beta = beta.data();
    rule.use_qk_l2norm = 1;
    rule.state = recurrent_.data();
    rule.state_slot_stride = dims_.recurrent_elements();
    rule.read_index = &slot_;
    rule.write_index = &slot_;
    rule.fresh = &fresh_;
    rule.o = o_.data();
    EXPECT_EQ(gdn_delta_rule_prefill(&exec_, &rule), GDN_OK) << gdn_last_error();
  }

  Rows OutputNorm(const Floats& z) {
    gdn_gated_rms_norm_args args{};
    args.tokens = tokens_;
    args.heads = dims_.value_heads;
    args.dim = dims_.value_dim;
    args.x = args.y = o_.data();
    args.gate = z.data();
    args.x_token_stride = args.gate_token_stride = args.y_token_stride = dims_.value_size();
    args.x_head_stride = args.gate_head_stride = args.y_head_stride = dims_.value_dim;
    args.weight = w_.gated_norm.data();
    args.activation =
        spec_.output_gate == model::GateActivation::kSigmoid ? GDN_GATE_SIGMOID : GDN_GATE_SILU;
    args.eps = spec_.rms_norm_eps;
    EXPECT_EQ(gdn_gated_rms_norm(&exec_, &args), GDN_OK) << gdn_last_error();
    return {o_.begin(), o_.end()};
  }

  const model::ModelSpec& spec_;
  const model::GdnDims& dims_;
  const model::GdnLayerWeights& w_;
  const Rows& normed_;
  const int64_t tokens_;
  const gdn_exec exec_{};  // GDN_BACKEND_REF.
  const int32_t cu_seqlens_[2];
  Floats recurrent_;
  Floats conv_;
  const int64_t slot_ = 0;
  const uint8_t fresh_ = 1;
  Floats q_, k_, v_, o_;
};

Rows Mlp(const model::GdnLayerWeights& w, const Rows& x) {
  Rows inner = Times(x, w.gate);
  const Rows up = Times(x, w.up);
  for (size_t i = 0; i < inner.size(); ++i) {
    inner[i] = inner[i] / (1.0 + std::exp(-inner[i])) * up[i];
  }
  return Times(inner, w.down);
}

}  // namespace

ReferenceRun RunReference(const model::Model& model, std::span<const int32_t> tokens) {
  const model::Weights& w = model.weights;
  const model::ModelSpec& spec = model.spec;
  ReferenceRun run;
  Rows x;
  for (const int32_t token : tokens) {
    for (int64_t c = 0; c < spec.hidden_size; ++c) {
      x.push_back(Element(*w.embedding, token * spec.hidden_size + c));
    }
  }
  for (const model::GdnLayerWeights& layer : w.layers) {
    const Rows normed = Normed(x, layer.input_norm, spec.rms_norm_eps);
    Add(Mixer(spec, layer, normed).Run(&run), &x);
    Add(Mlp(layer, Normed(x, layer.mlp_norm, spec.rms_norm_eps)), &x);
  }
  run.logits = ToFloats(Times(Normed(x, w.final_norm, spec.rms_norm_eps), *w.head));
  return run;
}

}  // namespace gdn::golden
