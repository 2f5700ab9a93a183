// A seeded call of linear_argmax on host memory, for the tests of both back ends.
#ifndef KERNELS_LINEAR_ARGMAX_TEST_UTIL_H_
#define KERNELS_LINEAR_ARGMAX_TEST_UTIL_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "gdn/kernels/linear_argmax.h"
#include "kernels/linear_op_test_util.h"

namespace gdn::kernels {

struct ArgmaxCall {
  static constexpr int32_t kPoisonToken = -77;
  static constexpr float kPoisonLogprob = 77.0f;

  explicit ArgmaxCall(LinearCase c)
      : linear(WithLogits(c)),
        position(static_cast<size_t>(c.rows), 5),
        token(static_cast<size_t>(c.rows), kPoisonToken),
        logprob(static_cast<size_t>(c.rows), kPoisonLogprob) {}

  gdn_linear_argmax_args Args() {
    const LinearCase& c = linear.shape;
    gdn_linear_argmax_args args{};
    args.rows = c.rows;
    args.n = c.n;
    args.k = c.k;
    args.x = linear.x.data();
    args.x_dtype = c.x_dtype;
    args.x_row_stride = c.x_stride();
    args.norm_weight = c.norm ? linear.norm_weight.data() : nullptr;
    args.norm_eps = c.eps;
    args.weight = linear.weight.data();
    args.weight_dtype = c.dtype;
    args.position = position.data();
    args.token = token.data();
    args.logprob = logprob.data();
    args.early_start = c.early_start;
    return args;
  }

  LinearCall linear;  // Its y is where a test puts the logits.
  std::vector<int64_t> position;
  std::vector<int32_t> token;
  std::vector<float> logprob;

 private:
  static LinearCase WithLogits(LinearCase c) {
    if (c.x_dtype != GDN_F32) c.x_dtype = c.dtype;
    c.y_dtype = GDN_F32;
    return c;
  }
};

inline void RunRef(ArgmaxCall& call) {
  const gdn_linear_argmax_args args = call.Args();
  const gdn_exec exec{};
  ASSERT_EQ(gdn_linear_argmax(&exec, &args), GDN_OK) << gdn_last_error();
}

// Each row's token is the largest of REF's logits up to their rounding, its log-probability theirs;
// padding has none.
inline void ExpectGreedy(const ArgmaxCall& got) {
  LinearCall logits = got.linear;
  RunRef(logits);
  const LinearCase& c = logits.shape;
  const double bound = c.norm ? 2e-2 : 2e-4;
  for (int64_t row = 0; row < c.rows; ++row) {
    const auto at = static_cast<size_t>(row);
    SCOPED_TRACE(row);
    if (got.position[at] < 0) {
      EXPECT_EQ(got.token[at], -1);
      EXPECT_EQ(got.logprob[at], ArgmaxCall::kPoisonLogprob);
      continue;
    }
    double max = -INFINITY;
    for (int64_t j = 0; j < c.n; ++j) {
      max = std::max(max, double{logits.y.Get(row * c.y_stride() + j)});
    }
    double sum = 0.0;
    for (int64_t j = 0; j < c.n; ++j) sum += std::exp(logits.y.Get(row * c.y_stride() + j) - max);
    ASSERT_GE(got.token[at], 0);
    ASSERT_LT(got.token[at], c.n);
    EXPECT_GE(logits.y.Get(row * c.y_stride() + got.token[at]), max - bound);
    EXPECT_NEAR(got.logprob[at], -std::log(sum), bound);
  }
}

}  // namespace gdn::kernels

#endif  // KERNELS_LINEAR_ARGMAX_TEST_UTIL_H_
