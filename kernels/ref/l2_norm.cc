#include "gdn/kernels/l2_norm.h"

#include <cmath>

#include "kernels/common/convert.h"

namespace gdn::ref {

using kernels::Load;
using kernels::Store;

gdn_status L2Norm(const gdn_exec&, const gdn_l2_norm_args& args) {
  for (int64_t row = 0; row < args.rows; ++row) {
    double sum = 0.0;
    for (int64_t i = 0; i < args.dim; ++i) {
      const double x = Load(args.x, args.x_dtype, row * args.x_row_stride + i);
      sum += x * x;
    }
    // With eps 0 an all-zero row would be 0 * inf; it is 0 like with any other eps.
    const double root = std::sqrt(sum + static_cast<double>(args.eps));
    const double factor = root > 0.0 || std::isnan(root) ? 1.0 / root : 0.0;
    for (int64_t i = 0; i < args.dim; ++i) {
      const double x = Load(args.x, args.x_dtype, row * args.x_row_stride + i);
      Store(args.y, args.y_dtype, row * args.y_row_stride + i,
            static_cast<float>(x * factor * static_cast<double>(args.scale)));
    }
    if (args.rstd != nullptr) args.rstd[row] = static_cast<float>(factor);
  }
  return GDN_OK;
}

}  // namespace gdn::ref
