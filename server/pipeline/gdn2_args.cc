#include "server/pipeline/gdn2_args.h"

namespace gdn::pipeline {
namespace {

const void* Column(const void* row, gdn_dtype dtype, int64_t index) {
  return static_cast<const std::byte*>(row) + index * (dtype == GDN_F32 ? 4 : 2);
}

}  // namespace

gdn2_gates_args Gdn2GatesArgs(const model::ModelSpec& spec, const void* projection, gdn_dtype dtype,
                              int64_t projection_stride) {
  const model::GdnDims& dims = spec.gdn;
  const int64_t f = dims.conv_channels() + dims.value_size();
  gdn2_gates_args args{};
  args.gate_heads = dims.key_heads;
  args.key_dim = dims.key_dim;
  args.write_width = dims.value_size();
  args.f = Column(projection, dtype, f);
  args.b = Column(projection, dtype, f + dims.key_size());
  args.w = Column(projection, dtype, f + 2 * dims.key_size());
  args.fbw_dtype = dtype;
  args.f_token_stride = projection_stride;
  args.b_token_stride = projection_stride;
  args.w_token_stride = projection_stride;
  args.decay =
      spec.decay_gate == model::DecayGate::kBounded ? GDN2_DECAY_BOUNDED : GDN2_DECAY_SOFTPLUS;
  args.lower_bound = spec.decay_lower_bound;
  args.erase_scale = spec.beta_scale;
  return args;
}

gdn_qk_norm_prepare_args Gdn2QkNormArgs(const model::ModelSpec& spec, int64_t tokens,
                                        void* conv_out, gdn_dtype dtype, int64_t conv_stride) {
  gdn_qk_norm_prepare_args args{};
  args.variant = GDN_RULE_GDN2;
  args.use_qk_l2norm = 1;
  args.tokens = tokens;
  args.vectors = 2 * spec.gdn.key_heads;
  args.key_dim = spec.gdn.key_dim;
  args.qk = conv_out;
  args.dtype = dtype;
  args.token_stride = conv_stride;
  return args;
}

gdn_status Gdn2QkNorm(const gdn_exec* exec, const gdn_qk_norm_prepare_args* args) {
  gdn_qk_norm_route route{};
  return gdn_qk_norm_prepare(exec, args, &route);
}

gdn2_args Gdn2Args(const model::ModelSpec& spec, const void* conv_out, gdn_dtype dtype,
                   int64_t conv_stride) {
  const model::GdnDims& dims = spec.gdn;
  gdn_qk_norm_route route{};
  gdn_qk_norm_route_of(GDN_RULE_GDN2, 1, &route);
  gdn2_args args{};
  args.key_heads = dims.key_heads;
  args.value_heads = dims.value_heads;
  args.gate_heads = dims.key_heads;
  args.key_dim = dims.key_dim;
  args.value_dim = dims.value_dim;
  args.q = conv_out;
  args.k = Column(conv_out, dtype, dims.key_size());
  args.v = Column(conv_out, dtype, 2 * dims.key_size());
  args.qkv_dtype = dtype;
  args.q_token_stride = conv_stride;
  args.k_token_stride = conv_stride;
  args.v_token_stride = conv_stride;
  args.use_qk_l2norm = route.use_qk_l2norm_in_kernel;
  return args;
}

}  // namespace gdn::pipeline
