#include "gdn/kernels/causal_conv_backward.h"

#include <algorithm>

#include "kernels/cuda/launch.h"
#include "kernels/cuda/narrow_pair.cuh"
#include "kernels/cuda/partial_sums.cuh"
#include "kernels/cuda/sigmoid.cuh"

namespace gdn::cuda {
namespace {

constexpr char kOp[] = "causal_conv_backward";
constexpr int kThreads = 128;
constexpr int kBlocks = 6;  // On a multiprocessor: more bytes under way than more registers give.
constexpr int64_t kLeastTokens = 16;  // Of a segment: less is mostly its neighbours' inputs.
constexpr int kRun = 64;  // Tokens summed in one accumulator, before that joins the total.
constexpr int kStep = 4;  // Tokens whose loads are under way while the last ones are computed.

// The tokens are cut into this many equal segments, each of which gives a partial row of d_weight
// and d_bias. Their number of tokens is not known to the host.
int64_t Segments(int64_t channels) {
  constexpr int64_t kWantedThreads = int64_t{1} << 19;
  return std::clamp<int64_t>(kWantedThreads / channels, 8, 256);
}

// How a thread gets at its channels. Raw: what a load brings, still to be widened.
// Run-time types, one channel.
struct AnyAccess {
  static constexpr int kChannels = 1;
  using Raw = float;
  static __device__ Raw Load(const void* data, gdn_dtype dtype, int64_t at) {
    return LoadAs(data, dtype, at);
  }
  static __device__ void Unpack(Raw raw, float (&to)[1]) { to[0] = raw; }
  static __device__ void Store(void* data, gdn_dtype dtype, int64_t at, const float (&from)[1]) {
    StoreAs(data, dtype, at, from[0]);
  }
};
// One 16-bit type for x, d_y and d_x, two channels in one access.
template <typename T>
struct PairAccess {
  static constexpr int kChannels = 2;
  using Raw = typename Pair<T>::Raw;
  static __device__ Raw Load(const void* data, gdn_dtype, int64_t at) {
    return *reinterpret_cast<const Raw*>(static_cast<const T*>(data) + at);
  }
  static __device__ void Unpack(Raw raw, float (&to)[2]) {
    const float2 pair = Pair<T>::Widen(raw);
    to[0] = pair.x;
    to[1] = pair.y;
  }
  static __device__ void Store(void* data, gdn_dtype, int64_t at, const float (&from)[2]) {
    T pair[2];
    NarrowPair<T>(from[0], from[1], pair);
    Raw raw;
    memcpy(&raw, pair, sizeof(raw));
    *reinterpret_cast<Raw*>(static_cast<T*>(data) + at) = raw;
  }
};

__device__ inline float SiluSlope(float p) {
  float e;
  const float s = FastSigmoid(p, &e);
  return s * fmaf(p, 1.0f - s, 1.0f);
}

// The sequence of a token: the last that begins at or before it, past all empty ones.
__device__ inline int64_t SequenceOf(const gdn_causal_conv_backward_args& a, int64_t token) {
  int64_t low = 0;
  int64_t high = a.sequences;
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    (a.cu_seqlens[middle] <= token ? low : high) = middle;
  }
  return low;
}

// Channels c to c + kChannels - 1 of a sequence.
template <typename Access, int kWidth>
struct Columns {
  static constexpr int kChannels = Access::kChannels;
  using Values = float[kChannels];

  __device__ explicit Columns(const gdn_causal_conv_backward_args& args, int64_t channel)
      : a(args), c(channel) {
#pragma unroll
    for (int i = 0; i < kChannels; ++i) {
      bias[i] = a.bias != nullptr ? a.bias[c + i] : 0.0f;
#pragma unroll
      for (int j = 0; j < kWidth; ++j) weight[j][i] = a.weight[(c + i) * kWidth + j];
    }
  }

  __device__ int64_t StateAt(int64_t column) const {
    return (sequence * (kWidth - 1) + column) * a.channels + c;
  }
  // Input t of the packed tokens; those before `begin` lie in the carried state.
  __device__ void Input(int64_t t, Values& to) const {
    if (t >= begin) {
      Access::Unpack(Access::Load(a.x, a.x_dtype, t * a.x_token_stride + c), to);
    } else if (a.initial_state != nullptr) {
      Access::Unpack(Access::Load(a.initial_state, a.x_dtype, StateAt(t - begin + kWidth - 1)), to);
    } else {
#pragma unroll
      for (int i = 0; i < kChannels; ++i) to[i] = 0.0f;
    }
  }
  // The window then ends before token t: its last entry is to be filled.
  __device__ void OpenWindow(int64_t t) {
#pragma unroll
    for (int j = 0; j + 1 < kWidth; ++j) Input(t - kWidth + 1 + j, window[j]);
  }
  // d_pre of the token whose input is `now`, which joins the window.
  __device__ void Gradient(const Values& now, const Values& d_y, Values& d_pre) {
#pragma unroll
    for (int i = 0; i < kChannels; ++i) {
      window[kWidth - 1][i] = now[i];
      d_pre[i] = d_y[i];
      if (a.silu == 0) continue;
      float p = bias[i];
#pragma unroll
      for (int j = 0; j < kWidth; ++j) p = fmaf(weight[j][i], window[j][i], p);
      d_pre[i] *= SiluSlope(p);
    }
  }
  __device__ void ShiftWindow() {
#pragma unroll
    for (int j = 0; j + 1 < kWidth; ++j) {
#pragma unroll
      for (int i = 0; i < kChannels; ++i) window[j][i] = window[j + 1][i];
    }
  }
  // `recent[j]` is the d_pre of token t + j, zeros beyond the end of the sequence. kLast: it may be
  // among the last of the sequence, which are the final state.
  template <bool kLast>
  __device__ void InputGradient(const Values (&recent)[kWidth], int64_t t, Values& d_x) const {
    const int64_t kept = t - end + kWidth - 1;
#pragma unroll
    for (int i = 0; i < kChannels; ++i) {
      d_x[i] = kLast && kept >= 0 && a.d_final_state != nullptr ? a.d_final_state[StateAt(kept) + i]
                                                                : 0.0f;
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        d_x[i] = fmaf(weight[kWidth - 1 - j][i], recent[j][i], d_x[i]);
      }
    }
  }

  const gdn_causal_conv_backward_args& a;
  int64_t c;
  int64_t sequence = 0;
  int64_t begin = 0;  // Tokens of the sequence.
  int64_t end = 0;
  Values weight[kWidth];
  Values bias;
  Values window[kWidth];
};

// What a thread sums over the tokens of its segment.
template <typename Access, int kWidth>
struct Walk : Columns<Access, kWidth> {
  using Base = Columns<Access, kWidth>;
  using Base::a, Base::c, Base::window;
  using typename Base::Values;
  static constexpr int kChannels = Access::kChannels;

  __device__ Walk(const gdn_causal_conv_backward_args& args, int64_t channel)
      : Base(args, channel) {}

  // d_pre of token t and its part of the sums, then d_x of token t - W + 1. Inside: both lie in the
  // segment, t in the sequence, and the final state's gradient is of later tokens.
  template <bool kInside>
  __device__ void Token(int64_t t, typename Access::Raw raw_x, typename Access::Raw raw_d_y) {
    Values d_pre = {};
    if (kInside || t < this->end) {
      Values now, d_y;
      Access::Unpack(raw_x, now);
      Access::Unpack(raw_d_y, d_y);
      this->Gradient(now, d_y, d_pre);
      if (kInside || t < high) {
#pragma unroll
        for (int i = 0; i < kChannels; ++i) {
#pragma unroll
          for (int j = 0; j < kWidth; ++j) run[j][i] = fmaf(d_pre[i], window[j][i], run[j][i]);
          run[kWidth][i] += d_pre[i];
        }
      }
      this->ShiftWindow();
    }
#pragma unroll
    for (int i = 0; i < kChannels; ++i) {
#pragma unroll
      for (int j = 0; j + 1 < kWidth; ++j) recent[j][i] = recent[j + 1][i];
      recent[kWidth - 1][i] = d_pre[i];
    }
    const int64_t at = t - kWidth + 1;
    if (!kInside && at < low) return;
    Values d_x;
    this->template InputGradient<!kInside>(recent, at, d_x);
    Access::Store(a.d_x, a.d_x_dtype, at * a.d_x_token_stride + c, d_x);
  }

  // Tokens low to high - 1 of the sequence.
  __device__ void Sequence() {
    using Raw = typename Access::Raw;
    this->OpenWindow(low);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
#pragma unroll
      for (int i = 0; i < kChannels; ++i) recent[j][i] = 0.0f;
    }
    const int64_t stop = high + kWidth - 1;  // Beyond the sequence d_pre is 0.
    const int64_t known = min(stop, this->end);
    Raw next_x[kStep], next_d_y[kStep];
    const auto load = [&](int64_t t) {
      const bool whole = t + kStep <= known;
#pragma unroll
      for (int u = 0; u < kStep; ++u) {
        const int64_t at = whole ? t + u : min(t + u, known - 1);
        next_x[u] = Access::Load(a.x, a.x_dtype, at * a.x_token_stride + c);
        next_d_y[u] = Access::Load(a.d_y, a.d_y_dtype, at * a.d_y_token_stride + c);
      }
    };
    load(low);
    for (int64_t t = low; t < stop; t += kStep) {
      Raw x[kStep], d_y[kStep];
#pragma unroll
      for (int u = 0; u < kStep; ++u) {
        x[u] = next_x[u];
        d_y[u] = next_d_y[u];
      }
      load(t + kStep);
      if (t >= low + kWidth - 1 && t + kStep <= high) {
#pragma unroll
        for (int u = 0; u < kStep; ++u) Token<true>(t + u, x[u], d_y[u]);
      } else {
#pragma unroll
        for (int u = 0; u < kStep; ++u) {
          if (t + u < stop) Token<false>(t + u, x[u], d_y[u]);
        }
      }
      in_run += kStep;
      if (in_run >= kRun) CloseRun();
    }
  }

  __device__ void CloseRun() {
    in_run = 0;
#pragma unroll
    for (int j = 0; j <= kWidth; ++j) {
#pragma unroll
      for (int i = 0; i < kChannels; ++i) {
        total[j][i] += run[j][i];
        run[j][i] = 0.0f;
      }
    }
  }

  int64_t low = 0;  // Tokens of the segment in the sequence.
  int64_t high = 0;
  int in_run = 0;
  Values recent[kWidth];        // d_pre of the last tokens.
  Values run[kWidth + 1] = {};  // d_weight, then d_bias.
  Values total[kWidth + 1] = {};
};

// d_x of a segment's tokens and their part of d_weight and d_bias. The last tokens' d_x need the
// d_pre of up to W - 1 tokens after the segment, which are computed here too.
template <typename Access, int kWidth>
__global__ void __launch_bounds__(kThreads, kBlocks)
    Segment(const __grid_constant__ gdn_causal_conv_backward_args a, float* partial) {
  constexpr int kChannels = Access::kChannels;
  const int64_t c = (blockIdx.x * int64_t{kThreads} + threadIdx.x) * kChannels;
  if (c >= a.channels) return;
  WaitForPreviousKernel();
  const int64_t tokens = a.cu_seqlens[a.sequences];
  const int64_t size = max(kLeastTokens, (tokens + gridDim.y - 1) / gridDim.y);
  const int64_t first = min(tokens, blockIdx.y * size);
  const int64_t last = min(tokens, first + size);
  Walk<Access, kWidth> walk(a, c);
  walk.high = first;
  for (int64_t n = first < last ? SequenceOf(a, first) : 0; walk.high < last; ++n) {
    walk.sequence = n;
    walk.begin = a.cu_seqlens[n];
    walk.end = a.cu_seqlens[n + 1];
    walk.low = walk.high;
    walk.high = max(walk.low, min(last, walk.end));
    if (walk.low < walk.high) walk.Sequence();  // Not an empty one.
  }
  walk.CloseRun();
  float* const row = partial + blockIdx.y * a.channels * (kWidth + 1);
#pragma unroll
  for (int i = 0; i < kChannels; ++i) {
#pragma unroll
    for (int j = 0; j < kWidth; ++j) row[(c + i) * kWidth + j] = walk.total[j][i];
    row[a.channels * kWidth + c + i] = walk.total[kWidth][i];
  }
}

// d_initial_state, from the first W - 1 tokens of each sequence.
template <int kWidth>
__global__ void __launch_bounds__(kThreads)
    States(const __grid_constant__ gdn_causal_conv_backward_args a) {
  const int64_t c = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (c >= a.channels) return;
  Columns<AnyAccess, kWidth> columns(a, c);
  for (int64_t n = blockIdx.y; n < a.sequences; n += gridDim.y) {
    columns.sequence = n;
    columns.begin = a.cu_seqlens[n];
    columns.end = a.cu_seqlens[n + 1];
    columns.OpenWindow(columns.begin);
    float recent[kWidth][1] = {};
#pragma unroll
    for (int s = 0; s < kWidth - 1; ++s) {
      const int64_t t = columns.begin + s;
      float d_pre[1] = {};
      if (t < columns.end) {
        float now[1];
        columns.Input(t, now);
        const float d_y[1] = {LoadAs(a.d_y, a.d_y_dtype, t * a.d_y_token_stride + c)};
        columns.Gradient(now, d_y, d_pre);
        columns.ShiftWindow();
      }
#pragma unroll
      for (int j = 0; j + 1 < kWidth; ++j) recent[j][0] = recent[j + 1][0];
      recent[kWidth - 1][0] = d_pre[0];
      float d_x[1];
      columns.template InputGradient<true>(recent, t - kWidth + 1, d_x);
      a.d_initial_state[columns.StateAt(s)] = d_x[0];
    }
  }
}

bool CoversPairs(const gdn_causal_conv_backward_args& a) {
  const auto pairs = [](const void* data, int64_t stride) {
    return reinterpret_cast<uintptr_t>(data) % 4 == 0 && stride % 2 == 0;
  };
  return a.width == 4 && a.x_dtype != GDN_F32 && a.d_y_dtype == a.x_dtype &&
         a.d_x_dtype == a.x_dtype && pairs(a.x, a.x_token_stride) &&
         pairs(a.d_y, a.d_y_token_stride) && pairs(a.d_x, a.d_x_token_stride) &&
         pairs(a.initial_state, a.channels);
}

template <typename Access, int kWidth>
cudaError_t LaunchSegments(const gdn_causal_conv_backward_args& args, float* partial, bool early,
                           cudaStream_t stream) {
  const int64_t groups = (args.channels + Access::kChannels - 1) / Access::kChannels;
  const dim3 grid(static_cast<unsigned>((groups + kThreads - 1) / kThreads),
                  static_cast<unsigned>(Segments(args.channels)));
  return LaunchMaybeEarly(early, grid, dim3(kThreads), 0, stream, Segment<Access, kWidth>, args,
                          partial);
}

template <int kWidth>
gdn_status Launch(const gdn_causal_conv_backward_args& args, float* partial, bool early,
                  cudaStream_t stream) {
  const auto segments = kWidth != 4 || !CoversPairs(args) ? LaunchSegments<AnyAccess, kWidth>
                        : args.x_dtype == GDN_BF16        ? LaunchSegments<PairAccess<Bf16>, 4>
                                                          : LaunchSegments<PairAccess<F16>, 4>;
  const cudaError_t error = segments(args, partial, early, stream);
  if (const gdn_status status = CheckCuda(kOp, error); status != GDN_OK) return status;
  if (args.d_initial_state == nullptr) return GDN_OK;
  const dim3 grid(static_cast<unsigned>((args.channels + kThreads - 1) / kThreads),
                  static_cast<unsigned>(std::min<int64_t>(args.sequences, 65535)));
  States<kWidth><<<grid, kThreads, 0, stream>>>(args);
  return CheckLaunch(kOp);
}

gdn_status Launch(const gdn_causal_conv_backward_args& args, float* partial, bool early,
                  cudaStream_t stream) {
  switch (args.width) {
    case 2:
      return Launch<2>(args, partial, early, stream);
    case 3:
      return Launch<3>(args, partial, early, stream);
    case 4:
      return Launch<4>(args, partial, early, stream);
    case 5:
      return Launch<5>(args, partial, early, stream);
    case 6:
      return Launch<6>(args, partial, early, stream);
    case 7:
      return Launch<7>(args, partial, early, stream);
    default:
      return Launch<8>(args, partial, early, stream);
  }
}

}  // namespace

size_t CausalConvBackwardWorkspace(const gdn_causal_conv_backward_args& args) {
  return static_cast<size_t>(Segments(args.channels) * args.channels * (args.width + 1)) *
         sizeof(float);
}

gdn_status CausalConvBackward(const gdn_exec& exec, const gdn_causal_conv_backward_args& args) {
  Device device;
  if (const gdn_status status = CurrentDevice(kOp, &device); status != GDN_OK) return status;
  auto* const partial = static_cast<float*>(exec.workspace);
  if (args.sequences > 0) {
    const gdn_status status = Launch(args, partial, device.compute_capability >= 90, Stream(exec));
    if (status != GDN_OK) return status;
  }
  const PartialSums sums = {partial,
                            args.sequences > 0 ? Segments(args.channels) : 0,
                            args.channels * args.width,
                            args.d_weight,
                            GDN_F32,
                            args.channels,
                            args.d_bias};
  return LaunchPartialSums(kOp, sums, device, Stream(exec));
}

}  // namespace gdn::cuda
