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

}  // namespace

gdn_status CausalConv(const gdn_exec& exec, const gdn_causal_conv_args& args) {
  if (args.sequences == 0) return GDN_OK;
  Device device;
  if (const gdn_status status = CurrentDevice(kOp, &device); status != GDN_OK) return status;
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
