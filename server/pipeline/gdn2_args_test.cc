// Which columns the ops of a gdn2 layer take, and where q and k are normalised: twice would not
// show in any value, so the flags themselves are asserted.
#include "server/pipeline/gdn2_args.h"

#include <gtest/gtest.h>

#include <vector>

namespace gdn::pipeline {
namespace {

model::ModelSpec Spec() {
  model::ModelSpec spec;
  spec.gdn = {.key_heads = 2, .value_heads = 6, .key_dim = 5, .value_dim = 7, .conv_width = 4};
  return spec;
}

constexpr int64_t kKeys = 10;
constexpr int64_t kValues = 42;

TEST(Gdn2ArgsTest, QAndKAreNormalisedOnceAndNotByTheRule) {
  std::vector<float> row(2 * kKeys + kValues);
  const gdn_qk_norm_prepare_args norm = Gdn2QkNormArgs(Spec(), 1, row.data(), GDN_F32, 70);
  EXPECT_EQ(norm.variant, GDN_RULE_GDN2);
  EXPECT_EQ(norm.use_qk_l2norm, 1);
  EXPECT_EQ(norm.vectors, 4);
  EXPECT_EQ(norm.key_dim, 5);
  EXPECT_EQ(norm.token_stride, 70);
  gdn_qk_norm_route route{};
  ASSERT_EQ(gdn_qk_norm_route_of(norm.variant, norm.use_qk_l2norm, &route), GDN_OK);
  EXPECT_EQ(route.normalize_in_caller, 1);
  EXPECT_EQ(Gdn2Args(Spec(), row.data(), GDN_F32, 70).use_qk_l2norm, 0);
}

// The norm really runs: heads of q and k become unit vectors, v keeps its values.
TEST(Gdn2ArgsTest, TheNormTakesQAndKAlone) {
  std::vector<float> row(2 * kKeys + kValues, 3.0f);
  const gdn_exec exec{};
  const gdn_qk_norm_prepare_args args = Gdn2QkNormArgs(Spec(), 1, row.data(), GDN_F32, 62);
  ASSERT_EQ(Gdn2QkNorm(&exec, &args), GDN_OK) << gdn_last_error();
  for (size_t i = 0; i < row.size(); ++i) {
    EXPECT_NEAR(row[i], i < 2 * kKeys ? 0.4472136f : 3.0f, 1e-6f) << i;
  }
}

TEST(Gdn2ArgsTest, TakesTheColumnsInTheirOrder) {
  for (const gdn_dtype dtype : {GDN_F32, GDN_BF16}) {
    const int64_t size = dtype == GDN_F32 ? 4 : 2;
    std::vector<std::byte> memory(4096);
    const auto at = [&](const void* column) {
      return (static_cast<const std::byte*>(column) - memory.data()) / size;
    };
    const gdn2_args rule = Gdn2Args(Spec(), memory.data(), dtype, 70);
    EXPECT_EQ(at(rule.q), 0);
    EXPECT_EQ(at(rule.k), kKeys);
    EXPECT_EQ(at(rule.v), 2 * kKeys);
    EXPECT_EQ(rule.gate_heads, 2);
    EXPECT_EQ(rule.qkv_dtype, dtype);
    const gdn2_gates_args gates = Gdn2GatesArgs(Spec(), memory.data(), dtype, 160);
    const int64_t f = 2 * kKeys + 2 * kValues;  // Behind q|k|v|z.
    EXPECT_EQ(at(gates.f), f);
    EXPECT_EQ(at(gates.b), f + kKeys);
    EXPECT_EQ(at(gates.w), f + 2 * kKeys);
    EXPECT_EQ(gates.fbw_dtype, dtype);
    EXPECT_EQ(f + 2 * kKeys + kValues, Spec().gdn.projection_size(model::LayerType::kGdn2));
  }
}

TEST(Gdn2ArgsTest, TheGatesAreTheModels) {
  model::ModelSpec spec = Spec();
  const std::vector<float> row(160);
  EXPECT_EQ(Gdn2GatesArgs(spec, row.data(), GDN_F32, 160).decay, GDN2_DECAY_SOFTPLUS);
  EXPECT_EQ(Gdn2GatesArgs(spec, row.data(), GDN_F32, 160).erase_scale, 1.0f);
  spec.decay_gate = model::DecayGate::kBounded;
  spec.decay_lower_bound = -3.0f;
  spec.beta_scale = 2.0f;
  const gdn2_gates_args args = Gdn2GatesArgs(spec, row.data(), GDN_F32, 160);
  EXPECT_EQ(args.decay, GDN2_DECAY_BOUNDED);
  EXPECT_EQ(args.lower_bound, -3.0f);
  EXPECT_EQ(args.erase_scale, 2.0f);
}

}  // namespace
}  // namespace gdn::pipeline
