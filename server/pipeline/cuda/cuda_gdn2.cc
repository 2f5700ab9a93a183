#include "server/pipeline/cuda/cuda_gdn2.h"

#include "gdn/kernels/causal_conv.h"
#include "gdn/kernels/gated_rms_norm.h"
#include "server/pipeline/gdn2_args.h"

namespace gdn::pipeline {

absl::Status CudaGdn2::Create(const model::ModelSpec* spec, const DeviceStatePool* states,
                              CudaOps* ops, int64_t max_rows, int64_t max_tokens) {
  spec_ = spec;
  states_ = states;
  ops_ = ops;
  const model::GdnDims& dims = spec->gdn;
  constexpr char kWhat[] =
      "cannot allocate the activations of gdn2 layers; use a smaller --prefill-token-budget";
  GDN_RETURN_IF_ERROR(conv_out_.Allocate(max_tokens * dims.conv_channels(), kWhat));
  GDN_RETURN_IF_ERROR(g_.Allocate(max_tokens * dims.key_size(), kWhat));
  GDN_RETURN_IF_ERROR(erase_.Allocate(max_tokens * dims.key_size(), kWhat));
  GDN_RETURN_IF_ERROR(write_.Allocate(max_tokens * dims.value_size(), kWhat));
  GDN_RETURN_IF_ERROR(o_.Allocate(max_tokens * dims.value_size(), kWhat));
  gdn2_args largest = RuleArgs({.sequences = max_rows, .tokens = max_tokens});
  largest.state_slot_stride = dims.recurrent_elements();
  return ops->NeedWorkspace("gdn2_prefill", gdn_gdn2_prefill_workspace, largest);
}

absl::Status CudaGdn2::Run(int64_t layer, const DeviceLayer& weights, const StackBatch& batch,
                           const StepArrays& arrays, const uint16_t* projection,
                           int64_t projection_stride, uint16_t* mixed) {
  const Group steps = {.step = true, .sequences = batch.step_rows, .tokens = batch.step_rows};
  const Group prefills = {.sequences = batch.prefills,
                          .tokens = batch.num_tokens - batch.step_rows,
                          .first = batch.step_rows,
                          .cu_seqlens = batch.cu_seqlens};
  GDN_RETURN_IF_ERROR(Gates(weights, batch.num_tokens, projection, projection_stride));
  for (const Group& group : {steps, prefills}) {
    if (group.tokens == 0) continue;  // Empty sequences keep their slots.
    GDN_RETURN_IF_ERROR(Convolve(layer, weights, group, arrays, projection, projection_stride));
    GDN_RETURN_IF_ERROR(Rule(layer, group, arrays));
  }
  return OutputNorm(weights, batch.num_tokens, projection, projection_stride, mixed);
}

absl::Status CudaGdn2::Gates(const DeviceLayer& weights, int64_t tokens, const uint16_t* projection,
                             int64_t projection_stride) {
  gdn2_gates_args args = Gdn2GatesArgs(*spec_, projection, GDN_BF16, projection_stride);
  args.tokens = tokens;
  args.a_log = weights.a_log;
  args.dt_bias = weights.dt_bias;
  args.g = g_.data();
  args.erase = erase_.data();
  args.write = write_.data();
  args.gate_dtype = GDN_F32;
  return ops_->Run("gdn2_gates", gdn_gdn2_gates, args);
}

absl::Status CudaGdn2::Convolve(int64_t layer, const DeviceLayer& weights, const Group& group,
                                const StepArrays& arrays, const uint16_t* projection,
                                int64_t projection_stride) {
  const int64_t channels = spec_->gdn.conv_channels();
  gdn_causal_conv_args args{};
  args.sequences = group.sequences;
  args.cu_seqlens = group.cu_seqlens;
  args.channels = channels;
  args.width = spec_->gdn.conv_width;
  args.silu = 1;
  args.x = projection + group.first * projection_stride;
  args.x_dtype = GDN_BF16;
  args.x_token_stride = projection_stride;
  args.weight = weights.conv;
  args.y = conv_out_.data() + group.first * channels;
  args.y_dtype = GDN_BF16;
  args.y_token_stride = channels;
  args.state = states_->conv(layer);
  args.state_slot_stride = states_->conv_slot_elements();
  args.read_index = arrays.read_slot + group.first;
  args.write_index = arrays.write_slot + group.first;
  args.fresh = arrays.fresh + group.first;
  return ops_->Run("causal_conv", gdn_causal_conv, args);
}

gdn2_args CudaGdn2::RuleArgs(const Group& group) const {
  const model::GdnDims& dims = spec_->gdn;
  const int64_t channels = dims.conv_channels();
  gdn2_args args = Gdn2Args(*spec_, conv_out_.data() + group.first * channels, GDN_BF16, channels);
  args.tokens = group.tokens;
  args.sequences = group.sequences;
  args.cu_seqlens = group.cu_seqlens;
  args.g = g_.data() + group.first * dims.key_size();
  args.erase = erase_.data() + group.first * dims.key_size();
  args.write = write_.data() + group.first * dims.value_size();
  args.gate_dtype = GDN_F32;
  args.o = o_.data() + group.first * dims.value_size();
  args.o_dtype = GDN_F32;
  args.o_token_stride = dims.value_size();
  return args;
}

absl::Status CudaGdn2::Rule(int64_t layer, const Group& group, const StepArrays& arrays) {
  const int64_t channels = spec_->gdn.conv_channels();
  uint16_t* columns = conv_out_.data() + group.first * channels;
  GDN_RETURN_IF_ERROR(ops_->Run("qk_norm", Gdn2QkNorm,
                                Gdn2QkNormArgs(*spec_, group.tokens, columns, GDN_BF16, channels)));
  gdn2_args args = RuleArgs(group);
  args.state = states_->recurrent(layer);
  args.state_dtype = states_->recurrent_type();
  args.state_slot_stride = states_->recurrent_slot_elements();
  args.read_index = arrays.read_slot + group.first;
  args.write_index = arrays.write_slot + group.first;
  args.fresh = arrays.fresh + group.first;
  return group.step ? ops_->Run("gdn2_step", gdn_gdn2_step, args)
                    : ops_->Run("gdn2_prefill", gdn_gdn2_prefill, args);
}

absl::Status CudaGdn2::OutputNorm(const DeviceLayer& weights, int64_t tokens,
                                  const uint16_t* projection, int64_t projection_stride,
                                  uint16_t* mixed) {
  const model::GdnDims& dims = spec_->gdn;
  gdn_gated_rms_norm_args args{};
  args.tokens = tokens;
  args.heads = dims.value_heads;
  args.dim = dims.value_dim;
  args.x = o_.data();
  args.x_dtype = GDN_F32;
  args.x_token_stride = dims.value_size();
  args.x_head_stride = dims.value_dim;
  args.gate = projection + dims.conv_channels();
  args.gate_dtype = GDN_BF16;
  args.gate_token_stride = projection_stride;
  args.gate_head_stride = dims.value_dim;
  args.weight = weights.gated_norm;
  args.activation =
      spec_->output_gate == model::GateActivation::kSilu ? GDN_GATE_SILU : GDN_GATE_SIGMOID;
  args.eps = spec_->rms_norm_eps;
  args.y = mixed;
  args.y_dtype = GDN_BF16;
  args.y_token_stride = dims.value_size();
  args.y_head_stride = dims.value_dim;
  return ops_->Run("gated_rms_norm", gdn_gated_rms_norm, args);
}

}  // namespace gdn::pipeline
