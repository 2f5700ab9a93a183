#include "gdn/kernels/l2_norm.h"

#include <cmath>

#include "kernels/common/convert.h"
#include "kernels/common/row_groups.h"

namespace gdn::ref {

using kernels::Load;
using kernels::RowOffset;
using kernels::Store;

gdn_status L2Norm(const gdn_exec&, const gdn_l2_norm_args& args) {
  for (int64_t row = 0; row < args.rows; ++row) {
    const int64_t x_at = RowOffset(row, args.x_row_stride, args.group_rows, args.x_group_stride);
    const int64_t y_at = RowOffset(row, args.y_row_stride, args.group_rows, args.y_group_stride);
    double sum = 0.0;
    for (int64_t i = 0; i < args.dim; ++i) {
      const double x = Load(args.x, args.x_dtype, x_at + i);
      sum += x * x;
    }
    // With eps 0 an all-zero row would be 0 * inf; it is 0 like with any other eps.
    const double root = std::sqrt(sum + static_cast<double>(args.eps));
    const double factor = root > 0.0 || std::isnan(root) ? 1.0 / root : 0.0;
    for (int64_t i = 0; i < args.dim; ++i) {
      const double x = Load(args.x, args.x_dtype, x_at + i);
      Store(args.y, args.y_dtype, y_at + i,
            static_cast<float>(x * factor * static_cast<double>(args.scale)));
    }
    if (args.rstd != nullptr) args.rstd[row] = static_cast<float>(factor);
  }
  return GDN_OK;
}

}  // namespace gdn::ref
