#include "gdn/kernels/gdn2_backward.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/gdn2_test_util.h"
#include "kernels/refusal_test_util.h"

namespace gdn::kernels {
namespace {

// Of an FP32 result; REF rounds once, the others in every operation.
double Bound(const Backend& backend) { return backend.backend == GDN_BACKEND_REF ? 3e-7 : 2.3e-6; }

// Of every back end.
void ExpectFiniteDifferences(Gdn2Problem p) {
  auto loss = [&] { return p.Loss(); };
  const Doubles d_q = FiniteDifferences(p.q, loss), d_k = FiniteDifferences(p.k, loss);
  const Doubles d_v = FiniteDifferences(p.v, loss), d_g = FiniteDifferences(p.g, loss);
  const Doubles d_erase = FiniteDifferences(p.erase, loss);
  const Doubles d_write = FiniteDifferences(p.write, loss);
  Doubles d_state;
  if (p.shape.states) d_state = FiniteDifferences(p.state, loss);
  for (const Backend& backend : PlacesAndRef()) {
    SCOPED_TRACE(backend.name);
    const Gdn2Gradients got = p.Backward(backend);
    ExpectGradient("d_q", got.q, d_q, Bound(backend));
    ExpectGradient("d_k", got.k, d_k, Bound(backend));
    ExpectGradient("d_v", got.v, d_v, Bound(backend));
    ExpectGradient("d_g", got.g, d_g, Bound(backend));
    ExpectGradient("d_erase", got.erase, d_erase, Bound(backend));
    ExpectGradient("d_write", got.write, d_write, Bound(backend));
    if (p.shape.states) ExpectGradient("d_state", got.state, d_state, Bound(backend));
  }
}

TEST(Gdn2Backward, FiniteDifferencesOfEveryGradient) {
  for (int64_t ratio = 1; ratio <= 4; ++ratio) {
    for (bool own_gates : {false, true}) {
      for (bool states : {true, false}) {
        RuleShape shape;
        shape.ratio = ratio;
        shape.normalize = ratio % 2 == 0;
        shape.states = states;
        ExpectFiniteDifferences(Gdn2Problem(shape, own_gates, 91));
      }
    }
  }
}

TEST(Gdn2Backward, FiniteDifferencesOnOddShapes) {
  for (auto [key_dim, value_dim] :
       std::vector<std::pair<int64_t, int64_t>>{{1, 1}, {1, 7}, {7, 1}, {3, 11}, {9, 2}}) {
    RuleShape shape;
    shape.lengths = {2, 7};
    shape.key_heads = 1;
    shape.ratio = 3;
    shape.key_dim = key_dim;
    shape.value_dim = value_dim;
    shape.normalize = false;
    ExpectFiniteDifferences(Gdn2Problem(shape, true, 93));
  }
}

// Sums over `channels` neighbours.
Floats Summed(const Floats& values, int64_t channels) {
  const auto width = static_cast<size_t>(channels);
  Floats sums(values.size() / width, 0.0f);
  for (size_t i = 0; i < values.size(); ++i) sums[i / width] += values[i];
  return sums;
}
Floats Plus(Floats a, const Floats& b) {
  for (size_t i = 0; i < a.size(); ++i) a[i] += b[i];
  return a;
}

// T18: with the delta rule's scalars on every channel the gradients are the delta rule's, those of
// the scalars summed over their channels. On every back end, against its own rule and REF's.
TEST(Gdn2Backward, T18ScalarGatesAreTheGatedDeltaRule) {
  for (bool normalize : {false, true}) {
    RuleShape shape;
    shape.lengths = {12, 0, 3};
    shape.ratio = 3;
    shape.normalize = normalize;
    const RuleProblem rule(shape, 95);
    for (const Backend& backend : PlacesAndRef()) {
      const Gdn2Gradients got = Gdn2Problem(rule).Backward(backend);
      const double bound = backend.backend == GDN_BACKEND_REF ? 5e-7 : 4e-6;
      for (const Backend& other : {backend, kRef}) {
        SCOPED_TRACE(backend.name + " against the rule of " + other.name);
        const RuleGradients expected = rule.Backward(other);
        EXPECT_LE(Error(got.q, expected.q), bound);
        EXPECT_LE(Error(got.k, expected.k), bound);
        EXPECT_LE(Error(got.v, expected.v), bound);
        EXPECT_LE(Error(got.state, expected.state), bound);
        EXPECT_LE(Error(Summed(got.g, shape.key_dim), expected.g), 2 * bound);
        const Floats beta =
            Plus(Summed(got.erase, shape.key_dim), Summed(got.write, shape.value_dim));
        EXPECT_LE(Error(beta, expected.beta), 2 * bound);
      }
    }
  }
}

// KDA, S <- S diag(a) (I - b k k^T) + b v k^T, on dense [V][K] states: a decay per channel, and the
// scalar b is p.erase of a head's first channel.
double KdaLoss(const Gdn2Problem& p) {
  const int64_t K = p.shape.key_dim, V = p.shape.value_dim;
  double loss = 0.0;
  for (int64_t i = 0; i < p.n() * p.heads(); ++i) {
    const int64_t hv = i % p.heads();
    Doubles S(p.state.begin() + i * K * V, p.state.begin() + (i + 1) * K * V);
    for (int64_t t = p.cu[i / p.heads()]; t < p.cu[i / p.heads() + 1]; ++t) {
      const double* q = p.q.data() + t * p.keys() + hv / p.shape.ratio * K;
      const double* k = p.k.data() + t * p.keys() + hv / p.shape.ratio * K;
      const double* g = p.g.data() + t * p.gates() + hv * K;
      const double b = p.erase[t * p.gates() + hv * K];
      for (int64_t v = 0; v < V; ++v) {
        double* row = S.data() + v * K;
        const int64_t at = t * p.values() + hv * V + v;
        double along = 0.0;
        for (int64_t a = 0; a < K; ++a) along += row[a] * std::exp(g[a]) * k[a];
        for (int64_t a = 0; a < K; ++a) {
          row[a] = row[a] * std::exp(g[a]) + b * (p.v[at] - along) * k[a];
          loss += p.d_o[at] * row[a] * q[a];
        }
      }
    }
    for (int64_t a = 0; a < K * V; ++a) loss += p.d_final[i * K * V + a] * S[a];
  }
  return loss;
}

// One beta for all channels of erase and write is KDA: its gradients by differences, that of beta
// summed over the channels.
TEST(Gdn2Backward, ScalarBetaWithChannelDecayHasTheGradientsOfKda) {
  for (int64_t ratio : {1, 2}) {
    RuleShape shape;
    shape.ratio = ratio;
    shape.normalize = false;
    shape.scale = 1.0f;
    Gdn2Problem p(shape, true, 96);
    const int64_t K = shape.key_dim, V = shape.value_dim;
    Doubles beta;
    for (int64_t i = 0; i < p.tokens() * p.heads(); ++i) beta.push_back(p.erase[i * K]);
    const auto tie = [&] {
      for (size_t i = 0; i < beta.size(); ++i) {
        std::fill_n(p.erase.begin() + static_cast<std::ptrdiff_t>(i) * K, K, beta[i]);
        std::fill_n(p.write.begin() + static_cast<std::ptrdiff_t>(i) * V, V, beta[i]);
      }
    };
    tie();
    auto loss = [&] { return KdaLoss(p); };
    const Doubles d_q = FiniteDifferences(p.q, loss), d_k = FiniteDifferences(p.k, loss);
    const Doubles d_v = FiniteDifferences(p.v, loss), d_g = FiniteDifferences(p.g, loss);
    const Doubles d_state = FiniteDifferences(p.state, loss);
    const Doubles d_beta = FiniteDifferences(beta, [&] {
      tie();
      return KdaLoss(p);
    });
    tie();
    for (const Backend& backend : PlacesAndRef()) {
      SCOPED_TRACE(backend.name);
      const Gdn2Gradients got = p.Backward(backend);
      ExpectGradient("d_q", got.q, d_q, Bound(backend));
      ExpectGradient("d_k", got.k, d_k, Bound(backend));
      ExpectGradient("d_v", got.v, d_v, Bound(backend));
      ExpectGradient("d_g", got.g, d_g, Bound(backend));
      ExpectGradient("d_state", got.state, d_state, Bound(backend));
      ExpectGradient("d_beta", Plus(Summed(got.erase, K), Summed(got.write, V)), d_beta,
                     2 * Bound(backend));
    }
  }
}

// D5: no exponent of a sum over tokens is formed, so a channel that dies in one step is finite.
TEST(Gdn2Backward, D5StrongDecayStaysFinite) {
  Gdn2Problem p(RuleShape{}, true, 97);
  for (size_t i = 0; i < p.g.size(); i += 3) p.g[i] = -1000.0;
  for (const Backend& backend : PlacesAndRef()) {
    const Gdn2Gradients got = p.Backward(backend);
    for (const Floats* values :
         {&got.q, &got.k, &got.v, &got.g, &got.erase, &got.write, &got.state}) {
      for (float value : *values) ASSERT_TRUE(std::isfinite(value));
    }
    for (size_t i = 0; i < p.g.size(); i += 3) EXPECT_EQ(got.g[i], 0.0f) << backend.name;
  }
}

// K4: a sequence's gradients do not move by a bit with its neighbours' data.
TEST(Gdn2Backward, K4NothingCrossesABoundary) {
  const Gdn2Problem p(RuleShape{}, false, 99);  // lengths 3, 0, 5, 1
  Gdn2Problem changed = p;
  for (int64_t i = 3 * p.values(); i < 8 * p.values(); ++i) changed.v[i] = changed.d_o[i] = 1e3;
  const Gdn2Gradients before = p.Backward(PlacesUnderTest()[0]);
  const Gdn2Gradients after = changed.Backward(PlacesUnderTest()[0]);
  auto expect_same = [&](const Floats& a, const Floats& b, int64_t width) {
    EXPECT_EQ(Floats(a.begin(), a.begin() + 3 * width), Floats(b.begin(), b.begin() + 3 * width));
    EXPECT_EQ(Floats(a.begin() + 8 * width, a.end()), Floats(b.begin() + 8 * width, b.end()));
    EXPECT_NE(a, b);
  };
  expect_same(before.q, after.q, p.keys());
  expect_same(before.k, after.k, p.keys());
  expect_same(before.v, after.v, p.values());
  expect_same(before.g, after.g, p.gates());
  expect_same(before.erase, after.erase, p.gates());
  expect_same(before.write, after.write, p.values());
}

std::vector<const Floats*> All(const Gdn2Gradients& g) {
  return {&g.q, &g.k, &g.v, &g.g, &g.erase, &g.write, &g.state};
}

// X1, X9: REF within FP32's rounding, and the same bits with any number of threads.
TEST(Gdn2Backward, EveryShapeMatchesRefWithAnyThreads) {
  for (auto [key_dim, value_dim] : std::vector<std::pair<int64_t, int64_t>>{
           {1, 1}, {8, 31}, {17, 9}, {60, 20}, {128, 64}, {256, 3}}) {
    RuleShape shape;
    shape.lengths = {1, 63, 0, 17};
    shape.ratio = 3;
    shape.key_dim = key_dim;
    shape.value_dim = value_dim;
    shape.normalize = key_dim > 1;
    const Gdn2Problem p(shape, key_dim % 8 == 0, 113);
    const Gdn2Gradients expected = p.Backward();
    const Gdn2Gradients got = p.Backward(PlacesUnderTest()[0]);
    for (size_t i = 0; i < All(got).size(); ++i) {
      EXPECT_LE(Error(*All(got)[i], *All(expected)[i]), 4e-6) << key_dim << " gradient " << i;
    }
    for (const Backend& backend : RepeatsUnderTest()) {
      const Gdn2Gradients again = p.Backward(backend);
      for (size_t i = 0; i < All(got).size(); ++i) EXPECT_EQ(*All(again)[i], *All(got)[i]);
    }
  }
}

TEST(Gdn2Backward, EveryTypeMatchesRef) {
  for (gdn_dtype dtype : {GDN_F32, GDN_BF16, GDN_F16}) {
    for (gdn_dtype d_dtype : {GDN_F32, GDN_BF16, GDN_F16}) {
      for (bool states : {false, true}) {
        RuleShape shape;
        shape.dtype = dtype;
        shape.d_dtype = d_dtype;
        shape.states = states;
        Gdn2Problem p(shape, states, 115);
        p.gate_dtype = dtype;
        const Gdn2Gradients expected = p.Backward();
        for (const Backend& backend : PlacesUnderTest()) {
          const Gdn2Gradients got = p.Backward(backend);
          for (size_t i = 0; i < 7; ++i) {
            const double bound = i < 3 ? 2.0 * RoundingBound(d_dtype) : 4e-6;
            EXPECT_LE(Error(*All(got)[i], *All(expected)[i]), bound) << i;
          }
        }
      }
    }
  }
}

TEST(Gdn2Backward, RefusesEveryDamagedArgument) {
  static const std::vector<int32_t> cu = {0, 1, 2};
  Tensor in(GDN_F32, 200), d_q(GDN_F32, 32), d_k(GDN_F32, 32), d_v(GDN_F32, 40);
  Tensor gates(GDN_F32, 168);
  using Args = gdn2_backward_args;
  Args good{};
  good.tokens = good.sequences = 2;
  good.cu_seqlens = cu.data();
  good.key_heads = 2;
  good.value_heads = good.gate_heads = 4;
  good.key_dim = 8;
  good.value_dim = 5;
  good.q = good.k = good.v = good.erase = good.write = good.d_o = in.data();
  good.g = good.q_rstd = good.k_rstd = static_cast<const float*>(in.data());
  good.use_qk_l2norm = 1;
  good.q_token_stride = good.k_token_stride = good.d_q_token_stride = good.d_k_token_stride = 16;
  good.v_token_stride = good.d_o_token_stride = good.d_v_token_stride = 20;
  good.d_q = d_q.data();
  good.d_k = d_k.data();
  good.d_v = d_v.data();
  good.d_g = static_cast<float*>(gates.data());
  good.d_erase = good.d_g + 64;
  good.d_write = good.d_g + 128;
  const auto bad = GDN_INVALID_ARGUMENT;
  std::vector<Misuse<Args>> cases = {
      {"tokens", bad, [](Args& a) { a.tokens = -1; }},
      {"cu_seqlens", bad, [](Args& a) { a.cu_seqlens = nullptr; }},
      {"value_heads", bad, [](Args& a) { a.value_heads = 5; }},
      {"gate_heads", bad, [](Args& a) { a.gate_heads = 3; }},
      {"key_dim", GDN_UNSUPPORTED_SHAPE, [](Args& a) { a.key_dim = 257; }},
      {"qkv_dtype", bad, [](Args& a) { a.qkv_dtype = kBadDtype; }},
      {"gate_dtype", bad, [](Args& a) { a.gate_dtype = kBadDtype; }},
      {"d_o_dtype", bad, [](Args& a) { a.d_o_dtype = kBadDtype; }},
      {"d_qkv_dtype", bad, [](Args& a) { a.d_qkv_dtype = kBadDtype; }},
      {"q_token_stride", bad, [](Args& a) { a.q_token_stride = 15; }},
      {"d_o_token_stride", bad, [](Args& a) { a.d_o_token_stride = 19; }},
      {"d_q_token_stride", bad, [](Args& a) { a.d_q_token_stride = 15; }},
      {"d_k_token_stride", bad, [](Args& a) { a.d_k_token_stride = 15; }},
      {"d_v_token_stride", bad, [](Args& a) { a.d_v_token_stride = 19; }},
      {"scale", bad, [](Args& a) { a.scale = NAN; }},
      {"q must", bad, [](Args& a) { a.q = nullptr; }},
      {"q_rstd must", bad, [](Args& a) { a.q_rstd = nullptr; }},
      {"k_rstd must", bad, [](Args& a) { a.k_rstd = nullptr; }},
      {"g must", bad, [](Args& a) { a.g = nullptr; }},
      {"erase must", bad, [](Args& a) { a.erase = nullptr; }},
      {"write must", bad, [](Args& a) { a.write = nullptr; }},
      {"d_o must", bad, [](Args& a) { a.d_o = nullptr; }},
      {"d_q must", bad, [](Args& a) { a.d_q = nullptr; }},
      {"d_k must", bad, [](Args& a) { a.d_k = nullptr; }},
      {"d_v must", bad, [](Args& a) { a.d_v = nullptr; }},
      {"d_g must", bad, [](Args& a) { a.d_g = nullptr; }},
      {"d_erase must", bad, [](Args& a) { a.d_erase = nullptr; }},
      {"d_write must", bad, [](Args& a) { a.d_write = nullptr; }},
      {"overlap", bad, [](Args& a) { a.v = a.d_v; }},
      {"overlap", bad, [](Args& a) { a.d_q = a.d_k; }}};
  if (DeviceMemoryUnderTest() == nullptr) {  // A device's offsets are read by its kernels alone.
    cases.push_back({"cu_seqlens must end", bad, [](Args& a) { a.tokens = 1; }});
  }
  ExpectRefusals<Args>(good, {&d_q, &d_k, &d_v, &gates}, gdn_gdn2_backward, cases,
                       CheckingPlaces());
  for (const gdn_backend backend : CheckingPlaces()) {
    const Execution execution({"", backend, 0});
    EXPECT_EQ(gdn_gdn2_backward(execution.exec(), &good), GDN_WORKSPACE_TOO_SMALL) << backend;
  }
}

}  // namespace
}  // namespace gdn::kernels
