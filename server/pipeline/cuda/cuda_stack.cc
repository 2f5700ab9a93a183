#include "server/pipeline/cuda/cuda_stack.h"

#include "gdn/kernels/fused_prefill.h"

namespace gdn::pipeline {
namespace {

constexpr gdn_dtype kActivation = GDN_BF16;
// Batches of up to so many rows may split their norms.
constexpr int64_t kMostSplitRows = 256;

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

absl::Status CudaStack::CreateInProj(model::LayerType type, LinearPlan* plan) {
  if (!spec_.Has(type)) return absl::OkStatus();
  return CreatePlan("in_proj", GDN_LINEAR_PLAIN, spec_.gdn.projection_size(type), spec_.hidden_size,
                    false, plan);
}

absl::Status CudaStack::Create(const model::ModelSpec& spec, const DeviceModel* weights,
                               const DeviceStatePool* states, CudaOps* ops, int64_t max_rows,
                               int64_t max_tokens, bool batch_invariant) {
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
  projection_stride_ = (spec_.max_projection_size() + kAlignment - 1) / kAlignment * kAlignment;

  GDN_RETURN_IF_ERROR(CreateInProj(model::LayerType::kLinearAttention, &in_proj_));
  GDN_RETURN_IF_ERROR(CreateInProj(model::LayerType::kGdn2, &gdn2_in_proj_));
  GDN_RETURN_IF_ERROR(
      CreatePlan("out_proj", GDN_LINEAR_PLAIN, hidden, dims.value_size(), true, &out_proj_));
  GDN_RETURN_IF_ERROR(
      CreatePlan("gate_up_proj", GDN_LINEAR_SILU_MUL, 2 * inner, hidden, false, &gate_up_));
  GDN_RETURN_IF_ERROR(CreatePlan("down_proj", GDN_LINEAR_PLAIN, hidden, inner, true, &down_));

  constexpr char kWhat[] = "cannot allocate the activations; use a smaller --prefill-token-budget";
  GDN_RETURN_IF_ERROR(projection_.Allocate(max_tokens * projection_stride_, kWhat));
  GDN_RETURN_IF_ERROR(mixed_.Allocate(max_tokens * dims.value_size(), kWhat));
  GDN_RETURN_IF_ERROR(inner_.Allocate(max_tokens * inner, kWhat));
  GDN_RETURN_IF_ERROR(normed_.Allocate(kMostSplitRows * hidden, kWhat));
  GDN_RETURN_IF_ERROR(squares_.Allocate(
      kMostSplitRows * ((hidden + GDN_LINEAR_SQUARES_COLUMNS - 1) / GDN_LINEAR_SQUARES_COLUMNS),
      kWhat));
  if (spec_.Has(model::LayerType::kGdn2)) {
    GDN_RETURN_IF_ERROR(gdn2_.Create(&spec_, states, ops, max_rows, max_tokens));
  }
  if (!spec_.Has(model::LayerType::kLinearAttention)) return absl::OkStatus();
  gdn_fused_prefill_args prefill{};
  prefill.tokens = max_tokens;
  prefill.layer = MixerShape();
  prefill.layer.rows = max_rows;
  return ops_->NeedWorkspace("fused_prefill", gdn_fused_prefill_workspace, prefill);
}

absl::Status CudaStack::Run(const StackBatch& batch, const StepArrays& arrays, float* x) {
  const auto num_layers = static_cast<int64_t>(weights_->layers.size());
  const bool split_norms = SplitsNorms(batch.num_tokens);
  for (int64_t layer = 0; layer < num_layers; ++layer) {
    GDN_RETURN_IF_ERROR(RunLayer(layer, batch, arrays, split_norms, x));
  }
  return absl::OkStatus();
}

bool CudaStack::SplitsNorms(int64_t rows) const {
  // With batch_invariant never: they round n elsewhere than a norm of its own does.
  if (batch_invariant_ || rows > kMostSplitRows) return false;
  for (const LinearPlan* plan : {&in_proj_, &gdn2_in_proj_, &out_proj_, &gate_up_, &down_}) {
    if (*plan != nullptr && gdn_linear_splits_norm(plan->get(), rows) == 0) return false;
  }
  return true;
}

absl::Status CudaStack::RunLayer(int64_t layer, const StackBatch& batch, const StepArrays& arrays,
                                 bool split_norms, float* x) {
  const DeviceLayer& weights = weights_->layers[static_cast<size_t>(layer)];
  const auto next = static_cast<size_t>(layer) + 1;
  const float* const next_norm =
      next < weights_->layers.size() ? weights_->layers[next].input_norm : nullptr;
  const int64_t hidden = spec_.hidden_size;
  const int64_t values = spec_.gdn.value_size();
  const int64_t inner = spec_.intermediate_size;

  const auto product = [&](const char* name, const LinearPlan& plan, const uint16_t* weight,
                           gdn_linear_args args) {
    args.plan = plan.get();
    args.rows = batch.num_tokens;
    args.norm_eps = spec_.rms_norm_eps;
    args.weight = weight;
    args.early_start = ops_->timing() ? 0 : 1;
    return ops_->Run(name, gdn_linear, args);
  };
  // With `begun` the product that last added to x has done the first part of the norm.
  const auto normed_from_x = [&](const float* norm_weight, bool begun, uint16_t* y,
                                 int64_t y_stride) {
    gdn_linear_args args{};
    args.x = begun ? static_cast<const void*>(normed_.data()) : x;
    args.x_dtype = begun ? kActivation : GDN_F32;
    args.x_row_stride = hidden;
    args.norm_weight = begun ? nullptr : norm_weight;
    args.squares = begun ? squares_.data() : nullptr;
    args.y = y;
    args.y_row_stride = y_stride;
    return args;
  };
  const auto added_to_x = [&](const uint16_t* from, int64_t from_stride, const float* after_norm) {
    gdn_linear_args args{};
    args.x = from;
    args.x_dtype = kActivation;
    args.x_row_stride = from_stride;
    args.y = x;
    args.y_row_stride = hidden;
    if (split_norms && after_norm != nullptr) {
      args.after_norm = after_norm;
      args.after_n = normed_.data();
      args.after_squares = squares_.data();
    }
    return args;
  };

  const gdn_linear_args in = normed_from_x(weights.input_norm, split_norms && layer > 0,
                                           projection_.data(), projection_stride_);
  if (weights.type == model::LayerType::kGdn2) {
    GDN_RETURN_IF_ERROR(product("in_proj", gdn2_in_proj_, weights.in_proj, in));
    GDN_RETURN_IF_ERROR(gdn2_.Run(layer, weights, batch, arrays, projection_.data(),
                                  projection_stride_, mixed_.data()));
  } else {
    GDN_RETURN_IF_ERROR(product("in_proj", in_proj_, weights.in_proj, in));
    if (batch.step_rows > 0) GDN_RETURN_IF_ERROR(FusedStep(layer, batch, arrays));
    if (batch.prefills > 0) GDN_RETURN_IF_ERROR(Prefill(layer, batch, arrays));
  }
  GDN_RETURN_IF_ERROR(product("out_proj", out_proj_, weights.out_proj,
                              added_to_x(mixed_.data(), values, weights.mlp_norm)));
  GDN_RETURN_IF_ERROR(product("gate_up_proj", gate_up_, weights.gate_up,
                              normed_from_x(weights.mlp_norm, split_norms, inner_.data(), inner)));
  return product("down_proj", down_, weights.down, added_to_x(inner_.data(), inner, next_norm));
}

gdn_fused_decode_args CudaStack::MixerShape() const {
  const model::GdnDims& dims = spec_.gdn;
  gdn_fused_decode_args args{};
  args.tokens = 1;
  args.key_heads = dims.key_heads;
  args.value_heads = dims.value_heads;
  args.key_dim = dims.key_dim;
  args.value_dim = dims.value_dim;
  args.conv_width = dims.conv_width;
  args.dtype = kActivation;
  args.x_token_stride = projection_stride_;
  args.q_offset = 0;
  args.k_offset = dims.key_size();
  args.v_offset = 2 * dims.key_size();
  args.z_offset = dims.conv_channels();
  args.b_offset = args.z_offset + dims.value_size();
  args.a_offset = args.b_offset + dims.value_heads;
  args.y_token_stride = dims.value_size();
  return args;
}

gdn_fused_decode_args CudaStack::MixerArgs(int64_t layer) const {
  const DeviceLayer& weights = weights_->layers[static_cast<size_t>(layer)];
  gdn_fused_decode_args args = MixerShape();
  args.x = projection_.data();
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
  args.y = mixed_.data();
  return args;
}

absl::Status CudaStack::FusedStep(int64_t layer, const StackBatch& batch,
                                  const StepArrays& arrays) {
  gdn_fused_decode_args args = MixerArgs(layer);
  args.rows = batch.step_rows;
  args.read_index = arrays.read_slot;
  args.write_index = arrays.write_slot;
  args.fresh = arrays.fresh;
  // The kernel before is in_proj, which writes none of states, indices and weights; and the first
  // kernels of a step wait for everything before them.
  args.early_start = ops_->timing() ? 0 : 1;
  return ops_->Run("fused_decode", gdn_fused_decode, args);
}

absl::Status CudaStack::Prefill(int64_t layer, const StackBatch& batch, const StepArrays& arrays) {
  const int64_t first = batch.step_rows;  // As a token, and as a sequence.
  gdn_fused_prefill_args args{};
  args.tokens = batch.num_tokens - first;
  if (args.tokens == 0) return absl::OkStatus();  // Empty sequences keep their slots.
  args.cu_seqlens = batch.cu_seqlens;
  args.layer = MixerArgs(layer);
  args.layer.rows = batch.prefills;
  args.layer.x = projection_.data() + first * projection_stride_;
  args.layer.read_index = arrays.read_slot + first;
  args.layer.write_index = arrays.write_slot + first;
  args.layer.fresh = arrays.fresh + first;
  args.layer.y = mixed_.data() + first * spec_.gdn.value_size();
  return ops_->Run("fused_prefill", gdn_fused_prefill, args);
}

}  // namespace gdn::pipeline
