#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <type_traits>

#include "gdn/kernels/gdn2_gates.h"
#include "kernels/common/convert.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/partial_sums.cuh"
#include "kernels/cuda/vector.cuh"

namespace gdn::cuda {
namespace {

constexpr char kOp[] = "gdn2_gates_backward";
constexpr int kStreams = 8;  // Of a block: its warps. Each takes every eighth token.
constexpr int kTokens = 64;  // Of a block: those behind a partial row.
constexpr int kThreads = 32 * kStreams;
constexpr int kMany = 4;  // Neighbouring channels of a lane, where their addresses allow it.

int64_t Partials(const gdn2_gates_args& args) { return (args.tokens + kTokens - 1) / kTokens; }
int64_t Width(const gdn2_gates_args& args) { return args.gate_heads * args.key_dim; }

template <typename T>
using Raw = std::conditional_t<sizeof(T) * kMany == 16, uint4, uint2>;

// kN is 1 or kMany: one access.
template <int kN, typename T>
__device__ inline void Load(const T* from, float (&to)[kN]) {
  T element[kN];
  if constexpr (kN == 1) {
    element[0] = *from;
  } else {
    const auto raw = *reinterpret_cast<const Raw<T>*>(from);
    memcpy(element, &raw, sizeof(raw));
  }
#pragma unroll
  for (int i = 0; i < kN; ++i) to[i] = Widen(element[i]);
}
template <int kN, typename T>
__device__ inline void Store(T* to, const float (&from)[kN]) {
  T element[kN];
#pragma unroll
  for (int i = 0; i < kN; ++i) element[i] = Narrow<T>(from[i]);
  if constexpr (kN == 1) {
    *to = element[0];
  } else {
    Raw<T> raw;
    memcpy(&raw, element, sizeof(raw));
    *reinterpret_cast<Raw<T>*>(to) = raw;
  }
}

// 1 / x for x in [1, 2^30], within a unit of the last place, without a division's branches.
__device__ inline float Reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  y = fmaf(y, fmaf(-x, y, 1.0f), y);
  return y;
}

// s(x) (1 - s(x)), which is even, without cancellation.
__device__ inline float SigmoidSlope(float x) {
  const float small = expf(-fabsf(x));
  return small * Reciprocal((1.0f + small) * (1.0f + small));
}

// What a token adds to the sums of a channel.
struct Terms {
  float d_f;  // To d_dt_bias.
  float of_rate;
  float by;  // of_rate * by to d_a_log.
};

__device__ inline Terms TermsOf(bool bounded, float lower_bound, float rate, float x, float d_g) {
  if (bounded) {
    const float d_f = d_g * (lower_bound * SigmoidSlope(rate * x) * rate);
    return {d_f, d_f, x};
  }
  const bool linear = x > 20.0f;
  const float e = expf(x);
  const float d_f = d_g * (-rate * (linear ? 1.0f : e * Reciprocal(1.0f + e)));
  return {d_f, d_g, -rate * (linear ? x : log1pf(e))};
}

template <typename T, int kN>
__device__ inline void WriteGates(const gdn2_gates_backward_args& p, int64_t begin, int64_t end,
                                  int64_t channel) {
  const gdn2_gates_args& a = p.forward;
  if (channel >= a.write_width) return;
#pragma unroll 4
  for (int64_t t = begin; t < end; t += kStreams) {
    float w[kN], d[kN];
    Load(static_cast<const T*>(a.w) + t * a.w_token_stride + channel, w);
    Load(p.d_write + t * a.write_width + channel, d);
#pragma unroll
    for (int i = 0; i < kN; ++i) d[i] *= SigmoidSlope(w[i]);
    Store(static_cast<T*>(p.d_w) + t * a.write_width + channel, d);
  }
}

// A block's tile is 32 kN neighbouring channels of kTokens tokens: of f and b for the first
// `key_tiles` tiles of these tokens, of w for the others, which need no sums. Where the partial row
// [2, G*K] of these tokens is, parts of d_a_log by channels come before those of d_dt_bias.
template <typename T, int kN>
__global__ void __launch_bounds__(kThreads)
    Kernel(const __grid_constant__ gdn2_gates_backward_args p, uint32_t key_tiles, uint32_t tiles,
           float* partial) {
  constexpr int kTile = 32 * kN;
  __shared__ alignas(16) float of_streams[2][kStreams][kTile];
  const gdn2_gates_args& a = p.forward;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int stream = static_cast<int>(threadIdx.x) / 32;
  const int64_t row = blockIdx.x / tiles;
  const uint32_t tile = blockIdx.x % tiles;
  const int64_t begin = row * kTokens + stream;
  const int64_t end = min(a.tokens, (row + 1) * kTokens);
  WaitForPreviousKernel();
  AllowNextKernel();
  if (tile >= key_tiles) {
    WriteGates<T, kN>(p, begin, end, int64_t{tile - key_tiles} * kTile + lane * kN);
    return;
  }
  const int64_t width = a.gate_heads * a.key_dim;
  const int64_t first = int64_t{tile} * kTile;
  const int64_t channel = first + lane * kN;
  const bool bounded = a.decay == GDN2_DECAY_BOUNDED;
  float d_a_log[kN] = {};
  float d_dt_bias[kN] = {};
  if (channel < width) {
    float rate[kN], bias[kN];
#pragma unroll
    for (int i = 0; i < kN; ++i) {
      rate[i] = a.a_log != nullptr ? expf(a.a_log[(channel + i) / a.key_dim]) : 1.0f;
      bias[i] = a.dt_bias != nullptr ? a.dt_bias[channel + i] : 0.0f;
    }
#pragma unroll 2
    for (int64_t t = begin; t < end; t += kStreams) {
      float f[kN], b[kN], d_g[kN], d_erase[kN];
      Load(static_cast<const T*>(a.f) + t * a.f_token_stride + channel, f);
      Load(static_cast<const T*>(a.b) + t * a.b_token_stride + channel, b);
      Load(p.d_g + t * width + channel, d_g);
      Load(p.d_erase + t * width + channel, d_erase);
#pragma unroll
      for (int i = 0; i < kN; ++i) {
        const Terms terms = TermsOf(bounded, a.lower_bound, rate[i], f[i] + bias[i], d_g[i]);
        d_a_log[i] = fmaf(terms.of_rate, terms.by, d_a_log[i]);
        d_dt_bias[i] += terms.d_f;
        f[i] = terms.d_f;
        b[i] = d_erase[i] * a.erase_scale * SigmoidSlope(b[i]);
      }
      Store(static_cast<T*>(p.d_f) + t * width + channel, f);
      Store(static_cast<T*>(p.d_b) + t * width + channel, b);
    }
  }
  Store(&of_streams[0][stream][lane * kN], d_a_log);
  Store(&of_streams[1][stream][lane * kN], d_dt_bias);
  __syncthreads();
  if (threadIdx.x >= 2 * kTile) return;
  const int which = static_cast<int>(threadIdx.x) / kTile;
  const int column = static_cast<int>(threadIdx.x) % kTile;
  if (first + column >= width) return;
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kStreams; ++i) sum += of_streams[which][i][column];
  partial[(row * 2 + which) * width + first + column] = sum;
}

// d_a_log from its parts by channels: a warp for a head. norm_bench leaves out the kernels whose
// names contain SumPartials.
__global__ void __launch_bounds__(kThreads)
    SumPartialsOfHeads(const float* parts, int64_t heads, int64_t key_dim, float* d_a_log) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t head = blockIdx.x * int64_t{kThreads / 32} + threadIdx.x / 32;
  WaitForPreviousKernel();
  AllowNextKernel();
  if (head >= heads) return;
  float sum = 0.0f;
  for (int64_t i = lane; i < key_dim; i += 32) sum += __ldcg(parts + head * key_dim + i);
  sum = LaneSum(sum);
  if (lane == 0) d_a_log[head] = sum;
}

// Whether kMany neighbouring elements of every row can be accessed at once.
bool AllowsMany(const gdn2_gates_backward_args& p) {
  const gdn2_gates_args& a = p.forward;
  const auto element = static_cast<uintptr_t>(kernels::SizeOf(a.fbw_dtype));
  const auto aligned = [](std::initializer_list<const void*> rows, uintptr_t bytes) {
    bool all = true;
    for (const void* data : rows) all = all && IsAligned(data, bytes);
    return all;
  };
  return aligned({a.f, a.b, a.w, p.d_f, p.d_b, p.d_w}, kMany * element) &&
         aligned({p.d_g, p.d_erase, p.d_write}, kMany * sizeof(float)) && Width(a) % kMany == 0 &&
         a.write_width % kMany == 0 && a.f_token_stride % kMany == 0 &&
         a.b_token_stride % kMany == 0 && a.w_token_stride % kMany == 0;
}

gdn_status LaunchTiles(const gdn2_gates_backward_args& args, const Device& device,
                       cudaStream_t stream, float* partial) {
  const gdn2_gates_args& in = args.forward;
  const bool many = AllowsMany(args);
  const int64_t tile = many ? 32 * kMany : 32;
  const int64_t key_tiles = (Width(in) + tile - 1) / tile;
  const int64_t tiles = key_tiles + (in.write_width + tile - 1) / tile;
  constexpr int64_t kMaxBlocks = (int64_t{1} << 31) - 1;
  GDN_CHECK_ARG(Partials(in) <= kMaxBlocks / tiles, GDN_UNSUPPORTED_SHAPE,
                "%s: on CUDA tokens must be at most %lld with these channels, got %lld", kOp,
                static_cast<long long>(kMaxBlocks / tiles * kTokens),
                static_cast<long long>(in.tokens));
  cudaError_t error = cudaSuccess;
  ForElementType(in.fbw_dtype, [&]<typename T>() {
    error = LaunchMaybeEarly(
        device.compute_capability >= 90, dim3(static_cast<unsigned>(Partials(in) * tiles)),
        dim3(kThreads), 0, stream, many ? Kernel<T, kMany> : Kernel<T, 1>, args,
        static_cast<uint32_t>(key_tiles), static_cast<uint32_t>(tiles), partial);
  });
  return CheckCuda(kOp, error);
}

}  // namespace

// Partial rows, and behind them the parts of d_a_log by channels.
size_t Gdn2GatesBackwardWorkspace(const gdn2_gates_backward_args& args) {
  return static_cast<size_t>((Partials(args.forward) * 2 + 1) * Width(args.forward)) *
         sizeof(float);
}

gdn_status Gdn2GatesBackward(const gdn_exec& exec, const gdn2_gates_backward_args& args) {
  const gdn2_gates_args& in = args.forward;
  Device device;
  if (const gdn_status status = CurrentDevice(kOp, &device); status != GDN_OK) return status;
  const int64_t width = Width(in);
  const int64_t partials = Partials(in);
  auto* const partial = static_cast<float*>(exec.workspace);
  float* const of_channels = partial + partials * 2 * width;
  if (partials > 0) {
    const gdn_status status = LaunchTiles(args, device, Stream(exec), partial);
    if (status != GDN_OK) return status;
  }
  if (args.d_a_log == nullptr && args.d_dt_bias == nullptr) return GDN_OK;
  const PartialSums sums = {partial, partials, width, of_channels, GDN_F32, width, args.d_dt_bias};
  const gdn_status status = LaunchPartialSums(kOp, sums, device, Stream(exec));
  if (status != GDN_OK || args.d_a_log == nullptr) return status;
  constexpr int64_t kHeads = kThreads / 32;  // Of a block.
  return CheckCuda(
      kOp, LaunchMaybeEarly(device.compute_capability >= 90,
                            dim3(static_cast<unsigned>((in.gate_heads + kHeads - 1) / kHeads)),
                            dim3(kThreads), 0, Stream(exec), SumPartialsOfHeads,
                            static_cast<const float*>(of_channels), in.gate_heads, in.key_dim,
                            args.d_a_log));
}

}  // namespace gdn::cuda
