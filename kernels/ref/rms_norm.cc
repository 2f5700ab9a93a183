#include "gdn/kernels/rms_norm.h"

#include <cmath>

#include "kernels/common/convert.h"

namespace gdn::ref {

gdn_status RmsNorm(const gdn_exec&, const gdn_rms_norm_args& args) {
  for (int64_t row = 0; row < args.rows; ++row) {
    const int64_t x0 = row * args.x_row_stride;
    double sum = 0.0;
    for (int64_t i = 0; i < args.dim; ++i) {
      const double x = kernels::Load(args.x, args.x_dtype, x0 + i);
      sum += x * x;
    }
    const double rstd = 1.0 / std::sqrt(sum / static_cast<double>(args.dim) + args.eps);
    for (int64_t i = 0; i < args.dim; ++i) {
      const double x = kernels::Load(args.x, args.x_dtype, x0 + i);
      const double weight = (args.zero_centered ? 1.0 : 0.0) + args.weight[i];
      kernels::Store(args.y, args.y_dtype, row * args.y_row_stride + i,
                     static_cast<float>(x * rstd * weight));
    }
  }
  return GDN_OK;
}

}  // namespace gdn::ref
