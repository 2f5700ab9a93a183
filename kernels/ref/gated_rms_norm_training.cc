#include "gdn/kernels/gated_rms_norm_training.h"

#include <algorithm>
#include <cmath>

#include "kernels/common/convert.h"

namespace gdn::ref {
namespace {

double RoundTo(gdn_dtype dtype, double value) {
  const auto narrow = static_cast<float>(value);
  if (dtype == GDN_BF16) return kernels::Bf16ToF32(kernels::F32ToBf16(narrow));
  if (dtype == GDN_F16) return kernels::F16ToF32(kernels::F32ToF16(narrow));
  return narrow;
}

int64_t Offset(const gdn_gated_rms_norm_input& in, const gdn_row_strides& strides, int64_t row,
               int64_t i) {
  const int64_t head = row % in.heads;
  const int64_t seq = row / in.heads % in.seq;
  const int64_t batch = row / in.heads / in.seq;
  return batch * strides.batch + seq * strides.seq + head * strides.head + i * strides.element;
}

double Sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }

// One element of the inputs, and what both directions derive from it.
struct Element {
  Element(const gdn_gated_rms_norm_input& in, int64_t row, int64_t i, double rstd)
      : x_hat(kernels::Load(in.x, in.x_dtype, Offset(in, in.x_strides, row, i)) * rstd),
        weight(kernels::Load(in.gamma, in.gamma_dtype, i) + (in.zero_centered_gamma ? 1.0 : 0.0)),
        normalised(RoundTo(in.x_dtype, x_hat * weight)) {
    const double gate = kernels::Load(in.gate, in.gate_dtype, Offset(in, in.gate_strides, row, i));
    const double sigmoid = Sigmoid(gate);
    const double complement = Sigmoid(-gate);
    if (in.activation == GDN_GATE_SILU) {
      act = gate * sigmoid;
      derivative = sigmoid * (1.0 + gate * complement);
    } else {
      act = sigmoid;
      derivative = sigmoid * complement;
    }
  }
  double x_hat, weight, normalised;
  double act = 0.0, derivative = 0.0;
};

// By scaling the last kept bit to 1: the lowest exponent of a normal E4M3 is -6, with 3 bits below.
uint8_t ToE4m3(double value) {
  const uint8_t sign = std::signbit(value) ? 0x80 : 0;
  if (std::isnan(value)) return sign | 0x7f;
  const double magnitude = std::min(std::fabs(value), 448.0);
  if (magnitude == 0.0) return sign;
  int exponent = std::max(std::ilogb(magnitude), -6);
  auto units = static_cast<int>(std::nearbyint(std::ldexp(magnitude, 3 - exponent)));
  if (units == 16) {
    units = 8;
    ++exponent;
  }
  const int biased = units < 8 ? 0 : exponent + 7;
  return static_cast<uint8_t>(sign | (biased << 3) | (units & 7));
}

double Larger(double a, double b) { return std::isnan(a) || a > b ? a : b; }

}  // namespace

gdn_status GatedRmsNormForward(const gdn_exec&, const gdn_gated_rms_norm_forward_args& args) {
  const gdn_gated_rms_norm_input& in = args.in;
  const int64_t rows = in.batch * in.seq * in.heads;
  double amax = 0.0;
  for (int64_t row = 0; row < rows; ++row) {
    double sum = 0.0;
    for (int64_t i = 0; i < in.dim; ++i) {
      const double x = kernels::Load(in.x, in.x_dtype, Offset(in, in.x_strides, row, i));
      sum += x * x;
    }
    const double root = std::sqrt(sum / static_cast<double>(in.dim) + args.eps);
    const double rstd = root == 0.0 ? 0.0 : 1.0 / root;
    if (args.rstd != nullptr) args.rstd[row] = static_cast<float>(rstd);
    const auto y = [&](int64_t i) {
      const Element e(in, row, i, rstd);
      return RoundTo(in.x_dtype, e.normalised * e.act);
    };
    double row_amax = 0.0;
    for (int64_t i = 0; i < in.dim; ++i) row_amax = Larger(std::fabs(y(i)), row_amax);
    amax = Larger(row_amax, amax);
    if (args.fp8 == GDN_FP8_NONE) {
      for (int64_t i = 0; i < in.dim; ++i) {
        kernels::Store(args.y, in.x_dtype, row * in.dim + i, static_cast<float>(y(i)));
      }
      continue;
    }
    double scale = 0.0;
    if (args.fp8 == GDN_FP8_ROW) {
      const double floored = row_amax < 0x1p-117 ? 0x1p-117 : row_amax;
      scale = 448.0 / floored;
      args.fp8_scale_inv[row] = static_cast<float>(floored / 448.0);
    } else {
      scale = *args.fp8_scale;
    }
    for (int64_t i = 0; i < in.dim; ++i) {
      static_cast<uint8_t*>(args.y)[row * in.dim + i] = ToE4m3(y(i) * scale);
    }
  }
  if (args.fp8 == GDN_FP8_STATIC && args.fp8_scale_inv != nullptr) {
    *args.fp8_scale_inv = static_cast<float>(1.0 / *args.fp8_scale);
  }
  if (args.amax != nullptr) *args.amax = static_cast<float>(amax);
  return GDN_OK;
}

gdn_status GatedRmsNormBackward(const gdn_exec&, const gdn_gated_rms_norm_backward_args& args) {
  const gdn_gated_rms_norm_input& in = args.in;
  const int64_t rows = in.batch * in.seq * in.heads;
  const auto dy = [&](int64_t row, int64_t i) -> double {
    return kernels::Load(args.dy, in.x_dtype, Offset(in, args.dy_strides, row, i));
  };
  for (int64_t row = 0; row < rows; ++row) {
    const double rstd = args.rstd[row];
    double c = 0.0;
    for (int64_t i = 0; i < in.dim; ++i) {
      const Element e(in, row, i, rstd);
      c += RoundTo(in.x_dtype, dy(row, i) * e.act) * e.weight * e.x_hat;
      kernels::Store(args.dgate, in.gate_dtype, row * in.dim + i,
                     static_cast<float>(dy(row, i) * e.normalised * e.derivative));
    }
    c /= static_cast<double>(in.dim);
    for (int64_t i = 0; i < in.dim; ++i) {
      const Element e(in, row, i, rstd);
      const double dn = RoundTo(in.x_dtype, dy(row, i) * e.act);
      kernels::Store(args.dx, in.x_dtype, row * in.dim + i,
                     static_cast<float>(rstd * (dn * e.weight - e.x_hat * c)));
    }
  }
  for (int64_t i = 0; i < in.dim; ++i) {
    double sum = 0.0;
    for (int64_t row = 0; row < rows; ++row) {
      const Element e(in, row, i, args.rstd[row]);
      sum += RoundTo(in.x_dtype, dy(row, i) * e.act) * e.x_hat;
    }
    kernels::Store(args.dgamma, in.gamma_dtype, i, static_cast<float>(sum));
  }
  return GDN_OK;
}

}  // namespace gdn::ref
