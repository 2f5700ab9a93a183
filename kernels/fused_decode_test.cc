// The fused step's REF back end against the chain of separate REF ops, and the argument checks.
#include "gdn/kernels/fused_decode.h"

#include <string>
#include <vector>

#include "gdn/kernels/causal_conv.h"
#include "gdn/kernels/delta_rule.h"
#include "gdn/kernels/gated_rms_norm.h"
#include "gdn/kernels/gates.h"
#include "gtest/gtest.h"
#include "kernels/fused_decode_test_util.h"

namespace gdn::kernels {
namespace {

constexpr gdn_exec kRefExec{};

// The chain of fused_decode.h, token by token. The convolution's output, o and the states between
// tokens are rounded as the separate ops do.
void RunChain(FusedCall& call) {
  const FusedShape& s = call.shape;
  std::vector<int64_t> read = call.read;
  std::vector<uint8_t> fresh = call.fresh;
  const gdn_fused_decode_args fused = call.Args();
  for (int64_t t = 0; t < s.tokens; ++t) {
    const auto line = [&](const Tensor& tensor, int64_t stride) {
      return static_cast<const char*>(tensor.data()) + t * stride * SizeOf(tensor.dtype());
    };
    const auto columns = [&](int64_t offset) {
      return line(call.x, s.x_stride()) + offset * SizeOf(s.dtype);
    };
    Tensor qkv(s.dtype, s.rows * s.channels());
    gdn_causal_conv_args conv{};
    conv.sequences = s.rows;
    conv.channels = s.channels();
    conv.width = static_cast<int32_t>(s.conv_width);
    conv.silu = 1;
    conv.x = columns(0);
    conv.x_dtype = conv.y_dtype = s.dtype;
    conv.x_token_stride = s.tokens * s.x_stride();
    conv.weight = call.conv_weight.data();
    conv.y = qkv.data();
    conv.y_token_stride = s.channels();
    conv.state = call.conv_state.data();
    conv.state_slot_stride = s.conv_stride();
    conv.read_index = read.data();
    conv.write_index = call.write.data();
    conv.fresh = fresh.data();
    ASSERT_EQ(gdn_causal_conv(&kRefExec, &conv), GDN_OK) << gdn_last_error();

    std::vector<float> g(s.rows * s.value_heads());
    std::vector<float> beta(g.size());
    gdn_gates_args gates{};
    gates.tokens = s.rows;
    gates.value_heads = s.value_heads();
    gates.a = columns(fused.a_offset);
    gates.b = columns(fused.b_offset);
    gates.dtype = s.dtype;
    gates.a_token_stride = gates.b_token_stride = s.tokens * s.x_stride();
    gates.a_log = call.a_log.data();
    gates.dt_bias = call.dt_bias.data();
    gates.beta_scale = s.beta_scale;
    gates.g = g.data();
    gates.beta = beta.data();
    ASSERT_EQ(gdn_gates(&kRefExec, &gates), GDN_OK) << gdn_last_error();

    Tensor o(s.round_o ? s.dtype : GDN_F32, s.rows * s.values());
    gdn_delta_rule_args rule{};
    rule.sequences = s.rows;
    rule.key_heads = s.key_heads;
    rule.value_heads = s.value_heads();
    rule.key_dim = s.key_dim;
    rule.value_dim = s.value_dim;
    rule.q = qkv.data();
    rule.k = static_cast<char*>(qkv.data()) + fused.k_offset * SizeOf(s.dtype);
    rule.v = static_cast<char*>(qkv.data()) + fused.v_offset * SizeOf(s.dtype);
    rule.qkv_dtype = s.dtype;
    rule.q_token_stride = rule.k_token_stride = rule.v_token_stride = s.channels();
    rule.g = g.data();
    rule.beta = beta.data();
    rule.scale = s.scale;
    rule.use_qk_l2norm = s.normalize;
    rule.state = call.state.data();
    rule.state_dtype = s.state_dtype;
    rule.state_slot_stride = s.state_stride();
    rule.read_index = read.data();
    rule.write_index = call.write.data();
    rule.fresh = fresh.data();
    rule.o = o.data();
    rule.o_dtype = o.dtype();
    rule.o_token_stride = s.values();
    ASSERT_EQ(gdn_delta_rule_step(&kRefExec, &rule), GDN_OK) << gdn_last_error();

    gdn_gated_rms_norm_args norm{};
    norm.tokens = s.rows;
    norm.heads = s.value_heads();
    norm.dim = s.value_dim;
    norm.x = o.data();
    norm.x_dtype = o.dtype();
    norm.x_token_stride = s.values();
    norm.x_head_stride = s.value_dim;
    norm.gate = columns(fused.z_offset);
    norm.gate_dtype = s.dtype;
    norm.gate_token_stride = s.tokens * s.x_stride();
    norm.gate_head_stride = s.value_dim;
    norm.weight = call.norm_weight.data();
    norm.zero_centered = s.zero_centered;
    norm.activation = s.activation;
    norm.round_before_gate = s.round_before_gate;
    norm.eps = 1e-6f;
    norm.y = static_cast<char*>(call.y.data()) + t * s.y_stride() * SizeOf(s.dtype);
    norm.y_dtype = s.dtype;
    norm.y_token_stride = s.tokens * s.y_stride();
    norm.y_head_stride = s.value_dim;
    ASSERT_EQ(gdn_gated_rms_norm(&kRefExec, &norm), GDN_OK) << gdn_last_error();

    for (int64_t i = 0; i < s.rows; ++i) {
      read[i] = call.Padding(i) ? -1 : call.write[i];
      fresh[i] = 0;
    }
  }
}

std::vector<FusedShape> Shapes() {
  std::vector<FusedShape> shapes;
  FusedShape s;
  s.name = "small";
  s.rows = 6;
  s.key_dim = 12;
  s.value_dim = 9;
  s.dtype = GDN_F32;
  shapes.push_back(s);
  s.name = "many tokens";
  s.tokens = 5;
  s.ratio = 3;
  s.conv_width = 3;
  s.state_pad = 5;
  s.conv_pad = 7;
  shapes.push_back(s);
  s.name = "zero-centred, sigmoid, doubled beta, no norm of q and k";
  s.zero_centered = 1;
  s.activation = GDN_GATE_SIGMOID;
  s.beta_scale = 2.0f;
  s.normalize = 0;
  s.scale = 0.25f;
  s.x_gain = 0.3f;
  shapes.push_back(s);
  s = FusedShape();
  s.name = "bf16, the published contract";
  s.rows = 6;
  s.key_dim = 16;
  s.value_dim = 24;
  s.round_o = s.round_before_gate = 1;
  shapes.push_back(s);
  return shapes;
}

TEST(FusedDecode, RefEqualsTheChainOfRefOps) {
  for (const FusedShape& shape : Shapes()) {
    SCOPED_TRACE(shape.name);
    const FusedCall before(shape);
    FusedCall fused(shape);
    FusedCall chain(shape);
    const gdn_fused_decode_args args = fused.Args();
    ASSERT_EQ(gdn_fused_decode(&kRefExec, &args), GDN_OK) << gdn_last_error();
    ASSERT_NO_FATAL_FAILURE(RunChain(chain));
    const FusedErrors errors = Compare(before, fused, chain);
    EXPECT_LE(errors.y, shape.dtype == GDN_F32 ? 1e-6 : 1e-3);
    EXPECT_LE(errors.state, 1e-6);
    EXPECT_EQ(errors.padding_not_zero, 0);
    EXPECT_EQ(errors.gaps_touched, 0);
    EXPECT_EQ(errors.slots_touched, 0);
    EXPECT_EQ(errors.conv_differs, 0);
    EXPECT_EQ(errors.pads_touched, 0);
  }
}

// Each row breaks one rule; nothing may be written.
TEST(FusedDecode, ChecksArgumentsBeforeWriting) {
  using Args = gdn_fused_decode_args;
  struct Broken {
    const char* mentions;
    gdn_status status;
    void (*damage)(Args&);
  };
  const Broken cases[] = {
      {"rows", GDN_INVALID_ARGUMENT, [](Args& a) { a.rows = -1; }},
      {"tokens", GDN_INVALID_ARGUMENT, [](Args& a) { a.tokens = 0; }},
      {"tokens", GDN_UNSUPPORTED_SHAPE, [](Args& a) { a.tokens = 9; }},
      {"value_heads", GDN_INVALID_ARGUMENT, [](Args& a) { a.value_heads = 3; }},
      {"value_heads", GDN_UNSUPPORTED_SHAPE, [](Args& a) { a.value_heads = 18; }},
      {"key_dim", GDN_UNSUPPORTED_SHAPE, [](Args& a) { a.key_dim = 257; }},
      {"value_dim", GDN_UNSUPPORTED_SHAPE, [](Args& a) { a.value_dim = 513; }},
      {"conv_width", GDN_UNSUPPORTED_SHAPE, [](Args& a) { a.conv_width = 9; }},
      {"dtype", GDN_INVALID_ARGUMENT, [](Args& a) { a.dtype = static_cast<gdn_dtype>(3); }},
      {"state_dtype", GDN_UNSUPPORTED_TYPE, [](Args& a) { a.state_dtype = GDN_F16; }},
      {"a_offset", GDN_INVALID_ARGUMENT, [](Args& a) { a.a_offset = a.x_token_stride - 3; }},
      {"q_offset", GDN_INVALID_ARGUMENT, [](Args& a) { a.q_offset = -1; }},
      {"y_token_stride", GDN_INVALID_ARGUMENT, [](Args& a) { a.y_token_stride = 1; }},
      {"state_slot_stride", GDN_INVALID_ARGUMENT, [](Args& a) { a.state_slot_stride -= 1; }},
      {"conv_slot_stride", GDN_INVALID_ARGUMENT, [](Args& a) { a.conv_slot_stride -= 1; }},
      {"eps", GDN_INVALID_ARGUMENT, [](Args& a) { a.eps = -1.0f; }},
      {"scale", GDN_INVALID_ARGUMENT, [](Args& a) { a.scale = INFINITY; }},
      {"read_index", GDN_INVALID_ARGUMENT, [](Args& a) { a.read_index = nullptr; }},
      {"conv_state", GDN_INVALID_ARGUMENT, [](Args& a) { a.conv_state = nullptr; }},
      {"overlap", GDN_INVALID_ARGUMENT, [](Args& a) { a.y = const_cast<void*>(a.x); }},
  };
  FusedShape shape;
  shape.key_dim = shape.value_dim = 8;
  for (const Broken& broken : cases) {
    SCOPED_TRACE(broken.mentions);
    const FusedCall before(shape);
    FusedCall call(shape);
    gdn_fused_decode_args args = call.Args();
    broken.damage(args);
    EXPECT_EQ(gdn_fused_decode(&kRefExec, &args), broken.status);
    EXPECT_NE(std::string(gdn_last_error()).find(broken.mentions), std::string::npos)
        << gdn_last_error();
    EXPECT_EQ(call.y.bytes(), before.y.bytes());
    EXPECT_EQ(call.state.bytes(), before.state.bytes());
    EXPECT_EQ(call.conv_state.bytes(), before.conv_state.bytes());
  }
  FusedCall call(shape);
  const gdn_fused_decode_args args = call.Args();
  gdn_exec cpu{};
  cpu.backend = GDN_BACKEND_CPU;
  EXPECT_EQ(gdn_fused_decode(&cpu, &args), GDN_BACKEND_UNAVAILABLE);
  gdn_exec unknown{};
  unknown.backend = static_cast<gdn_backend>(3);
  EXPECT_EQ(gdn_fused_decode(&unknown, &args), GDN_BACKEND_UNAVAILABLE);
}

}  // namespace
}  // namespace gdn::kernels
