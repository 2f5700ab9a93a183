#include "gdn/kernels/l2_norm_backward.h"

#include "kernels/common/convert.h"

namespace gdn::ref {

gdn_status L2NormBackward(const gdn_exec&, const gdn_l2_norm_backward_args& args) {
  const auto y = [&](int64_t row, int64_t i) -> double {
    return kernels::Load(args.y, args.y_dtype, row * args.y_row_stride + i);
  };
  const auto dy = [&](int64_t row, int64_t i) -> double {
    return kernels::Load(args.dy, args.dy_dtype, row * args.dy_row_stride + i);
  };
  const double scale = args.scale;
  for (int64_t row = 0; row < args.rows; ++row) {
    double sum = 0.0;
    for (int64_t i = 0; i < args.dim; ++i) sum += y(row, i) * dy(row, i);
    const double c = sum / scale;
    for (int64_t i = 0; i < args.dim; ++i) {
      const double dx = args.rstd[row] * (scale * dy(row, i) - y(row, i) * c);
      kernels::Store(args.dx, args.dx_dtype, row * args.dx_row_stride + i, static_cast<float>(dx));
    }
  }
  return GDN_OK;
}

}  // namespace gdn::ref
