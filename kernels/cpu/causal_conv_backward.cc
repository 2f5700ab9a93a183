#include "gdn/kernels/causal_conv_backward.h"

#include <algorithm>
#include <array>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/causal_conv_backward.cc"
#include "hwy/foreach_target.h"
// After foreach_target.h.
#include "gdn/kernels/cpu_pool.h"
#include "hwy/highway.h"
#include "kernels/cpu/activations-inl.h"
#include "kernels/cpu/elements-inl.h"

#ifndef KERNELS_CPU_CAUSAL_CONV_BACKWARD_ONCE_
#define KERNELS_CPU_CAUSAL_CONV_BACKWARD_ONCE_
namespace gdn::cpu {

// A worker owns channels, never tokens: the sums over tokens then have one order.
inline constexpr int64_t kConvBackwardBlock = 128;
inline constexpr int64_t kConvBackwardMaxWidth = 8;
// Tokens summed in one FP32 accumulator before it is added to the total: the error stays that of
// the run, not of the whole batch.
inline constexpr int64_t kConvBackwardRun = 64;

struct ConvBackwardScratch {
  using Columns = std::array<float, kConvBackwardMaxWidth * kConvBackwardBlock>;
  alignas(64) Columns taps;
  alignas(64) Columns d_pre;  // those of the last W tokens: token t in column t % W
  alignas(64) Columns run;    // d_weight of the current run
  alignas(64) Columns total;
  alignas(64) std::array<float, kConvBackwardBlock> bias;
  alignas(64) std::array<float, kConvBackwardBlock> bias_run;
  alignas(64) std::array<float, kConvBackwardBlock> bias_total;
};

}  // namespace gdn::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace gdn::cpu::HWY_NAMESPACE {

using F32 = hn::ScalableTag<float>;

HWY_INLINE hn::Vec<F32> SiluSlope(F32 d, hn::Vec<F32> p) {
  const auto one = hn::Set(d, 1.0f);
  const auto s = SigmoidOf(d, p);
  return hn::Mul(s, hn::MulAdd(p, hn::Sub(one, s), one));
}

template <typename TX, typename TDY, typename TDX>
class BlockOfChannels {
 public:
  BlockOfChannels(const gdn_causal_conv_backward_args& args, int64_t c0)
      : args_(args),
        c0_(c0),
        channels_(static_cast<size_t>(std::min(kConvBackwardBlock, args.channels - c0))),
        width_(args.width) {
    scratch_.taps.fill(0.0f);
    scratch_.total.fill(0.0f);
    scratch_.run.fill(0.0f);
    scratch_.bias.fill(0.0f);
    scratch_.bias_run.fill(0.0f);
    scratch_.bias_total.fill(0.0f);
  }

  void Run() {
    for (size_t c = 0; args_.weight != nullptr && c < channels_; ++c) {
      for (int j = 0; j < width_; ++j) {
        scratch_.taps[Column(j) + c] = args_.weight[(c0_ + int64_t(c)) * width_ + j];
      }
      if (args_.bias != nullptr) scratch_.bias[c] = args_.bias[c0_ + int64_t(c)];
    }
    for (int64_t n = 0; n < args_.sequences; ++n) Sequence(n);
    CloseRun();
    for (size_t c = 0; c < channels_; ++c) {
      for (int j = 0; j < width_; ++j) {
        args_.d_weight[(c0_ + int64_t(c)) * width_ + j] = scratch_.total[Column(j) + c];
      }
      if (args_.d_bias != nullptr) args_.d_bias[c0_ + int64_t(c)] = scratch_.bias_total[c];
    }
  }

 private:
  static size_t Column(int64_t j) { return static_cast<size_t>(j * kConvBackwardBlock); }
  int64_t StateOffset(int64_t sequence, int64_t column) const {
    return (sequence * (width_ - 1) + column) * args_.channels + c0_;
  }

  void CloseRun() {
    for (size_t i = 0; i < Column(width_); ++i) scratch_.total[i] += scratch_.run[i];
    for (size_t i = 0; i < channels_; ++i) scratch_.bias_total[i] += scratch_.bias_run[i];
    scratch_.run.fill(0.0f);
    scratch_.bias_run.fill(0.0f);
    tokens_in_run_ = 0;
  }

  // Input i of the sequence; NULL where it lies in a carried state of zeros.
  const TX* Input(int64_t sequence, int64_t i) const {
    if (i >= 0) {
      return static_cast<const TX*>(args_.x) +
             (args_.cu_seqlens[sequence] + i) * args_.x_token_stride + c0_;
    }
    if (args_.initial_state == nullptr) return nullptr;
    return static_cast<const TX*>(args_.initial_state) + StateOffset(sequence, i + width_ - 1);
  }

  void Sequence(int64_t n) {
    const int64_t length = args_.cu_seqlens[n + 1] - args_.cu_seqlens[n];
    scratch_.d_pre.fill(0.0f);
    for (int64_t t = 0; t < length; ++t) {
      Token(n, t);
      Gradient(n, t - width_ + 1, t, length);
      if (++tokens_in_run_ == kConvBackwardRun) CloseRun();
    }
    // The last W-1 inputs, whose later tokens do not exist.
    for (int64_t t = length; t < length + width_ - 1; ++t) {
      std::fill_n(scratch_.d_pre.begin() + Column(t % width_), kConvBackwardBlock, 0.0f);
      Gradient(n, t - width_ + 1, t, length);
    }
  }

  // d_pre of token t and its part of the sums.
  void Token(int64_t sequence, int64_t t) {
    const F32 d;
    const size_t lanes = hn::Lanes(d);
    std::array<const TX*, kConvBackwardMaxWidth> input;
    for (int j = 0; j < width_; ++j) input[j] = Input(sequence, t - width_ + 1 + j);
    const TDY* d_y = static_cast<const TDY*>(args_.d_y) +
                     (args_.cu_seqlens[sequence] + t) * args_.d_y_token_stride + c0_;
    for (size_t c = 0; c < channels_; c += lanes) {
      const size_t n = std::min(lanes, channels_ - c);
      hn::Vec<F32> x[kConvBackwardMaxWidth];
      auto pre = hn::Load(d, scratch_.bias.data() + c);
      for (int j = 0; j < width_; ++j) {
        x[j] = input[j] == nullptr ? hn::Zero(d) : LoadLanes(d, input[j] + c, n);
        pre = hn::MulAdd(hn::Load(d, scratch_.taps.data() + Column(j) + c), x[j], pre);
      }
      auto d_pre = LoadLanes(d, d_y + c, n);
      if (args_.silu != 0) d_pre = hn::Mul(d_pre, SiluSlope(d, pre));
      hn::Store(d_pre, d, scratch_.d_pre.data() + Column(t % width_) + c);
      for (int j = 0; j < width_; ++j) {
        float* sum = scratch_.run.data() + Column(j) + c;
        hn::Store(hn::MulAdd(d_pre, x[j], hn::Load(d, sum)), d, sum);
      }
      float* sum = scratch_.bias_run.data() + c;
      hn::Store(hn::Add(d_pre, hn::Load(d, sum)), d, sum);
    }
  }

  // Writes the gradient of input i, all of whose tokens are known once token t = i+W-1 is.
  void Gradient(int64_t sequence, int64_t i, int64_t t, int64_t length) {
    if (i < 0 && args_.d_initial_state == nullptr) return;
    const F32 d;
    const size_t lanes = hn::Lanes(d);
    const int64_t kept = i - length + width_ - 1;
    const float* d_final = kept < 0 || args_.d_final_state == nullptr
                               ? nullptr
                               : args_.d_final_state + StateOffset(sequence, kept);
    for (size_t c = 0; c < channels_; c += lanes) {
      const size_t n = std::min(lanes, channels_ - c);
      auto sum = d_final == nullptr ? hn::Zero(d) : LoadLanes(d, d_final + c, n);
      for (int j = 0; j < width_ && j <= t; ++j) {
        sum = hn::MulAdd(hn::Load(d, scratch_.taps.data() + Column(j) + c),
                         hn::Load(d, scratch_.d_pre.data() + Column((t - j) % width_) + c), sum);
      }
      if (i < 0) {
        StoreLanes(d, sum, args_.d_initial_state + StateOffset(sequence, i + width_ - 1) + c, n);
      } else {
        TDX* d_x = static_cast<TDX*>(args_.d_x) +
                   (args_.cu_seqlens[sequence] + i) * args_.d_x_token_stride + c0_;
        StoreLanes(d, sum, d_x + c, n);
      }
    }
  }

  const gdn_causal_conv_backward_args& args_;
  const int64_t c0_;
  const size_t channels_;
  const int width_;
  int64_t tokens_in_run_ = 0;
  ConvBackwardScratch scratch_;
};

void CausalConvBackwardRange(const gdn_causal_conv_backward_args& args, int64_t begin,
                             int64_t end) {
  WithElementType(args.x_dtype, [&](auto x) HWY_ATTR {
    WithElementType(args.d_y_dtype, [&](auto d_y) HWY_ATTR {
      WithElementType(args.d_x_dtype, [&](auto d_x) HWY_ATTR {
        for (int64_t block = begin; block < end; ++block) {
          BlockOfChannels<decltype(x), decltype(d_y), decltype(d_x)>(args,
                                                                     block * kConvBackwardBlock)
              .Run();
        }
      });
    });
  });
}

}  // namespace gdn::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace gdn::cpu {

HWY_EXPORT(CausalConvBackwardRange);

gdn_status CausalConvBackward(const gdn_exec& exec, const gdn_causal_conv_backward_args& args) {
  const int64_t blocks = (args.channels + kConvBackwardBlock - 1) / kConvBackwardBlock;
  ParallelFor(exec.pool, blocks, 1, [&](int64_t begin, int64_t end, int32_t) {
    HWY_DYNAMIC_DISPATCH(CausalConvBackwardRange)(args, begin, end);
  });
  return GDN_OK;
}

}  // namespace gdn::cpu
#endif  // HWY_ONCE
