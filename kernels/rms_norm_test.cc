#include "gdn/kernels/rms_norm.h"

#include <cstdint>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/linear_test_util.h"

namespace gdn::kernels {
namespace {

struct Case {
  int64_t rows;
  int64_t dim;
  gdn_dtype x_dtype;
  gdn_dtype y_dtype;
  int32_t zero_centered;
  float eps;
  float scale;  // of x
};

struct Problem {
  Tensor x;
  std::vector<float> weight;
  gdn_rms_norm_args args;
};

constexpr int64_t kPadding = 3;

Problem Make(Random& random, const Case& c) {
  Problem p;
  p.x = Tensor(c.x_dtype, c.rows * (c.dim + kPadding));
  for (int64_t row = 0; row < c.rows; ++row) {
    for (int64_t i = 0; i < c.dim; ++i) {
      p.x.Set(row * (c.dim + kPadding) + i, c.scale * random.Normal());
    }
  }
  for (int64_t i = 0; i < c.dim; ++i) p.weight.push_back(random.Uniform(-1.0f, 1.0f));
  p.args = {};
  p.args.rows = c.rows;
  p.args.dim = c.dim;
  p.args.x_dtype = c.x_dtype;
  p.args.x_row_stride = c.dim + kPadding;
  p.args.zero_centered = c.zero_centered;
  p.args.eps = c.eps;
  p.args.y_dtype = c.y_dtype;
  p.args.y_row_stride = c.dim + 1;
  return p;
}

Tensor Evaluate(const Execution& execution, const Problem& p) {
  Tensor y(p.args.y_dtype, p.args.rows * p.args.y_row_stride);
  gdn_rms_norm_args args = p.args;
  args.x = p.x.data();
  args.weight = p.weight.data();
  args.y = y.data();
  EXPECT_EQ(gdn_rms_norm(execution.exec(), &args), GDN_OK) << gdn_last_error();
  return y;
}

// Row `row` by the formula, for checking the oracle itself.
std::vector<double> Expected(const Problem& p, int64_t row) {
  const int64_t x0 = row * p.args.x_row_stride;
  long double sum = 0.0L;
  for (int64_t i = 0; i < p.args.dim; ++i) {
    const long double x = p.x.Get(x0 + i);
    sum += x * x;
  }
  const long double rms = sqrtl(sum / static_cast<long double>(p.args.dim) + p.args.eps);
  std::vector<double> y;
  for (int64_t i = 0; i < p.args.dim; ++i) {
    const double weight = p.weight[static_cast<size_t>(i)] + (p.args.zero_centered ? 1.0 : 0.0);
    y.push_back(static_cast<double>(p.x.Get(x0 + i) / rms) * weight);
  }
  return y;
}

TEST(RmsNormTest, MatchesTheFormulaForEveryTypeShapeAndTarget) {
  Random random(21);
  for (const int64_t dim : {1, 2, 7, 8, 9, 31, 64, 100, 256, 1025}) {
    for (const gdn_dtype x_dtype : kDtypes) {
      for (const gdn_dtype y_dtype : kDtypes) {
        for (const int32_t zero_centered : {0, 1}) {
          for (const float scale : {1.0f, 1e-3f, 30.0f}) {
            const Problem p = Make(random, {5, dim, x_dtype, y_dtype, zero_centered, 1e-6f, scale});
            std::vector<Tensor> results;
            results.push_back(Evaluate(Execution(kRef), p));
            for (const Variant& variant : kVariants) {
              const BaselineTargetScope target(variant.baseline);
              results.push_back(Evaluate(Execution(CpuBackend(variant.threads)), p));
            }
            for (size_t r = 0; r < results.size(); ++r) {
              SCOPED_TRACE(testing::Message()
                           << (r == 0 ? "ref" : kVariants[r - 1].name) << " dim " << dim
                           << " types " << x_dtype << " " << y_dtype << " scale " << scale);
              RelativeL2 error;
              for (int64_t row = 0; row < 5; ++row) {
                const std::vector<double> expected = Expected(p, row);
                for (int64_t i = 0; i < dim; ++i) {
                  error.Add(results[r].Get(row * (dim + 1) + i), expected[static_cast<size_t>(i)]);
                }
                ASSERT_TRUE(IsPoison(results[r], row * (dim + 1) + dim));
              }
              EXPECT_LE(error.value(), WorstRounding(y_dtype));
            }
          }
        }
      }
    }
  }
}

TEST(RmsNormTest, EpsIsAddedToTheMeanInsideTheRoot) {
  Random random(22);
  Problem p = Make(random, {2, 16, GDN_F32, GDN_F32, 0, 0.25f, 0.0f});
  for (int64_t i = 0; i < 16; ++i) p.x.Set(i, 2.0f);
  p.weight.assign(16, 3.0f);
  for (const Backend& backend : {kRef, CpuBackend(0)}) {
    const Tensor y = Evaluate(Execution(backend), p);
    EXPECT_FLOAT_EQ(y.Get(0), 6.0f / std::sqrt(4.25f)) << backend.name;
    EXPECT_EQ(y.Get(17), 0.0f) << backend.name;  // an all-zero row
  }
}

TEST(RmsNormTest, InPlaceAndRowBitsDependOnNothingElse) {
  Random random(23);
  for (const gdn_dtype dtype : kDtypes) {
    Problem p = Make(random, {300, 67, dtype, dtype, 1, 1e-5f, 1.0f});
    p.args.y_row_stride = p.args.x_row_stride;
    const Tensor expected = Evaluate(Execution(CpuBackend(0)), p);
    for (const int32_t threads : {0, 2, 3}) {
      Execution execution(CpuBackend(threads));
      Tensor x = p.x;
      gdn_rms_norm_args args = p.args;
      args.x = x.data();
      args.y = x.data();
      args.weight = p.weight.data();
      ASSERT_EQ(gdn_rms_norm(execution.exec(), &args), GDN_OK);
      EXPECT_EQ(x.bytes(), expected.bytes());
    }
    for (int64_t row = 0; row < 300; ++row) {
      Tensor y(dtype, 67);
      gdn_rms_norm_args args = p.args;
      args.rows = 1;
      args.x = static_cast<const uint8_t*>(p.x.data()) + row * 70 * SizeOf(dtype);
      args.y = y.data();
      args.weight = p.weight.data();
      ASSERT_EQ(gdn_rms_norm(Execution(CpuBackend(0)).exec(), &args), GDN_OK);
      ASSERT_EQ(y.bytes(), expected.Slice(row * 70, row * 70 + 67));
    }
  }
}

TEST(RmsNormTest, RefusesMisuseByName) {
  Random random(24);
  const Problem p = Make(random, {2, 4, GDN_F32, GDN_F32, 0, 1e-6f, 1.0f});
  Tensor y(GDN_F32, 64);
  Execution execution(CpuBackend(0));
  auto refused = [&](gdn_status status, const char* sentence, auto change) {
    gdn_rms_norm_args args = p.args;
    args.x = p.x.data();
    args.y = y.data();
    args.weight = p.weight.data();
    change(args);
    ExpectRefused(gdn_rms_norm(execution.exec(), &args), status, y, sentence);
  };
  refused(GDN_INVALID_ARGUMENT, "rows must be in 0..2^40, got -2", [](auto& a) { a.rows = -2; });
  refused(GDN_INVALID_ARGUMENT, "dim must be in 1..2^40, got 0", [](auto& a) { a.dim = 0; });
  refused(GDN_INVALID_ARGUMENT, "x must not be NULL", [](auto& a) { a.x = nullptr; });
  refused(GDN_INVALID_ARGUMENT, "weight must not be NULL", [](auto& a) { a.weight = nullptr; });
  refused(GDN_INVALID_ARGUMENT, "y must not be NULL", [](auto& a) { a.y = nullptr; });
  refused(GDN_INVALID_ARGUMENT, "x_row_stride", [](auto& a) { a.x_row_stride = 3; });
  refused(GDN_INVALID_ARGUMENT, "y_row_stride", [](auto& a) { a.y_row_stride = 3; });
  refused(GDN_INVALID_ARGUMENT, "eps must be finite and >= 0, got -1", [](auto& a) { a.eps = -1; });
  refused(GDN_INVALID_ARGUMENT, "x_dtype", [](auto& a) { a.x_dtype = Unlisted<gdn_dtype>(5); });
  refused(GDN_INVALID_ARGUMENT, "y_dtype", [](auto& a) { a.y_dtype = Unlisted<gdn_dtype>(5); });
  refused(GDN_INVALID_ARGUMENT, "in place", [&](auto& a) { a.x = y.data(); });
}

}  // namespace
}  // namespace gdn::kernels
