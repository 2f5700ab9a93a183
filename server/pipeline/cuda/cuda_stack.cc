#include "server/pipeline/cuda/cuda_stack.h"

#include "gdn/kernels/causal_conv.h"
#include "gdn/kernels/delta_rule.h"
#include "gdn/kernels/fused_decode.h"
#include "gdn/kernels/gated_rms_norm.h"
#include "gdn/kernels/gates.h"

namespace gdn::pipeline {
namespace {

constexpr gdn_dtype kActivation = GDN_BF16;

gdn_gate_activation Activation(const model::ModelSpec& spec) {
  return spec.output_gate == model::GateActivation::kSilu ? GDN_GATE_SILU : GDN_GATE_SIGMOID;
}

}  // namespace

absl::Status CudaStack::CreatePlan(const char* name, gdn_linear_kind kind, int64_t n, int64_t k,
                                   bool residual, LinearPlan* plan) {
  gdn_linear_shape shape{};
  shape.kind = kind;
  shape.n = n;
  shape.k = k;
  shape.weight_dtype = kActivation;
  shape.y_dtype = residual ? GDN_F32 : kActivation;
  shape.accumulate = residual ? 1 : 0;
  shape.batch_invariant = batch_invariant_ ? 1 : 0;
  shape.max_rows = max_tokens_;
  gdn_linear_plan* raw = nullptr;
  const gdn_status status = gdn_linear_plan_create(GDN_BACKEND_CUDA, &shape, &raw);
  plan->reset(raw);
  GDN_RETURN_IF_ERROR(KernelStatus(status, name));
  gdn_linear_args largest{};
  largest.plan = raw;
  largest.rows = max_tokens_;
  return ops_->NeedWorkspace(name, gdn_linear_workspace, largest);
}

absl::Status CudaStack::Create(const model::ModelSpec& spec, const DeviceModel* weights,
                               const DeviceStatePool* states, CudaOps* ops, int64_t max_tokens,
                               bool batch_invariant) {
  spec_ = spec;
  weights_ = weights;
  states_ = states;
  ops_ = ops;
  max_tokens_ = max_tokens;
  batch_invariant_ = batch_invariant;
  const model::GdnDims& dims = spec_.gdn;
  const int64_t hidden = spec_.hidden_size;
  const int64_t inner = spec_.intermediate_size;
  constexpr int64_t kAlignment = 8;  // Elements: rows start at 16 bytes.
  projection_stride_ = (dims.projection_size() + kAlignment - 1) / kAlignment * kAlignment;

  GDN_RETURN_IF_ERROR(
      CreatePlan("in_proj", GDN_LINEAR_PLAIN, dims.projection_size(), hidden, false, &in_proj_));
  GDN_RETURN_IF_ERROR(
      CreatePlan("out_proj", GDN_LINEAR_PLAIN, hidden, dims.value_size(), true, &out_proj_));
  GDN_RETURN_IF_ERROR(
      CreatePlan("gate_up_proj", GDN_LINEAR_SILU_MUL, 2 * inner, hidden, false, &gate_up_));
  GDN_RETURN_IF_ERROR(CreatePlan("down_proj", GDN_LINEAR_PLAIN, hidden, inner, true, &down_));

  constexpr char kWhat[] = "cannot allocate the activations; use a smaller --prefill-token-budget";
  GDN_RETURN_IF_ERROR(projection_.Allocate(max_tokens * projection_stride_, kWhat));
  GDN_RETURN_IF_ERROR(mixed_.Allocate(max_tokens * dims.value_size(), kWhat));
  GDN_RETURN_IF_ERROR(inner_.Allocate(max_tokens * inner, kWhat));
  GDN_RETURN_IF_ERROR(conv_out_.Allocate(max_tokens * dims.conv_channels(), kWhat));
  GDN_RETURN_IF_ERROR(g_.Allocate(max_tokens * dims.value_heads, kWhat));
  GDN_RETURN_IF_ERROR(beta_.Allocate(max_tokens * dims.value_heads, kWhat));
  return o_.Allocate(max_tokens * dims.value_size(), kWhat);
}

absl::Status CudaStack::Run(const StackBatch& batch, const StepArrays& arrays, float* x) {
  const auto num_layers = static_cast<int64_t>(weights_->layers.size());
  for (int64_t layer = 0; layer < num_layers; ++layer) {
    GDN_RETURN_IF_ERROR(RunLayer(layer, batch, arrays, x));
  }
  return absl::OkStatus();
}

absl::Status CudaStack::RunLayer(int64_t layer, const StackBatch& batch, const StepArrays& arrays,
                                 float* x) {
  const DeviceLayer& weights = weights_->layers[static_cast<size_t>(layer)];
  const int64_t hidden = spec_.hidden_size;
  const int64_t values = spec_.gdn.value_size();
  const int64_t inner = spec_.intermediate_size;

  gdn_linear_args args{};
  args.rows = batch.num_tokens;
  args.norm_eps = spec_.rms_norm_eps;
  args.early_start = ops_->timing() ? 0 : 1;
  const auto product = [&](const char* name, const LinearPlan& plan, const uint16_t* weight) {
    args.plan = plan.get();
    args.weight = weight;
    return ops_->Run(name, gdn_linear, args);
  };
  const auto normed_from_x = [&](const float* norm_weight, uint16_t* y, int64_t y_stride) {
    args.x = x;
    args.x_dtype = GDN_F32;
    args.x_row_stride = hidden;
    args.norm_weight = norm_weight;
    args.y = y;
    args.y_row_stride = y_stride;
  };
  const auto added_to_x = [&](const uint16_t* from, int64_t from_stride) {
    args.x = from;
    args.x_dtype = kActivation;
    args.x_row_stride = from_stride;
    args.norm_weight = nullptr;
    args.y = x;
    args.y_row_stride = hidden;
  };

  normed_from_x(weights.input_norm, projection_.data(), projection_stride_);
  GDN_RETURN_IF_ERROR(product("in_proj", in_proj_, weights.in_proj));
  if (batch.step_rows > 0) GDN_RETURN_IF_ERROR(FusedStep(layer, batch, arrays));
  if (batch.prefills > 0) GDN_RETURN_IF_ERROR(Prefill(layer, batch, arrays));
  added_to_x(mixed_.data(), values);
  GDN_RETURN_IF_ERROR(product("out_proj", out_proj_, weights.out_proj));
  normed_from_x(weights.mlp_norm, inner_.data(), inner);
  GDN_RETURN_IF_ERROR(product("gate_up_proj", gate_up_, weights.gate_up));
  added_to_x(inner_.data(), inner);
  return product("down_proj", down_, weights.down);
}

absl::Status CudaStack::FusedStep(int64_t layer, const StackBatch& batch,
                                  const StepArrays& arrays) {
  const DeviceLayer& weights = weights_->layers[static_cast<size_t>(layer)];
  const model::GdnDims& dims = spec_.gdn;
  gdn_fused_decode_args args{};
  args.rows = batch.step_rows;
  args.tokens = 1;
  args.key_heads = dims.key_heads;
  args.value_heads = dims.value_heads;
  args.key_dim = dims.key_dim;
  args.value_dim = dims.value_dim;
  args.conv_width = dims.conv_width;
  args.x = projection_.data();
  args.dtype = kActivation;
  args.x_token_stride = projection_stride_;
  args.q_offset = 0;
  args.k_offset = dims.key_size();
  args.v_offset = 2 * dims.key_size();
  args.z_offset = dims.conv_channels();
  args.b_offset = args.z_offset + dims.value_size();
  args.a_offset = args.b_offset + dims.value_heads;
  args.conv_weight = weights.conv;
  args.a_log = weights.a_log;
  args.dt_bias = weights.dt_bias;
  args.beta_scale = spec_.beta_scale;
  args.use_qk_l2norm = 1;  // q and k arrive raw; this is the only place they are normalised.
  args.norm_weight = weights.gated_norm;
  args.activation = Activation(spec_);
  args.eps = spec_.rms_norm_eps;
  args.state = states_->recurrent(layer);
  args.state_dtype = states_->recurrent_type();
  args.state_slot_stride = states_->recurrent_slot_elements();
  args.conv_state = states_->conv(layer);
  args.conv_slot_stride = states_->conv_slot_elements();
  args.read_index = arrays.read_slot;
  args.write_index = arrays.write_slot;
  args.fresh = arrays.fresh;
  args.y = mixed_.data();
  args.y_token_stride = dims.value_size();
  // The kernel before is in_proj, which writes none of states, indices and weights; and the first
  // kernels of a step wait for everything before them.
  args.early_start = ops_->timing() ? 0 : 1;
  return ops_->Run("fused_decode", gdn_fused_decode, args);
}

absl::Status CudaStack::Prefill(int64_t layer, const StackBatch& batch, const StepArrays& arrays) {
  const DeviceLayer& weights = weights_->layers[static_cast<size_t>(layer)];
  const model::GdnDims& dims = spec_.gdn;
  const int64_t first = batch.step_rows;  // As a token, and as a sequence.
  const int64_t tokens = batch.num_tokens - first;
  if (tokens == 0) return absl::OkStatus();  // Empty sequences keep their slots.
  const uint16_t* columns = projection_.data() + first * projection_stride_;
  const uint16_t* z = columns + dims.conv_channels();

  gdn_causal_conv_args conv{};
  conv.sequences = batch.prefills;
  conv.cu_seqlens = batch.cu_seqlens;
  conv.channels = dims.conv_channels();
  conv.width = dims.conv_width;
  conv.silu = 1;
  conv.x = columns;
  conv.x_dtype = kActivation;
  conv.x_token_stride = projection_stride_;
  conv.weight = weights.conv;
  conv.y = conv_out_.data();
  conv.y_dtype = kActivation;
  conv.y_token_stride = dims.conv_channels();
  conv.state = states_->conv(layer);
  conv.state_slot_stride = states_->conv_slot_elements();
  conv.read_index = arrays.read_slot + first;
  conv.write_index = arrays.write_slot + first;
  conv.fresh = arrays.fresh + first;
  GDN_RETURN_IF_ERROR(ops_->Run("causal_conv", gdn_causal_conv, conv));

  gdn_gates_args gates{};
  gates.tokens = tokens;
  gates.value_heads = dims.value_heads;
  gates.b = z + dims.value_size();
  gates.a = z + dims.value_size() + dims.value_heads;
  gates.dtype = kActivation;
  gates.a_token_stride = projection_stride_;
  gates.b_token_stride = projection_stride_;
  gates.a_log = weights.a_log;
  gates.dt_bias = weights.dt_bias;
  gates.beta_scale = spec_.beta_scale;
  gates.g = g_.data();
  gates.beta = beta_.data();
  GDN_RETURN_IF_ERROR(ops_->Run("gates", gdn_gates, gates));

  gdn_delta_rule_args rule{};
  rule.sequences = batch.prefills;
  rule.cu_seqlens = batch.cu_seqlens;
  rule.key_heads = dims.key_heads;
  rule.value_heads = dims.value_heads;
  rule.key_dim = dims.key_dim;
  rule.value_dim = dims.value_dim;
  rule.q = conv_out_.data();
  rule.k = conv_out_.data() + dims.key_size();
  rule.v = conv_out_.data() + 2 * dims.key_size();
  rule.qkv_dtype = kActivation;
  rule.q_token_stride = dims.conv_channels();
  rule.k_token_stride = dims.conv_channels();
  rule.v_token_stride = dims.conv_channels();
  rule.g = g_.data();
  rule.beta = beta_.data();
  rule.use_qk_l2norm = 1;
  rule.state = states_->recurrent(layer);
  rule.state_dtype = states_->recurrent_type();
  rule.state_slot_stride = states_->recurrent_slot_elements();
  rule.read_index = conv.read_index;
  rule.write_index = conv.write_index;
  rule.fresh = conv.fresh;
  rule.o = o_.data();
  rule.o_dtype = GDN_F32;
  rule.o_token_stride = dims.value_size();
  GDN_RETURN_IF_ERROR(ops_->Run("delta_rule_prefill", gdn_delta_rule_prefill, rule));

  gdn_gated_rms_norm_args norm{};
  norm.tokens = tokens;
  norm.heads = dims.value_heads;
  norm.dim = dims.value_dim;
  norm.x = o_.data();
  norm.x_dtype = GDN_F32;
  norm.x_token_stride = dims.value_size();
  norm.x_head_stride = dims.value_dim;
  norm.gate = z;
  norm.gate_dtype = kActivation;
  norm.gate_token_stride = projection_stride_;
  norm.gate_head_stride = dims.value_dim;
  norm.weight = weights.gated_norm;
  norm.activation = Activation(spec_);
  norm.eps = spec_.rms_norm_eps;
  norm.y = mixed_.data() + first * dims.value_size();
  norm.y_dtype = kActivation;
  norm.y_token_stride = dims.value_size();
  norm.y_head_stride = dims.value_dim;
  return ops_->Run("gated_rms_norm", gdn_gated_rms_norm, norm);
}

}  // namespace gdn::pipeline
