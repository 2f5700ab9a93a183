#include "gdn/kernels/causal_conv_backward.h"

#include <cmath>

#include "kernels/common/convert.h"

namespace gdn::ref {

using kernels::Load;
using kernels::Store;

namespace {

// One channel of one sequence. Nothing is kept between tokens: what a term needs is computed again.
struct Column {
  const gdn_causal_conv_backward_args& args;
  int64_t sequence;
  int64_t begin;
  int64_t length;
  int64_t c;

  int64_t StateOffset(int64_t column) const {
    return (sequence * (args.width - 1) + column) * args.channels + c;
  }
  // Input i; those before the first token lie in the carried state.
  double X(int64_t i) const {
    if (i >= 0) return Load(args.x, args.x_dtype, (begin + i) * args.x_token_stride + c);
    if (args.initial_state == nullptr) return 0.0;
    return Load(args.initial_state, args.x_dtype, StateOffset(i + args.width - 1));
  }
  double Weight(int32_t j) const { return args.weight[c * args.width + j]; }
  double DPre(int64_t t) const {
    double slope = 1.0;
    if (args.silu != 0) {
      double p = args.bias != nullptr ? static_cast<double>(args.bias[c]) : 0.0;
      for (int32_t j = 0; j < args.width; ++j) p += Weight(j) * X(t - args.width + 1 + j);
      const double s = 1.0 / (1.0 + std::exp(-p));
      slope = s * (1.0 + p * (1.0 - s));
    }
    return slope * static_cast<double>(
                       Load(args.d_y, args.d_y_dtype, (begin + t) * args.d_y_token_stride + c));
  }
  double DX(int64_t i) const {
    double sum = 0.0;
    for (int32_t j = 0; j < args.width; ++j) {
      const int64_t t = i + args.width - 1 - j;
      if (t >= 0 && t < length) sum += Weight(j) * DPre(t);
    }
    const int64_t kept = i - length + args.width - 1;
    if (kept >= 0 && args.d_final_state != nullptr) {
      sum += static_cast<double>(args.d_final_state[StateOffset(kept)]);
    }
    return sum;
  }
};

}  // namespace

gdn_status CausalConvBackward(const gdn_exec&, const gdn_causal_conv_backward_args& args) {
  const int32_t width = args.width;
  for (int64_t c = 0; c < args.channels; ++c) {
    double d_weight[8] = {};
    double d_bias = 0.0;
    for (int64_t n = 0; n < args.sequences; ++n) {
      const int64_t begin = args.cu_seqlens[n];
      const Column column{args, n, begin, args.cu_seqlens[n + 1] - begin, c};
      for (int64_t t = 0; t < column.length; ++t) {
        const double d_pre = column.DPre(t);
        for (int32_t j = 0; j < width; ++j) d_weight[j] += d_pre * column.X(t - width + 1 + j);
        d_bias += d_pre;
        Store(args.d_x, args.d_x_dtype, (begin + t) * args.d_x_token_stride + c,
              static_cast<float>(column.DX(t)));
      }
      for (int32_t j = 0; j + 1 < width && args.d_initial_state != nullptr; ++j) {
        args.d_initial_state[column.StateOffset(j)] = static_cast<float>(column.DX(j - width + 1));
      }
    }
    for (int32_t j = 0; j < width; ++j) {
      args.d_weight[c * width + j] = static_cast<float>(d_weight[j]);
    }
    if (args.d_bias != nullptr) args.d_bias[c] = static_cast<float>(d_bias);
  }
  return GDN_OK;
}

}  // namespace gdn::ref
