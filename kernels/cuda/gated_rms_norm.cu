#include "gdn/kernels/gated_rms_norm.h"

#include "kernels/cuda/element.cuh"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/math.cuh"
#include "kernels/cuda/vector.cuh"

namespace gdn::cuda {
namespace {

constexpr char kOp[] = "gated_rms_norm";
constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;

// One warp per head of a token.
__global__ void __launch_bounds__(kThreads)
    Kernel(const __grid_constant__ gdn_gated_rms_norm_args a) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t rows = a.tokens * a.heads;
  for (int64_t row = blockIdx.x * int64_t{kWarps} + threadIdx.x / 32; row < rows;
       row += int64_t{gridDim.x} * kWarps) {
    const int64_t token = row / a.heads;
    const int64_t head = row % a.heads;
    const int64_t x0 = token * a.x_token_stride + head * a.x_head_stride;
    const int64_t gate0 = token * a.gate_token_stride + head * a.gate_head_stride;
    const int64_t y0 = token * a.y_token_stride + head * a.y_head_stride;
    float sum = 0.0f;
    for (int64_t i = lane; i < a.dim; i += 32) {
      const float x = LoadAs(a.x, a.x_dtype, x0 + i);
      sum = fmaf(x, x, sum);
    }
    const float rstd = rsqrtf(LaneSum(sum) / static_cast<float>(a.dim) + a.eps);
    for (int64_t i = lane; i < a.dim; i += 32) {
      const float w = a.weight[i] + (a.zero_centered != 0 ? 1.0f : 0.0f);
      float n = LoadAs(a.x, a.x_dtype, x0 + i) * rstd * w;
      if (a.round_before_gate != 0) n = RoundAs(a.x_dtype, n);
      const float gate = LoadAs(a.gate, a.gate_dtype, gate0 + i);
      StoreAs(a.y, a.y_dtype, y0 + i, n * Activate(a.activation, gate));
    }
  }
}

// The same for dim 128 and a 16-bit gate and result: 16 lanes of eight elements a head, kHeads
// heads a half warp with all loads under way at once.
constexpr int kHeads = 4;

template <typename X, typename Y>
__global__ void __launch_bounds__(kThreads)
    Kernel128(const __grid_constant__ gdn_gated_rms_norm_args a) {
  const int64_t rows = a.tokens * a.heads;
  const int half = static_cast<int>(threadIdx.x) / 16;
  const int column = static_cast<int>(threadIdx.x) % 16 * kVectorElements;
  constexpr int64_t kRowsPerBlock = kThreads / 16 * kHeads;
  float weight[kVectorElements];
#pragma unroll
  for (int e = 0; e < kVectorElements; ++e) {
    weight[e] = a.weight[column + e] + (a.zero_centered != 0 ? 1.0f : 0.0f);
  }
  for (int64_t block = blockIdx.x; block * kRowsPerBlock < rows; block += gridDim.x) {
    Vector<X> x[kHeads];
    Vector<Y> gate[kHeads];
    int64_t token[kHeads];
    int64_t head[kHeads];
#pragma unroll
    for (int i = 0; i < kHeads; ++i) {
      int64_t row = block * kRowsPerBlock + i * (kThreads / 16) + half;
      if (row >= rows) row = rows - 1;  // Its result is not stored.
      token[i] = row / a.heads;
      head[i] = row % a.heads;
      x[i] = LoadVector(static_cast<const X*>(a.x) + token[i] * a.x_token_stride +
                        head[i] * a.x_head_stride + column);
      gate[i] = LoadVector(static_cast<const Y*>(a.gate) + token[i] * a.gate_token_stride +
                           head[i] * a.gate_head_stride + column);
    }
#pragma unroll
    for (int i = 0; i < kHeads; ++i) {
      float sum = 0.0f;
#pragma unroll
      for (int e = 0; e < kVectorElements; ++e) {
        const float value = Widen(x[i].element[e]);
        sum = fmaf(value, value, sum);
      }
      const float rstd = rsqrtf(LaneSum<15>(sum) / 128.0f + a.eps);
      Vector<Y> y;
#pragma unroll
      for (int e = 0; e < kVectorElements; ++e) {
        float n = Widen(x[i].element[e]) * rstd * weight[e];
        if (a.round_before_gate != 0) n = RoundTo<X>(n);
        y.element[e] = Narrow<Y>(n * Activate(a.activation, Widen(gate[i].element[e])));
      }
      if (block * kRowsPerBlock + i * (kThreads / 16) + half < rows) {
        StoreVector(
            static_cast<Y*>(a.y) + token[i] * a.y_token_stride + head[i] * a.y_head_stride + column,
            y);
      }
    }
  }
}

bool Covers128(const gdn_gated_rms_norm_args& a) {
  return a.dim == 128 && a.gate_dtype != GDN_F32 && a.y_dtype == a.gate_dtype &&
         (a.x_dtype == GDN_F32 || a.x_dtype == a.y_dtype) &&
         IsVectorAligned(a.x, a.x_token_stride) && a.x_head_stride % kVectorElements == 0 &&
         IsVectorAligned(a.gate, a.gate_token_stride) &&
         a.gate_head_stride % kVectorElements == 0 && IsVectorAligned(a.y, a.y_token_stride) &&
         a.y_head_stride % kVectorElements == 0;
}

void Launch128(const gdn_gated_rms_norm_args& a, const Device& device, cudaStream_t stream) {
  constexpr int64_t kRowsPerBlock = kThreads / 16 * kHeads;
  constexpr int64_t kBlocksPerMultiprocessor = 64;
  const unsigned needed = GridFor(a.tokens * a.heads, kRowsPerBlock);
  const auto most = static_cast<unsigned>(kBlocksPerMultiprocessor * device.multiprocessors);
  const unsigned grid = needed < most ? needed : most;
  const bool wide = a.x_dtype == GDN_F32;
  if (a.y_dtype == GDN_BF16) {
    wide ? Kernel128<float, Bf16><<<grid, kThreads, 0, stream>>>(a)
         : Kernel128<Bf16, Bf16><<<grid, kThreads, 0, stream>>>(a);
  } else {
    wide ? Kernel128<float, F16><<<grid, kThreads, 0, stream>>>(a)
         : Kernel128<F16, F16><<<grid, kThreads, 0, stream>>>(a);
  }
}

}  // namespace

gdn_status GatedRmsNorm(const gdn_exec& exec, const gdn_gated_rms_norm_args& args) {
  if (args.tokens == 0) return GDN_OK;
  Device device;
  if (const gdn_status status = CurrentDevice(kOp, &device); status != GDN_OK) return status;
  if (Covers128(args)) {
    Launch128(args, device, Stream(exec));
    return CheckLaunch(kOp);
  }
  Kernel<<<GridFor(args.tokens * args.heads, kWarps), kThreads, 0, Stream(exec)>>>(args);
  return CheckLaunch(kOp);
}

}  // namespace gdn::cuda
