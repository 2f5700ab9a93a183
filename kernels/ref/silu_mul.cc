#include "gdn/kernels/silu_mul.h"

#include <cmath>

#include "kernels/common/convert.h"

namespace gdn::ref {

gdn_status SiluMul(const gdn_exec&, const gdn_silu_mul_args& args) {
  for (int64_t row = 0; row < args.rows; ++row) {
    for (int64_t i = 0; i < args.dim; ++i) {
      const double gate = kernels::Load(args.gate, args.dtype, row * args.row_stride + i);
      const double up = kernels::Load(args.up, args.dtype, row * args.row_stride + i);
      kernels::Store(args.y, args.y_dtype, row * args.y_row_stride + i,
                     static_cast<float>(gate / (1.0 + std::exp(-gate)) * up));
    }
  }
  return GDN_OK;
}

}  // namespace gdn::ref
