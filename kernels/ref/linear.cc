#include "gdn/kernels/linear.h"

#include <cmath>
#include <vector>

#include "kernels/common/convert.h"
#include "kernels/common/linear_plan.h"

namespace gdn::ref {
namespace {

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

}  // namespace

gdn_status Linear(const gdn_exec&, const gdn_linear_args& args) {
  const gdn_linear_shape& shape = args.plan->shape;
  const int64_t outputs = kernels::LinearOutputs(shape);
  std::vector<double> n(static_cast<size_t>(shape.k));
  for (int64_t row = 0; row < args.rows; ++row) {
    NormRow(args, row, n);
    for (int64_t j = 0; j < outputs; ++j) {
      const int64_t at = row * args.y_row_stride + j;
      double value = Product(args, n, j);
      if (shape.kind == GDN_LINEAR_SILU_MUL) {
        value = value / (1.0 + std::exp(-value)) * Product(args, n, outputs + j);
      }
      if (shape.accumulate != 0) value += static_cast<const float*>(args.y)[at];
      kernels::Store(args.y, shape.y_dtype, at, static_cast<float>(value));
    }
  }
  return GDN_OK;
}

}  // namespace gdn::ref
