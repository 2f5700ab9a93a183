#include "gdn/kernels/linear.h"

#include <cmath>
#include <vector>

#include "kernels/common/convert.h"
#include "kernels/common/linear_plan.h"

namespace gdn::ref {
namespace {

constexpr int64_t kSquaresColumns = GDN_LINEAR_SQUARES_COLUMNS;

// n: the row of x, normed where asked for, rounded to the weight's type.
void NormRow(const gdn_linear_args& args, int64_t row, std::vector<double>& n) {
  const gdn_linear_shape& shape = args.plan->shape;
  const int64_t x0 = row * args.x_row_stride;
  double rstd = 1.0;
  if (args.norm_weight != nullptr) {
    double sum = 0.0;
    for (int64_t k = 0; k < shape.k; ++k) {
      const double x = kernels::Load(args.x, args.x_dtype, x0 + k);
      sum += x * x;
    }
    rstd = 1.0 / std::sqrt(sum / static_cast<double>(shape.k) + args.norm_eps);
  }
  for (int64_t k = 0; k < shape.k; ++k) {
    double value = kernels::Load(args.x, args.x_dtype, x0 + k);
    if (args.norm_weight != nullptr) value *= rstd * args.norm_weight[k];
    float rounded = 0.0f;
    kernels::Store(&rounded, shape.weight_dtype, 0, static_cast<float>(value));
    n[static_cast<size_t>(k)] = kernels::Load(&rounded, shape.weight_dtype, 0);
  }
}

double Product(const gdn_linear_args& args, const std::vector<double>& n, int64_t weight_row) {
  const gdn_linear_shape& shape = args.plan->shape;
  double sum = 0.0;
  for (int64_t k = 0; k < shape.k; ++k) {
    sum += n[static_cast<size_t>(k)] *
           kernels::Load(args.weight, shape.weight_dtype, weight_row * shape.k + k);
  }
  return sum;
}

// The factor of a norm whose first part another product has done.
double Factor(const gdn_linear_args& args, int64_t row) {
  if (args.squares == nullptr) return 1.0;
  const int64_t k = args.plan->shape.k;
  double sum = 0.0;
  for (int64_t group = 0; group * kSquaresColumns < k; ++group) {
    sum += args.squares[group * args.rows + row];
  }
  return 1.0 / std::sqrt(sum / static_cast<double>(k) + args.norm_eps);
}

// The first part of the norm behind this product.
void AfterRow(const gdn_linear_args& args, int64_t row) {
  const int64_t outputs = kernels::LinearOutputs(args.plan->shape);
  const float* const y = static_cast<const float*>(args.y) + row * args.y_row_stride;
  double sum = 0.0;
  for (int64_t j = 0; j < outputs; ++j) {
    const double value = y[j];
    kernels::Store(args.after_n, args.plan->shape.weight_dtype, row * outputs + j,
                   static_cast<float>(value * args.after_norm[j]));
    sum += value * value;
    if ((j + 1) % kSquaresColumns != 0 && j + 1 != outputs) continue;
    args.after_squares[j / kSquaresColumns * args.rows + row] = static_cast<float>(sum);
    sum = 0.0;
  }
}

}  // namespace

gdn_status Linear(const gdn_exec&, const gdn_linear_args& args) {
  const gdn_linear_shape& shape = args.plan->shape;
  const int64_t outputs = kernels::LinearOutputs(shape);
  std::vector<double> n(static_cast<size_t>(shape.k));
  for (int64_t row = 0; row < args.rows; ++row) {
    NormRow(args, row, n);
    const double factor = Factor(args, row);
    for (int64_t j = 0; j < outputs; ++j) {
      const int64_t at = row * args.y_row_stride + j;
      double value = factor * Product(args, n, j);
      if (shape.kind == GDN_LINEAR_SILU_MUL) {
        value = value / (1.0 + std::exp(-value)) * factor * Product(args, n, outputs + j);
      }
      if (shape.accumulate != 0) value += static_cast<const float*>(args.y)[at];
      kernels::Store(args.y, shape.y_dtype, at, static_cast<float>(value));
    }
    if (args.after_norm != nullptr) AfterRow(args, row);
  }
  return GDN_OK;
}

}  // namespace gdn::ref
