#include "gdn/kernels/silu_mul.h"

#include <cmath>
#include <cstdint>

#include "gtest/gtest.h"
#include "kernels/linear_test_util.h"

namespace gdn::kernels {
namespace {

struct Problem {
  Tensor both;  // [rows, 2 * dim]: gate | up
  gdn_silu_mul_args args;
};

Problem Make(Random& random, int64_t rows, int64_t dim, gdn_dtype dtype, gdn_dtype y_dtype) {
  Problem p;
  p.both = Tensor(dtype, rows * 2 * dim);
  FillNormal(random, p.both, 4.0f);
  p.args = {rows, dim, nullptr, nullptr, dtype, 2 * dim, nullptr, y_dtype, dim + 1};
  return p;
}

gdn_silu_mul_args Args(const Problem& p, Tensor& y) {
  gdn_silu_mul_args args = p.args;
  args.gate = p.both.data();
  args.up = static_cast<const uint8_t*>(p.both.data()) + p.args.dim * SizeOf(p.args.dtype);
  args.y = y.data();
  return args;
}

Tensor Evaluate(const Execution& execution, const Problem& p) {
  Tensor y(p.args.y_dtype, p.args.rows * p.args.y_row_stride);
  const gdn_silu_mul_args args = Args(p, y);
  EXPECT_EQ(gdn_silu_mul(execution.exec(), &args), GDN_OK) << gdn_last_error();
  return y;
}

double Expected(const Problem& p, int64_t row, int64_t i) {
  const double gate = p.both.Get(row * 2 * p.args.dim + i);
  return gate / (1.0 + std::exp(-gate)) * p.both.Get(row * 2 * p.args.dim + p.args.dim + i);
}

TEST(SiluMulTest, MatchesTheFormulaForEveryTypeShapeAndTarget) {
  Random random(41);
  for (const int64_t dim : {1, 3, 8, 17, 64, 251, 5000}) {
    for (const gdn_dtype dtype : kDtypes) {
      for (const gdn_dtype y_dtype : kDtypes) {
        const Problem p = Make(random, 4, dim, dtype, y_dtype);
        for (int v = -1; v < 3; ++v) {
          const BaselineTargetScope target(v >= 0 && kVariants[v].baseline);
          const Tensor y = Evaluate(Execution(v < 0 ? kRef : CpuBackend(kVariants[v].threads)), p);
          RelativeL2 error;
          for (int64_t row = 0; row < 4; ++row) {
            for (int64_t i = 0; i < dim; ++i) {
              const double got = y.Get(row * (dim + 1) + i);
              ASSERT_TRUE(std::isfinite(got));
              error.Add(got, Expected(p, row, i));
              if (y_dtype == GDN_F32) {
                ASSERT_NEAR(got, Expected(p, row, i), 1e-6 * std::abs(Expected(p, row, i)));
              }
            }
            ASSERT_TRUE(IsPoison(y, row * (dim + 1) + dim));
          }
          EXPECT_LE(error.value(), WorstRounding(y_dtype))
              << (v < 0 ? "ref" : kVariants[v].name) << " dim " << dim << " types " << dtype
              << y_dtype;
        }
      }
    }
  }
}

// The exponential is cut off; what it is multiplied by must not make that visible.
TEST(SiluMulTest, LargeNegativeGatesGiveNothing) {
  Random random(43);
  Problem p = Make(random, 1, 8, GDN_F32, GDN_F32);
  const float gates[] = {-87.0f, -88.0f, -104.0f, -1e4f, -1e30f, -1e38f, -3e38f, -90.0f};
  for (int64_t i = 0; i < 8; ++i) {
    p.both.Set(i, gates[i]);
    p.both.Set(8 + i, 1.0f);
  }
  const Tensor y = Evaluate(Execution(CpuBackend(1)), p);
  for (int64_t i = 0; i < 8; ++i) EXPECT_NEAR(y.Get(i), 0.0, 1e-35) << gates[i];
}

TEST(SiluMulTest, InPlaceAndBitsDependOnNothingElse) {
  Random random(42);
  for (const gdn_dtype dtype : kDtypes) {
    Problem p = Make(random, 33, 1001, dtype, dtype);
    p.args.y_row_stride = p.args.row_stride;
    const Tensor expected = Evaluate(Execution(CpuBackend(0)), p);
    for (const int32_t threads : {0, 2, 3, 7}) {
      Tensor both = p.both;
      gdn_silu_mul_args args = p.args;
      args.gate = both.data();
      args.up = static_cast<const uint8_t*>(both.data()) + 1001 * SizeOf(dtype);
      args.y = both.data();
      ASSERT_EQ(gdn_silu_mul(Execution(CpuBackend(threads)).exec(), &args), GDN_OK);
      for (int64_t row = 0; row < 33; ++row) {
        ASSERT_EQ(both.Slice(row * 2002, row * 2002 + 1001),
                  expected.Slice(row * 2002, row * 2002 + 1001));
        ASSERT_EQ(both.Slice(row * 2002 + 1001, row * 2002 + 2002),
                  p.both.Slice(row * 2002 + 1001, row * 2002 + 2002));
      }
    }
  }
}

TEST(SiluMulTest, RefusesMisuseByName) {
  Random random(43);
  const Problem p = Make(random, 2, 4, GDN_F32, GDN_F32);
  Tensor y(GDN_F32, 64);
  auto refused = [&](const char* sentence, auto change) {
    gdn_silu_mul_args args = Args(p, y);
    change(args);
    ExpectRefused(gdn_silu_mul(Execution(CpuBackend(0)).exec(), &args), GDN_INVALID_ARGUMENT, y,
                  sentence);
  };
  refused("rows must be in 0..2^40, got -1", [](auto& a) { a.rows = -1; });
  refused("dim must be in 1..2^40, got 0", [](auto& a) { a.dim = 0; });
  refused("gate must not be NULL", [](auto& a) { a.gate = nullptr; });
  refused("up must not be NULL", [](auto& a) { a.up = nullptr; });
  refused("y must not be NULL", [](auto& a) { a.y = nullptr; });
  refused("row_stride", [](auto& a) { a.row_stride = 3; });
  refused("y_row_stride", [](auto& a) { a.y_row_stride = 3; });
  refused("y_dtype", [](auto& a) { a.y_dtype = Unlisted<gdn_dtype>(-1); });
  refused("in place", [&](auto& a) { a.gate = y.data(); });
}

}  // namespace
}  // namespace gdn::kernels
