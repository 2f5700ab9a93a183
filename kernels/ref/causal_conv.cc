#include "gdn/kernels/causal_conv.h"

#include <array>
#include <cmath>

#include "kernels/common/convert.h"

namespace gdn::ref {

using kernels::Load;
using kernels::Store;

namespace {

// One channel of one sequence: `history` holds the W-1 inputs before the token, oldest first.
void Channel(const gdn_causal_conv_args& args, int64_t sequence, int64_t begin, int64_t end,
             int64_t c) {
  const int32_t width = args.width;
  const int64_t read = args.read_index[sequence];
  const int64_t write = args.write_index[sequence];
  const bool fresh = args.fresh != nullptr && args.fresh[sequence] != 0;
  std::array<float, 8> history{};
  for (int32_t j = 0; j + 1 < width && !fresh; ++j) {
    history[j] =
        Load(args.state, args.x_dtype, read * args.state_slot_stride + j * args.channels + c);
  }
  for (int64_t t = begin; t < end; ++t) {
    history[width - 1] = Load(args.x, args.x_dtype, t * args.x_token_stride + c);
    double sum = 0.0;
    for (int32_t j = 0; j < width; ++j) {
      sum += static_cast<double>(args.weight[c * width + j]) * static_cast<double>(history[j]);
    }
    if (args.silu != 0) sum /= 1.0 + std::exp(-sum);
    Store(args.y, args.y_dtype, t * args.y_token_stride + c, static_cast<float>(sum));
    for (int32_t j = 0; j + 1 < width; ++j) history[j] = history[j + 1];
  }
  for (int32_t j = 0; j + 1 < width; ++j) {
    Store(args.state, args.x_dtype, write * args.state_slot_stride + j * args.channels + c,
          history[j]);
  }
}

}  // namespace

gdn_status CausalConv(const gdn_exec&, const gdn_causal_conv_args& args) {
  for (int64_t i = 0; i < args.sequences; ++i) {
    const int64_t begin = args.cu_seqlens == nullptr ? i : args.cu_seqlens[i];
    const int64_t end = args.cu_seqlens == nullptr ? i + 1 : args.cu_seqlens[i + 1];
    if (args.read_index[i] < 0 || args.write_index[i] < 0) {
      for (int64_t t = begin; t < end; ++t) {
        for (int64_t c = 0; c < args.channels; ++c) {
          Store(args.y, args.y_dtype, t * args.y_token_stride + c, 0.0f);
        }
      }
      continue;
    }
    if (begin == end && args.read_index[i] == args.write_index[i]) continue;
    for (int64_t c = 0; c < args.channels; ++c) Channel(args, i, begin, end, c);
  }
  return GDN_OK;
}

}  // namespace gdn::ref
