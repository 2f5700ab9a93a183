#include "gdn/kernels/gates.h"

#include <cmath>

#include "kernels/common/convert.h"

namespace gdn::ref {

using kernels::Load;

gdn_status Gates(const gdn_exec&, const gdn_gates_args& args) {
  for (int64_t t = 0; t < args.tokens; ++t) {
    for (int64_t h = 0; h < args.value_heads; ++h) {
      const double a = Load(args.a, args.dtype, t * args.a_token_stride + h);
      const double b = Load(args.b, args.dtype, t * args.b_token_stride + h);
      const double x = a + static_cast<double>(args.dt_bias[h]);
      const double softplus = x > 20.0 ? x : std::log1p(std::exp(x));
      const double rate = std::exp(static_cast<double>(args.a_log[h]));
      const double sigmoid = 1.0 / (1.0 + std::exp(-b));
      const int64_t out = t * args.value_heads + h;
      args.g[out] = static_cast<float>(-rate * softplus);
      args.beta[out] = static_cast<float>(static_cast<double>(args.beta_scale) * sigmoid);
    }
  }
  return GDN_OK;
}

}  // namespace gdn::ref
