// gdn_linear: REF against plain FP64 loops, and what is refused.
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "gdn/kernels/linear.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/linear_op_test_util.h"
#include "kernels/linear_test_util.h"

namespace gdn::kernels {
namespace {

// The definition in linear.h, on values that are already rounded.
double Expected(const LinearCall& call, const Tensor& y_before, int64_t row, int64_t j) {
  const LinearCase& c = call.shape;
  std::vector<double> n(c.k);
  double square = 0.0;
  for (int64_t k = 0; k < c.k; ++k) {
    n[k] = call.x.Get(row * c.x_stride() + k);
    square += n[k] * n[k];
  }
  Tensor rounded(c.dtype, 1);
  for (int64_t k = 0; k < c.k; ++k) {
    if (c.norm) n[k] *= call.norm_weight[k] / std::sqrt(square / static_cast<double>(c.k) + c.eps);
    rounded.Set(0, static_cast<float>(n[k]));
    n[k] = rounded.Get(0);
  }
  const auto product = [&](int64_t weight_row) {
    double sum = 0.0;
    for (int64_t k = 0; k < c.k; ++k) sum += n[k] * call.weight.Get(weight_row * c.k + k);
    return sum;
  };
  double value = product(j);
  if (c.kind == GDN_LINEAR_SILU_MUL) {
    value *= product(c.outputs() + j) / (1.0 + std::exp(-value));
  }
  if (c.accumulate) value += y_before.Get(row * c.y_stride() + j);
  return value;
}

TEST(LinearRef, MatchesTheDefinition) {
  for (gdn_dtype dtype : {GDN_F32, GDN_BF16, GDN_F16}) {
    for (const bool f32_y : {false, true}) {
      for (int variant = 0; variant < 8; ++variant) {
        LinearCase c;
        c.dtype = dtype;
        c.x_dtype = (variant & 1) != 0 ? GDN_F32 : dtype;
        c.norm = (variant & 2) != 0;
        c.kind = (variant & 4) != 0 ? GDN_LINEAR_SILU_MUL : GDN_LINEAR_PLAIN;
        c.y_dtype = f32_y ? GDN_F32 : dtype;
        c.accumulate = f32_y && c.kind == GDN_LINEAR_PLAIN;
        c.rows = 3;
        c.n = 14;
        c.k = 37;
        SCOPED_TRACE(c.Name());
        LinearCall call(c);
        const Tensor before = call.y;
        RunRef(call);
        RelativeL2 error;
        for (int64_t row = 0; row < c.rows; ++row) {
          for (int64_t j = 0; j < c.outputs(); ++j) {
            error.Add(call.y.Get(row * c.y_stride() + j), Expected(call, before, row, j));
          }
        }
        EXPECT_LE(error.value(), RoundingBound(c.y_dtype));
        EXPECT_EQ(GapsTouched(call, before), 0);
      }
    }
  }
}

// The two parts of a norm give what the norm gives, up to where it rounds.
TEST(LinearRef, ASplitNormIsTheNorm) {
  LinearCase out;
  out.rows = 5;
  out.n = 72;  // Its last group of columns is not whole.
  out.k = 24;
  out.y_dtype = GDN_F32;
  out.accumulate = true;
  LinearCall residual(out);
  SplitNorm split(out);
  RunRef(residual, split.First());
  for (const gdn_linear_kind kind : {GDN_LINEAR_PLAIN, GDN_LINEAR_SILU_MUL}) {
    LinearCase in;
    in.rows = out.rows;
    in.n = 34;
    in.k = out.n;
    in.kind = kind;
    in.norm = true;
    in.x_dtype = GDN_F32;
    in.x_pad = out.y_pad;
    LinearCall normed(in);
    normed.x = residual.y;
    normed.norm_weight = split.weight;
    LinearCall halved = normed;
    RunRef(normed);
    RunRef(halved, split.Second());
    EXPECT_LE(LinearError(halved, normed), 6e-3);
    EXPECT_GT(LinearError(halved, normed), 0.0);
  }
}

TEST(LinearRef, NoRowsTouchNothing) {
  LinearCase c;
  c.rows = 2;
  LinearCall call(c);
  const Tensor before = call.y;
  const LinearPlan plan = MakePlan(GDN_BACKEND_REF, c);
  gdn_linear_args args = call.Args(plan.get());
  args.rows = 0;
  args.x = nullptr;
  args.weight = nullptr;
  args.y = nullptr;
  const gdn_exec exec{};
  EXPECT_EQ(gdn_linear(&exec, &args), GDN_OK);
  EXPECT_EQ(call.y.bytes(), before.bytes());
}

// A y that shares x's buffer is fine where no element is shared.
TEST(LinearRef, ColumnsOfOneBufferMayInterleave) {
  LinearCase c;
  c.dtype = c.x_dtype = c.y_dtype = GDN_F32;
  c.rows = 3;
  c.n = 5;
  c.k = 4;
  c.x_pad = 5;
  c.y_pad = 4;
  LinearCall apart(c);
  LinearCall call(c);
  RunRef(apart);
  const LinearPlan plan = MakePlan(GDN_BACKEND_REF, c);
  gdn_linear_args args = call.Args(plan.get());
  args.y = static_cast<float*>(call.x.data()) + 4;
  const gdn_exec exec{};
  ASSERT_EQ(gdn_linear(&exec, &args), GDN_OK) << gdn_last_error();
  for (int64_t row = 0; row < c.rows; ++row) {
    for (int64_t j = 0; j < c.n; ++j) {
      EXPECT_EQ(call.x.Get(row * 9 + 4 + j), apart.y.Get(row * 9 + j));
    }
  }
  args.y = static_cast<float*>(call.x.data()) + 3;
  EXPECT_EQ(gdn_linear(&exec, &args), GDN_INVALID_ARGUMENT);
  EXPECT_THAT(gdn_last_error(), testing::HasSubstr("y must not overlap x"));
}

TEST(LinearMisuse, PlansNameWhatIsWrong) {
  const LinearCase c;
  const auto refused = [&](auto&& change, gdn_status status, const std::string& sentence,
                           gdn_backend backend = GDN_BACKEND_REF) {
    gdn_linear_shape shape = c.Shape();
    change(shape);
    gdn_linear_plan* plan = nullptr;
    EXPECT_EQ(gdn_linear_plan_create(backend, &shape, &plan), status) << sentence;
    EXPECT_THAT(gdn_last_error(), testing::HasSubstr(sentence));
    EXPECT_EQ(plan, nullptr);
  };
  const auto nothing = [](gdn_linear_shape&) {};
  gdn_linear_plan* plan = nullptr;
  EXPECT_EQ(gdn_linear_plan_create(GDN_BACKEND_REF, nullptr, &plan), GDN_INVALID_ARGUMENT);
  EXPECT_THAT(gdn_last_error(), testing::HasSubstr("shape must not be NULL"));
  const gdn_linear_shape good = c.Shape();
  EXPECT_EQ(gdn_linear_plan_create(GDN_BACKEND_REF, &good, nullptr), GDN_INVALID_ARGUMENT);
  EXPECT_THAT(gdn_last_error(), testing::HasSubstr("plan must not be NULL"));
  gdn_linear_plan_destroy(nullptr);

  refused(nothing, GDN_BACKEND_UNAVAILABLE, "use matmul.h", GDN_BACKEND_CPU);
  refused(nothing, GDN_BACKEND_UNAVAILABLE, "backend must be", Unlisted<gdn_backend>(9));
#ifndef GDN_TEST_CUDA
  refused(nothing, GDN_BACKEND_UNAVAILABLE, "no CUDA back end", GDN_BACKEND_CUDA);
#endif
  const auto invalid = [&](auto&& change, const std::string& sentence) {
    refused(change, GDN_INVALID_ARGUMENT, sentence);
  };
  invalid([](auto& s) { s.kind = Unlisted<gdn_linear_kind>(7); }, "kind must be");
  invalid([](auto& s) { s.n = 0; }, "n must be in 1..2^30, got 0");
  invalid([](auto& s) { s.n = (int64_t{1} << 30) + 1; }, "n must be in");
  invalid([](auto& s) { s.k = 0; }, "k must be in 1..2^30, got 0");
  invalid([](auto& s) { s.max_rows = 0; }, "max_rows must be in 1..2^40, got 0");
  invalid([](auto& s) { s.weight_dtype = Unlisted<gdn_dtype>(5); }, "weight_dtype must be");
  invalid([](auto& s) { s.y_dtype = Unlisted<gdn_dtype>(5); }, "y_dtype must be");
  invalid([](auto& s) { s.y_dtype = GDN_F16; }, "y_dtype must be GDN_F32 (0) or weight_dtype 1");
  invalid(
      [](auto& s) {
        s.kind = GDN_LINEAR_SILU_MUL;
        s.n = 7;
      },
      "n must be even");
  invalid(
      [](auto& s) {
        s.kind = GDN_LINEAR_SILU_MUL;
        s.n = 8;
        s.y_dtype = GDN_F32;
        s.accumulate = 1;
      },
      "accumulate needs kind PLAIN");
  invalid([](auto& s) { s.accumulate = 1; }, "accumulate needs kind PLAIN and y_dtype GDN_F32");
#ifdef GDN_TEST_CUDA
  refused([](auto& s) { s.k = 36; }, GDN_UNSUPPORTED_SHAPE, "k must be a multiple of 8",
          GDN_BACKEND_CUDA);
  refused([](auto& s) { s.k = 40000; }, GDN_UNSUPPORTED_SHAPE, "k must be a multiple of 8 in",
          GDN_BACKEND_CUDA);
  refused([](auto& s) { s.weight_dtype = s.y_dtype = GDN_F32; }, GDN_UNSUPPORTED_TYPE,
          "weight_dtype must be GDN_BF16", GDN_BACKEND_CUDA);
#endif
}

TEST(LinearMisuse, CallsNameWhatIsWrongAndTouchNothing) {
  LinearCase c;
  c.rows = 2;
  LinearCall call(c);
  const Tensor before = call.y;
  const LinearPlan plan = MakePlan(GDN_BACKEND_REF, c);
  const auto refused = [&](auto&& change, gdn_status status, const std::string& sentence) {
    gdn_linear_args args = call.Args(plan.get());
    gdn_exec exec{};
    change(args, exec);
    EXPECT_EQ(gdn_linear(&exec, &args), status) << sentence;
    EXPECT_THAT(gdn_last_error(), testing::HasSubstr(sentence));
    EXPECT_EQ(call.y.bytes(), before.bytes()) << sentence;
  };
  const auto invalid = [&](auto&& change, const std::string& sentence) {
    refused(change, GDN_INVALID_ARGUMENT, sentence);
  };
  const gdn_exec good{};
  gdn_linear_args args = call.Args(plan.get());
  EXPECT_EQ(gdn_linear(nullptr, &args), GDN_INVALID_ARGUMENT);
  EXPECT_EQ(gdn_linear(&good, nullptr), GDN_INVALID_ARGUMENT);
  EXPECT_EQ(gdn_linear_workspace(&good, &args, nullptr), GDN_INVALID_ARGUMENT);
  EXPECT_THAT(gdn_last_error(), testing::HasSubstr("bytes must not be NULL"));
  size_t bytes = 1;
  EXPECT_EQ(gdn_linear_workspace(&good, &args, &bytes), GDN_OK);
  EXPECT_EQ(bytes, 0u);

  invalid([](auto& a, auto&) { a.plan = nullptr; }, "plan must not be NULL");
  invalid([](auto&, auto& e) { e.backend = GDN_BACKEND_CPU; }, "got one made for 0");
  invalid([](auto& a, auto&) { a.rows = 3; }, "rows must be in 0..max_rows of the plan, 2, got 3");
  invalid([](auto& a, auto&) { a.rows = -1; }, "rows must be in");
  invalid([](auto& a, auto&) { a.x_dtype = Unlisted<gdn_dtype>(4); }, "x_dtype must be");
  invalid([](auto& a, auto&) { a.x_dtype = GDN_F16; }, "x_dtype must be GDN_F32 (0) or weight");
  invalid([](auto& a, auto&) { a.norm_eps = -1.0f; }, "eps must be");
  invalid([](auto& a, auto&) { a.norm_eps = std::numeric_limits<float>::quiet_NaN(); }, "eps");
  invalid([](auto& a, auto&) { a.x = nullptr; }, "x must not be NULL");
  invalid([](auto& a, auto&) { a.weight = nullptr; }, "weight must not be NULL");
  invalid([](auto& a, auto&) { a.y = nullptr; }, "y must not be NULL");
  invalid([&](auto& a, auto&) { a.x_row_stride = c.k - 1; }, "x_row_stride must be >=");
  invalid([&](auto& a, auto&) { a.y_row_stride = c.n - 1; }, "y_row_stride must be >=");
  invalid([&](auto& a, auto&) { a.x = call.y.data(); }, "y must not overlap x");
  const std::vector<float> floats(static_cast<size_t>(c.k), 1.0f);
  invalid([&](auto& a, auto&) { a.after_norm = floats.data(); }, "after_norm needs a plan with");
  invalid([&](auto& a, auto&) { a.squares = a.norm_weight = floats.data(); }, "one must be NULL");
}

TEST(LinearMisuse, SplitNormsNameWhatIsWrongAndTouchNothing) {
  LinearCase c;
  c.rows = 2;
  c.n = c.k = 32;
  c.y_dtype = GDN_F32;
  c.accumulate = true;
  LinearCall call(c);
  const Tensor before = call.y;
  SplitNorm split(c);
  const LinearPlan plan = MakePlan(GDN_BACKEND_REF, c);
  const auto refused = [&](auto&& change, const std::string& sentence) {
    gdn_linear_args args = call.Args(plan.get());
    split.First()(args);
    change(args);
    const gdn_exec exec{};
    EXPECT_EQ(gdn_linear(&exec, &args), GDN_INVALID_ARGUMENT) << sentence;
    EXPECT_THAT(gdn_last_error(), testing::HasSubstr(sentence));
    EXPECT_EQ(call.y.bytes(), before.bytes()) << sentence;
    EXPECT_TRUE(IsUntouched(split.n)) << sentence;
  };
  refused([](auto& a) { a.after_n = nullptr; }, "after_n must not be NULL");
  refused([](auto& a) { a.after_squares = nullptr; }, "after_squares must not be NULL");
  refused([](auto& a) { a.after_n = const_cast<void*>(a.x); }, "after_n must not overlap x, got");
  refused([](auto& a) { a.after_squares = static_cast<float*>(a.y); },
          "after_squares must not overlap y, got");
  refused([](auto& a) { a.squares = a.after_squares; }, "after_squares must not overlap squares");
  refused([](auto& a) { a.after_squares = static_cast<float*>(a.after_n); },
          "after_squares must not overlap after_n");
  refused(
      [&](auto& a) {
        a.squares = split.weight.data();
        a.x_dtype = GDN_F32;
        a.x_row_stride = c.k;
      },
      "with squares x_dtype must be weight_dtype");
}

}  // namespace
}  // namespace gdn::kernels
