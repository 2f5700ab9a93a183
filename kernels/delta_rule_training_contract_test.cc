// What the delta rule's training ops refuse, and the bytes that they keep.
#include <cmath>
#include <limits>
#include <vector>

#include "gdn/kernels/delta_rule_backward.h"
#include "gdn/kernels/delta_rule_forward.h"
#include "gdn/kernels/delta_rule_saved.h"
#include "gtest/gtest.h"
#include "kernels/place_test_util.h"
#include "kernels/recurrence_test_util.h"
#include "kernels/refusal_test_util.h"

namespace gdn::kernels {
namespace {

const auto kBad = GDN_INVALID_ARGUMENT;
const int32_t kOneTokenEach[] = {0, 1, 2};
const int32_t kStartsAtOne[] = {1, 2, 2};
const int32_t kDecreases[] = {0, 2, 1};

// T17: malformed offsets. On a device only the kernels read them: their contents are the caller's.
template <typename Args>
std::vector<Misuse<Args>> OffsetMisuses() {
  if (DeviceMemoryUnderTest() != nullptr) return {};
  return {{"cu_seqlens[0]", kBad, [](Args& a) { a.cu_seqlens = kStartsAtOne; }},
          {"cu_seqlens", kBad, [](Args& a) { a.cu_seqlens = kDecreases; }}};
}

template <typename Args>
std::vector<Misuse<Args>> RuleMisuses() {
  const auto shape = GDN_UNSUPPORTED_SHAPE;
  return {{"sequences", kBad, [](Args& a) { a.sequences = -1; }},
          {"cu_seqlens", kBad, [](Args& a) { a.cu_seqlens = nullptr; }},
          {"key_heads", kBad, [](Args& a) { a.key_heads = 0; }},
          {"value_heads", kBad, [](Args& a) { a.value_heads = 5; }},
          {"value_heads", shape, [](Args& a) { a.value_heads = 18; }},
          {"key_dim", kBad, [](Args& a) { a.key_dim = 0; }},
          {"key_dim", shape, [](Args& a) { a.key_dim = 257; }},
          {"value_dim", shape, [](Args& a) { a.value_dim = 513; }},
          {"qkv_dtype", kBad, [](Args& a) { a.qkv_dtype = kBadDtype; }},
          {"q_token_stride", kBad, [](Args& a) { a.q_token_stride = 15; }},
          {"k_token_stride", kBad, [](Args& a) { a.k_token_stride = 15; }},
          {"v_token_stride", kBad, [](Args& a) { a.v_token_stride = 19; }},
          {"scale", kBad, [](Args& a) { a.scale = NAN; }},
          {"q must", kBad, [](Args& a) { a.q = nullptr; }},
          {"k must", kBad, [](Args& a) { a.k = nullptr; }},
          {"v must", kBad, [](Args& a) { a.v = nullptr; }},
          {"g must", kBad, [](Args& a) { a.g = nullptr; }},
          {"beta must", kBad, [](Args& a) { a.beta = nullptr; }},
          {"q_rstd must", kBad, [](Args& a) { a.q_rstd = nullptr; }},
          {"k_rstd must", kBad, [](Args& a) { a.k_rstd = nullptr; }}};
}

template <typename Args>
void Append(std::vector<Misuse<Args>>& cases, const std::vector<Misuse<Args>>& more) {
  cases.insert(cases.end(), more.begin(), more.end());
}

// Without a workspace every back end under test refuses the call, but REF's forward, which needs
// none.
template <typename Args>
void ExpectWorkspaceRefusals(const Args& good, gdn_status (*call)(const gdn_exec*, const Args*),
                             bool ref) {
  for (const gdn_backend backend : CheckingPlaces()) {
    if (backend == GDN_BACKEND_REF && !ref) continue;
    const Execution execution({"", backend, 0});
    EXPECT_EQ(call(execution.exec(), &good), GDN_WORKSPACE_TOO_SMALL) << backend;
  }
}

// Two sequences of one token, H 2, HV 4, K 8, V 5.
template <typename Args>
Args GoodArgs(const Tensor& in) {
  Args good{};
  good.sequences = 2;
  good.cu_seqlens = kOneTokenEach;
  good.key_heads = 2;
  good.value_heads = 4;
  good.key_dim = 8;
  good.value_dim = 5;
  good.q = good.k = good.v = in.data();
  good.q_token_stride = good.k_token_stride = 16;
  good.v_token_stride = 20;
  good.g = good.beta = static_cast<const float*>(in.data());
  good.use_qk_l2norm = 1;
  return good;
}

TEST(Misuse, DeltaRuleForward) {
  Tensor in(GDN_F32, 200), o(GDN_F32, 40), hats(GDN_F32, 64), rstds(GDN_F32, 8);
  using Args = gdn_delta_rule_forward_args;
  auto good = GoodArgs<Args>(in);
  good.o = o.data();
  good.o_token_stride = 20;
  good.q_hat = hats.data();
  good.k_hat = static_cast<float*>(hats.data()) + 32;
  good.q_rstd = static_cast<float*>(rstds.data());
  good.k_rstd = good.q_rstd + 4;
  std::vector<Misuse<Args>> cases = RuleMisuses<Args>();
  cases.push_back({"o_dtype", kBad, [](Args& a) { a.o_dtype = kBadDtype; }});
  cases.push_back({"o_token_stride", kBad, [](Args& a) { a.o_token_stride = 19; }});
  cases.push_back({"o must", kBad, [](Args& a) { a.o = nullptr; }});
  cases.push_back({"q_hat must", kBad, [](Args& a) { a.q_hat = nullptr; }});
  cases.push_back({"k_hat must", kBad, [](Args& a) { a.k_hat = nullptr; }});
  cases.push_back({"overlap", kBad, [](Args& a) { a.k_hat = a.q_hat; }});
  Append(cases, OffsetMisuses<Args>());
  ExpectRefusals<Args>(good, {&o, &hats, &rstds}, gdn_delta_rule_forward, cases, CheckingPlaces());
  ExpectWorkspaceRefusals(good, gdn_delta_rule_forward, /*ref=*/false);
}

TEST(Misuse, DeltaRuleBackward) {
  Tensor in(GDN_F32, 200), d_q(GDN_F32, 32), d_k(GDN_F32, 32), d_v(GDN_F32, 40);
  Tensor gates(GDN_F32, 16);
  using Args = gdn_delta_rule_backward_args;
  auto good = GoodArgs<Args>(in);
  good.tokens = 2;
  good.q_rstd = good.k_rstd = good.g;
  good.d_o = in.data();
  good.d_o_token_stride = good.d_v_token_stride = 20;
  good.d_q_token_stride = good.d_k_token_stride = 16;
  good.d_q = d_q.data();
  good.d_k = d_k.data();
  good.d_v = d_v.data();
  good.d_g = static_cast<float*>(gates.data());
  good.d_beta = good.d_g + 8;
  std::vector<Misuse<Args>> cases = RuleMisuses<Args>();
  Append(cases, OffsetMisuses<Args>());
  if (DeviceMemoryUnderTest() == nullptr) {
    cases.push_back({"cu_seqlens must end", kBad, [](Args& a) { a.tokens = 1; }});
  }
  const std::vector<Misuse<Args>> more = {
      {"tokens", kBad, [](Args& a) { a.tokens = -1; }},
      {"d_o_dtype", kBad, [](Args& a) { a.d_o_dtype = kBadDtype; }},
      {"d_qkv_dtype", kBad, [](Args& a) { a.d_qkv_dtype = kBadDtype; }},
      {"d_o_token_stride", kBad, [](Args& a) { a.d_o_token_stride = 19; }},
      {"d_q_token_stride", kBad, [](Args& a) { a.d_q_token_stride = 15; }},
      {"d_k_token_stride", kBad, [](Args& a) { a.d_k_token_stride = 15; }},
      {"d_v_token_stride", kBad, [](Args& a) { a.d_v_token_stride = 19; }},
      {"d_o must", kBad, [](Args& a) { a.d_o = nullptr; }},
      {"d_q must", kBad, [](Args& a) { a.d_q = nullptr; }},
      {"d_k must", kBad, [](Args& a) { a.d_k = nullptr; }},
      {"d_v must", kBad, [](Args& a) { a.d_v = nullptr; }},
      {"d_g must", kBad, [](Args& a) { a.d_g = nullptr; }},
      {"d_beta must", kBad, [](Args& a) { a.d_beta = nullptr; }},
      {"overlap", kBad, [](Args& a) { a.q = a.d_q; }},
      {"overlap", kBad, [](Args& a) { a.d_q = a.d_k; }}};
  Append(cases, more);
  ExpectRefusals<Args>(good, {&d_q, &d_k, &d_v, &gates}, gdn_delta_rule_backward, cases,
                       CheckingPlaces());
  ExpectWorkspaceRefusals(good, gdn_delta_rule_backward, /*ref=*/true);
}

gdn_delta_rule_saved_args PublishedShape(int64_t tokens) {
  gdn_delta_rule_saved_args args{};
  args.tokens = tokens;
  args.sequences = 1;
  args.key_heads = 16;
  args.value_heads = 32;
  args.key_dim = args.value_dim = 128;
  args.dtype = GDN_BF16;
  args.replicated_heads = 1;
  args.chunk = 64;
  return args;
}

int64_t TotalBytes(gdn_delta_rule_saved_args args, gdn_saved_route route) {
  args.route = route;
  gdn_delta_rule_saved_bytes_result bytes{};
  EXPECT_EQ(gdn_delta_rule_saved_bytes(&args, &bytes), GDN_OK) << gdn_last_error();
  EXPECT_EQ(bytes.total, bytes.qk + bytes.qk_rstd + bytes.v + bytes.g + bytes.beta +
                             bytes.chunk_inverse + bytes.initial_state + bytes.cu_seqlens +
                             bytes.caller_qk + bytes.caller_rstd);
  return bytes.total;
}

// A10: with heads replicated before the rule, the kernel's norm keeps 8064 bytes a token fewer:
// 1008 MiB a layer at 131072 tokens.
TEST(DeltaRuleSaved, A10KernelRouteKeeps8064BytesATokenFewer) {
  for (int64_t tokens : {1, 4096, 131072}) {
    const auto args = PublishedShape(tokens);
    EXPECT_EQ(TotalBytes(args, GDN_SAVED_CALLER_NORM) - TotalBytes(args, GDN_SAVED_KERNEL_NORM),
              8064 * tokens);
  }
  EXPECT_EQ(int64_t{8064} * 131072, int64_t{1008} << 20);
}

// Where the rule reads shared heads through strides there is no second tensor to save: what remains
// is that replication doubled q, k and the rstd.
TEST(DeltaRuleSaved, A6SharedHeadsKeepTheSameBytesOnBothRoutes) {
  auto args = PublishedShape(4096);
  args.replicated_heads = 0;
  const int64_t caller = TotalBytes(args, GDN_SAVED_CALLER_NORM);
  EXPECT_EQ(caller, TotalBytes(args, GDN_SAVED_KERNEL_NORM));
  args.replicated_heads = 1;
  // q and k of 16 more heads in BF16, and their rstd.
  EXPECT_EQ(TotalBytes(args, GDN_SAVED_KERNEL_NORM) - caller,
            int64_t{4096} * (2 * 16 * 128 * 2 + 2 * 16 * 4));
}

// A9: each saved tensor, and nothing else.
TEST(DeltaRuleSaved, A9ListsEverySavedTensor) {
  auto args = PublishedShape(10);
  args.route = GDN_SAVED_KERNEL_NORM;
  args.replicated_heads = 0;
  args.initial_state = 1;
  gdn_delta_rule_saved_bytes_result bytes{};
  ASSERT_EQ(gdn_delta_rule_saved_bytes(&args, &bytes), GDN_OK);
  EXPECT_EQ(bytes.qk, 2 * 10 * 16 * 128 * 2);
  EXPECT_EQ(bytes.qk_rstd, 2 * 10 * 16 * 4);
  EXPECT_EQ(bytes.v, 10 * 32 * 128 * 2);
  EXPECT_EQ(bytes.g, 10 * 32 * 4);
  EXPECT_EQ(bytes.beta, 10 * 32 * 4);
  EXPECT_EQ(bytes.chunk_inverse, 10 * 32 * 64 * 2);
  EXPECT_EQ(bytes.initial_state, 32 * 128 * 128 * 4);
  EXPECT_EQ(bytes.cu_seqlens, 8);
  EXPECT_EQ(bytes.caller_qk, 0);
  EXPECT_EQ(bytes.caller_rstd, 0);
}

TEST(DeltaRuleSaved, RefusesWhatItCannotCount) {
  using Args = gdn_delta_rule_saved_args;
  const std::vector<Misuse<Args>> cases = {
      {"tokens", kBad, [](Args& a) { a.tokens = -1; }},
      {"sequences", kBad, [](Args& a) { a.sequences = -1; }},
      {"key_heads", kBad, [](Args& a) { a.key_heads = 0; }},
      {"value_heads", kBad, [](Args& a) { a.value_heads = 33; }},
      {"key_dim", kBad, [](Args& a) { a.key_dim = 0; }},
      {"value_dim", kBad, [](Args& a) { a.value_dim = 0; }},
      {"chunk", kBad, [](Args& a) { a.chunk = -1; }},
      {"dtype", kBad, [](Args& a) { a.dtype = kBadDtype; }},
      {"route", kBad, [](Args& a) { a.route = static_cast<gdn_saved_route>(3); }},
      {"64 bits", kBad, [](Args& a) { a.tokens = a.key_dim = int64_t{1} << 40; }}};
  for (const auto& misuse : cases) {
    Args args = PublishedShape(1);
    misuse.damage(args);
    gdn_delta_rule_saved_bytes_result bytes{};
    bytes.total = 77;
    EXPECT_EQ(gdn_delta_rule_saved_bytes(&args, &bytes), misuse.status) << misuse.name;
    EXPECT_NE(std::string(gdn_last_error()).find(misuse.name), std::string::npos) << misuse.name;
    EXPECT_EQ(bytes.total, 77);
  }
  EXPECT_EQ(gdn_delta_rule_saved_bytes(nullptr, nullptr), kBad);
}

}  // namespace
}  // namespace gdn::kernels
