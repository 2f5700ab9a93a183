#include "gdn/kernels/causal_conv.h"

#include "kernels/cuda/element.cuh"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/math.cuh"

namespace gdn::cuda {
namespace {

constexpr char kOp[] = "causal_conv";
constexpr int kThreads = 256;
constexpr int kMaxWidth = 8;

// One thread takes one channel of one sequence; nobody else touches that channel of its slots.
template <typename X>
__global__ void __launch_bounds__(kThreads) Kernel(const __grid_constant__ gdn_causal_conv_args a) {
  const int width = a.width;
  X* const state = static_cast<X*>(a.state);
  for (int64_t i = blockIdx.y; i < a.sequences; i += gridDim.y) {
    const int64_t begin = a.cu_seqlens == nullptr ? i : a.cu_seqlens[i];
    const int64_t end = a.cu_seqlens == nullptr ? i + 1 : a.cu_seqlens[i + 1];
    const int64_t read = a.read_index[i];
    const int64_t write = a.write_index[i];
    const bool padding = read < 0 || write < 0;
    const bool fresh = a.fresh != nullptr && a.fresh[i] != 0;
    if (!padding && begin == end && read == write) continue;
    for (int64_t c = blockIdx.x * int64_t{kThreads} + threadIdx.x; c < a.channels;
         c += int64_t{gridDim.x} * kThreads) {
      if (padding) {
        for (int64_t t = begin; t < end; ++t) {
          StoreAs(a.y, a.y_dtype, t * a.y_token_stride + c, 0.0f);
        }
        continue;
      }
      float window[kMaxWidth];  // The last W inputs, newest at W - 1.
#pragma unroll
      for (int j = 0; j < kMaxWidth; ++j) {
        window[j] = j + 1 < width && !fresh
                        ? Widen(state[read * a.state_slot_stride + j * a.channels + c])
                        : 0.0f;
      }
      for (int64_t t = begin; t < end; ++t) {
        const float now = Widen(static_cast<const X*>(a.x)[t * a.x_token_stride + c]);
        float sum = 0.0f;
#pragma unroll
        for (int j = 0; j < kMaxWidth; ++j) {
          if (j + 1 == width) window[j] = now;
          if (j < width) sum = fmaf(a.weight[c * width + j], window[j], sum);
        }
        if (a.silu != 0) sum = Silu(sum);
        StoreAs(a.y, a.y_dtype, t * a.y_token_stride + c, sum);
#pragma unroll
        for (int j = 0; j + 1 < kMaxWidth; ++j) window[j] = window[j + 1];
      }
#pragma unroll
      for (int j = 0; j < kMaxWidth; ++j) {
        if (j + 1 < width) {
          state[write * a.state_slot_stride + j * a.channels + c] = Narrow<X>(window[j]);
        }
      }
    }
  }
}

// The same for 16-bit elements and width 4: a thread takes four neighbouring channels and kTile
// tokens. Tiles of a sequence run in parallel: each reads the inputs before it, and the first,
// which alone reads the state, also writes the new one, whose inputs it fetches from the sequence's
// end.
constexpr int kTileThreads = 128;
constexpr int kTile = 32;
constexpr int kStep = 8;  // Tokens in flight.
constexpr int kPast = 3;
constexpr int kQuad = 4;

// Four channels of a token.
template <typename X>
struct alignas(8) Quad {
  X element[kQuad];
};
template <typename X>
__device__ inline Quad<X> LoadQuad(const X* from) {
  return *reinterpret_cast<const Quad<X>*>(from);
}
template <typename X>
__device__ inline void StoreQuad(X* to, const Quad<X>& quad) {
  *reinterpret_cast<Quad<X>*>(to) = quad;
}
bool IsQuadAligned(const void* data, int64_t stride) {
  return reinterpret_cast<uintptr_t>(data) % 8 == 0 && stride % kQuad == 0;
}

template <typename X>
__device__ inline void Shift(float (&window)[kPast][kQuad], const Quad<X>& now) {
#pragma unroll
  for (int e = 0; e < kQuad; ++e) {
    window[0][e] = window[1][e];
    window[1][e] = window[2][e];
    window[2][e] = Widen(now.element[e]);
  }
}

template <typename X>
__global__ void __launch_bounds__(kTileThreads, 8)
    TileKernel(const __grid_constant__ gdn_causal_conv_args a) {
  const int64_t c = (blockIdx.x * int64_t{kTileThreads} + threadIdx.x) * int64_t{kQuad};
  if (c >= a.channels) return;
  float weight[kPast + 1][kQuad];
#pragma unroll
  for (int e = 0; e < kQuad; ++e) {
    const float4 w = reinterpret_cast<const float4*>(a.weight)[c + e];
    weight[0][e] = w.x;
    weight[1][e] = w.y;
    weight[2][e] = w.z;
    weight[3][e] = w.w;
  }
  const X* const x = static_cast<const X*>(a.x) + c;
  X* const y = static_cast<X*>(a.y) + c;
  X* const state = static_cast<X*>(a.state) + c;
  for (int64_t i = blockIdx.y; i < a.sequences; i += gridDim.y) {
    const int64_t begin = a.cu_seqlens[i];
    const int64_t end = a.cu_seqlens[i + 1];
    const int64_t read = a.read_index[i];
    const int64_t write = a.write_index[i];
    const bool padding = read < 0 || write < 0;
    const bool fresh = a.fresh != nullptr && a.fresh[i] != 0;
    if (!padding && begin == end && read == write) continue;
    for (int64_t t = begin + blockIdx.z * int64_t{kTile};; t += gridDim.z * int64_t{kTile}) {
      const bool first = t == begin;
      if (t >= end && !first) break;
      const int64_t last = t + kTile < end ? t + kTile : end;
      if (padding) {
        const Quad<X> zeros{};
        for (int64_t row = t; row < last; ++row) StoreQuad(y + row * a.y_token_stride, zeros);
        continue;
      }
      float window[kPast][kQuad] = {};
      if (!first || !fresh) {
        const X* const from =
            first ? state + read * a.state_slot_stride : x + (t - kPast) * a.x_token_stride;
        const int64_t stride = first ? a.channels : a.x_token_stride;
#pragma unroll
        for (int j = 0; j < kPast; ++j) Shift(window, LoadQuad(from + j * stride));
      }
      if (first) {
        // New entry j is input end - kPast + j, or where the sequence is shorter an old entry.
        const int64_t length = end - begin;
#pragma unroll
        for (int j = 0; j < kPast; ++j) {
          Quad<X> entry;
          if (length + j >= kPast) {
            entry = LoadQuad(x + (end - kPast + j) * a.x_token_stride);
          } else {
            // window[length + j], with the index known to the compiler.
#pragma unroll
            for (int e = 0; e < kQuad; ++e) {
              float old = window[j][e];
              if (j + 1 < kPast && length == 1) old = window[j + 1 < kPast ? j + 1 : j][e];
              if (j + 2 < kPast && length == 2) old = window[j + 2 < kPast ? j + 2 : j][e];
              entry.element[e] = Narrow<X>(old);
            }
          }
          StoreQuad(state + write * a.state_slot_stride + j * a.channels, entry);
        }
      }
      for (int64_t row = t; row < last; row += kStep) {
        Quad<X> now[kStep];
#pragma unroll
        for (int u = 0; u < kStep; ++u) {
          const int64_t at = row + u < last ? row + u : last - 1;
          now[u] = LoadQuad(x + at * a.x_token_stride);
        }
#pragma unroll
        for (int u = 0; u < kStep; ++u) {
          Quad<X> out;
#pragma unroll
          for (int e = 0; e < kQuad; ++e) {
            float sum = fmaf(weight[0][e], window[0][e], 0.0f);
            sum = fmaf(weight[1][e], window[1][e], sum);
            sum = fmaf(weight[2][e], window[2][e], sum);
            sum = fmaf(weight[3][e], Widen(now[u].element[e]), sum);
            out.element[e] = Narrow<X>(a.silu != 0 ? Silu(sum) : sum);
          }
          Shift(window, now[u]);
          if (row + u < last) StoreQuad(y + (row + u) * a.y_token_stride, out);
        }
      }
    }
  }
}

bool CoversTiles(const gdn_causal_conv_args& a) {
  return a.cu_seqlens != nullptr && a.width == kPast + 1 && a.x_dtype != GDN_F32 &&
         a.y_dtype == a.x_dtype && a.channels % kQuad == 0 &&
         IsQuadAligned(a.x, a.x_token_stride) && IsQuadAligned(a.y, a.y_token_stride) &&
         IsQuadAligned(a.state, a.state_slot_stride) &&
         reinterpret_cast<uintptr_t>(a.weight) % 16 == 0;
}

void LaunchTiles(const gdn_causal_conv_args& a, const Device& device, cudaStream_t stream) {
  constexpr int64_t kBlocksPerMultiprocessor = 16;
  const unsigned columns = GridFor(a.channels, int64_t{kTileThreads} * kQuad);
  const auto rows = static_cast<unsigned>(a.sequences < 65535 ? a.sequences : 65535);
  // Lengths are not known here; tiles beyond the grid are walked.
  const int64_t tiles = kBlocksPerMultiprocessor * device.multiprocessors / columns / rows;
  const dim3 grid(columns, rows, static_cast<unsigned>(tiles > 1 ? tiles : 1));
  if (a.x_dtype == GDN_BF16) {
    TileKernel<Bf16><<<grid, kTileThreads, 0, stream>>>(a);
  } else {
    TileKernel<F16><<<grid, kTileThreads, 0, stream>>>(a);
  }
}

}  // namespace

gdn_status CausalConv(const gdn_exec& exec, const gdn_causal_conv_args& args) {
  if (args.sequences == 0) return GDN_OK;
  Device device;
  if (const gdn_status status = CurrentDevice(kOp, &device); status != GDN_OK) return status;
  if (CoversTiles(args)) {
    LaunchTiles(args, device, Stream(exec));
    return CheckLaunch(kOp);
  }
  const dim3 grid(GridFor(args.channels, kThreads),
                  static_cast<unsigned>(args.sequences < 65535 ? args.sequences : 65535));
  switch (args.x_dtype) {
    case GDN_F32:
      Kernel<float><<<grid, kThreads, 0, Stream(exec)>>>(args);
      break;
    case GDN_BF16:
      Kernel<Bf16><<<grid, kThreads, 0, Stream(exec)>>>(args);
      break;
    case GDN_F16:
      Kernel<F16><<<grid, kThreads, 0, Stream(exec)>>>(args);
      break;
  }
  return CheckLaunch(kOp);
}

}  // namespace gdn::cuda
