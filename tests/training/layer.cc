#include "tests/training/layer.h"

#include "gdn/kernels/gdn_kernels.h"

namespace gdn::kernels {
namespace {

Tensor ToTensor(gdn_dtype dtype, const Doubles& values) {
  Tensor tensor(dtype, static_cast<int64_t>(values.size()));
  for (size_t i = 0; i < values.size(); ++i) {
    tensor.Set(static_cast<int64_t>(i), static_cast<float>(values[i]));
  }
  return tensor;
}
Tensor Filled(gdn_dtype dtype, int64_t size, float value) {
  return ToTensor(dtype, Doubles(static_cast<size_t>(size), value));
}
std::vector<int64_t> Slots(int64_t count) {
  std::vector<int64_t> slots;
  for (int64_t i = 0; i < count; ++i) slots.push_back(i);
  return slots;
}

class Layer {
 public:
  Layer(const Backend& backend, const LayerData& data, const StepOptions& options)
      : options_(options),
        data_(data),
        s_(data.shape),
        run_(backend, options.from_graphs),
        cu_(backend, data.cu),
        slots_(backend, Slots(s_.sequences())),
        fresh_(backend, std::vector<uint8_t>(data.cu.size(), 1)),
        conv_weight_(Float(data.conv_weight)),
        conv_bias_(Float(data.conv_bias)),
        a_log_(Float(data.a_log)),
        dt_bias_(Float(data.dt_bias)),
        gamma_(Float(data.gamma)),
        qk_(New(s_.dtype, s_.tokens() * 2 * s_.keys())),
        v_(New(s_.dtype, s_.tokens() * s_.values())),
        g_(New(GDN_F32, s_.tokens() * s_.value_heads())),
        beta_(New(GDN_F32, s_.tokens() * s_.value_heads())),
        rstd_qk_(New(GDN_F32, s_.tokens() * 2 * s_.key_heads)),
        q_hat_(New(s_.dtype, s_.tokens() * s_.keys())),
        k_hat_(New(s_.dtype, s_.tokens() * s_.keys())),
        q_rstd_(New(GDN_F32, s_.tokens() * s_.key_heads)),
        k_rstd_(New(GDN_F32, s_.tokens() * s_.key_heads)),
        o_(New(s_.dtype, s_.tokens() * s_.values())) {}

  Step Run() {
    Forward();
    Backward();
    step_.launches = run_.launches();
    return std::move(step_);
  }

 private:
  Buffer New(gdn_dtype dtype, int64_t size) const { return {run_.backend(), dtype, size}; }
  Buffer Float(const Doubles& values) const { return {run_.backend(), ToTensor(GDN_F32, values)}; }
  int64_t ElementBytes() const { return SizeOf(s_.dtype); }
  bool InKernel() const { return step_.route.use_qk_l2norm_in_kernel != 0; }

  void Forward() {
    projected_ =
        Buffer(run_.backend(), Product(run_, "in_projection", ToTensor(s_.dtype, data_.x),
                                       ToTensor(s_.dtype, data_.in_weight), s_.hidden, s_.dtype));
    Convolve(0, 2 * s_.keys(), qk_);
    Convolve(s_.v(), s_.values(), v_);
    Gates();
    PrepareQueriesAndKeys();
    Rule();
    OutputNorm();
    const Tensor out = Product(run_, "out_projection", y_.Take(),
                               ToTensor(s_.dtype, data_.out_weight), s_.values(), s_.dtype);
    Doubles values;
    for (int64_t i = 0; i < out.size(); ++i) values.push_back(out.Get(i));
    step_.loss = Loss(data_, values);
    d_out_ = Tensor(s_.dtype, out.size());
    for (int64_t i = 0; i < out.size(); ++i) {
      d_out_.Set(i, static_cast<float>(out.Get(i) - data_.target[static_cast<size_t>(i)]));
    }
    step_.results["out"] = out;
  }

  void Backward() {
    if (options_.recompute_norm) OutputNorm();
    OutputProjectionBackward();
    OutputNormBackward();
    RuleBackward();
    d_projected_ = New(s_.dtype, s_.tokens() * s_.projected());
    GatesBackward();
    ConvolveBackward();
    InputProjectionBackward();
  }

  // Columns [first, first + channels) of the projection into a dense buffer.
  void Convolve(int64_t first, int64_t channels, Buffer& to) {
    constexpr int64_t kHistory = LayerShape::kWidth - 1;
    Buffer state = New(s_.dtype, s_.sequences() * kHistory * channels);
    gdn_causal_conv_args args{};
    args.sequences = s_.sequences();
    args.cu_seqlens = cu_.at<int32_t>();
    args.channels = channels;
    args.width = LayerShape::kWidth;
    args.silu = 1;
    args.x = projected_.at(first);
    args.x_dtype = args.y_dtype = s_.dtype;
    args.x_token_stride = s_.projected();
    args.weight = conv_weight_.at<float>(first * LayerShape::kWidth);
    args.y = to.at();
    args.y_token_stride = channels;
    args.state = state.at();
    args.state_slot_stride = kHistory * channels;
    args.read_index = args.write_index = slots_.at<int64_t>();
    args.fresh = fresh_.at<uint8_t>();
    run_.Run("causal_conv", gdn_causal_conv, args);
  }

  void Gates() {
    gdn_gates_args args{};
    args.tokens = s_.tokens();
    args.value_heads = s_.value_heads();
    args.a = projected_.at(s_.a());
    args.b = projected_.at(s_.b());
    args.dtype = s_.dtype;
    args.a_token_stride = args.b_token_stride = s_.projected();
    args.a_log = a_log_.at<float>();
    args.dt_bias = dt_bias_.at<float>();
    args.beta_scale = 1.0f;
    args.g = g_.at<float>();
    args.beta = beta_.at<float>();
    run_.Run("gates", gdn_gates, args);
  }

  void PrepareQueriesAndKeys() {
    const Tensor raw = qk_.Take();
    const gdn_qk_norm_prepare_args args = {
        options_.norm_route, 1,        s_.tokens(), 2 * s_.key_heads,
        s_.key_dim,          qk_.at(), s_.dtype,    2 * s_.keys(),
        rstd_qk_.at<float>()};
    run_.Call("qk_norm_prepare", 0,
              [&](const gdn_exec* exec) { return gdn_qk_norm_prepare(exec, &args, &step_.route); });
    // A1: the kernel's q and k are raw.
    EXPECT_EQ(qk_.Take().bytes() == raw.bytes(), step_.route.normalize_in_caller == 0);
  }

  void Rule() {
    gdn_delta_rule_forward_args args{};
    args.sequences = s_.sequences();
    args.cu_seqlens = cu_.at<int32_t>();
    args.key_heads = s_.key_heads;
    args.value_heads = s_.value_heads();
    args.key_dim = s_.key_dim;
    args.value_dim = s_.value_dim;
    args.q = qk_.at();
    args.k = qk_.at(s_.keys());
    args.v = v_.at();
    args.qkv_dtype = args.o_dtype = s_.dtype;
    args.q_token_stride = args.k_token_stride = 2 * s_.keys();
    args.v_token_stride = args.o_token_stride = s_.values();
    args.g = g_.at<float>();
    args.beta = beta_.at<float>();
    args.use_qk_l2norm = step_.route.use_qk_l2norm_in_kernel;
    args.o = o_.at();
    if (InKernel()) {
      args.q_hat = q_hat_.at();
      args.k_hat = k_hat_.at();
      args.q_rstd = q_rstd_.at<float>();
      args.k_rstd = k_rstd_.at<float>();
    }
    run_.Run("delta_rule_forward", gdn_delta_rule_forward, gdn_delta_rule_forward_workspace, args);
  }

  gdn_row_strides DenseRows() const { return {0, s_.values(), s_.value_dim, 1}; }
  gdn_gated_rms_norm_input NormInput() {
    gdn_gated_rms_norm_input in{};
    in.batch = 1;
    in.seq = s_.tokens();
    in.heads = s_.value_heads();
    in.dim = s_.value_dim;
    in.x = o_.at();
    in.x_strides = DenseRows();
    in.gate = projected_.at(s_.z());
    in.gate_strides = {0, s_.projected(), s_.value_dim, 1};
    in.x_dtype = in.gate_dtype = s_.dtype;
    in.gamma = gamma_.at();
    in.gamma_dtype = GDN_F32;
    return in;
  }

  void OutputNorm() {
    y_ = New(s_.dtype, s_.tokens() * s_.values());
    rstd_ = New(GDN_F32, s_.tokens() * s_.value_heads());
    const gdn_gated_rms_norm_forward_args args = {
        .in = NormInput(), .eps = 1e-6f, .y = y_.at(), .rstd = rstd_.at<float>()};
    run_.Run("gated_rms_norm_forward", gdn_gated_rms_norm_forward, args);
    if (options_.composed_norm) ComposedNorm();
    step_.results["y"] = y_.Take();
  }

  // y once more, from separate ops. The rstd above stays: this norm saves none.
  void ComposedNorm() {
    const int64_t rows = s_.tokens() * s_.value_heads();
    y_ = New(s_.dtype, s_.tokens() * s_.values());
    n_ = New(s_.dtype, s_.tokens() * s_.values());
    const gdn_rms_norm_args norm = {rows,         s_.value_dim,       o_.at(),     s_.dtype,
                                    s_.value_dim, gamma_.at<float>(), 0,           1e-6f,
                                    n_.at(),      s_.dtype,           s_.value_dim};
    run_.Run("rms_norm", gdn_rms_norm, norm);
    const Tensor projected = projected_.Take();
    Tensor z(s_.dtype, s_.tokens() * s_.values());
    for (int64_t i = 0; i < z.size(); ++i) {
      z.Set(i, projected.Get(i / s_.values() * s_.projected() + s_.z() + i % s_.values()));
    }
    z_ = Buffer(run_.backend(), z);
    SiluMul(n_, y_);
  }
  void SiluMul(Buffer& up, Buffer& to) {
    const gdn_silu_mul_args args = {s_.tokens() * s_.value_heads(),
                                    s_.value_dim,
                                    z_.at(),
                                    up.at(),
                                    s_.dtype,
                                    s_.value_dim,
                                    to.at(),
                                    s_.dtype,
                                    s_.value_dim};
    run_.Run("silu_mul", gdn_silu_mul, args);
  }

  void OutputProjectionBackward() {
    const Tensor y = y_.Take();
    step_.results["d_out_weight"] = Product(run_, "out_weight_gradient", TokensLast(d_out_),
                                            TokensLast(y), UpToMultipleOf8(s_.tokens()), GDN_F32);
    d_y_ = Buffer(run_.backend(),
                  Product(run_, "out_projection_gradient", d_out_,
                          Transposed(ToTensor(s_.dtype, data_.out_weight), s_.hidden, s_.hidden),
                          s_.hidden, s_.dtype));
  }

  void NormBackward(const gdn_gated_rms_norm_input& in, Buffer& rstd, Buffer& d_y, Buffer& d_x,
                    Buffer& d_gate, Buffer& d_gamma) {
    const gdn_gated_rms_norm_backward_args args = {
        in, rstd.at<float>(), d_y.at(), DenseRows(), d_x.at(), d_gate.at(), d_gamma.at()};
    run_.Run("gated_rms_norm_backward", gdn_gated_rms_norm_backward,
             gdn_gated_rms_norm_backward_workspace, args);
  }

  void OutputNormBackward() {
    const int64_t count = s_.tokens() * s_.values();
    d_o_ = New(s_.dtype, count);
    d_gate_ = New(s_.dtype, count);
    Buffer d_gamma = New(GDN_F32, s_.value_dim);
    if (!options_.composed_norm) {
      NormBackward(NormInput(), rstd_, d_y_, d_o_, d_gate_, d_gamma);
    } else {
      // The gate's, of an n that is taken as it is (rstd and gamma 1); then the norm's, behind a
      // gate that is open (sigmoid of 1e4 is 1).
      Buffer unused = New(s_.dtype, count), unused_too = New(GDN_F32, s_.value_dim);
      Buffer ones(run_.backend(), Filled(GDN_F32, s_.tokens() * s_.values(), 1.0f));
      gdn_gated_rms_norm_input gate = NormInput();
      gate.x = n_.at();
      gate.gamma = ones.at();
      NormBackward(gate, ones, d_y_, unused, d_gate_, unused_too);
      Buffer d_n = New(s_.dtype, count);
      SiluMul(d_y_, d_n);
      Buffer open(run_.backend(), Filled(s_.dtype, count, 1e4f));
      gdn_gated_rms_norm_input norm = NormInput();
      norm.gate = open.at();
      norm.gate_strides = DenseRows();
      norm.activation = GDN_GATE_SIGMOID;
      NormBackward(norm, rstd_, d_n, d_o_, unused, d_gamma);
    }
    step_.results["d_gate"] = d_gate_.Take();
    step_.results["d_o"] = d_o_.Take();
    step_.results["d_gamma"] = d_gamma.Take();
  }

  void RuleBackward() {
    const int64_t gates = s_.tokens() * s_.value_heads();
    d_qk_ = New(s_.dtype, s_.tokens() * 2 * s_.keys());
    d_v_ = New(s_.dtype, s_.tokens() * s_.values());
    d_g_ = New(GDN_F32, gates);
    d_beta_ = New(GDN_F32, gates);
    gdn_delta_rule_backward_args args{};
    args.tokens = s_.tokens();
    args.sequences = s_.sequences();
    args.cu_seqlens = cu_.at<int32_t>();
    args.key_heads = s_.key_heads;
    args.value_heads = s_.value_heads();
    args.key_dim = s_.key_dim;
    args.value_dim = s_.value_dim;
    args.q = InKernel() ? q_hat_.at() : qk_.at();
    args.k = InKernel() ? k_hat_.at() : qk_.at(s_.keys());
    args.q_token_stride = args.k_token_stride = (InKernel() ? 1 : 2) * s_.keys();
    if (InKernel()) {
      args.q_rstd = q_rstd_.at<float>();
      args.k_rstd = k_rstd_.at<float>();
    }
    args.v = v_.at();
    args.v_token_stride = args.d_o_token_stride = args.d_v_token_stride = s_.values();
    args.qkv_dtype = args.d_o_dtype = args.d_qkv_dtype = s_.dtype;
    args.g = g_.at<float>();
    args.beta = beta_.at<float>();
    args.use_qk_l2norm = step_.route.use_qk_l2norm_in_kernel;
    args.d_o = d_o_.at();
    args.d_q = d_qk_.at();
    args.d_k = d_qk_.at(s_.keys());
    args.d_v = d_v_.at();
    args.d_q_token_stride = args.d_k_token_stride = 2 * s_.keys();
    args.d_g = d_g_.at<float>();
    args.d_beta = d_beta_.at<float>();
    run_.Run("delta_rule_backward", gdn_delta_rule_backward, gdn_delta_rule_backward_workspace,
             args);
    if (step_.route.normalize_in_caller != 0) CallersNormBackward();
  }

  void CallersNormBackward() {
    const gdn_l2_norm_backward_args args = {s_.tokens() * 2 * s_.key_heads,
                                            s_.key_dim,
                                            qk_.at(),
                                            s_.dtype,
                                            s_.key_dim,
                                            rstd_qk_.at<float>(),
                                            d_qk_.at(),
                                            s_.dtype,
                                            s_.key_dim,
                                            d_qk_.at(),
                                            s_.dtype,
                                            s_.key_dim,
                                            1.0f};
    run_.Run("l2_norm_backward", gdn_l2_norm_backward, args);
  }

  void GatesBackward() {
    Buffer d_a_log = New(GDN_F32, s_.value_heads()), d_dt_bias = New(GDN_F32, s_.value_heads());
    gdn_gates_backward_args args{};
    args.tokens = s_.tokens();
    args.value_heads = s_.value_heads();
    args.a = projected_.at(s_.a());
    args.b = projected_.at(s_.b());
    args.dtype = s_.dtype;
    args.a_token_stride = args.b_token_stride = s_.projected();
    args.a_log = a_log_.at<float>();
    args.dt_bias = dt_bias_.at<float>();
    args.beta_scale = 1.0f;
    args.d_g = d_g_.at<float>();
    args.d_beta = d_beta_.at<float>();
    args.d_a = d_projected_.at(s_.a());
    args.d_b = d_projected_.at(s_.b());
    args.d_a_token_stride = args.d_b_token_stride = s_.projected();
    args.d_a_log = d_a_log.at<float>();
    args.d_dt_bias = d_dt_bias.at<float>();
    run_.Run("gates_backward", gdn_gates_backward, gdn_gates_backward_workspace, args);
    step_.results["d_a_log"] = d_a_log.Take();
    step_.results["d_dt_bias"] = d_dt_bias.Take();
  }

  void ConvolveBackward() {
    Buffer d_weight = New(GDN_F32, s_.z() * LayerShape::kWidth), d_bias = New(GDN_F32, s_.z());
    const auto columns = [&](int64_t first, int64_t channels, Buffer& d_y) {
      gdn_causal_conv_backward_args args{};
      args.sequences = s_.sequences();
      args.cu_seqlens = cu_.at<int32_t>();
      args.channels = channels;
      args.width = LayerShape::kWidth;
      args.silu = 1;
      args.x = projected_.at(first);
      args.x_dtype = args.d_y_dtype = args.d_x_dtype = s_.dtype;
      args.x_token_stride = args.d_x_token_stride = s_.projected();
      args.weight = conv_weight_.at<float>(first * LayerShape::kWidth);
      args.bias = conv_bias_.at<float>(first);
      args.d_y = d_y.at();
      args.d_y_token_stride = channels;
      args.d_x = d_projected_.at(first);
      args.d_weight = d_weight.at<float>(first * LayerShape::kWidth);
      args.d_bias = d_bias.at<float>(first);
      run_.Run("causal_conv_backward", gdn_causal_conv_backward, gdn_causal_conv_backward_workspace,
               args);
    };
    columns(0, 2 * s_.keys(), d_qk_);
    columns(s_.v(), s_.values(), d_v_);
    step_.results["d_conv_weight"] = d_weight.Take();
    step_.results["d_conv_bias"] = d_bias.Take();
  }

  // For a sum over tokens, whose number is filled up with zeros.
  Tensor TokensLast(const Tensor& activations) const {
    return Transposed(activations, s_.tokens(), UpToMultipleOf8(s_.tokens()));
  }

  void InputProjectionBackward() {
    Tensor d_projected = d_projected_.Take();
    const Tensor d_gate = d_gate_.Take();
    for (int64_t i = 0; i < d_gate.size(); ++i) {
      const int64_t at = i / s_.values() * s_.projected() + s_.z() + i % s_.values();
      EXPECT_TRUE(std::isnan(d_projected.Get(at))) << "written beside its columns";
      d_projected.Set(at, d_gate.Get(i));
    }
    step_.results["d_in_weight"] =
        Product(run_, "in_weight_gradient", TokensLast(d_projected),
                TokensLast(ToTensor(s_.dtype, data_.x)), UpToMultipleOf8(s_.tokens()), GDN_F32);
    step_.results["d_x"] =
        Product(run_, "in_projection_gradient", d_projected,
                Transposed(ToTensor(s_.dtype, data_.in_weight), s_.projected(), s_.projected()),
                s_.projected(), s_.dtype);
  }

  StepOptions options_;
  const LayerData& data_;
  const LayerShape& s_;
  OpRunner run_;
  Step step_;
  Buffer cu_, slots_, fresh_;
  Buffer conv_weight_, conv_bias_, a_log_, dt_bias_, gamma_;
  Buffer projected_, qk_, v_, g_, beta_, rstd_qk_, q_hat_, k_hat_, q_rstd_, k_rstd_, o_;
  Buffer rstd_, y_, n_, z_;
  Tensor d_out_;
  Buffer d_y_, d_o_, d_gate_, d_qk_, d_v_, d_g_, d_beta_, d_projected_;
};

}  // namespace

Step TrainingStep(const Backend& backend, const LayerData& data, const StepOptions& options) {
  return Layer(backend, data, options).Run();
}

}  // namespace gdn::kernels
