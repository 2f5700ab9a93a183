#include "gdn/kernels/causal_conv.h"

#include <algorithm>
#include <array>
#include <cstring>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/causal_conv.cc"
#include "hwy/foreach_target.h"
// After foreach_target.h.
#include "gdn/kernels/cpu_pool.h"
#include "hwy/highway.h"
#include "kernels/cpu/activations-inl.h"
#include "kernels/cpu/elements-inl.h"

#ifndef KERNELS_CPU_CAUSAL_CONV_ONCE_
#define KERNELS_CPU_CAUSAL_CONV_ONCE_
namespace gdn::cpu {

// Channels handled together: their inputs of W tokens and their taps stay in the L1 cache.
inline constexpr int64_t kConvBlock = 512;
inline constexpr int64_t kConvMaxWidth = 8;

}  // namespace gdn::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace gdn::cpu::HWY_NAMESPACE {

using Taps = std::array<float, kConvMaxWidth * kConvBlock>;

// One token of `channels` channels; input[j] is the column under tap j. The arithmetic of a channel
// is the same in the vector body and in the rest.
template <int kWidth, typename TX, typename TY>
void Token(const gdn_causal_conv_args& args, const TX* const* input, const Taps& taps,
           size_t channels, TY* y) {
  const int width = kWidth > 0 ? kWidth : args.width;
  const hn::ScalableTag<float> d;
  const size_t n = hn::Lanes(d);
  size_t c = 0;
  for (; c + n <= channels; c += n) {
    auto sum = hn::Mul(hn::LoadU(d, taps.data() + c), LoadElements(d, input[0] + c));
    for (int j = 1; j < width; ++j) {
      sum = hn::MulAdd(hn::LoadU(d, taps.data() + j * kConvBlock + c),
                       LoadElements(d, input[j] + c), sum);
    }
    StoreElements(d, args.silu != 0 ? SiluOf(d, sum) : sum, y + c);
  }
  if (c == channels) return;
  const size_t rest = channels - c;
  auto sum =
      hn::Mul(LoadElementsPart(d, taps.data() + c, rest), LoadElementsPart(d, input[0] + c, rest));
  for (int j = 1; j < width; ++j) {
    sum = hn::MulAdd(LoadElementsPart(d, taps.data() + j * kConvBlock + c, rest),
                     LoadElementsPart(d, input[j] + c, rest), sum);
  }
  StoreElementsPart(d, args.silu != 0 ? SiluOf(d, sum) : sum, y + c, rest);
}

// Channels [c0, c0 + channels) of one sequence. kWidth is 0 where the width is known at run time
// only.
template <int kWidth, typename TX, typename TY>
void Block(const gdn_causal_conv_args& args, const Taps& taps, int64_t sequence, int64_t c0,
           size_t channels) {
  const int64_t begin = args.cu_seqlens == nullptr ? sequence : args.cu_seqlens[sequence];
  const int64_t end = args.cu_seqlens == nullptr ? sequence + 1 : args.cu_seqlens[sequence + 1];
  const int64_t read = args.read_index[sequence];
  const int64_t write = args.write_index[sequence];
  const TX* x = static_cast<const TX*>(args.x) + c0;
  TY* y = static_cast<TY*>(args.y) + c0;
  if (read < 0 || write < 0) {
    for (int64_t t = begin; t < end; ++t) {
      std::memset(static_cast<void*>(y + t * args.y_token_stride), 0, channels * sizeof(TY));
    }
    return;
  }
  if (begin == end && read == write) return;

  static constexpr std::array<TX, kConvBlock> kZeros{};
  const int width = kWidth > 0 ? kWidth : args.width;
  const int history = width - 1;
  const bool fresh = args.fresh != nullptr && args.fresh[sequence] != 0;
  TX* state = static_cast<TX*>(args.state);
  const TX* old_state = state + (fresh ? 0 : read * args.state_slot_stride + c0);
  TX* new_state = state + write * args.state_slot_stride + c0;
  // The column `back` tokens before token t, which may lie in the carried state.
  auto column = [&](int64_t t, int back) -> const TX* {
    if (t - back >= begin) return x + (t - back) * args.x_token_stride;
    return fresh ? kZeros.data() : old_state + (t - back - begin + history) * args.channels;
  };
  for (int64_t t = begin; t < end; ++t) {
    std::array<const TX*, kConvMaxWidth> input;
    for (int j = 0; j < width; ++j) input[j] = column(t, history - j);
    Token<kWidth>(args, input.data(), taps, channels, y + t * args.y_token_stride);
  }
  // Oldest first, so that in place a column is read before it is overwritten.
  for (int j = 0; j < history; ++j) {
    std::memmove(static_cast<void*>(new_state + j * args.channels), column(end, history - j),
                 channels * sizeof(TX));
  }
}

// Tasks are ordered block by block, so that the taps are gathered once a block and thread.
template <int kWidth, typename TX, typename TY>
void Tasks(const gdn_causal_conv_args& args, int64_t begin, int64_t end) {
  const int width = kWidth > 0 ? kWidth : args.width;
  Taps taps;
  int64_t gathered = -1;
  for (int64_t task = begin; task < end; ++task) {
    const int64_t c0 = task / args.sequences * kConvBlock;
    const int64_t channels = std::min(kConvBlock, args.channels - c0);
    if (c0 != gathered) {
      for (int64_t c = 0; c < channels; ++c) {
        for (int j = 0; j < width; ++j) {
          taps[j * kConvBlock + c] = args.weight[(c0 + c) * width + j];
        }
      }
      gathered = c0;
    }
    Block<kWidth, TX, TY>(args, taps, task % args.sequences, c0, static_cast<size_t>(channels));
  }
}

void CausalConvRange(const gdn_causal_conv_args& args, int64_t begin, int64_t end) {
  WithElementType(args.x_dtype, [&](auto x) HWY_ATTR {
    WithElementType(args.y_dtype, [&](auto y) HWY_ATTR {
      if (args.width == 4) {  // The width of every published model.
        Tasks<4, decltype(x), decltype(y)>(args, begin, end);
      } else {
        Tasks<0, decltype(x), decltype(y)>(args, begin, end);
      }
    });
  });
}

}  // namespace gdn::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace gdn::cpu {

HWY_EXPORT(CausalConvRange);

gdn_status CausalConv(const gdn_exec& exec, const gdn_causal_conv_args& args) {
  const int64_t blocks = (args.channels + kConvBlock - 1) / kConvBlock;
  ParallelFor(exec.pool, blocks * args.sequences, 2, [&](int64_t begin, int64_t end, int32_t) {
    HWY_DYNAMIC_DISPATCH(CausalConvRange)(args, begin, end);
  });
  return GDN_OK;
}

}  // namespace gdn::cpu
#endif  // HWY_ONCE
