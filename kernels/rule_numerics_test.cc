// Error bounds of the delta rule and of GDN2 over long sequences, the form of eps in the rule's own
// norm, and a prefill continued by steps.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/gdn2_test_util.h"
#include "kernels/rule_slots_test_util.h"

namespace gdn::kernels {
namespace {

bool TestsADevice() { return DeviceMemoryUnderTest() != nullptr; }

RuleProblem LongMemory(const RuleShape& shape, uint32_t seed) {
  RuleProblem p(shape, seed);
  for (double& g : p.g) g = static_cast<float>(g * 0.1);
  return p;
}

// T13, Y3: FP32 inputs within 1e-5 of FP64, output and state; FP16 within two roundings of it. The
// host's run is shorter.
TEST(RuleNumerics, T13RecurrentForwardOverLongSequences) {
  struct Case {
    int32_t sequences, tokens;
    int64_t key_heads, value_heads, dim;
    gdn_dtype dtype;
  };
  std::vector<Case> cases = {{1, 63, 1, 1, 64, GDN_F32}, {2, 500, 4, 4, 60, GDN_F32}};
  if (TestsADevice()) {
    cases.insert(cases.end(), {{2, 1000, 2, 8, 128, GDN_F32},
                               {3, 1024, 2, 2, 128, GDN_F32},
                               {4, 2048, 4, 4, 64, GDN_F32},
                               {2, 500, 4, 4, 60, GDN_F16},
                               {1, 2048, 2, 2, 64, GDN_F16}});
  } else {
    cases.insert(cases.end(), {{1, 500, 1, 2, 128, GDN_F32}, {1, 300, 2, 2, 64, GDN_F16}});
  }
  for (const Case& c : cases) {
    RuleShape shape;
    shape.lengths.assign(static_cast<size_t>(c.sequences), c.tokens);
    shape.key_heads = c.key_heads;
    shape.ratio = c.value_heads / c.key_heads;
    shape.key_dim = shape.value_dim = c.dim;
    shape.dtype = c.dtype;
    const RuleProblem p = LongMemory(shape, 931);
    const RuleOutputs expected = p.Forward();
    const double bound = c.dtype == GDN_F32 ? 1e-5 : 2 * RoundingBound(c.dtype);
    for (const Backend& backend : PlacesUnderTest()) {
      const std::string what = backend.name + ", " + std::to_string(c.tokens) +
                               " tokens, heads of " + std::to_string(c.dim) + ", type " +
                               std::to_string(c.dtype);
      const RuleOutputs got = p.Forward(backend);
      EXPECT_LE(Error(got.o, expected.o), bound) << what;
      EXPECT_LE(Error(got.state, expected.state), bound) << what;
    }
  }
}

// T14, T17: packed as published, ragged and with a leading empty sequence, forward and backward. By
// tokens in FP32; on a GPU BF16 goes by chunks, whose backward has T15's bounds.
TEST(RuleNumerics, T14T17PackedForwardAndBackward) {
  for (const std::vector<int32_t>& lengths :
       {std::vector<int32_t>{15, 85, 200}, {256, 244, 500}, {48, 112}, {0, 64, 96}}) {
    for (const gdn_dtype dtype : {GDN_F32, GDN_BF16}) {
      if (dtype == GDN_BF16 && !TestsADevice())
        continue;  // The host's arithmetic is FP32 throughout.
      RuleShape shape;
      shape.lengths = lengths;
      shape.key_heads = 1;
      shape.key_dim = dtype == GDN_F32 ? 60 : 128;
      shape.value_dim = dtype == GDN_F32 ? 20 : 128;
      shape.dtype = shape.d_dtype = dtype;
      shape.pad = 8;
      const RuleProblem p = LongMemory(shape, 933);
      const double state_bound = dtype == GDN_F32 ? 1e-5 : 2e-3;
      const double bound = dtype == GDN_F32 ? 1e-5 : 8e-3;
      const double gate_bound = dtype == GDN_F32 ? 1e-5 : 2e-2;
      const RuleOutputs expected = p.Forward();
      const RuleGradients gradients = p.Backward();
      for (const Backend& backend : PlacesUnderTest()) {
        SCOPED_TRACE(backend.name + " " + std::to_string(p.tokens()));
        const RuleOutputs got = p.Forward(backend);
        EXPECT_LE(Error(got.o, expected.o), state_bound);
        EXPECT_LE(Error(got.state, expected.state), state_bound);
        const RuleGradients back = p.Backward(backend);
        EXPECT_LE(Error(back.q, gradients.q), bound);
        EXPECT_LE(Error(back.k, gradients.k), bound);
        EXPECT_LE(Error(back.v, gradients.v), bound);
        EXPECT_LE(Error(back.state, gradients.state), bound);
        EXPECT_LE(Error(back.g, gradients.g), gate_bound);
        EXPECT_LE(Error(back.beta, gradients.beta), gate_bound);
      }
    }
  }
}

// A2, A3, T2: eps stands inside the root, on the sum, in the rule's own norm, in every type and on
// aligned rows and others. Other forms in use make rows of these sums 1, 0.9990 and 1 long instead
// of 0.7071, and 1, 0.9999 and 1 instead of 0.9950. A row of zeros stays exactly that.
TEST(RuleNumerics, A3FormOfEpsInTheSavedNorm) {
  const std::vector<double> sums = {1e-6, 1e-4, 1.0, 0.0};
  for (const gdn_dtype dtype : {GDN_F32, GDN_BF16, GDN_F16}) {
    for (const int64_t pad : {8, 3}) {
      RuleShape shape;
      shape.lengths = {static_cast<int32_t>(sums.size())};
      shape.key_dim = shape.value_dim = 128;
      shape.dtype = dtype;
      shape.pad = pad;
      RuleProblem p(shape, 935);
      const int64_t K = shape.key_dim, rows = p.tokens() * shape.key_heads;
      Tensor rounded(dtype, 1);
      std::vector<Doubles> exact_rstd(2), exact_length(2);
      for (const int which : {0, 1}) {
        Doubles& x = which == 0 ? p.q : p.k;
        for (int64_t row = 0; row < rows; ++row) {
          const auto begin = x.begin() + row * K;
          double squares = 0.0, got = 0.0;
          std::for_each(begin, begin + K, [&](double e) { squares += e * e; });
          const double factor = std::sqrt(sums[row / shape.key_heads] / squares);
          std::for_each(begin, begin + K, [&](double& e) {
            rounded.Set(0, static_cast<float>(e * factor));
            e = rounded.Get(0);
            got += e * e;
          });
          exact_rstd[which].push_back(1.0 / std::sqrt(got + 1e-6));
          exact_length[which].push_back(std::sqrt(got / (got + 1e-6)));
        }
      }
      for (const Backend& backend : PlacesAndRef()) {
        const RuleOutputs got = p.Forward(backend);
        for (const int which : {0, 1}) {
          const Floats& hat = which == 0 ? got.q_hat : got.k_hat;
          const Floats& rstd = which == 0 ? got.q_rstd : got.k_rstd;
          for (int64_t row = 0; row < rows; ++row) {
            SCOPED_TRACE(backend.name + " type " + std::to_string(dtype) + " row " +
                         std::to_string(row));
            EXPECT_NEAR(rstd[row] / exact_rstd[which][row], 1.0, 1e-6);
            double squares = 0.0;
            for (int64_t i = row * K; i < (row + 1) * K; ++i) {
              squares += double{hat[i]} * double{hat[i]};
              if (sums[row / shape.key_heads] == 0.0) {
                ASSERT_EQ(hat[i], 0.0f);
              }
            }
            EXPECT_NEAR(std::sqrt(squares), exact_length[which][row], RoundingBound(dtype));
          }
        }
      }
    }
  }
}

// Y4 holds over the tokens that were decoded, and the state they leave.
void ExpectContinues(const Floats& decoded, const Floats& state, const RuleOutputs& whole,
                     const std::string& what) {
  const Floats expected(whole.o.end() - static_cast<std::ptrdiff_t>(decoded.size()), whole.o.end());
  EXPECT_LE(Error(decoded, expected), 1e-2) << what;
  EXPECT_LE(Error(state, whole.state), 1e-2) << what;
}

constexpr int64_t kPrompt = 100, kDecoded = 30;
RuleShape PromptShape(gdn_dtype dtype) {
  RuleShape shape;
  shape.lengths = {kPrompt + kDecoded};
  shape.key_heads = 1;
  shape.key_dim = shape.value_dim = 128;
  shape.dtype = dtype;
  shape.pad = 8;
  shape.trailing_tokens = 0;
  return shape;
}

// Y4, I11: a prefill (by chunks on a GPU) and steps behind it are one prefill.
TEST(RuleNumerics, Y4StepsContinueThePrefill) {
  for (const gdn_dtype dtype : {GDN_BF16, GDN_F16, GDN_F32}) {
    const RuleProblem p = LongMemory(PromptShape(dtype), 937);
    const RuleOutputs ref = RunOnSlots(p, kRef);
    for (const Backend& backend : PlacesUnderTest()) {
      Floats state = RunOnSlots(PartOf(p, 0, 0, kPrompt, p.state), backend).state, decoded;
      for (int64_t t = kPrompt; t < kPrompt + kDecoded; ++t) {
        const Doubles before(state.begin(), state.end());
        const RuleOutputs step =
            RunOnSlots(PartOf(p, 0, t, t + 1, before), backend, gdn_delta_rule_step);
        decoded.insert(decoded.end(), step.o.begin(), step.o.end());
        state = step.state;
      }
      ExpectContinues(decoded, state, RunOnSlots(p, backend), backend.name);
      ExpectContinues(decoded, state, ref, backend.name + " against REF");
    }
  }
}

TEST(RuleNumerics, Y4StepsContinueGdn2sPrefill) {
  for (const gdn_dtype dtype : {GDN_BF16, GDN_F16, GDN_F32}) {
    for (const bool own_gates : {false, true}) {
      if (!TestsADevice() && own_gates != (dtype == GDN_BF16)) continue;
      Gdn2Problem p(PromptShape(dtype), own_gates, 939);
      for (double& g : p.g) g = static_cast<float>(g * 0.1);
      const RuleOutputs ref = p.Forward();
      for (const Backend& backend : PlacesUnderTest()) {
        Floats state = PartOf(p, 0, 0, kPrompt).Forward(backend).state, decoded;
        for (int64_t t = kPrompt; t < kPrompt + kDecoded; ++t) {
          Gdn2Problem token = PartOf(p, 0, t, t + 1);
          token.state.assign(state.begin(), state.end());
          const RuleOutputs step = token.Forward(backend, gdn_gdn2_step);
          decoded.insert(decoded.end(), step.o.begin(), step.o.end());
          state = step.state;
        }
        ExpectContinues(decoded, state, p.Forward(backend), backend.name);
        ExpectContinues(decoded, state, ref, backend.name + " against REF");
      }
    }
  }
}

}  // namespace
}  // namespace gdn::kernels
