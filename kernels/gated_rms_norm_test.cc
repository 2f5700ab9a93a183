#include "gdn/kernels/gated_rms_norm.h"

#include <cmath>
#include <cstdint>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/linear_test_util.h"

namespace gdn::kernels {
namespace {

struct Case {
  int64_t tokens = 3;
  int64_t heads = 2;
  int64_t dim = 16;
  gdn_dtype x_dtype = GDN_F32;
  gdn_dtype gate_dtype = GDN_F32;
  gdn_dtype y_dtype = GDN_F32;
  int32_t zero_centered = 0;
  gdn_gate_activation activation = GDN_GATE_SILU;
  int32_t round_before_gate = 0;
  float eps = 1e-6f;
  float scale = 1.0f;
};

// The gate is a column range of a wider buffer that starts at an odd element.
struct Problem {
  Tensor x;
  Tensor gate;
  std::vector<float> weight;
  gdn_gated_rms_norm_args args;
};
constexpr int64_t kGateOffset = 17;

Problem Make(Random& random, const Case& c) {
  Problem p;
  const int64_t row = c.heads * c.dim;
  p.x = Tensor(c.x_dtype, c.tokens * row);
  FillNormal(random, p.x, c.scale);
  p.gate = Tensor(c.gate_dtype, kGateOffset + c.tokens * (row + 9));
  FillNormal(random, p.gate, 4.0f);
  for (int64_t i = 0; i < c.dim; ++i) p.weight.push_back(random.Uniform(-1.0f, 2.0f));
  p.args = {};
  p.args.tokens = c.tokens;
  p.args.heads = c.heads;
  p.args.dim = c.dim;
  p.args.x_dtype = c.x_dtype;
  p.args.x_token_stride = row;
  p.args.x_head_stride = c.dim;
  p.args.gate_dtype = c.gate_dtype;
  p.args.gate_token_stride = row + 9;
  p.args.gate_head_stride = c.dim;
  p.args.zero_centered = c.zero_centered;
  p.args.activation = c.activation;
  p.args.round_before_gate = c.round_before_gate;
  p.args.eps = c.eps;
  p.args.y_dtype = c.y_dtype;
  p.args.y_token_stride = row + 2;
  p.args.y_head_stride = c.dim;
  return p;
}

gdn_gated_rms_norm_args Args(const Problem& p, Tensor& y) {
  gdn_gated_rms_norm_args args = p.args;
  args.x = p.x.data();
  args.gate = static_cast<const uint8_t*>(p.gate.data()) + kGateOffset * SizeOf(p.args.gate_dtype);
  args.weight = p.weight.data();
  args.y = y.data();
  return args;
}

Tensor Evaluate(const Execution& execution, const Problem& p) {
  Tensor y(p.args.y_dtype, p.args.tokens * p.args.y_token_stride);
  const gdn_gated_rms_norm_args args = Args(p, y);
  EXPECT_EQ(gdn_gated_rms_norm(execution.exec(), &args), GDN_OK) << gdn_last_error();
  return y;
}

float Rounded(gdn_dtype dtype, double value) {
  Tensor one(dtype, 1);
  one.Set(0, static_cast<float>(value));
  return one.Get(0);
}

// One head by the formula, for checking the oracle too.
std::vector<double> Expected(const Problem& p, int64_t token, int64_t head) {
  const auto& a = p.args;
  const int64_t x0 = token * a.x_token_stride + head * a.x_head_stride;
  const int64_t gate0 = kGateOffset + token * a.gate_token_stride + head * a.gate_head_stride;
  long double sum = 0.0L;
  for (int64_t i = 0; i < a.dim; ++i) sum += powl(p.x.Get(x0 + i), 2);
  const long double rms = sqrtl(sum / static_cast<long double>(a.dim) + a.eps);
  std::vector<double> y;
  for (int64_t i = 0; i < a.dim; ++i) {
    double n = static_cast<double>(p.x.Get(x0 + i) / rms) *
               (p.weight[static_cast<size_t>(i)] + (a.zero_centered ? 1.0 : 0.0));
    if (a.round_before_gate) n = Rounded(a.x_dtype, n);
    const double gate = p.gate.Get(gate0 + i);
    const double sigmoid = 1.0 / (1.0 + std::exp(-gate));
    y.push_back(n * (a.activation == GDN_GATE_SILU ? gate * sigmoid : sigmoid));
  }
  return y;
}

void ExpectMatches(const Problem& p, const Tensor& y, double bound) {
  const auto& a = p.args;
  RelativeL2 error;
  for (int64_t token = 0; token < a.tokens; ++token) {
    for (int64_t head = 0; head < a.heads; ++head) {
      const std::vector<double> expected = Expected(p, token, head);
      for (int64_t i = 0; i < a.dim; ++i) {
        const double got = y.Get(token * a.y_token_stride + head * a.y_head_stride + i);
        ASSERT_TRUE(std::isfinite(got));
        error.Add(got, expected[static_cast<size_t>(i)]);
      }
    }
    for (int64_t i = a.heads * a.dim; i < a.y_token_stride; ++i) {
      ASSERT_TRUE(IsPoison(y, token * a.y_token_stride + i));
    }
  }
  EXPECT_LE(error.value(), bound);
}

TEST(GatedRmsNormTest, MatchesTheFormulaForEveryTypeModeAndTarget) {
  Random random(31);
  for (const Variant& variant : kVariants) {
    const BaselineTargetScope target(variant.baseline);
    Execution execution(CpuBackend(variant.threads));
    for (const int64_t dim : {1, 5, 8, 19, 32, 60, 128}) {
      for (const gdn_dtype x : kDtypes) {
        for (const gdn_dtype gate : kDtypes) {
          for (const gdn_dtype y : kDtypes) {
            for (int mode = 0; mode < 8; ++mode) {
              Case c;
              c.dim = dim;
              c.x_dtype = x;
              c.gate_dtype = gate;
              c.y_dtype = y;
              c.zero_centered = mode & 1;
              c.activation = mode & 2 ? GDN_GATE_SIGMOID : GDN_GATE_SILU;
              c.round_before_gate = mode & 4;
              SCOPED_TRACE(testing::Message() << variant.name << " dim " << dim << " types " << x
                                              << gate << y << " mode " << mode);
              const Problem p = Make(random, c);
              // A rounding of n to 16 bits may fall the other way where it is a near tie.
              const double bound =
                  WorstRounding(y) + (c.round_before_gate && x != GDN_F32 ? WorstRounding(x) : 0.0);
              ExpectMatches(p, Evaluate(execution, p), bound);
              if (variant.threads == 0 && !variant.baseline) {
                ExpectMatches(p, Evaluate(Execution(kRef), p), WorstRounding(y));
              }
            }
          }
        }
      }
    }
  }
}

// With inputs this small eps dominates the statistic.
TEST(GatedRmsNormTest, SmallInputsLetEpsDominate) {
  Random random(32);
  for (const gdn_dtype dtype : {GDN_F32, GDN_BF16}) {
    Case c;
    c.tokens = 97;
    c.heads = 16;
    c.dim = 128;
    c.x_dtype = c.gate_dtype = c.y_dtype = dtype;
    c.zero_centered = 1;
    c.scale = 1e-5f;
    const Problem p = Make(random, c);
    ExpectMatches(p, Evaluate(Execution(CpuBackend(2)), p), WorstRounding(dtype));
  }
}

// BF16 rounds n before the gate: about a quarter of the elements differ from the unrounded form.
TEST(GatedRmsNormTest, RoundingContractIsVisibleAndMatchesTheComposition) {
  Random random(33);
  Case c;
  c.tokens = 64;
  c.dim = 128;
  c.x_dtype = c.gate_dtype = c.y_dtype = GDN_BF16;
  Problem p = Make(random, c);
  const Tensor plain = Evaluate(Execution(CpuBackend(0)), p);
  p.args.round_before_gate = 1;
  const Tensor rounded = Evaluate(Execution(CpuBackend(0)), p);
  const Tensor reference = Evaluate(Execution(kRef), p);
  int64_t differ = 0;
  int64_t wrong = 0;
  const int64_t count = 64 * 2 * 128;
  for (int64_t token = 0; token < 64; ++token) {
    for (int64_t i = 0; i < 256; ++i) {
      const int64_t at = token * 258 + i;
      differ += plain.Get(at) != rounded.Get(at);
      wrong += reference.Get(at) != rounded.Get(at);
    }
  }
  EXPECT_GT(differ, count * 15 / 100);
  EXPECT_LT(differ, count * 40 / 100);
  EXPECT_LT(wrong, count / 1000);  // near ties of the FP32 statistic only

  // With FP32 x the two contracts agree bit for bit.
  c.x_dtype = GDN_F32;
  p = Make(random, c);
  const Tensor unrounded = Evaluate(Execution(CpuBackend(0)), p);
  p.args.round_before_gate = 1;
  EXPECT_EQ(Evaluate(Execution(CpuBackend(0)), p).bytes(), unrounded.bytes());
}

TEST(GatedRmsNormTest, ExtremeGatesKeepRelativeAccuracyAndNanStaysVisible) {
  for (const gdn_gate_activation activation : {GDN_GATE_SILU, GDN_GATE_SIGMOID}) {
    for (const float gate : {-80.0f, -30.0f, -1e-6f, 0.0f, 1e-6f, 30.0f, 100.0f, 3e38f}) {
      const float x = 1.0f;
      const float weight = 1.0f;
      float y = -7.0f;
      gdn_gated_rms_norm_args args = {1,     1,       1,  &x,      GDN_F32, 1, 1,
                                      &gate, GDN_F32, 1,  1,       &weight, 0, activation,
                                      0,     0.0f,    &y, GDN_F32, 1,       1};
      ASSERT_EQ(gdn_gated_rms_norm(Execution(CpuBackend(0)).exec(), &args), GDN_OK);
      const double sigmoid = 1.0 / (1.0 + std::exp(-static_cast<double>(gate)));
      const double expected = activation == GDN_GATE_SILU ? gate * sigmoid : sigmoid;
      EXPECT_NEAR(y, expected, 1e-6 * std::abs(expected)) << gate;
    }
    const float x = 1.0f;
    const float weight = 1.0f;
    const float gate = std::numeric_limits<float>::quiet_NaN();
    float y = -7.0f;
    gdn_gated_rms_norm_args args = {1,     1,       1,  &x,      GDN_F32, 1, 1,
                                    &gate, GDN_F32, 1,  1,       &weight, 0, activation,
                                    0,     0.0f,    &y, GDN_F32, 1,       1};
    ASSERT_EQ(gdn_gated_rms_norm(Execution(CpuBackend(0)).exec(), &args), GDN_OK);
    EXPECT_TRUE(std::isnan(y));
  }
}

TEST(GatedRmsNormTest, StridedBroadcastAndInPlaceAgreeWithDense) {
  Random random(34);
  Case c;
  c.tokens = 37;
  c.heads = 5;
  c.dim = 24;
  c.x_dtype = c.y_dtype = GDN_BF16;
  Problem p = Make(random, c);
  p.args.gate_head_stride = 0;  // one gate for all heads
  p.args.y_token_stride = p.args.x_token_stride;
  const Tensor expected = Evaluate(Execution(CpuBackend(0)), p);
  ExpectMatches(p, expected, WorstRounding(GDN_BF16));
  Tensor x = p.x;
  gdn_gated_rms_norm_args args = Args(p, x);
  args.x = x.data();
  Execution threads(CpuBackend(3));
  ASSERT_EQ(gdn_gated_rms_norm(threads.exec(), &args), GDN_OK) << gdn_last_error();
  EXPECT_EQ(x.bytes(), expected.bytes());
  // One token and head at a time gives the same bits.
  for (int64_t token = 0; token < c.tokens; ++token) {
    for (int64_t head = 0; head < c.heads; ++head) {
      Tensor y(GDN_BF16, c.dim);
      gdn_gated_rms_norm_args one = Args(p, y);
      const int64_t x0 = token * p.args.x_token_stride + head * p.args.x_head_stride;
      one.tokens = one.heads = 1;
      one.x = static_cast<const uint16_t*>(p.x.data()) + x0;
      one.gate =
          static_cast<const float*>(p.gate.data()) + kGateOffset + token * p.args.gate_token_stride;
      ASSERT_EQ(gdn_gated_rms_norm(Execution(CpuBackend(0)).exec(), &one), GDN_OK);
      ASSERT_EQ(y.bytes(), expected.Slice(x0, x0 + c.dim));
    }
  }
}

TEST(GatedRmsNormTest, RefusesMisuseByName) {
  Random random(35);
  const Problem p = Make(random, Case());
  Tensor y(GDN_F32, 256);
  Execution execution(CpuBackend(0));
  auto refused = [&](gdn_status status, const char* sentence, auto change) {
    gdn_gated_rms_norm_args args = Args(p, y);
    change(args);
    ExpectRefused(gdn_gated_rms_norm(execution.exec(), &args), status, y, sentence);
  };
  const auto kBad = GDN_INVALID_ARGUMENT;
  refused(kBad, "tokens must be in 0..2^40, got -1", [](auto& a) { a.tokens = -1; });
  refused(kBad, "heads must be in 1..2^40, got 0", [](auto& a) { a.heads = 0; });
  refused(kBad, "dim must be in 1..2^40, got 0", [](auto& a) { a.dim = 0; });
  refused(kBad, "x must not be NULL", [](auto& a) { a.x = nullptr; });
  refused(kBad, "gate must not be NULL", [](auto& a) { a.gate = nullptr; });
  refused(kBad, "weight must not be NULL", [](auto& a) { a.weight = nullptr; });
  refused(kBad, "y must not be NULL", [](auto& a) { a.y = nullptr; });
  refused(kBad, "x_token_stride", [](auto& a) { a.x_token_stride = -1; });
  refused(kBad, "gate_head_stride", [](auto& a) { a.gate_head_stride = -1; });
  refused(kBad, "y_head_stride", [](auto& a) { a.y_head_stride = 15; });
  refused(kBad, "y_token_stride", [](auto& a) { a.y_token_stride = 15; });
  refused(kBad, "eps", [](auto& a) { a.eps = std::nanf(""); });
  refused(kBad, "activation must be SILU (0) or SIGMOID (1), got 4",
          [](auto& a) { a.activation = Unlisted<gdn_gate_activation>(4); });
  refused(kBad, "gate_dtype", [](auto& a) { a.gate_dtype = Unlisted<gdn_dtype>(9); });
  refused(kBad, "must not be the gate", [&](auto& a) { a.gate = y.data(); });
  refused(kBad, "in place", [&](auto& a) { a.x = y.data(); });
}

}  // namespace
}  // namespace gdn::kernels
