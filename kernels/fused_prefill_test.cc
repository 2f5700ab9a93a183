// The fused prefill's reference against the chain of the separate references, and its refusals.
#include "gdn/kernels/fused_prefill.h"

#include <cstdint>
#include <utility>
#include <vector>

#include "gdn/kernels/causal_conv.h"
#include "gdn/kernels/delta_rule.h"
#include "gdn/kernels/gated_rms_norm.h"
#include "gdn/kernels/gates.h"
#include "gtest/gtest.h"
#include "kernels/fused_decode_test_util.h"

namespace gdn::kernels {
namespace {

constexpr gdn_exec kExec{};

// Lengths 1 for all rows but the last, which takes the rest of the lines.
struct Prompt : FusedCall {
  explicit Prompt(const FusedShape& s) : FusedCall(s) {
    for (int64_t i = 0; i < s.rows; ++i) cu_seqlens.push_back(static_cast<int32_t>(i));
    cu_seqlens.push_back(static_cast<int32_t>(s.rows * s.tokens));
  }
  gdn_fused_prefill_args PrefillArgs() {
    gdn_fused_prefill_args args{};
    args.tokens = cu_seqlens.back();
    args.cu_seqlens = cu_seqlens.data();
    args.layer = Args();
    return args;
  }
  std::vector<int32_t> cu_seqlens;
};

FusedShape Shape() {
  FusedShape shape;
  shape.rows = 5;
  shape.tokens = 3;
  shape.key_dim = 16;
  shape.value_dim = 8;
  shape.dtype = GDN_F32;
  return shape;
}

// The separate ops, with FP32 between them.
void RunChain(Prompt& call) {
  const gdn_fused_prefill_args prefill = call.PrefillArgs();
  const gdn_fused_decode_args& a = prefill.layer;
  const FusedShape& s = call.shape;
  const auto tokens = static_cast<size_t>(prefill.tokens);
  std::vector<float> qkv(tokens * static_cast<size_t>(s.channels()));
  std::vector<float> g(tokens * static_cast<size_t>(s.value_heads()));
  std::vector<float> beta(g.size());
  std::vector<float> o(tokens * static_cast<size_t>(s.values()));
  const float* const x = static_cast<const float*>(a.x);

  gdn_causal_conv_args conv{};
  conv.sequences = a.rows;
  conv.cu_seqlens = prefill.cu_seqlens;
  conv.channels = conv.y_token_stride = s.channels();
  conv.width = static_cast<int32_t>(a.conv_width);
  conv.silu = 1;
  conv.x = x;
  conv.x_token_stride = a.x_token_stride;
  conv.weight = a.conv_weight;
  conv.y = qkv.data();
  conv.state = a.conv_state;
  conv.state_slot_stride = a.conv_slot_stride;
  conv.read_index = a.read_index;
  conv.write_index = a.write_index;
  conv.fresh = a.fresh;
  ASSERT_EQ(gdn_causal_conv(&kExec, &conv), GDN_OK) << gdn_last_error();

  gdn_gates_args gates{};
  gates.tokens = prefill.tokens;
  gates.value_heads = a.value_heads;
  gates.a = x + a.a_offset;
  gates.b = x + a.b_offset;
  gates.a_token_stride = gates.b_token_stride = a.x_token_stride;
  gates.a_log = a.a_log;
  gates.dt_bias = a.dt_bias;
  gates.beta_scale = a.beta_scale;
  gates.g = g.data();
  gates.beta = beta.data();
  ASSERT_EQ(gdn_gates(&kExec, &gates), GDN_OK) << gdn_last_error();

  gdn_delta_rule_args rule{};
  rule.sequences = a.rows;
  rule.cu_seqlens = prefill.cu_seqlens;
  rule.key_heads = a.key_heads;
  rule.value_heads = a.value_heads;
  rule.key_dim = a.key_dim;
  rule.value_dim = a.value_dim;
  rule.q = qkv.data();
  rule.k = qkv.data() + a.k_offset;
  rule.v = qkv.data() + a.v_offset;
  rule.q_token_stride = rule.k_token_stride = rule.v_token_stride = s.channels();
  rule.g = g.data();
  rule.beta = beta.data();
  rule.use_qk_l2norm = a.use_qk_l2norm;
  rule.state = a.state;
  rule.state_dtype = a.state_dtype;
  rule.state_slot_stride = a.state_slot_stride;
  rule.read_index = a.read_index;
  rule.write_index = a.write_index;
  rule.fresh = a.fresh;
  rule.o = o.data();
  rule.o_token_stride = s.values();
  ASSERT_EQ(gdn_delta_rule_prefill(&kExec, &rule), GDN_OK) << gdn_last_error();

  gdn_gated_rms_norm_args norm{};
  norm.tokens = prefill.tokens;
  norm.heads = a.value_heads;
  norm.dim = a.value_dim;
  norm.x = o.data();
  norm.x_token_stride = s.values();
  norm.x_head_stride = norm.gate_head_stride = norm.y_head_stride = a.value_dim;
  norm.gate = x + a.z_offset;
  norm.gate_token_stride = a.x_token_stride;
  norm.weight = a.norm_weight;
  norm.activation = a.activation;
  norm.eps = a.eps;
  norm.y = a.y;
  norm.y_token_stride = a.y_token_stride;
  ASSERT_EQ(gdn_gated_rms_norm(&kExec, &norm), GDN_OK) << gdn_last_error();
}

TEST(FusedPrefillRef, EqualsTheSeparateOps) {
  for (uint32_t seed : {1, 2}) {
    FusedShape shape = Shape();
    shape.seed = seed;
    const Prompt before(shape);
    Prompt fused = before;
    const gdn_fused_prefill_args args = fused.PrefillArgs();
    ASSERT_EQ(gdn_fused_prefill(&kExec, &args), GDN_OK) << gdn_last_error();
    Prompt chain = before;
    RunChain(chain);
    RelativeL2 y;
    for (int64_t t = 0; t < args.tokens; ++t) {
      for (int64_t j = 0; j < shape.values(); ++j) {
        const int64_t at = t * shape.y_stride() + j;
        y.Add(fused.y.Get(at), chain.y.Get(at));
      }
    }
    EXPECT_LE(y.value(), 2e-6);
    const FusedErrors errors = Compare(before, fused, chain);
    EXPECT_LE(errors.state, 2e-6);
    EXPECT_EQ(errors.slots_touched + errors.conv_differs + errors.pads_touched, 0);
  }
}

TEST(FusedPrefillRef, AnEmptySequenceForksAndOtherwiseKeepsItsState) {
  FusedShape shape = Shape();
  const Prompt before(shape);
  Prompt call = before;
  call.cu_seqlens.assign(6, 0);  // Row 1 forks, row 2 is fresh.
  const gdn_fused_prefill_args args = call.PrefillArgs();
  ASSERT_EQ(gdn_fused_prefill(&kExec, &args), GDN_OK) << gdn_last_error();
  const auto slot = [&](const FusedCall& of, int64_t index) {
    const int64_t begin = index * shape.state_stride();
    return of.state.Slice(begin, begin + shape.values() * shape.key_dim);
  };
  EXPECT_EQ(slot(call, call.write[1]), slot(before, before.read[1]));
  EXPECT_EQ(slot(call, call.write[0]), slot(before, before.read[0]));
  EXPECT_EQ(slot(call, call.write[2]), slot(before, before.read[2]));
  EXPECT_TRUE(call.y.bytes() == before.y.bytes());
}

TEST(FusedPrefillRef, CheckpointsAreTheStatesAfterPrefixes) {
  FusedShape shape = Shape();
  shape.rows = 2;
  shape.tokens = 100;
  shape.special_rows = false;
  const Prompt before(shape);  // A token, then 199.
  Prompt call = before;
  gdn_fused_prefill_args args = call.PrefillArgs();
  const std::vector<int64_t> begin = {0, 0};
  std::vector<int64_t> slots;
  for (int64_t slot = 0; slots.size() < 3; ++slot) {
    if (slot != call.write[0] && slot != call.write[1]) slots.push_back(slot);
  }
  const int64_t unwanted = slots[1];
  slots[1] = -1;
  args.checkpoint_every = 64;
  args.checkpoint_begin = begin.data();
  args.checkpoint_slots = slots.data();
  ASSERT_EQ(gdn_fused_prefill(&kExec, &args), GDN_OK) << gdn_last_error();
  const auto state = [&](const FusedCall& of, int64_t slot) {
    const int64_t at = slot * shape.state_stride();
    return of.state.Slice(at, at + shape.values() * shape.key_dim);
  };
  const auto conv = [&](const FusedCall& of, int64_t slot) {
    const int64_t at = slot * shape.conv_stride();
    return of.conv_state.Slice(at, at + (shape.conv_width - 1) * shape.channels());
  };
  EXPECT_EQ(state(call, unwanted), state(before, unwanted));
  for (int32_t length : {64, 192, 199}) {
    Prompt prefix = before;
    prefix.cu_seqlens = {0, 1, 1 + length};
    const gdn_fused_prefill_args prefix_args = prefix.PrefillArgs();
    ASSERT_EQ(gdn_fused_prefill(&kExec, &prefix_args), GDN_OK) << gdn_last_error();
    const int64_t slot = length == 199 ? call.write[1] : slots[length / 64 - 1];
    // A checkpoint rounds the state, from which the rest goes on.
    RelativeL2 error;
    for (int64_t e = 0; e < shape.values() * shape.key_dim; ++e) {
      error.Add(call.state.Get(slot * shape.state_stride() + e),
                prefix.state.Get(prefix.write[1] * shape.state_stride() + e));
    }
    EXPECT_LE(error.value(), 1e-6) << length;
    EXPECT_EQ(conv(call, slot), conv(prefix, prefix.write[1])) << length;
  }
}

TEST(FusedPrefillRef, RefusesWhatItCannotRun) {
  Prompt call(Shape());
  const gdn_fused_prefill_args args = call.PrefillArgs();
  gdn_exec cpu{};
  cpu.backend = GDN_BACKEND_CPU;
  EXPECT_EQ(gdn_fused_prefill(&cpu, &args), GDN_BACKEND_UNAVAILABLE);
  size_t bytes = 7;
  EXPECT_EQ(gdn_fused_prefill_workspace(&cpu, &args, &bytes), GDN_BACKEND_UNAVAILABLE);
  EXPECT_EQ(gdn_fused_prefill_workspace(&kExec, &args, &bytes), GDN_OK);
  EXPECT_EQ(bytes, 0u);
  EXPECT_EQ(gdn_fused_prefill_workspace(&kExec, &args, nullptr), GDN_INVALID_ARGUMENT);
  gdn_fused_prefill_args bad = args;
  bad.tokens = args.tokens - 1;
  EXPECT_EQ(gdn_fused_prefill(&kExec, &bad), GDN_INVALID_ARGUMENT);
  bad = args;
  bad.tokens = -1;
  EXPECT_EQ(gdn_fused_prefill(&kExec, &bad), GDN_INVALID_ARGUMENT);
  bad = args;
  bad.cu_seqlens = nullptr;
  EXPECT_EQ(gdn_fused_prefill(&kExec, &bad), GDN_INVALID_ARGUMENT);
  bad = args;
  bad.checkpoint_every = 96;
  EXPECT_EQ(gdn_fused_prefill(&kExec, &bad), GDN_INVALID_ARGUMENT);
  bad.checkpoint_every = 64;
  EXPECT_EQ(gdn_fused_prefill(&kExec, &bad), GDN_INVALID_ARGUMENT);  // Without slots.
  bad = args;
  bad.layer.state_dtype = GDN_F16;
  EXPECT_EQ(gdn_fused_prefill(&kExec, &bad), GDN_UNSUPPORTED_TYPE);
  bad = args;
  bad.layer.z_offset = args.layer.x_token_stride;
  EXPECT_EQ(gdn_fused_prefill(&kExec, &bad), GDN_INVALID_ARGUMENT);
  bad = args;
  bad.layer.tokens = -5;  // Not read.
  EXPECT_EQ(gdn_fused_prefill(&kExec, &bad), GDN_OK) << gdn_last_error();
}

}  // namespace
}  // namespace gdn::kernels
