// The delta rule's training forward and its gradients.
#include "gdn/kernels/delta_rule_backward.h"

#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "gdn/kernels/l2_norm.h"
#include "gtest/gtest.h"
#include "kernels/delta_rule_gradient_test_util.h"
#include "kernels/rule_slots_test_util.h"

namespace gdn::kernels {
namespace {

// One head in the paper's form, S <- a S (I - b k k^T) + b v k^T; `state` is [V][K]. Returns
// sum(d_o * o).
double Head(const RuleProblem& p, int64_t n, int64_t hv, Doubles& state) {
  const int64_t K = p.shape.key_dim, V = p.shape.value_dim;
  const int64_t h = hv / p.shape.ratio;
  const double scale = p.shape.scale != 0 ? double{p.shape.scale} : std::pow(double(K), -0.5);
  double loss = 0.0;
  for (int64_t t = p.cu[n]; t < p.cu[n + 1]; ++t) {
    Doubles q(K), k(K);
    double qq = 0.0, kk = 0.0;
    for (int64_t i = 0; i < K; ++i) {
      q[i] = p.q[t * p.keys() + h * K + i];
      k[i] = p.k[t * p.keys() + h * K + i];
      qq += q[i] * q[i];
      kk += k[i] * k[i];
    }
    for (int64_t i = 0; i < K && p.shape.normalize; ++i) {
      q[i] /= std::sqrt(qq + 1e-6);
      k[i] /= std::sqrt(kk + 1e-6);
    }
    const double a = std::exp(p.g[t * p.heads() + hv]);
    const double b = p.beta[t * p.heads() + hv];
    for (int64_t v = 0; v < V; ++v) {
      double* row = state.data() + v * K;
      double along = 0.0, o = 0.0;
      for (int64_t i = 0; i < K; ++i) along += row[i] * k[i];
      for (int64_t i = 0; i < K; ++i) {
        row[i] = a * (row[i] - b * along * k[i]) + b * p.v[t * p.values() + hv * V + v] * k[i];
        o += row[i] * q[i] * scale;
      }
      loss += p.d_o[t * p.values() + hv * V + v] * o;
    }
  }
  return loss;
}

double Loss(const RuleProblem& p) {
  const int64_t size = p.shape.key_dim * p.shape.value_dim;
  double loss = 0.0;
  for (int64_t n = 0; n < p.n(); ++n) {
    for (int64_t hv = 0; hv < p.heads(); ++hv) {
      const int64_t at = (n * p.heads() + hv) * size;
      Doubles state(p.state.begin() + at, p.state.begin() + at + size);
      loss += Head(p, n, hv, state);
      for (int64_t i = 0; i < size; ++i) loss += p.d_final[at + i] * state[i];
    }
  }
  return loss;
}

// Of every back end; `bound` is REF's, the others round in FP32 in every operation.
void ExpectFiniteDifferences(RuleProblem p, double step = 1e-5, double bound = 3e-7) {
  auto loss = [&] { return Loss(p); };
  const Doubles d_q = FiniteDifferences(p.q, loss, step), d_k = FiniteDifferences(p.k, loss, step);
  const Doubles d_v = FiniteDifferences(p.v, loss, step), d_g = FiniteDifferences(p.g, loss, step);
  const Doubles d_beta = FiniteDifferences(p.beta, loss, step);
  Doubles d_state;
  if (p.shape.states) d_state = FiniteDifferences(p.state, loss, step);
  for (const Backend& backend : PlacesAndRef()) {
    SCOPED_TRACE(backend.name);
    const double limit = backend.backend == GDN_BACKEND_REF ? bound : bound + 2e-6;
    const RuleGradients got = p.Backward(backend);
    ExpectGradient("d_q", got.q, d_q, limit);
    ExpectGradient("d_k", got.k, d_k, limit);
    ExpectGradient("d_v", got.v, d_v, limit);
    ExpectGradient("d_g", got.g, d_g, limit);
    ExpectGradient("d_beta", got.beta, d_beta, limit);
    if (p.shape.states) ExpectGradient("d_state", got.state, d_state, limit);
  }
}

TEST(DeltaRuleBackward, FiniteDifferencesOfEveryGradient) {
  for (int64_t ratio = 1; ratio <= 4; ++ratio) {
    for (bool normalize : {true, false}) {
      for (bool states : {true, false}) {
        RuleShape shape;
        shape.ratio = ratio;
        shape.normalize = normalize;
        shape.states = states;
        shape.scale = ratio % 2 == 0 ? 0.0f : 0.7f;
        ExpectFiniteDifferences(RuleProblem(shape, 30 + static_cast<uint32_t>(ratio)));
      }
    }
  }
}

TEST(DeltaRuleBackward, FiniteDifferencesOnOddShapes) {
  for (auto [key_dim, value_dim] :
       std::vector<std::pair<int64_t, int64_t>>{{1, 1}, {1, 7}, {7, 1}, {3, 11}, {9, 2}}) {
    RuleShape shape;
    shape.lengths = {2, 7};
    shape.key_heads = 1;
    shape.ratio = 3;
    shape.key_dim = key_dim;
    shape.value_dim = value_dim;
    // A vector of one element, normalised, is a sign: its gradient is of the size of eps.
    shape.normalize = key_dim > 1;
    ExpectFiniteDifferences(RuleProblem(shape, 41));
  }
}

// A3, T2: rows whose sum of squares is that of eps tell the forms of eps apart.
TEST(DeltaRuleBackward, T2TinyRowsFollowEpsInsideTheRoot) {
  for (double sum_of_squares : {1e-6, 1e-4}) {
    RuleShape shape;
    shape.lengths = {3};
    RuleProblem p(shape, 43);
    const double factor = std::sqrt(sum_of_squares / static_cast<double>(shape.key_dim));
    for (double& value : p.q) value = static_cast<float>(value * factor);
    for (double& value : p.k) value = static_cast<float>(value * factor);
    ExpectFiniteDifferences(p, 1e-7, 2e-6);
  }
}

TEST(DeltaRuleBackward, X4ZeroRowsAndExtremeGatesStayFinite) {
  RuleProblem p(RuleShape{}, 45);
  std::fill(p.q.begin(), p.q.begin() + p.keys(), 0.0);
  std::fill(p.k.begin(), p.k.begin() + p.keys(), 0.0);
  p.g[p.heads()] = -1000.0;
  p.g[p.heads() + 1] = -1e30;
  for (const Backend& backend : PlacesAndRef()) {
    const RuleGradients got = p.Backward(backend);
    for (const Floats* values : {&got.q, &got.k, &got.v, &got.g, &got.beta, &got.state}) {
      for (float value : *values) ASSERT_TRUE(std::isfinite(value)) << backend.name;
    }
    EXPECT_EQ(got.g[p.heads()], 0.0f) << backend.name;
    EXPECT_EQ(got.g[p.heads() + 1], 0.0f) << backend.name;
  }
}

// A7: the gradient through the norm is orthogonal to the normalised row, up to eps.
TEST(DeltaRuleBackward, A7GradientThroughTheNormIsTangential) {
  const RuleProblem p(RuleShape{}, 47);
  const RuleGradients got = p.Backward();
  const int64_t K = p.shape.key_dim;
  for (int64_t row = 0; row < p.tokens() * p.shape.key_heads; ++row) {
    double dot = 0.0, norm = 0.0;
    for (int64_t i = row * K; i < (row + 1) * K; ++i) {
      dot += double{got.q[i]} * p.q[i];
      norm += double{got.q[i]} * double{got.q[i]};
    }
    EXPECT_LE(std::fabs(dot), 1e-5 * std::sqrt(norm) + 1e-6) << row;
  }
}

// A5, A8: d_q and d_k of a shared key head are the sums over replicated ones.
TEST(DeltaRuleBackward, A8SharedHeadsSumOverTheirReplicas) {
  RuleShape shape;
  shape.ratio = 4;
  const RuleProblem shared(shape, 49);
  RuleProblem replicated = shared;
  replicated.shape.key_heads = shared.heads();
  replicated.shape.ratio = 1;
  const int64_t K = shape.key_dim;
  replicated.q.clear();
  replicated.k.clear();
  for (int64_t t = 0; t < shared.tokens(); ++t) {
    for (int64_t hv = 0; hv < shared.heads(); ++hv) {
      const int64_t at = t * shared.keys() + hv / 4 * K;
      replicated.q.insert(replicated.q.end(), shared.q.begin() + at, shared.q.begin() + at + K);
      replicated.k.insert(replicated.k.end(), shared.k.begin() + at, shared.k.begin() + at + K);
    }
  }
  EXPECT_EQ(replicated.Forward().o, shared.Forward().o);
  const RuleGradients got = shared.Backward();
  const RuleGradients parts = replicated.Backward();
  EXPECT_EQ(parts.v, got.v);
  EXPECT_EQ(parts.g, got.g);
  Floats q(got.q.size(), 0.0f), k(got.k.size(), 0.0f);
  for (size_t i = 0; i < parts.q.size(); ++i) {
    const auto K_ = static_cast<size_t>(K);
    const size_t row = i / K_;
    q[row / 4 * K_ + i % K_] += parts.q[i];
    k[row / 4 * K_ + i % K_] += parts.k[i];
  }
  EXPECT_LE(Error(got.q, q), 1e-6);
  EXPECT_LE(Error(got.k, k), 1e-6);
}

// The training forward is the served prefill, on dense states.
TEST(DeltaRuleForward, MatchesThePrefill) {
  for (bool normalize : {true, false}) {
    RuleShape shape;
    shape.normalize = normalize;
    shape.lengths = {9, 0, 70};
    const RuleProblem p(shape, 63);
    for (const Backend& backend : PlacesAndRef()) {
      const RuleOutputs expected = p.Forward(backend), got = RunOnSlots(p, backend);
      EXPECT_LE(Error(got.o, expected.o), 5e-7) << backend.name;
      EXPECT_LE(Error(got.state, expected.state), 5e-7) << backend.name;
    }
  }
}

// T14, T15: every dimension, type and number of tokens; with a wanted final state or without.
TEST(DeltaRuleForward, EveryShapeMatchesRef) {
  for (auto [key_dim, value_dim] :
       std::vector<std::pair<int64_t, int64_t>>{{1, 1}, {8, 31}, {17, 65}, {60, 60}, {128, 128}}) {
    for (gdn_dtype dtype : {GDN_F32, GDN_BF16, GDN_F16}) {
      RuleShape shape;
      shape.lengths = {1, 63, 0, 17};
      shape.ratio = 3;
      shape.key_dim = key_dim;
      shape.value_dim = value_dim;
      shape.dtype = dtype;
      shape.states = value_dim % 2 == 0;
      shape.final_state = dtype != GDN_F16;
      const RuleProblem p(shape, 65);
      const RuleOutputs expected = p.Forward();
      for (const Backend& backend : PlacesUnderTest()) {
        const RuleOutputs got = p.Forward(backend);
        // A normalised element rounds the other way where FP32 and FP64 straddle a tie.
        EXPECT_LE(Error(got.q_hat, expected.q_hat), RoundingBound(dtype));
        EXPECT_LE(Error(got.k_hat, expected.k_hat), RoundingBound(dtype));
        EXPECT_LE(Error(got.q_rstd, expected.q_rstd), 1e-6);
        EXPECT_LE(Error(got.k_rstd, expected.k_rstd), 1e-6);
        // Y3: 2e-3 for BF16.
        const double bound = dtype == GDN_F32 ? 4e-6 : dtype == GDN_BF16 ? 2e-3 : 3.5e-4;
        EXPECT_LE(Error(got.o, expected.o), bound);
        if (!shape.final_state) continue;
        EXPECT_LE(Error(got.state, expected.state), bound);
      }
    }
  }
}

void ExpectKernelRouteEqualsCallerRoute(const Backend& backend, const RuleShape& shape) {
  RuleProblem kernel(shape, 51);
  for (double& value : kernel.q) value *= 3.0;
  for (double& value : kernel.k) value *= 0.5;
  RuleProblem caller = kernel;
  caller.shape.normalize = false;
  const RuleOutputs expected = kernel.Forward(backend);
  for (Doubles* x : {&caller.q, &caller.k}) {
    const Rows in(shape.dtype, kernel.tokens(), kernel.keys(), 0, *x);
    Rows out(shape.dtype, kernel.tokens(), kernel.keys(), 0);
    Floats rstd(static_cast<size_t>(kernel.tokens() * shape.key_heads));
    Place at(backend);
    const gdn_l2_norm_args args{kernel.tokens() * shape.key_heads,
                                shape.key_dim,
                                in.In(at),
                                shape.dtype,
                                shape.key_dim,
                                out.Out(at),
                                shape.dtype,
                                shape.key_dim,
                                at.Out(rstd.data(), rstd.size()),
                                1e-6f,
                                1.0f};
    ASSERT_EQ(at.Call(gdn_l2_norm, args), GDN_OK) << gdn_last_error();
    const Floats y = out.Take(kernel.tokens());
    EXPECT_EQ(y, x == &caller.q ? expected.q_hat : expected.k_hat);
    EXPECT_EQ(rstd, x == &caller.q ? expected.q_rstd : expected.k_rstd);
    x->assign(y.begin(), y.end());
  }
  const RuleOutputs got = caller.Forward(backend);
  EXPECT_EQ(got.o, expected.o);
  EXPECT_EQ(got.state, expected.state);
  // The gradients by v, the gates and the state are then those of the same rule.
  if (backend.backend != GDN_BACKEND_REF) return;
  EXPECT_EQ(caller.Backward().v, kernel.Backward().v);
  EXPECT_EQ(caller.Backward().beta, kernel.Backward().beta);
}

// A18: kernel-normalised is caller-normalised, bit for bit, when both round in the same place.
TEST(DeltaRuleForward, A18KernelRouteEqualsCallerRoute) {
  for (const Backend& backend : PlacesAndRef()) {
    for (gdn_dtype dtype : {GDN_F32, GDN_BF16, GDN_F16}) {
      for (int64_t key_dim : {16, 64, 128}) {
        RuleShape shape;
        shape.dtype = dtype;
        shape.key_dim = key_dim;
        shape.value_dim = key_dim == 128 ? 128 : 3;
        shape.pad = 8;
        ExpectKernelRouteEqualsCallerRoute(backend, shape);
      }
    }
  }
}

// A17: the gradients of the kernel route are the caller's, taken through the caller's norm.
TEST(DeltaRuleBackward, A17KernelRouteHasTheCallersGradients) {
  for (gdn_dtype dtype : {GDN_F32, GDN_BF16}) {
    RuleShape shape;
    shape.dtype = dtype;
    shape.ratio = 3;
    const RuleProblem kernel(shape, 52);
    const RuleOutputs saved = kernel.Forward();
    RuleProblem caller = kernel;
    caller.shape.normalize = false;
    caller.q.assign(saved.q_hat.begin(), saved.q_hat.end());
    caller.k.assign(saved.k_hat.begin(), saved.k_hat.end());
    const RuleGradients got = kernel.Backward();
    const RuleGradients of_hats = caller.Backward();
    auto through_norm = [&](const Floats& y, const Floats& rstd, const Floats& d_y) {
      const auto K = static_cast<size_t>(shape.key_dim);
      Floats d_x;
      for (size_t row = 0; row < rstd.size(); ++row) {
        double dot = 0.0;
        for (size_t i = row * K; i < (row + 1) * K; ++i) dot += double{d_y[i]} * double{y[i]};
        for (size_t i = row * K; i < (row + 1) * K; ++i) {
          d_x.push_back(static_cast<float>(double{rstd[row]} * (d_y[i] - y[i] * dot)));
        }
      }
      return d_x;
    };
    EXPECT_LE(Error(got.q, through_norm(saved.q_hat, saved.q_rstd, of_hats.q)), 1e-6);
    EXPECT_LE(Error(got.k, through_norm(saved.k_hat, saved.k_rstd, of_hats.k)), 1e-6);
    EXPECT_EQ(got.v, of_hats.v);
    EXPECT_EQ(got.g, of_hats.g);
    EXPECT_EQ(got.beta, of_hats.beta);
    EXPECT_EQ(got.state, of_hats.state);
  }
}

// A11: without the norm nothing of it is written, and q and k are used as given.
TEST(DeltaRuleForward, A11WithoutTheNormNothingIsNormalised) {
  RuleShape shape;
  shape.normalize = false;
  const RuleProblem p(shape, 53);
  const RuleOutputs got = p.Forward();
  for (const Floats* untouched : {&got.q_hat, &got.k_hat, &got.q_rstd, &got.k_rstd}) {
    for (float value : *untouched) ASSERT_TRUE(std::isnan(value));
  }
  RuleProblem doubled = p;
  for (double& value : doubled.q) value *= 2.0;
  const RuleOutputs twice = doubled.Forward();
  for (size_t i = 0; i < got.o.size(); ++i) ASSERT_EQ(twice.o[i], 2.0f * got.o[i]);
}

// Two calls with the state and its gradient carried between them are one call.
TEST(DeltaRuleBackward, EverySplitGivesTheSameGradient) {
  RuleShape shape;
  shape.lengths = {7};
  shape.trailing_tokens = 0;
  const RuleProblem whole(shape, 55);
  const Backend backend = PlacesUnderTest()[0];
  const RuleGradients expected = whole.Backward();
  for (int32_t cut = 1; cut < 7; ++cut) {
    RuleProblem head = whole, tail = whole;
    head.cu = {0, cut};
    tail.cu = {0, 7 - cut};
    auto split = [&](Doubles RuleProblem::*field, int64_t width) {
      (head.*field).resize(static_cast<size_t>(cut * width));
      (tail.*field).erase((tail.*field).begin(), (tail.*field).begin() + cut * width);
    };
    for (auto field : {&RuleProblem::q, &RuleProblem::k}) split(field, whole.keys());
    for (auto field : {&RuleProblem::v, &RuleProblem::d_o}) split(field, whole.values());
    for (auto field : {&RuleProblem::g, &RuleProblem::beta}) split(field, whole.heads());
    const Floats carried = head.Forward(backend).state;
    tail.state.assign(carried.begin(), carried.end());
    const RuleGradients second = tail.Backward(backend);
    head.d_final.assign(second.state.begin(), second.state.end());
    const RuleGradients first = head.Backward(backend);
    auto joined = [](Floats a, const Floats& b) {
      a.insert(a.end(), b.begin(), b.end());
      return a;
    };
    EXPECT_LE(Error(joined(first.q, second.q), expected.q), 1e-6) << cut;
    EXPECT_LE(Error(joined(first.k, second.k), expected.k), 1e-6) << cut;
    EXPECT_LE(Error(joined(first.v, second.v), expected.v), 1e-6) << cut;
    EXPECT_LE(Error(joined(first.g, second.g), expected.g), 1e-6) << cut;
    EXPECT_LE(Error(joined(first.beta, second.beta), expected.beta), 1e-6) << cut;
    EXPECT_LE(Error(first.state, expected.state), 1e-6) << cut;
  }
}

// K4: a sequence's gradients do not move by a bit with its neighbours' data.
TEST(DeltaRuleBackward, K4NothingCrossesABoundary) {
  const RuleProblem p(RuleShape{}, 57);  // lengths 3, 0, 5, 1
  RuleProblem changed = p;
  for (int64_t i = 3 * p.values(); i < 8 * p.values(); ++i) changed.v[i] = changed.d_o[i] = 1e3;
  const RuleGradients before = p.Backward(PlacesUnderTest()[0]);
  const RuleGradients after = changed.Backward(PlacesUnderTest()[0]);
  auto expect_same = [&](const Floats& a, const Floats& b, int64_t width) {
    EXPECT_EQ(Floats(a.begin(), a.begin() + 3 * width), Floats(b.begin(), b.begin() + 3 * width));
    EXPECT_EQ(Floats(a.begin() + 8 * width, a.end()), Floats(b.begin() + 8 * width, b.end()));
    EXPECT_NE(a, b);
  };
  expect_same(before.q, after.q, p.keys());
  expect_same(before.k, after.k, p.keys());
  expect_same(before.v, after.v, p.values());
  expect_same(before.g, after.g, p.heads());
  expect_same(before.beta, after.beta, p.heads());
}

// X3: a sequence without tokens passes the state and its gradient on.
TEST(DeltaRuleBackward, X3EmptySequencesPassTheStateOn) {
  RuleShape shape;
  shape.lengths = {0, 4, 0};
  const RuleProblem p(shape, 59);
  const Floats state = p.Forward(PlacesUnderTest()[0]).state;
  const Floats d_state = p.Backward(PlacesUnderTest()[0]).state;
  const int64_t one = p.states() / 3;
  for (int64_t i = 0; i < p.states(); ++i) {
    if (i / one == 1) continue;
    ASSERT_EQ(state[i], static_cast<float>(p.state[i]));
    ASSERT_EQ(d_state[i], static_cast<float>(p.d_final[i]));
  }
}

std::vector<const Floats*> All(const RuleGradients& g) {
  return {&g.q, &g.k, &g.v, &g.g, &g.beta, &g.state};
}

// T15, X9: REF within FP32's rounding, and the same bits with any number of threads.
TEST(DeltaRuleBackward, EveryShapeMatchesRefWithAnyThreads) {
  for (auto [key_dim, value_dim] : std::vector<std::pair<int64_t, int64_t>>{
           {1, 1}, {8, 31}, {17, 9}, {60, 20}, {128, 64}, {256, 3}}) {
    for (bool normalize : {false, true}) {
      RuleShape shape;
      shape.lengths = {1, 63, 0, 17, 64};
      shape.ratio = 3;
      shape.key_dim = key_dim;
      shape.value_dim = value_dim;
      shape.normalize = normalize && key_dim > 1;
      RuleProblem p(shape, 67);
      if (!shape.normalize) {  // |k| stays below 1, or the recurrence grows
        const double size = 1.0 / std::sqrt(static_cast<double>(key_dim));
        for (double& value : p.k) value = static_cast<float>(value * size);
      }
      const std::string what = std::to_string(key_dim) + "x" + std::to_string(value_dim);
      const RuleGradients expected = p.Backward();
      const RuleGradients got = p.Backward(PlacesUnderTest()[0]);
      const auto expected_all = All(expected), got_all = All(got);
      for (size_t i = 0; i < got_all.size(); ++i) {
        EXPECT_LE(Error(*got_all[i], *expected_all[i]), 4e-6) << what << " gradient " << i;
      }
      for (const Backend& backend : RepeatsUnderTest()) {
        const RuleGradients again = p.Backward(backend);
        const auto again_all = All(again);
        for (size_t i = 0; i < got_all.size(); ++i) EXPECT_EQ(*again_all[i], *got_all[i]) << what;
      }
    }
  }
}

TEST(DeltaRuleBackward, EveryTypeMatchesRef) {
  for (gdn_dtype dtype : {GDN_F32, GDN_BF16, GDN_F16}) {
    for (gdn_dtype d_dtype : {GDN_F32, GDN_BF16, GDN_F16}) {
      for (bool states : {false, true}) {
        RuleShape shape;
        shape.dtype = dtype;
        shape.d_dtype = d_dtype;
        shape.states = states;
        shape.key_dim = 19;
        const RuleProblem p(shape, 69);
        const RuleGradients expected = p.Backward();
        for (const Backend& backend : PlacesUnderTest()) {
          const RuleGradients got = p.Backward(backend);
          EXPECT_LE(Error(got.q, expected.q), 2.0 * RoundingBound(d_dtype));
          EXPECT_LE(Error(got.k, expected.k), 2.0 * RoundingBound(d_dtype));
          EXPECT_LE(Error(got.v, expected.v), 2.0 * RoundingBound(d_dtype));
          EXPECT_LE(Error(got.g, expected.g), 4e-6);
          EXPECT_LE(Error(got.beta, expected.beta), 4e-6);
          EXPECT_LE(Error(got.state, expected.state), 4e-6);
        }
      }
    }
  }
}

// Rounded outputs are the unrounded ones, rounded once.
TEST(DeltaRuleBackward, EveryOutputTypeIsRoundedOnce) {
  for (gdn_dtype dtype : {GDN_BF16, GDN_F16}) {
    RuleShape shape;
    shape.dtype = dtype;
    RuleProblem wide(shape, 61), narrow(shape, 61);
    narrow.shape.d_dtype = dtype;
    const RuleGradients expected = wide.Backward();
    const RuleGradients got = narrow.Backward();
    Tensor rounded(dtype, 1);
    for (size_t i = 0; i < got.k.size(); ++i) {
      rounded.Set(0, expected.k[i]);
      ASSERT_EQ(got.k[i], rounded.Get(0));
    }
    for (size_t i = 0; i < got.v.size(); ++i) {
      rounded.Set(0, expected.v[i]);
      ASSERT_EQ(got.v[i], rounded.Get(0));
    }
    EXPECT_EQ(got.g, expected.g);
  }
}

}  // namespace
}  // namespace gdn::kernels
