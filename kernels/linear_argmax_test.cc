// linear_argmax: REF against its definition, and what is refused.
#include "gdn/kernels/linear_argmax.h"

#include <cmath>
#include <cstdint>
#include <limits>
#include <string>

#include "gtest/gtest.h"
#include "kernels/linear_argmax_test_util.h"

namespace gdn::kernels {
namespace {

TEST(LinearArgmaxRef, IsTheLargestLogitAndItsProbability) {
  for (const gdn_dtype dtype : {GDN_F32, GDN_BF16, GDN_F16}) {
    for (const bool norm : {false, true}) {
      LinearCase c;
      c.rows = 7;
      c.n = 90;
      c.k = 40;
      c.dtype = dtype;
      c.norm = norm;
      c.x_dtype = norm ? GDN_F32 : dtype;
      SCOPED_TRACE(c.Name());
      ArgmaxCall call(c);
      call.position[3] = -1;
      RunRef(call);
      ExpectGreedy(call);
    }
  }
}

TEST(LinearArgmaxRef, TheLowestOfEqualLogitsWins) {
  LinearCase c;
  c.rows = 2;
  c.n = 50;
  c.k = 16;
  ArgmaxCall call(c);
  for (int64_t i = 0; i < call.linear.weight.size(); ++i) call.linear.weight.Set(i, 0.5f);
  RunRef(call);
  EXPECT_EQ(call.token[0], 0);
  EXPECT_EQ(call.token[1], 0);
  EXPECT_NEAR(call.logprob[0], -std::log(50.0), 1e-6);
}

TEST(LinearArgmaxRef, ADamagedRowSaysNoToken) {
  LinearCase c;
  c.rows = 2;
  ArgmaxCall call(c);
  call.linear.x.Set(c.x_stride(), std::numeric_limits<float>::quiet_NaN());
  RunRef(call);
  EXPECT_GE(call.token[0], 0);
  EXPECT_EQ(call.token[1], -1);
  EXPECT_TRUE(std::isnan(call.logprob[1]));
}

TEST(LinearArgmax, RefusesBadArgumentsByName) {
  LinearCase c;
  ArgmaxCall call(c);
  const gdn_linear_argmax_args good = call.Args();
  const gdn_exec exec{};
  const auto expect = [&](const char* name, gdn_status status, const auto& damage) {
    gdn_linear_argmax_args args = good;
    damage(args);
    EXPECT_EQ(gdn_linear_argmax(&exec, &args), status) << name;
    EXPECT_NE(std::string(gdn_last_error()).find(name), std::string::npos) << gdn_last_error();
    EXPECT_EQ(call.token[0], ArgmaxCall::kPoisonToken) << name;
  };
  expect("rows", GDN_INVALID_ARGUMENT, [](auto& a) { a.rows = -1; });
  expect("n must", GDN_INVALID_ARGUMENT, [](auto& a) { a.n = 0; });
  expect("n must", GDN_INVALID_ARGUMENT, [](auto& a) { a.n = int64_t{1} << 31; });
  expect("k must", GDN_INVALID_ARGUMENT, [](auto& a) { a.k = 0; });
  expect("x must", GDN_INVALID_ARGUMENT, [](auto& a) { a.x = nullptr; });
  expect("weight must", GDN_INVALID_ARGUMENT, [](auto& a) { a.weight = nullptr; });
  expect("position must", GDN_INVALID_ARGUMENT, [](auto& a) { a.position = nullptr; });
  expect("token must", GDN_INVALID_ARGUMENT, [](auto& a) { a.token = nullptr; });
  expect("x_row_stride", GDN_INVALID_ARGUMENT, [](auto& a) { a.x_row_stride = a.k - 1; });
  expect("x_dtype", GDN_INVALID_ARGUMENT, [](auto& a) { a.x_dtype = GDN_F16; });
  expect("eps", GDN_INVALID_ARGUMENT, [](auto& a) { a.norm_eps = -1.0f; });
  EXPECT_EQ(gdn_linear_argmax(&exec, &good), GDN_OK) << gdn_last_error();

  gdn_exec cpu{};
  cpu.backend = GDN_BACKEND_CPU;
  EXPECT_EQ(gdn_linear_argmax(&cpu, &good), GDN_BACKEND_UNAVAILABLE);
}

}  // namespace
}  // namespace gdn::kernels
