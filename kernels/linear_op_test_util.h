// A seeded call of the linear op on host memory, for the tests of every back end.
#ifndef KERNELS_LINEAR_OP_TEST_UTIL_H_
#define KERNELS_LINEAR_OP_TEST_UTIL_H_

#include <cmath>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "gdn/kernels/linear.h"
#include "gtest/gtest.h"
#include "kernels/recurrence_test_util.h"

namespace gdn::kernels {

struct LinearCase {
  gdn_linear_kind kind = GDN_LINEAR_PLAIN;
  int64_t rows = 2;
  int64_t n = 10;
  int64_t k = 16;
  gdn_dtype dtype = GDN_BF16;  // Of the weight.
  gdn_dtype x_dtype = GDN_BF16;
  gdn_dtype y_dtype = GDN_BF16;
  bool norm = false;
  bool accumulate = false;
  bool batch_invariant = false;
  bool early_start = false;
  float eps = 1e-6f;
  int64_t x_pad = 8;
  int64_t y_pad = 3;
  uint32_t seed = 1;

  int64_t outputs() const { return kind == GDN_LINEAR_SILU_MUL ? n / 2 : n; }
  int64_t x_stride() const { return k + x_pad; }
  int64_t y_stride() const { return outputs() + y_pad; }
  gdn_linear_shape Shape() const {
    gdn_linear_shape shape{};
    shape.kind = kind;
    shape.n = n;
    shape.k = k;
    shape.weight_dtype = dtype;
    shape.y_dtype = y_dtype;
    shape.accumulate = accumulate;
    shape.batch_invariant = batch_invariant;
    shape.max_rows = rows > 0 ? rows : 1;
    return shape;
  }
  std::string Name() const {
    std::string name = "rows " + std::to_string(rows) + ", n " + std::to_string(n) + ", k " +
                       std::to_string(k) + ", types x " + std::to_string(x_dtype) + " w " +
                       std::to_string(dtype) + " y " + std::to_string(y_dtype) + ", pads " +
                       std::to_string(x_pad) + " " + std::to_string(y_pad);
    if (kind == GDN_LINEAR_SILU_MUL) name += ", silu_mul";
    if (norm) name += ", norm";
    if (accumulate) name += ", accumulate";
    if (batch_invariant) name += ", batch_invariant";
    if (early_start) name += ", early_start";
    return name;
  }
};

// Poisoned wherever the op must not read: the pads of x, and y unless it is added to.
struct LinearCall {
  explicit LinearCall(const LinearCase& c)
      : shape(c),
        x(c.x_dtype, c.rows * c.x_stride()),
        weight(c.dtype, c.n * c.k),
        y(c.y_dtype, c.rows * c.y_stride()) {
    Random random(c.seed);
    for (int64_t row = 0; row < c.rows; ++row) {
      // Rows of different size, so that a norm with the wrong row's factor shows.
      const float gain = c.norm ? std::exp2(static_cast<float>(row % 5 - 2)) : 1.0f;
      for (int64_t k = 0; k < c.k; ++k) x.Set(row * c.x_stride() + k, gain * Value(random));
    }
    const float scale = 1.0f / std::sqrt(static_cast<float>(c.k));
    for (int64_t i = 0; i < weight.size(); ++i) weight.Set(i, 2.0f * scale * Value(random));
    if (c.norm) {
      norm_weight.resize(static_cast<size_t>(c.k));
      for (float& w : norm_weight) w = random.Uniform(0.2f, 1.8f);
    }
    if (c.accumulate) {
      for (int64_t row = 0; row < c.rows; ++row) {
        for (int64_t j = 0; j < c.outputs(); ++j) y.Set(row * c.y_stride() + j, Value(random));
      }
    }
  }

  gdn_linear_args Args(const gdn_linear_plan* plan) {
    gdn_linear_args args{};
    args.plan = plan;
    args.rows = shape.rows;
    args.x = x.data();
    args.x_dtype = shape.x_dtype;
    args.x_row_stride = shape.x_stride();
    args.norm_weight = shape.norm ? norm_weight.data() : nullptr;
    args.norm_eps = shape.eps;
    args.weight = weight.data();
    args.y = y.data();
    args.y_row_stride = shape.y_stride();
    args.early_start = shape.early_start;
    return args;
  }

  LinearCase shape;
  Tensor x;
  Tensor weight;
  std::vector<float> norm_weight;
  Tensor y;

 private:
  // Zero mean, variance 1; cheaper than a normal one.
  static float Value(Random& random) { return random.Uniform(-1.7320508f, 1.7320508f); }
};

struct LinearPlanDeleter {
  void operator()(gdn_linear_plan* plan) const { gdn_linear_plan_destroy(plan); }
};
using LinearPlan = std::unique_ptr<gdn_linear_plan, LinearPlanDeleter>;

inline LinearPlan MakePlan(gdn_backend backend, const gdn_linear_shape& shape) {
  gdn_linear_plan* plan = nullptr;
  EXPECT_EQ(gdn_linear_plan_create(backend, &shape, &plan), GDN_OK) << gdn_last_error();
  return LinearPlan(plan);
}
inline LinearPlan MakePlan(gdn_backend backend, const LinearCase& c) {
  return MakePlan(backend, c.Shape());
}

// What passes between a product that adds to y, and the one whose norm it begins.
struct SplitNorm {
  explicit SplitNorm(const LinearCase& c)
      : n(c.dtype, c.rows * c.outputs()),
        squares(GDN_F32, (c.outputs() + GDN_LINEAR_SQUARES_COLUMNS - 1) /
                             GDN_LINEAR_SQUARES_COLUMNS * c.rows) {
    Random random(c.seed + 1);
    for (int64_t i = 0; i < c.outputs(); ++i) weight.push_back(random.Uniform(0.2f, 1.8f));
  }
  std::function<void(gdn_linear_args&)> First() {
    return [this](gdn_linear_args& args) {
      args.after_norm = weight.data();
      args.after_n = n.data();
      args.after_squares = static_cast<float*>(squares.data());
    };
  }
  std::function<void(gdn_linear_args&)> Second() const {
    return [this](gdn_linear_args& args) {
      args.x = n.data();
      args.x_dtype = n.dtype();
      args.x_row_stride = static_cast<int64_t>(weight.size());
      args.norm_weight = nullptr;
      args.squares = static_cast<const float*>(squares.data());
    };
  }

  std::vector<float> weight;
  Tensor n;
  Tensor squares;
};

inline void RunRef(
    LinearCall& call,
    const std::function<void(gdn_linear_args&)>& change = [](gdn_linear_args&) {}) {
  const LinearPlan plan = MakePlan(GDN_BACKEND_REF, call.shape);
  gdn_linear_args args = call.Args(plan.get());
  change(args);
  const gdn_exec exec{};
  ASSERT_EQ(gdn_linear(&exec, &args), GDN_OK) << gdn_last_error();
}

// Elements between the rows of y whose bits changed.
inline int64_t GapsTouched(const LinearCall& call, const Tensor& before) {
  const LinearCase& c = call.shape;
  int64_t touched = 0;
  for (int64_t row = 0; row < c.rows; ++row) {
    for (int64_t i = c.outputs(); i < c.y_stride(); ++i) {
      const int64_t at = row * c.y_stride() + i;
      touched += call.y.Slice(at, at + 1) != before.Slice(at, at + 1);
    }
  }
  return touched;
}

inline double LinearError(const LinearCall& got, const LinearCall& expected) {
  const LinearCase& c = got.shape;
  RelativeL2 error;
  for (int64_t row = 0; row < c.rows; ++row) {
    for (int64_t j = 0; j < c.outputs(); ++j) {
      const int64_t at = row * c.y_stride() + j;
      error.Add(got.y.Get(at), expected.y.Get(at));
    }
  }
  return error.value();
}

}  // namespace gdn::kernels

#endif  // KERNELS_LINEAR_OP_TEST_UTIL_H_
