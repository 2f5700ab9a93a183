#include "gdn/kernels/gates_backward.h"

#include <cmath>
#include <vector>

#include "gdn/kernels/gates.h"
#include "gtest/gtest.h"
#include "kernels/gradient_test_util.h"
#include "kernels/op_call_test_util.h"
#include "kernels/refusal_test_util.h"

namespace gdn::kernels {
namespace {

GDN_BACKEND_SUITE(GatesBackward);

struct Gradients {
  Tensor d_a, d_b;
  Floats d_a_log, d_dt_bias;
};

struct Problem {
  int64_t tokens, heads;
  float beta_scale = 1.0f;
  gdn_dtype dtype = GDN_F32;
  Doubles a, b, a_log, dt_bias, d_g, d_beta;
  static constexpr int64_t kPad = 3;

  Problem(int64_t t, int64_t h, uint32_t seed, float range = 3.0f) : tokens(t), heads(h) {
    Random random(seed);
    a = RandomDoubles(random, t * h, -range, range);
    b = RandomDoubles(random, t * h, -range, range);
    a_log = RandomDoubles(random, h, -2.0f, 2.5f);
    dt_bias = RandomDoubles(random, h, -3.0f, 1.0f);
    d_g = RandomDoubles(random, t * h, -1.0f, 1.0f);
    d_beta = RandomDoubles(random, t * h, -1.0f, 1.0f);
  }

  double Loss() const {
    double loss = 0.0;
    for (int64_t i = 0; i < tokens * heads; ++i) {
      const int64_t h = i % heads;
      const double x = a[i] + dt_bias[h];
      loss -= d_g[i] * std::exp(a_log[h]) * (x > 20.0 ? x : std::log1p(std::exp(x)));
      loss += d_beta[i] * double{beta_scale} / (1.0 + std::exp(-b[i]));
    }
    return loss;
  }

  Tensor Strided(const Doubles& dense) const {
    Tensor tensor(dtype, tokens * (heads + kPad));
    for (int64_t i = 0; i < tokens * heads; ++i) {
      tensor.Set(i / heads * (heads + kPad) + i % heads, static_cast<float>(dense[i]));
    }
    return tensor;
  }
  Floats Dense(const Tensor& strided) const {
    Floats dense;
    for (int64_t t = 0; t < tokens; ++t) {
      for (int64_t h = 0; h < heads + kPad; ++h) {
        const float value = strided.Get(t * (heads + kPad) + h);
        if (h < heads) {
          dense.push_back(value);
        } else {
          EXPECT_TRUE(std::isnan(value)) << "written between the rows";
        }
      }
    }
    return dense;
  }

  Gradients Run(const Backend& backend) const {
    const Tensor a_in = Strided(a), b_in = Strided(b);
    const Floats a_log_in = ToFloats(a_log), dt_bias_in = ToFloats(dt_bias);
    const Floats d_g_in = ToFloats(d_g), d_beta_in = ToFloats(d_beta);
    Gradients out{
        Tensor(dtype, tokens * (heads + kPad)), Tensor(dtype, tokens * (heads + kPad)), {}, {}};
    GuardedFloats d_a_log(heads), d_dt_bias(heads);
    gdn_gates_backward_args args{};
    args.tokens = tokens;
    args.value_heads = heads;
    args.a = a_in.data();
    args.b = b_in.data();
    args.dtype = dtype;
    args.a_token_stride = args.b_token_stride = heads + kPad;
    args.d_a_token_stride = args.d_b_token_stride = heads + kPad;
    args.a_log = a_log_in.data();
    args.dt_bias = dt_bias_in.data();
    args.beta_scale = beta_scale;
    args.d_g = d_g_in.data();
    args.d_beta = d_beta_in.data();
    args.d_a = out.d_a.data();
    args.d_b = out.d_b.data();
    args.d_a_log = d_a_log.data();
    args.d_dt_bias = d_dt_bias.data();
    Execution execution(backend);
    size_t bytes = 0;
    EXPECT_EQ(gdn_gates_backward_workspace(execution.exec(), &args, &bytes), GDN_OK);
    execution.SetWorkspace(bytes);
    EXPECT_EQ(CallOp(execution, gdn_gates_backward, args,
                     {In(a_in), In(b_in), In(a_log_in), In(dt_bias_in), In(d_g_in), In(d_beta_in),
                      Out(out.d_a), Out(out.d_b), Out(d_a_log.values()), Out(d_dt_bias.values())},
                     {args.a, args.b, args.a_log, args.dt_bias, args.d_g, args.d_beta, args.d_a,
                      args.d_b, args.d_a_log, args.d_dt_bias}),
              GDN_OK)
        << gdn_last_error();
    out.d_a_log = d_a_log.Take("d_a_log");
    out.d_dt_bias = d_dt_bias.Take("d_dt_bias");
    return out;
  }

  // g of the forward.
  Floats LogDecays(const Backend& backend) const {
    const Tensor a_in = Strided(a), b_in = Strided(b);
    const Floats a_log_in = ToFloats(a_log), dt_bias_in = ToFloats(dt_bias);
    Floats g(static_cast<size_t>(tokens * heads), NAN), beta = g;
    gdn_gates_args args{};
    args.tokens = tokens;
    args.value_heads = heads;
    args.a = a_in.data();
    args.b = b_in.data();
    args.dtype = dtype;
    args.a_token_stride = args.b_token_stride = heads + kPad;
    args.a_log = a_log_in.data();
    args.dt_bias = dt_bias_in.data();
    args.beta_scale = beta_scale;
    args.g = g.data();
    args.beta = beta.data();
    const Execution execution(backend);
    EXPECT_EQ(CallOp(execution, gdn_gates, args,
                     {In(a_in), In(b_in), In(a_log_in), In(dt_bias_in), Out(g), Out(beta)},
                     {args.a, args.b, args.a_log, args.dt_bias, args.g, args.beta}),
              GDN_OK)
        << gdn_last_error();
    return g;
  }
};

// The factor 2 is allow_neg_eigval.
GDN_BACKEND_TEST(GatesBackward, FiniteDifferencesOfEveryGradient) {
  for (float beta_scale : {1.0f, 2.0f}) {
    for (int64_t heads : {1, 3, 13}) {
      Problem problem(7, heads, 21);
      problem.beta_scale = beta_scale;
      for (int64_t i = 0; i < heads; ++i) problem.a[i] = 25.0;  // beyond softplus' threshold
      auto loss = [&] { return problem.Loss(); };
      const Doubles d_a = FiniteDifferences(problem.a, loss);
      const Doubles d_b = FiniteDifferences(problem.b, loss);
      const Doubles d_a_log = FiniteDifferences(problem.a_log, loss);
      const Doubles d_dt_bias = FiniteDifferences(problem.dt_bias, loss);
      for (const Backend& backend : TestedBackendsAndRef()) {
        const double bound = backend.backend == GDN_BACKEND_REF ? 2e-7 : 1e-6;
        const Gradients got = problem.Run(backend);
        ExpectGradient("d_a", problem.Dense(got.d_a), d_a, bound);
        ExpectGradient("d_b", problem.Dense(got.d_b), d_b, bound);
        ExpectGradient("d_a_log", got.d_a_log, d_a_log, bound);
        ExpectGradient("d_dt_bias", got.d_dt_bias, d_dt_bias, bound);
      }
    }
  }
}

// T19: above 20 value and derivative are those of torch's threshold form, exactly.
GDN_BACKEND_TEST(GatesBackward, T19SlopeAboveTheThresholdIsExactlyOne) {
  for (float x : {20.0001f, 21.0f, 1e4f}) {
    Problem problem(1, 4, 23);
    for (int h = 0; h < 4; ++h) {
      problem.a[h] = x;
      problem.dt_bias[h] = 0.0;
      problem.a_log[h] = 0.0;
    }
    for (const Backend& backend : TestedBackendsAndRef()) {
      const Gradients got = problem.Run(backend);
      for (float g : problem.LogDecays(backend)) EXPECT_EQ(g, -x) << backend.name;
      for (int h = 0; h < 4; ++h) {
        EXPECT_EQ(got.d_a.Get(h), static_cast<float>(-problem.d_g[h])) << backend.name << x;
        EXPECT_EQ(got.d_dt_bias[h], static_cast<float>(-problem.d_g[h])) << backend.name << x;
        EXPECT_EQ(got.d_a_log[h], static_cast<float>(-problem.d_g[h]) * x) << backend.name << x;
      }
    }
  }
}

GDN_BACKEND_TEST(GatesBackward, X4SaturatedGatesStayFinite) {
  Problem problem(4, 6, 25);
  for (size_t i = 0; i < problem.a.size(); ++i) {
    problem.a[i] = i % 2 == 0 ? 1e4 : -1e4;
    problem.b[i] = i % 3 == 0 ? 1e4 : -1e4;
  }
  for (const Backend& backend : TestedBackendsAndRef()) {
    const Gradients got = problem.Run(backend);
    for (float value : problem.Dense(got.d_b)) EXPECT_EQ(value, 0.0f) << backend.name;
    for (float value : problem.Dense(got.d_a)) EXPECT_TRUE(std::isfinite(value)) << backend.name;
    for (float value : got.d_a_log) EXPECT_TRUE(std::isfinite(value)) << backend.name;
    for (float value : got.d_dt_bias) EXPECT_TRUE(std::isfinite(value)) << backend.name;
  }
}

GDN_BACKEND_TEST(GatesBackward, EveryTypeAndShapeMatchesRef) {
  for (gdn_dtype dtype : {GDN_F32, GDN_BF16, GDN_F16}) {
    for (int64_t tokens : {0, 1, 63, 64, 65, 500}) {
      for (int64_t heads : {1, 8, 31, 32}) {
        Problem problem(tokens, heads, 27, 9.0f);
        problem.dtype = dtype;
        const Gradients expected = problem.Run(kRef);
        for (const Backend& backend : TestedBackends()) {
          const Gradients got = problem.Run(backend);
          const double bound = 2.0 * RoundingBound(dtype);
          EXPECT_LE(Error(problem.Dense(got.d_a), problem.Dense(expected.d_a)), bound);
          EXPECT_LE(Error(problem.Dense(got.d_b), problem.Dense(expected.d_b)), bound);
          EXPECT_LE(Error(got.d_a_log, expected.d_a_log), 4e-6);
          EXPECT_LE(Error(got.d_dt_bias, expected.d_dt_bias), 4e-6);
        }
      }
    }
  }
}

GDN_BACKEND_TEST(GatesBackward, RepeatsAndThreadsGiveTheSameBits) {
  const Problem problem(1000, 32, 29);
  const Gradients first = problem.Run(Tested());
  for (int32_t threads : {1, 2, 5}) {
    const Gradients again = problem.Run(Tested(threads));
    EXPECT_EQ(again.d_a.bytes(), first.d_a.bytes());
    EXPECT_EQ(again.d_b.bytes(), first.d_b.bytes());
    EXPECT_EQ(again.d_a_log, first.d_a_log);
    EXPECT_EQ(again.d_dt_bias, first.d_dt_bias);
  }
}

GDN_BACKEND_TEST(GatesBackward, RefusesEveryDamagedArgument) {
  Tensor in(GDN_F32, 20), d_a(GDN_F32, 20), d_b(GDN_F32, 20), sums(GDN_F32, 20);
  using Args = gdn_gates_backward_args;
  Args good{};
  good.tokens = 2;
  good.value_heads = 10;
  good.a = good.b = in.data();
  good.a_token_stride = good.b_token_stride = good.d_a_token_stride = good.d_b_token_stride = 10;
  good.a_log = good.dt_bias = good.d_g = good.d_beta = static_cast<const float*>(in.data());
  good.beta_scale = 1.0f;
  good.d_a = d_a.data();
  good.d_b = d_b.data();
  good.d_a_log = static_cast<float*>(sums.data());
  good.d_dt_bias = good.d_a_log + 10;
  const auto bad = GDN_INVALID_ARGUMENT;
  ExpectRefusals<Args>(
      good, {&d_a, &d_b, &sums}, gdn_gates_backward,
      {{"tokens", bad, [](Args& a) { a.tokens = -1; }},
       {"value_heads", bad, [](Args& a) { a.value_heads = 0; }},
       {"value_heads", GDN_UNSUPPORTED_SHAPE, [](Args& a) { a.value_heads = 70000; }},
       {"dtype", bad, [](Args& a) { a.dtype = kBadDtype; }},
       {"a_token_stride", bad, [](Args& a) { a.a_token_stride = 9; }},
       {"b_token_stride", bad, [](Args& a) { a.b_token_stride = 9; }},
       {"d_a_token_stride", bad, [](Args& a) { a.d_a_token_stride = 9; }},
       {"d_b_token_stride", bad, [](Args& a) { a.d_b_token_stride = 9; }},
       {"beta_scale", bad, [](Args& a) { a.beta_scale = NAN; }},
       {"a must", bad, [](Args& a) { a.a = nullptr; }},
       {"b must", bad, [](Args& a) { a.b = nullptr; }},
       {"a_log must", bad, [](Args& a) { a.a_log = nullptr; }},
       {"dt_bias must", bad, [](Args& a) { a.dt_bias = nullptr; }},
       {"d_g must", bad, [](Args& a) { a.d_g = nullptr; }},
       {"d_beta must", bad, [](Args& a) { a.d_beta = nullptr; }},
       {"d_a must", bad, [](Args& a) { a.d_a = nullptr; }},
       {"d_b must", bad, [](Args& a) { a.d_b = nullptr; }},
       {"overlap", bad, [](Args& a) { a.d_b = a.d_a; }},
       {"d_a_log must", bad, [](Args& a) { a.d_a_log = nullptr; }},
       {"d_dt_bias must", bad, [](Args& a) { a.d_dt_bias = nullptr; }}},
      CheckingBackends());
  Execution execution(Tested());
  size_t bytes = 0;
  ASSERT_EQ(gdn_gates_backward_workspace(execution.exec(), &good, &bytes), GDN_OK);
  ASSERT_GT(bytes, 0u);
  EXPECT_EQ(gdn_gates_backward(execution.exec(), &good), GDN_WORKSPACE_TOO_SMALL);
}

}  // namespace
}  // namespace gdn::kernels
