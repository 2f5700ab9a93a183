// Every validated argument of the recurrence family: refused with its status and a message that
// names it, and no output is touched.
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "gdn/kernels/causal_conv.h"
#include "gdn/kernels/delta_rule.h"
#include "gdn/kernels/gates.h"
#include "gdn/kernels/l2_norm.h"
#include "gtest/gtest.h"
#include "kernels/recurrence_test_util.h"
#include "kernels/refusal_test_util.h"

namespace gdn::kernels {
namespace {

TEST(Misuse, L2Norm) {
  Tensor x(GDN_F32, 20);
  Tensor y(GDN_F32, 20);
  Tensor rstd(GDN_F32, 2);
  using Args = gdn_l2_norm_args;
  const Args good{
      2,     10,  x.data(), GDN_F32, 10, y.data(), GDN_F32, 10, static_cast<float*>(rstd.data()),
      1e-6f, 1.0f};
  const auto bad = GDN_INVALID_ARGUMENT;
  ExpectRefusals<Args>(good, {&y, &rstd}, gdn_l2_norm,
                       {{"rows", bad, [](Args& a) { a.rows = -1; }},
                        {"dim", bad, [](Args& a) { a.dim = 0; }},
                        {"dim", bad, [](Args& a) { a.dim = int64_t{1} << 62; }},
                        {"x must", bad, [](Args& a) { a.x = nullptr; }},
                        {"y must", bad, [](Args& a) { a.y = nullptr; }},
                        {"x_dtype", bad, [](Args& a) { a.x_dtype = kBadDtype; }},
                        {"y_dtype", bad, [](Args& a) { a.y_dtype = kBadDtype; }},
                        {"x_row_stride", bad, [](Args& a) { a.x_row_stride = 9; }},
                        {"y_row_stride", bad, [](Args& a) { a.y_row_stride = -10; }},
                        {"in place", bad, [](Args& a) { a.x = a.y, a.x_row_stride = 11; }},
                        {"in place", bad, [](Args& a) { a.x = a.y, a.x_dtype = GDN_BF16; }},
                        {"eps", bad, [](Args& a) { a.eps = -1e-6f; }},
                        {"eps", bad, [](Args& a) { a.eps = NAN; }},
                        {"scale", bad, [](Args& a) { a.scale = INFINITY; }}});
}

TEST(Misuse, Gates) {
  Tensor in(GDN_F32, 20);
  Tensor g(GDN_F32, 20);
  Tensor beta(GDN_F32, 20);
  const auto* values = static_cast<const float*>(in.data());
  using Args = gdn_gates_args;
  const Args good{2,
                  10,
                  values,
                  values,
                  GDN_F32,
                  10,
                  10,
                  values,
                  values,
                  1.0f,
                  static_cast<float*>(g.data()),
                  static_cast<float*>(beta.data())};
  const auto bad = GDN_INVALID_ARGUMENT;
  ExpectRefusals<Args>(good, {&g, &beta}, gdn_gates,
                       {{"tokens", bad, [](Args& a) { a.tokens = -1; }},
                        {"value_heads", bad, [](Args& a) { a.value_heads = 0; }},
                        {"a must", bad, [](Args& a) { a.a = nullptr; }},
                        {"b must", bad, [](Args& a) { a.b = nullptr; }},
                        {"dtype", bad, [](Args& a) { a.dtype = kBadDtype; }},
                        {"a_token_stride", bad, [](Args& a) { a.a_token_stride = 9; }},
                        {"b_token_stride", bad, [](Args& a) { a.b_token_stride = 0; }},
                        {"a_log", bad, [](Args& a) { a.a_log = nullptr; }},
                        {"dt_bias", bad, [](Args& a) { a.dt_bias = nullptr; }},
                        {"beta_scale", bad, [](Args& a) { a.beta_scale = NAN; }},
                        {"g must", bad, [](Args& a) { a.g = nullptr; }},
                        {"beta must", bad, [](Args& a) { a.beta = nullptr; }}});
}

const int32_t kStartsAtOne[] = {1, 2, 2};
const int32_t kDecreases[] = {0, 2, 1};

TEST(Misuse, CausalConv) {
  Tensor x(GDN_F32, 20);
  Tensor weight(GDN_F32, 40);
  Tensor y(GDN_F32, 20);
  Tensor state(GDN_F32, 60);
  const std::vector<int32_t> cu = {0, 1, 2};
  const std::vector<int64_t> slots = {0, 1};
  using Args = gdn_causal_conv_args;
  Args good{};
  good.sequences = 2;
  good.cu_seqlens = cu.data();
  good.channels = 10;
  good.width = 4;
  good.x = x.data();
  good.weight = static_cast<const float*>(weight.data());
  good.y = y.data();
  good.x_token_stride = good.y_token_stride = 10;
  good.state = state.data();
  good.state_slot_stride = 30;
  good.read_index = good.write_index = slots.data();
  const auto bad = GDN_INVALID_ARGUMENT;
  ExpectRefusals<Args>(good, {&y, &state}, gdn_causal_conv,
                       {{"sequences", bad, [](Args& a) { a.sequences = -1; }},
                        {"cu_seqlens[0]", bad, [](Args& a) { a.cu_seqlens = kStartsAtOne; }},
                        {"cu_seqlens", bad, [](Args& a) { a.cu_seqlens = kDecreases; }},
                        {"channels", bad, [](Args& a) { a.channels = 0; }},
                        {"width", bad, [](Args& a) { a.width = 0; }},
                        {"width", GDN_UNSUPPORTED_SHAPE, [](Args& a) { a.width = 1; }},
                        {"width", GDN_UNSUPPORTED_SHAPE, [](Args& a) { a.width = 9; }},
                        {"x must", bad, [](Args& a) { a.x = nullptr; }},
                        {"x_dtype", bad, [](Args& a) { a.x_dtype = kBadDtype; }},
                        {"x_token_stride", bad, [](Args& a) { a.x_token_stride = 9; }},
                        {"weight", bad, [](Args& a) { a.weight = nullptr; }},
                        {"y must", bad, [](Args& a) { a.y = nullptr; }},
                        {"overlap", bad, [](Args& a) { a.x = a.y; }},
                        {"y_dtype", bad, [](Args& a) { a.y_dtype = kBadDtype; }},
                        {"y_token_stride", bad, [](Args& a) { a.y_token_stride = -1; }},
                        {"state must", bad, [](Args& a) { a.state = nullptr; }},
                        {"state_slot_stride", bad, [](Args& a) { a.state_slot_stride = 29; }},
                        {"read_index", bad, [](Args& a) { a.read_index = nullptr; }},
                        {"write_index", bad, [](Args& a) { a.write_index = nullptr; }}});
}

TEST(Misuse, DeltaRule) {
  Tensor in(GDN_F32, 200);
  Tensor o(GDN_F32, 2 * 4 * 5);
  Tensor state(GDN_F32, 2 * 4 * 5 * 8);
  const std::vector<int32_t> cu = {0, 1, 2};
  const std::vector<int64_t> slots = {0, 1};
  const auto* values = static_cast<const float*>(in.data());
  using Args = gdn_delta_rule_args;
  Args good{};
  good.sequences = 2;
  good.cu_seqlens = cu.data();
  good.key_heads = 2;
  good.value_heads = 4;
  good.key_dim = 8;
  good.value_dim = 5;
  good.q = good.k = good.v = values;
  good.q_token_stride = good.k_token_stride = 16;
  good.v_token_stride = good.o_token_stride = 20;
  good.g = good.beta = values;
  good.state = state.data();
  good.state_slot_stride = 160;
  good.read_index = good.write_index = slots.data();
  good.o = o.data();
  const auto bad = GDN_INVALID_ARGUMENT;
  const auto shape = GDN_UNSUPPORTED_SHAPE;
  const std::vector<Misuse<Args>> shapes = {
      {"sequences", bad, [](Args& a) { a.sequences = -1; }},
      {"key_heads", bad, [](Args& a) { a.key_heads = 0; }},
      {"value_heads", bad, [](Args& a) { a.value_heads = 0; }},
      {"value_heads", bad, [](Args& a) { a.value_heads = 5; }},
      {"value_heads", shape, [](Args& a) { a.value_heads = 18; }},
      {"key_dim", bad, [](Args& a) { a.key_dim = 0; }},
      {"key_dim", shape, [](Args& a) { a.key_dim = 257; }},
      {"value_dim", bad, [](Args& a) { a.value_dim = -3; }},
      {"value_dim", shape, [](Args& a) { a.value_dim = 513; }},
      {"qkv_dtype", bad, [](Args& a) { a.qkv_dtype = kBadDtype; }},
      {"o_dtype", bad, [](Args& a) { a.o_dtype = kBadDtype; }},
      {"state_dtype", bad, [](Args& a) { a.state_dtype = kBadDtype; }},
      {"state_dtype", GDN_UNSUPPORTED_TYPE, [](Args& a) { a.state_dtype = GDN_F16; }}};
  std::vector<Misuse<Args>> step = shapes;
  const std::vector<Misuse<Args>> buffers = {
      {"q must", bad, [](Args& a) { a.q = nullptr; }},
      {"k must", bad, [](Args& a) { a.k = nullptr; }},
      {"v must", bad, [](Args& a) { a.v = nullptr; }},
      {"q_token_stride", bad, [](Args& a) { a.q_token_stride = 15; }},
      {"k_token_stride", bad, [](Args& a) { a.k_token_stride = 15; }},
      {"v_token_stride", bad, [](Args& a) { a.v_token_stride = 19; }},
      {"g must", bad, [](Args& a) { a.g = nullptr; }},
      {"beta must", bad, [](Args& a) { a.beta = nullptr; }},
      {"scale", bad, [](Args& a) { a.scale = NAN; }},
      {"state must", bad, [](Args& a) { a.state = nullptr; }},
      {"state_slot_stride", bad, [](Args& a) { a.state_slot_stride = 159; }},
      {"read_index", bad, [](Args& a) { a.read_index = nullptr; }},
      {"write_index", bad, [](Args& a) { a.write_index = nullptr; }},
      {"o must", bad, [](Args& a) { a.o = nullptr; }},
      {"o_token_stride", bad, [](Args& a) { a.o_token_stride = 19; }}};
  step.insert(step.end(), buffers.begin(), buffers.end());
  ExpectRefusals<Args>(good, {&o, &state}, gdn_delta_rule_step, step);
  std::vector<Misuse<Args>> prefill = step;
  prefill.push_back({"cu_seqlens", bad, [](Args& a) { a.cu_seqlens = nullptr; }});
  prefill.push_back({"cu_seqlens[0]", bad, [](Args& a) { a.cu_seqlens = kStartsAtOne; }});
  prefill.push_back({"cu_seqlens", bad, [](Args& a) { a.cu_seqlens = kDecreases; }});
  o = Tensor(GDN_F32, o.size());
  state = Tensor(GDN_F32, state.size());
  good.o = o.data();
  good.state = state.data();
  ExpectRefusals<Args>(good, {&o, &state}, gdn_delta_rule_prefill, prefill);

  Execution execution({"", GDN_BACKEND_CPU, 0});
  for (auto* query : {gdn_delta_rule_step_workspace, gdn_delta_rule_prefill_workspace}) {
    size_t bytes = 12345;
    for (const Misuse<Args>& misuse : shapes) {
      Args args = good;
      misuse.damage(args);
      EXPECT_EQ(query(execution.exec(), &args, &bytes), misuse.status) << misuse.name;
    }
    EXPECT_EQ(query(nullptr, &good, &bytes), bad);
    EXPECT_EQ(query(execution.exec(), nullptr, &bytes), bad);
    EXPECT_EQ(bytes, 12345u);
    EXPECT_EQ(query(execution.exec(), &good, nullptr), bad);
    Args no_pointers{};
    no_pointers.sequences = 2;
    no_pointers.key_heads = no_pointers.value_heads = 1;
    no_pointers.key_dim = no_pointers.value_dim = 8;
    EXPECT_EQ(query(execution.exec(), &no_pointers, &bytes), GDN_OK) << gdn_last_error();
  }
}

TEST(Misuse, DeltaRulePrefillWorkspace) {
  Tensor in(GDN_F32, 64);
  Tensor o(GDN_F32, 16);
  Tensor state(GDN_F32, 64);
  const std::vector<int32_t> cu = {0, 2};
  const std::vector<int64_t> slots = {0};
  gdn_delta_rule_args args{};
  args.sequences = 1;
  args.cu_seqlens = cu.data();
  args.key_heads = args.value_heads = 1;
  args.key_dim = args.value_dim = 8;
  args.q = args.k = args.v = in.data();
  args.g = args.beta = static_cast<const float*>(in.data());
  args.q_token_stride = args.k_token_stride = args.v_token_stride = args.o_token_stride = 8;
  args.state = state.data();
  args.state_slot_stride = 64;
  args.read_index = args.write_index = slots.data();
  args.o = o.data();
  Execution execution({"", GDN_BACKEND_CPU, 2});
  size_t bytes = 0;
  ASSERT_EQ(gdn_delta_rule_prefill_workspace(execution.exec(), &args, &bytes), GDN_OK);
  ASSERT_GT(bytes, 0u);
  execution.SetWorkspace(bytes + 64);
  const std::vector<uint8_t> o_before = o.bytes();
  const std::vector<uint8_t> state_before = state.bytes();
  gdn_exec exec = *execution.exec();
  exec.workspace_bytes = bytes - 1;
  EXPECT_EQ(gdn_delta_rule_prefill(&exec, &args), GDN_WORKSPACE_TOO_SMALL);
  EXPECT_NE(std::string(gdn_last_error()).find(std::to_string(bytes)), std::string::npos);
  exec.workspace_bytes = bytes;
  exec.workspace = static_cast<char*>(execution.exec()->workspace) + 4;
  EXPECT_EQ(gdn_delta_rule_prefill(&exec, &args), GDN_INVALID_ARGUMENT);
  exec.workspace = nullptr;
  EXPECT_EQ(gdn_delta_rule_prefill(&exec, &args), GDN_WORKSPACE_TOO_SMALL);
  EXPECT_EQ(o.bytes(), o_before);
  EXPECT_EQ(state.bytes(), state_before);
  exec.workspace = execution.exec()->workspace;
  EXPECT_EQ(gdn_delta_rule_prefill(&exec, &args), GDN_OK) << gdn_last_error();
}

// Nothing to do is not an error, and needs no pointer.
TEST(Misuse, EmptyCallsNeedNoPointers) {
  for (gdn_backend backend : {GDN_BACKEND_REF, GDN_BACKEND_CPU}) {
    Execution execution({"", backend, 0});
    execution.SetWorkspace(1 << 20);
    gdn_l2_norm_args l2{};
    l2.dim = l2.x_row_stride = l2.y_row_stride = 4;
    EXPECT_EQ(gdn_l2_norm(execution.exec(), &l2), GDN_OK) << gdn_last_error();
    gdn_gates_args gates{};
    gates.value_heads = gates.a_token_stride = gates.b_token_stride = 4;
    EXPECT_EQ(gdn_gates(execution.exec(), &gates), GDN_OK) << gdn_last_error();
    gdn_causal_conv_args conv{};
    conv.channels = conv.x_token_stride = conv.y_token_stride = 4;
    conv.width = 4;
    conv.state_slot_stride = 12;
    EXPECT_EQ(gdn_causal_conv(execution.exec(), &conv), GDN_OK) << gdn_last_error();
    gdn_delta_rule_args delta{};
    delta.key_heads = delta.value_heads = 1;
    delta.key_dim = delta.value_dim = 4;
    delta.q_token_stride = delta.k_token_stride = 4;
    delta.v_token_stride = delta.o_token_stride = 4;
    delta.state_slot_stride = 16;
    EXPECT_EQ(gdn_delta_rule_step(execution.exec(), &delta), GDN_OK) << gdn_last_error();
    EXPECT_EQ(gdn_delta_rule_prefill(execution.exec(), &delta), GDN_OK) << gdn_last_error();
  }
}

}  // namespace
}  // namespace gdn::kernels
