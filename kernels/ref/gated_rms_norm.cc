#include "gdn/kernels/gated_rms_norm.h"

#include <cmath>

#include "kernels/common/convert.h"

namespace gdn::ref {
namespace {

double RoundTo(gdn_dtype dtype, double value) {
  const auto narrow = static_cast<float>(value);
  switch (dtype) {
    case GDN_F32:
      return narrow;
    case GDN_BF16:
      return kernels::Bf16ToF32(kernels::F32ToBf16(narrow));
    case GDN_F16:
      return kernels::F16ToF32(kernels::F32ToF16(narrow));
  }
  return value;
}

}  // namespace

gdn_status GatedRmsNorm(const gdn_exec&, const gdn_gated_rms_norm_args& args) {
  for (int64_t token = 0; token < args.tokens; ++token) {
    for (int64_t head = 0; head < args.heads; ++head) {
      const int64_t x0 = token * args.x_token_stride + head * args.x_head_stride;
      const int64_t gate0 = token * args.gate_token_stride + head * args.gate_head_stride;
      const int64_t y0 = token * args.y_token_stride + head * args.y_head_stride;
      double sum = 0.0;
      for (int64_t i = 0; i < args.dim; ++i) {
        const double x = kernels::Load(args.x, args.x_dtype, x0 + i);
        sum += x * x;
      }
      const double rstd = 1.0 / std::sqrt(sum / static_cast<double>(args.dim) + args.eps);
      for (int64_t i = 0; i < args.dim; ++i) {
        const double x = kernels::Load(args.x, args.x_dtype, x0 + i);
        const double weight = (args.zero_centered ? 1.0 : 0.0) + args.weight[i];
        double normalised = x * rstd * weight;
        if (args.round_before_gate) normalised = RoundTo(args.x_dtype, normalised);
        const double gate = kernels::Load(args.gate, args.gate_dtype, gate0 + i);
        const double sigmoid = 1.0 / (1.0 + std::exp(-gate));
        const double act = args.activation == GDN_GATE_SILU ? gate * sigmoid : sigmoid;
        kernels::Store(args.y, args.y_dtype, y0 + i, static_cast<float>(normalised * act));
      }
    }
  }
  return GDN_OK;
}

}  // namespace gdn::ref
