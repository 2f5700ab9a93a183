// The separate ops of a decode step, for their tests on a GPU.
#ifndef KERNELS_CUDA_OPS_TEST_UTIL_H_
#define KERNELS_CUDA_OPS_TEST_UTIL_H_

#include <cstdint>
#include <vector>

#include "gdn/kernels/causal_conv.h"
#include "gdn/kernels/delta_rule.h"
#include "gdn/kernels/gated_rms_norm.h"
#include "gdn/kernels/gates.h"
#include "kernels/cuda/cuda_test_util.h"

namespace gdn::kernels {

// What the ops leave to each other, lines of qkv and o `pad` elements longer than their contents.
// Each a row's first element.
struct StepBetween {
  void* qkv;
  float* g;
  float* beta;
  void* o;
  int64_t pad;
};

inline gdn_causal_conv_args ConvArgs(const gdn_fused_decode_args& a, const StepBetween& between) {
  gdn_causal_conv_args conv{};
  conv.sequences = a.rows;
  conv.channels = a.z_offset;
  conv.width = static_cast<int32_t>(a.conv_width);
  conv.silu = 1;
  conv.x = a.x;
  conv.x_dtype = conv.y_dtype = a.dtype;
  conv.x_token_stride = a.x_token_stride;
  conv.weight = a.conv_weight;
  conv.y = between.qkv;
  conv.y_token_stride = conv.channels + between.pad;
  conv.state = a.conv_state;
  conv.state_slot_stride = a.conv_slot_stride;
  conv.read_index = a.read_index;
  conv.write_index = a.write_index;
  conv.fresh = a.fresh;
  return conv;
}

inline gdn_gates_args GatesArgs(const gdn_fused_decode_args& a, const StepBetween& between) {
  gdn_gates_args gates{};
  gates.tokens = a.rows;
  gates.value_heads = a.value_heads;
  gates.a = static_cast<const char*>(a.x) + a.a_offset * SizeOf(a.dtype);
  gates.b = static_cast<const char*>(a.x) + a.b_offset * SizeOf(a.dtype);
  gates.dtype = a.dtype;
  gates.a_token_stride = gates.b_token_stride = a.x_token_stride;
  gates.a_log = a.a_log;
  gates.dt_bias = a.dt_bias;
  gates.beta_scale = a.beta_scale;
  gates.g = between.g;
  gates.beta = between.beta;
  return gates;
}

inline gdn_delta_rule_args RuleArgs(const gdn_fused_decode_args& a, const StepBetween& between) {
  gdn_delta_rule_args rule{};
  rule.sequences = a.rows;
  rule.key_heads = a.key_heads;
  rule.value_heads = a.value_heads;
  rule.key_dim = a.key_dim;
  rule.value_dim = a.value_dim;
  rule.q = between.qkv;
  rule.k = static_cast<const char*>(between.qkv) + a.k_offset * SizeOf(a.dtype);
  rule.v = static_cast<const char*>(between.qkv) + a.v_offset * SizeOf(a.dtype);
  rule.qkv_dtype = a.dtype;
  rule.q_token_stride = rule.k_token_stride = rule.v_token_stride = a.z_offset + between.pad;
  rule.g = between.g;
  rule.beta = between.beta;
  rule.scale = a.scale;
  rule.use_qk_l2norm = a.use_qk_l2norm;
  rule.state = a.state;
  rule.state_dtype = a.state_dtype;
  rule.state_slot_stride = a.state_slot_stride;
  rule.read_index = a.read_index;
  rule.write_index = a.write_index;
  rule.fresh = a.fresh;
  rule.o = between.o;
  rule.o_dtype = a.dtype;
  rule.o_token_stride = a.value_heads * a.value_dim + between.pad;
  return rule;
}

inline gdn_gated_rms_norm_args NormArgs(const gdn_fused_decode_args& a,
                                        const StepBetween& between) {
  gdn_gated_rms_norm_args norm{};
  norm.tokens = a.rows;
  norm.heads = a.value_heads;
  norm.dim = a.value_dim;
  norm.x = between.o;
  norm.x_dtype = a.dtype;
  norm.x_token_stride = a.value_heads * a.value_dim + between.pad;
  norm.x_head_stride = a.value_dim;
  norm.gate = static_cast<const char*>(a.x) + a.z_offset * SizeOf(a.dtype);
  norm.gate_dtype = a.dtype;
  norm.gate_token_stride = a.x_token_stride;
  norm.gate_head_stride = a.value_dim;
  norm.weight = a.norm_weight;
  norm.zero_centered = a.zero_centered;
  norm.activation = a.activation;
  norm.round_before_gate = a.round_before_gate;
  norm.eps = a.eps;
  norm.y = a.y;
  norm.y_dtype = a.dtype;
  norm.y_token_stride = a.y_token_stride;
  norm.y_head_stride = a.value_dim;
  return norm;
}

// Poisoned buffers between the ops, on the host and on the device.
struct HostBetween {
  explicit HostBetween(const FusedShape& s, int64_t line_pad = 0)
      : qkv(s.dtype, s.rows * (s.channels() + line_pad)),
        g(GDN_F32, s.rows * s.value_heads()),
        beta(GDN_F32, s.rows * s.value_heads()),
        o(s.dtype, s.rows * (s.values() + line_pad)),
        pad(line_pad) {}
  StepBetween get() {
    return {qkv.data(), static_cast<float*>(g.data()), static_cast<float*>(beta.data()), o.data(),
            pad};
  }
  Tensor qkv, g, beta, o;
  int64_t pad;
};
struct DeviceBetween {
  explicit DeviceBetween(const HostBetween& host)
      : qkv(host.qkv), g(host.g), beta(host.beta), o(host.o), pad(host.pad) {}
  StepBetween get() const { return {qkv.get(), g.get<float>(), beta.get<float>(), o.get(), pad}; }
  void Download(HostBetween& host) const {
    qkv.Download(host.qkv.data());
    g.Download(host.g.data());
    beta.Download(host.beta.data());
    o.Download(host.o.data());
  }
  DeviceBuffer qkv, g, beta, o;
  int64_t pad;
};

// All four, one after the other.
inline void EnqueueOps(const gdn_exec& exec, const gdn_fused_decode_args& a,
                       const StepBetween& between) {
  const gdn_causal_conv_args conv = ConvArgs(a, between);
  ASSERT_EQ(gdn_causal_conv(&exec, &conv), GDN_OK) << gdn_last_error();
  const gdn_gates_args gates = GatesArgs(a, between);
  ASSERT_EQ(gdn_gates(&exec, &gates), GDN_OK) << gdn_last_error();
  const gdn_delta_rule_args rule = RuleArgs(a, between);
  ASSERT_EQ(gdn_delta_rule_step(&exec, &rule), GDN_OK) << gdn_last_error();
  const gdn_gated_rms_norm_args norm = NormArgs(a, between);
  ASSERT_EQ(gdn_gated_rms_norm(&exec, &norm), GDN_OK) << gdn_last_error();
}

}  // namespace gdn::kernels

#endif  // KERNELS_CUDA_OPS_TEST_UTIL_H_
