#include "gdn/kernels/gdn2_gates.h"

#include <cmath>

#include "kernels/common/convert.h"

namespace gdn::ref {

using kernels::Load;
using kernels::Store;

namespace {

double Sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }
// 1 - s is sigmoid(-x), without cancellation.
double SigmoidSlope(double x) { return Sigmoid(x) * Sigmoid(-x); }

struct Decay {
  double x;
  double rate;
  double g;
  double slope;  // of g by x
};

Decay DecayAt(const gdn2_gates_args& args, int64_t t, int64_t channel) {
  Decay d{};
  d.x = Load(args.f, args.fbw_dtype, t * args.f_token_stride + channel);
  if (args.dt_bias != nullptr) d.x += static_cast<double>(args.dt_bias[channel]);
  const float* a_log = args.a_log;
  d.rate = a_log != nullptr ? std::exp(static_cast<double>(a_log[channel / args.key_dim])) : 1.0;
  if (args.decay == GDN2_DECAY_BOUNDED) {
    const double bound = args.lower_bound;
    d.g = bound * Sigmoid(d.rate * d.x);
    d.slope = bound * SigmoidSlope(d.rate * d.x) * d.rate;
  } else {
    d.g = -d.rate * (d.x > 20.0 ? d.x : std::log1p(std::exp(d.x)));
    d.slope = -d.rate * (d.x > 20.0 ? 1.0 : Sigmoid(d.x));
  }
  return d;
}

}  // namespace

gdn_status Gdn2Gates(const gdn_exec&, const gdn2_gates_args& args) {
  const int64_t width = args.gate_heads * args.key_dim;
  for (int64_t t = 0; t < args.tokens; ++t) {
    for (int64_t i = 0; i < width; ++i) {
      args.g[t * width + i] = static_cast<float>(DecayAt(args, t, i).g);
      const double b = Load(args.b, args.fbw_dtype, t * args.b_token_stride + i);
      Store(args.erase, args.gate_dtype, t * width + i,
            static_cast<float>(static_cast<double>(args.erase_scale) * Sigmoid(b)));
    }
    for (int64_t j = 0; j < args.write_width; ++j) {
      const double w = Load(args.w, args.fbw_dtype, t * args.w_token_stride + j);
      Store(args.write, args.gate_dtype, t * args.write_width + j, static_cast<float>(Sigmoid(w)));
    }
  }
  return GDN_OK;
}

gdn_status Gdn2GatesBackward(const gdn_exec&, const gdn2_gates_backward_args& args) {
  const gdn2_gates_args& in = args.forward;
  const int64_t width = in.gate_heads * in.key_dim;
  for (int64_t h = 0; h < in.gate_heads; ++h) {
    double d_a_log = 0.0;
    for (int64_t i = h * in.key_dim; i < (h + 1) * in.key_dim; ++i) {
      double d_dt_bias = 0.0;
      for (int64_t t = 0; t < in.tokens; ++t) {
        const Decay decay = DecayAt(in, t, i);
        const double d_g = args.d_g[t * width + i];
        const double d_f = d_g * decay.slope;
        d_dt_bias += d_f;
        d_a_log += in.decay == GDN2_DECAY_BOUNDED ? d_f * decay.x : d_g * decay.g;
        Store(args.d_f, in.fbw_dtype, t * width + i, static_cast<float>(d_f));
        const double b = Load(in.b, in.fbw_dtype, t * in.b_token_stride + i);
        const double d_erase = args.d_erase[t * width + i];
        Store(args.d_b, in.fbw_dtype, t * width + i,
              static_cast<float>(d_erase * static_cast<double>(in.erase_scale) * SigmoidSlope(b)));
      }
      if (args.d_dt_bias != nullptr) args.d_dt_bias[i] = static_cast<float>(d_dt_bias);
    }
    if (args.d_a_log != nullptr) args.d_a_log[h] = static_cast<float>(d_a_log);
  }
  for (int64_t t = 0; t < in.tokens; ++t) {
    for (int64_t j = 0; j < in.write_width; ++j) {
      const double w = Load(in.w, in.fbw_dtype, t * in.w_token_stride + j);
      const double d_write = args.d_write[t * in.write_width + j];
      Store(args.d_w, in.fbw_dtype, t * in.write_width + j,
            static_cast<float>(d_write * SigmoidSlope(w)));
    }
  }
  return GDN_OK;
}

}  // namespace gdn::ref
