#include "server/pipeline/layer_stack.h"

#include "gdn/kernels/causal_conv.h"
#include "gdn/kernels/delta_rule.h"
#include "gdn/kernels/gates.h"
#include "gdn/kernels/matmul.h"
#include "gdn/kernels/rms_norm.h"
#include "gdn/kernels/silu_mul.h"

namespace gdn::pipeline {

namespace {

// Whole cache lines, an odd number of them: rows at a power-of-two stride would share cache sets.
int64_t RowStride(int64_t columns) {
  constexpr int64_t kLine = 16;  // floats
  return ((columns + kLine - 1) / kLine | 1) * kLine;
}

}  // namespace

LayerStack::LayerStack(const model::ModelSpec& spec, const PackedModel* weights, StatePool* states,
                       OpRunner* ops)
    : spec_(spec),
      weights_(weights),
      states_(states),
      ops_(ops),
      projection_stride_(RowStride(spec.max_projection_size())),
      conv_stride_(RowStride(spec.gdn.conv_channels())),
      mixed_stride_(RowStride(spec.gdn.value_size())),
      gate_up_stride_(RowStride(2 * spec.intermediate_size)),
      gdn2_(spec, states, ops, projection_stride_, conv_stride_, mixed_stride_) {}

void LayerStack::Reserve(int64_t tokens) {
  normed_.Reserve(tokens * spec_.hidden_size);
  projection_.Reserve(tokens * projection_stride_);
  conv_out_.Reserve(tokens * conv_stride_);
  if (spec_.Has(model::LayerType::kLinearAttention)) {
    g_.Reserve(tokens * spec_.gdn.value_heads);
    beta_.Reserve(tokens * spec_.gdn.value_heads);
  }
  if (spec_.Has(model::LayerType::kGdn2)) gdn2_.Reserve(tokens);
  mixed_.Reserve(tokens * mixed_stride_);
  gate_up_.Reserve(tokens * gate_up_stride_);
}

absl::Status LayerStack::Run(const BatchPlan& plan, float* x) {
  Reserve(plan.num_tokens);
  const auto num_layers = static_cast<int64_t>(weights_->layers.size());
  for (int64_t layer = 0; layer < num_layers; ++layer) {
    GDN_RETURN_IF_ERROR(RunLayer(layer, plan, x));
  }
  return absl::OkStatus();
}

absl::Status LayerStack::RunLayer(int64_t layer, const BatchPlan& plan, float* x) {
  const PackedLayer& weights = weights_->layers[static_cast<size_t>(layer)];
  const int64_t tokens = plan.num_tokens;
  const int64_t hidden = spec_.hidden_size;
  const int64_t inner = spec_.intermediate_size;

  GDN_RETURN_IF_ERROR(Norm(tokens, x, weights.input_norm, normed_.data()));
  GDN_RETURN_IF_ERROR(Product("in_proj", tokens, normed_.data(), hidden, weights.in_proj,
                              projection_.data(), projection_stride_, false));
  GDN_RETURN_IF_ERROR(Mix(layer, plan));
  GDN_RETURN_IF_ERROR(
      Product("out_proj", tokens, mixed_.data(), mixed_stride_, weights.out_proj, x, hidden, true));

  GDN_RETURN_IF_ERROR(Norm(tokens, x, weights.mlp_norm, normed_.data()));
  GDN_RETURN_IF_ERROR(Product("gate_up_proj", tokens, normed_.data(), hidden, weights.gate_up,
                              gate_up_.data(), gate_up_stride_, false));
  gdn_silu_mul_args act{};
  act.rows = tokens;
  act.dim = inner;
  act.gate = gate_up_.data();
  act.up = gate_up_.data() + inner;
  act.dtype = GDN_F32;
  act.row_stride = gate_up_stride_;
  act.y = gate_up_.data();
  act.y_dtype = GDN_F32;
  act.y_row_stride = gate_up_stride_;
  GDN_RETURN_IF_ERROR(ops_->Run("silu_mul", gdn_silu_mul, act));
  return Product("down_proj", tokens, gate_up_.data(), gate_up_stride_, weights.down, x, hidden,
                 true);
}

// From the projection's columns to the normed, gated rows of the output projection.
absl::Status LayerStack::Mix(int64_t layer, const BatchPlan& plan) {
  const PackedLayer& weights = weights_->layers[static_cast<size_t>(layer)];
  const model::GdnDims& dims = spec_.gdn;

  GDN_RETURN_IF_ERROR(weights.type == model::LayerType::kGdn2
                          ? gdn2_.Gates(weights, plan.num_tokens, projection_.data())
                          : Gates(layer, plan.num_tokens));
  if (plan.steps.size() > 0) GDN_RETURN_IF_ERROR(MixGroup(layer, plan.steps, true, 0));
  if (plan.prefills.size() > 0) {
    GDN_RETURN_IF_ERROR(MixGroup(layer, plan.prefills, false, plan.steps.size()));
  }

  gdn_gated_rms_norm_args norm{};
  norm.tokens = plan.num_tokens;
  norm.heads = dims.value_heads;
  norm.dim = dims.value_dim;
  norm.x = mixed_.data();
  norm.x_dtype = GDN_F32;
  norm.x_token_stride = mixed_stride_;
  norm.x_head_stride = dims.value_dim;
  norm.gate = projection_.data() + dims.conv_channels();
  norm.gate_dtype = GDN_F32;
  norm.gate_token_stride = projection_stride_;
  norm.gate_head_stride = dims.value_dim;
  norm.weight = weights.gated_norm.data();
  norm.activation =
      spec_.output_gate == model::GateActivation::kSilu ? GDN_GATE_SILU : GDN_GATE_SIGMOID;
  norm.eps = spec_.rms_norm_eps;
  norm.y = mixed_.data();
  norm.y_dtype = GDN_F32;
  norm.y_token_stride = mixed_stride_;
  norm.y_head_stride = dims.value_dim;
  return ops_->Run("gated_rms_norm", gdn_gated_rms_norm, norm);
}

absl::Status LayerStack::Gates(int64_t layer, int64_t tokens) {
  const PackedLayer& weights = weights_->layers[static_cast<size_t>(layer)];
  const model::GdnDims& dims = spec_.gdn;
  gdn_gates_args args{};
  args.tokens = tokens;
  args.value_heads = dims.value_heads;
  args.b = projection_.data() + dims.conv_channels() + dims.value_size();
  args.a = projection_.data() + dims.conv_channels() + dims.value_size() + dims.value_heads;
  args.dtype = GDN_F32;
  args.a_token_stride = projection_stride_;
  args.b_token_stride = projection_stride_;
  args.a_log = weights.a_log.data();
  args.dt_bias = weights.dt_bias.data();
  args.beta_scale = spec_.beta_scale;
  args.g = g_.data();
  args.beta = beta_.data();
  return ops_->Run("gates", gdn_gates, args);
}

absl::Status LayerStack::MixGroup(int64_t layer, const SequenceGroup& group, bool step,
                                  int64_t first_token) {
  GDN_RETURN_IF_ERROR(Convolve(layer, group, step, first_token));
  if (weights_->layers[static_cast<size_t>(layer)].type == model::LayerType::kGdn2) {
    return gdn2_.Run(layer, group, step, first_token, conv_out_.data(), mixed_.data());
  }
  return DeltaRule(layer, group, step, first_token);
}

absl::Status LayerStack::Convolve(int64_t layer, const SequenceGroup& group, bool step,
                                  int64_t first_token) {
  const PackedLayer& weights = weights_->layers[static_cast<size_t>(layer)];
  const int64_t channels = spec_.gdn.conv_channels();
  gdn_causal_conv_args args{};
  args.sequences = group.size();
  args.cu_seqlens = step ? nullptr : group.cu_seqlens.data();
  args.channels = channels;
  args.width = spec_.gdn.conv_width;
  args.silu = 1;
  args.x = projection_.data() + first_token * projection_stride_;
  args.x_dtype = GDN_F32;
  args.x_token_stride = projection_stride_;
  args.weight = weights.conv.data();
  args.y = conv_out_.data() + first_token * conv_stride_;
  args.y_dtype = GDN_F32;
  args.y_token_stride = conv_stride_;
  args.state = states_->conv(layer);
  args.state_slot_stride = states_->conv_slot_elements();
  args.read_index = group.read_slot.data();
  args.write_index = group.write_slot.data();
  args.fresh = group.fresh.data();
  return ops_->Run("causal_conv", gdn_causal_conv, args);
}

absl::Status LayerStack::DeltaRule(int64_t layer, const SequenceGroup& group, bool step,
                                   int64_t first_token) {
  const model::GdnDims& dims = spec_.gdn;
  const float* columns = conv_out_.data() + first_token * conv_stride_;
  gdn_delta_rule_args args{};
  args.sequences = group.size();
  args.cu_seqlens = group.cu_seqlens.data();
  args.key_heads = dims.key_heads;
  args.value_heads = dims.value_heads;
  args.key_dim = dims.key_dim;
  args.value_dim = dims.value_dim;
  args.q = columns;
  args.k = columns + dims.key_size();
  args.v = columns + 2 * dims.key_size();
  args.qkv_dtype = GDN_F32;
  args.q_token_stride = conv_stride_;
  args.k_token_stride = conv_stride_;
  args.v_token_stride = conv_stride_;
  args.g = g_.data() + first_token * dims.value_heads;
  args.beta = beta_.data() + first_token * dims.value_heads;
  args.use_qk_l2norm = 1;  // q and k arrive raw; this is the only place they are normalised.
  args.state = states_->recurrent(layer);
  args.state_dtype = states_->recurrent_type();
  args.state_slot_stride = states_->recurrent_slot_elements();
  args.read_index = group.read_slot.data();
  args.write_index = group.write_slot.data();
  args.fresh = group.fresh.data();
  args.o = mixed_.data() + first_token * mixed_stride_;
  args.o_dtype = GDN_F32;
  args.o_token_stride = mixed_stride_;
  if (!step) {
    return ops_->Run("delta_rule_prefill", gdn_delta_rule_prefill, args,
                     gdn_delta_rule_prefill_workspace);
  }
  if (ops_->timer() != nullptr) {
    ops_->timer()->OnDecodeStateBytes(2 * group.size() * states_->recurrent_slot_bytes());
  }
  return ops_->Run("delta_rule_step", gdn_delta_rule_step, args, gdn_delta_rule_step_workspace);
}

absl::Status LayerStack::Norm(int64_t tokens, const float* x, const std::vector<float>& weight,
                              float* y) {
  gdn_rms_norm_args args{};
  args.rows = tokens;
  args.dim = spec_.hidden_size;
  args.x = x;
  args.x_dtype = GDN_F32;
  args.x_row_stride = spec_.hidden_size;
  args.weight = weight.data();
  args.eps = spec_.rms_norm_eps;
  args.y = y;
  args.y_dtype = GDN_F32;
  args.y_row_stride = spec_.hidden_size;
  return ops_->Run("rms_norm", gdn_rms_norm, args);
}

absl::Status LayerStack::Product(const char* name, int64_t tokens, const float* x, int64_t x_stride,
                                 const PackedWeight& weight, float* y, int64_t y_stride,
                                 bool accumulate) {
  gdn_matmul_args args{};
  args.rows = tokens;
  args.x = x;
  args.x_row_stride = x_stride;
  args.weight = weight.get();
  args.y = y;
  args.y_row_stride = y_stride;
  args.accumulate = accumulate ? 1 : 0;
  return ops_->Run(name, gdn_matmul, args, gdn_matmul_workspace);
}

}  // namespace gdn::pipeline
