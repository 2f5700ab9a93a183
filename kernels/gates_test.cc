#include "gdn/kernels/gates.h"

#include <cmath>
#include <limits>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/recurrence_test_util.h"

namespace gdn::kernels {
namespace {

struct GatesCall {
  int64_t tokens, heads, stride;
  Tensor a, b;
  std::vector<float> a_log, dt_bias, g, beta;
  float beta_scale = 1.0f;

  GatesCall(int64_t t, int64_t h, gdn_dtype dtype, int64_t pad, float range)
      : tokens(t),
        heads(h),
        stride(h + pad),
        a(dtype, t * stride),
        b(dtype, t * stride),
        g(t * h + 1, NAN),
        beta(t * h + 1, NAN) {
    Random random(17);
    for (int64_t i = 0; i < t; ++i) {
      for (int64_t j = 0; j < h; ++j) {
        a.Set(i * stride + j, random.Uniform(-range, range));
        b.Set(i * stride + j, random.Uniform(-range, range));
      }
    }
    for (int64_t j = 0; j < h; ++j) {
      a_log.push_back(std::log(random.Uniform(0.01f, 16.0f)));
      dt_bias.push_back(random.Uniform(-7.0f, 1.0f));
    }
  }
  gdn_gates_args Args() {
    return {tokens, heads,        a.data(),       b.data(),   a.dtype(), stride,
            stride, a_log.data(), dt_bias.data(), beta_scale, g.data(),  beta.data()};
  }
};

void RunGates(const Backend& backend, GatesCall& call) {
  Execution execution(backend);
  const gdn_gates_args args = call.Args();
  ASSERT_EQ(gdn_gates(execution.exec(), &args), GDN_OK) << gdn_last_error();
}

// Every element to 1e-6 of the long double value, on every back end and in every range.
TEST(Gates, EveryElementIsWithinOneInAMillion) {
  std::vector<Backend> backends = BackendsUnderTest();
  backends.push_back(kRef);
  for (const Backend& backend : backends) {
    for (gdn_dtype dtype : {GDN_F32, GDN_BF16, GDN_F16}) {
      for (float range : {0.01f, 1.0f, 8.0f, 30.0f, 75.0f}) {
        for (int64_t heads : {1, 3, 8, 16, 32, 37}) {
          GatesCall call(70, heads, dtype, 5, range);
          call.beta_scale = heads == 3 ? 2.0f : 1.0f;
          RunGates(backend, call);
          for (int64_t t = 0; t < call.tokens; ++t) {
            for (int64_t h = 0; h < heads; ++h) {
              using Real = long double;
              const Real x = Real{call.a.Get(t * call.stride + h)} + Real{call.dt_bias[h]};
              const Real rate = std::exp(Real{call.a_log[h]});
              const Real g = -rate * (x > 20 ? x : std::log1p(std::exp(x)));
              const Real beta =
                  Real{call.beta_scale} / (1 + std::exp(-Real{call.b.Get(t * call.stride + h)}));
              ASSERT_NEAR(double(call.g[t * heads + h] / g), 1.0, 1e-6)
                  << backend.name << " x " << double(x);
              ASSERT_NEAR(double(call.beta[t * heads + h] / beta), 1.0, 1e-6)
                  << backend.name << " b " << call.b.Get(t * call.stride + h);
            }
          }
          EXPECT_TRUE(std::isnan(call.g.back()) && std::isnan(call.beta.back()));
        }
      }
    }
  }
}

TEST(Gates, SaturatesWithoutOverflowAndKeepsNan) {
  const float inf = std::numeric_limits<float>::infinity();
  const std::vector<float> a = {-inf, -1e30f, -200.0f, 20.0f, 20.001f, 100.0f, 1e30f, inf, NAN, 0};
  const std::vector<float> b = {-inf, -1e30f, -200.0f, -90.0f, 90.0f, 100.0f, 1e30f, inf, 0, NAN};
  const auto n = static_cast<int64_t>(a.size());
  std::vector<Backend> backends = BackendsUnderTest();
  backends.push_back(kRef);
  for (const Backend& backend : backends) {
    GatesCall call(1, n, GDN_F32, 0, 1.0f);
    for (int64_t i = 0; i < n; ++i) {
      call.a.Set(i, a[i]);
      call.b.Set(i, b[i]);
      call.a_log[i] = 0.0f;
      call.dt_bias[i] = 0.0f;
    }
    RunGates(backend, call);
    const std::vector<float> g = {0, 0, 0, -20.0f, -20.001f, -100.0f, -1e30f, -inf};
    const std::vector<float> beta = {0, 0, 0, 0, 1, 1, 1, 1};
    for (size_t i = 0; i < g.size(); ++i) {
      if (std::isinf(g[i])) {
        EXPECT_EQ(call.g[i], g[i]) << backend.name;
      } else {
        EXPECT_NEAR(call.g[i], g[i], 1e-6 * std::fabs(double{g[i]}) + 1e-30) << backend.name << i;
      }
      EXPECT_NEAR(call.beta[i], beta[i], 1e-30) << backend.name << i;
    }
    EXPECT_TRUE(std::isnan(call.g[8])) << backend.name;
    EXPECT_TRUE(std::isnan(call.beta[9])) << backend.name;
  }
}

TEST(Gates, TokensDoNotDependOnTheThreads) {
  GatesCall one(3000, 32, GDN_BF16, 0, 8.0f);
  GatesCall four = one;
  RunGates({"cpu", GDN_BACKEND_CPU, 0}, one);
  RunGates({"cpu", GDN_BACKEND_CPU, 4}, four);
  one.g.pop_back(), four.g.pop_back(), one.beta.pop_back(), four.beta.pop_back();
  EXPECT_EQ(one.g, four.g);
  EXPECT_EQ(one.beta, four.beta);
}

}  // namespace
}  // namespace gdn::kernels
