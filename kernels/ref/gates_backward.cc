#include "gdn/kernels/gates_backward.h"

#include <cmath>

#include "kernels/common/convert.h"

namespace gdn::ref {

using kernels::Load;
using kernels::Store;

gdn_status GatesBackward(const gdn_exec&, const gdn_gates_backward_args& args) {
  for (int64_t h = 0; h < args.value_heads; ++h) {
    const double rate = std::exp(static_cast<double>(args.a_log[h]));
    double d_a_log = 0.0;
    double d_dt_bias = 0.0;
    for (int64_t t = 0; t < args.tokens; ++t) {
      const int64_t at = t * args.value_heads + h;
      const double a = Load(args.a, args.dtype, t * args.a_token_stride + h);
      const double b = Load(args.b, args.dtype, t * args.b_token_stride + h);
      const double d_g = args.d_g[at];
      const double x = a + static_cast<double>(args.dt_bias[h]);
      const double softplus = x > 20.0 ? x : std::log1p(std::exp(x));
      const double slope = x > 20.0 ? 1.0 : 1.0 / (1.0 + std::exp(-x));
      const double d_a = -rate * slope * d_g;
      d_dt_bias += d_a;
      d_a_log += d_g * -rate * softplus;
      Store(args.d_a, args.dtype, t * args.d_a_token_stride + h, static_cast<float>(d_a));
      const double s = 1.0 / (1.0 + std::exp(-b));
      const double not_s = 1.0 / (1.0 + std::exp(b));  // 1 - s without cancellation
      const double d_beta = args.d_beta[at];
      Store(args.d_b, args.dtype, t * args.d_b_token_stride + h,
            static_cast<float>(d_beta * static_cast<double>(args.beta_scale) * s * not_s));
    }
    args.d_a_log[h] = static_cast<float>(d_a_log);
    args.d_dt_bias[h] = static_cast<float>(d_dt_bias);
  }
  return GDN_OK;
}

}  // namespace gdn::ref
