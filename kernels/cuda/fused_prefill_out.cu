#include "kernels/cuda/chunk_slots.cuh"
#include "kernels/cuda/fused_prefill.h"
#include "kernels/cuda/math.cuh"
#include "kernels/cuda/vector.cuh"

// The gated norm of a prefill's output. It walks chunks, and so touches no line that no sequence
// owns, and writes zeros where one is padding.

namespace gdn::cuda {
namespace {

using namespace chunk;  // NOLINT(build/namespaces)

constexpr int kThreads = 256;

struct OutParams {
  gdn_fused_prefill_args args;
  const void* o;
  gdn_dtype o_dtype;
};

__device__ inline bool IsPadding(const gdn_fused_decode_args& a, const SlotChunk& chunk) {
  return a.read_index[chunk.sequence] < 0 || a.write_index[chunk.sequence] < 0;
}

// Any V: a warp a head of a token.
__global__ void __launch_bounds__(kThreads) GenericKernel(const __grid_constant__ OutParams p) {
  const gdn_fused_decode_args& a = p.args.layer;
  SlotChunk chunk;
  if (!ChunkOfSlot(p.args.cu_seqlens, a.rows, blockIdx.x, &chunk)) return;
  const bool padding = IsPadding(a, chunk);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int64_t row = blockIdx.y * int64_t{kThreads / 32} + threadIdx.x / 32;
       row < chunk.count * a.value_heads; row += int64_t{gridDim.y} * (kThreads / 32)) {
    const int64_t token = chunk.begin + row / a.value_heads;
    const int64_t head = row % a.value_heads;
    const int64_t from = (token * a.value_heads + head) * a.value_dim;
    const int64_t gate = token * a.x_token_stride + a.z_offset + head * a.value_dim;
    const int64_t to = token * a.y_token_stride + head * a.value_dim;
    float sum = 0.0f;
    for (int64_t i = lane; i < a.value_dim && !padding; i += 32) {
      const float o = LoadAs(p.o, p.o_dtype, from + i);
      sum = fmaf(o, o, sum);
    }
    const float rstd = rsqrtf(LaneSum(sum) / static_cast<float>(a.value_dim) + a.eps);
    for (int64_t i = lane; i < a.value_dim; i += 32) {
      float y = 0.0f;
      if (!padding) {
        const float w = a.norm_weight[i] + (a.zero_centered != 0 ? 1.0f : 0.0f);
        float n = LoadAs(p.o, p.o_dtype, from + i) * rstd * w;
        if (a.round_before_gate != 0) n = RoundAs(a.dtype, n);
        y = n * Activate(a.activation, LoadAs(a.x, a.dtype, gate + i));
      }
      StoreAs(a.y, a.dtype, to + i, y);
    }
  }
}

// V = 128: 16 lanes of eight elements a head, kAtOnce heads of a half warp with all loads under
// way.
constexpr int kAtOnce = 4;
constexpr int kDim = 128;

template <typename O, typename X>
__global__ void __launch_bounds__(kThreads) Kernel128(const __grid_constant__ OutParams p) {
  const gdn_fused_decode_args& a = p.args.layer;
  SlotChunk chunk;
  if (!ChunkOfSlot(p.args.cu_seqlens, a.rows, blockIdx.x, &chunk)) return;
  const bool padding = IsPadding(a, chunk);
  const int column = static_cast<int>(threadIdx.x) % 16 * kVectorElements;
  constexpr int kHalves = kThreads / 16;
  const int heads = static_cast<int>(a.value_heads);
  const int rows = chunk.count * heads;
  float weight[kVectorElements];
#pragma unroll
  for (int e = 0; e < kVectorElements; ++e) {
    weight[e] = a.norm_weight[column + e] + (a.zero_centered != 0 ? 1.0f : 0.0f);
  }
  for (int block = static_cast<int>(blockIdx.y); block * kHalves * kAtOnce < rows;
       block += static_cast<int>(gridDim.y)) {
    Vector<O> o[kAtOnce];
    Vector<X> gate[kAtOnce];
    int64_t to[kAtOnce];
    const int first = block * kHalves * kAtOnce + static_cast<int>(threadIdx.x) / 16;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int row = first + i * kHalves < rows ? first + i * kHalves : rows - 1;
      const int64_t token = chunk.begin + row / heads;
      const int head = row % heads;
      to[i] = token * a.y_token_stride + head * kDim + column;
      o[i] = LoadVector(static_cast<const O*>(p.o) + (token * heads + head) * kDim + column);
      gate[i] = LoadVector(static_cast<const X*>(a.x) + token * a.x_token_stride + a.z_offset +
                           head * kDim + column);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      float sum = 0.0f;
#pragma unroll
      for (int e = 0; e < kVectorElements; ++e) {
        const float value = Widen(o[i].element[e]);
        sum = fmaf(value, value, sum);
      }
      const float rstd = rsqrtf(LaneSum<15>(sum) / float{kDim} + a.eps);
      Vector<X> y;
#pragma unroll
      for (int e = 0; e < kVectorElements; ++e) {
        float n = Widen(o[i].element[e]) * rstd * weight[e];
        if (a.round_before_gate != 0) n = RoundTo<X>(n);
        n *= Activate(a.activation, Widen(gate[i].element[e]));
        y.element[e] = Narrow<X>(padding ? 0.0f : n);
      }
      if (first + i * kHalves < rows) StoreVector(static_cast<X*>(a.y) + to[i], y);
    }
  }
}

template <typename X>
void Launch128(const OutParams& p, dim3 grid, cudaStream_t stream) {
  if (p.o_dtype == GDN_F32) {
    Kernel128<float, X><<<grid, kThreads, 0, stream>>>(p);
  } else {
    Kernel128<X, X><<<grid, kThreads, 0, stream>>>(p);
  }
}

bool Covers128(const OutParams& p) {
  const gdn_fused_decode_args& a = p.args.layer;
  return a.value_dim == kDim && a.dtype != GDN_F32 && a.z_offset % kVectorElements == 0 &&
         IsVectorAligned(a.x, a.x_token_stride) && IsVectorAligned(a.y, a.y_token_stride);
}

}  // namespace

void LaunchWayOut(const gdn_fused_prefill_args& args, const void* o, cudaStream_t stream) {
  const gdn_fused_decode_args& a = args.layer;
  OutParams p;
  p.args = args;
  p.o = o;
  p.o_dtype = a.round_o != 0 ? a.dtype : GDN_F32;
  const auto slots = static_cast<unsigned>(ChunkSlots(args.tokens, a.rows));
  if (!Covers128(p)) {
    GenericKernel<<<dim3(slots, 8), kThreads, 0, stream>>>(p);
    return;
  }
  constexpr int64_t kRowsPerBlock = kThreads / 16 * kAtOnce;
  const dim3 grid(slots, GridFor(kChunk * a.value_heads, 2 * kRowsPerBlock));
  if (a.dtype == GDN_BF16) {
    Launch128<Bf16>(p, grid, stream);
  } else {
    Launch128<F16>(p, grid, stream);
  }
}

}  // namespace gdn::cuda
