// The convolution on the way into the fused prefill's chunks. A warp takes 16 tokens of two heads'
// columns, half a warp each, a lane eight channels, and keeps the last inputs in registers.
#ifndef KERNELS_CUDA_FUSED_PREFILL_CONV_CUH_
#define KERNELS_CUDA_FUSED_PREFILL_CONV_CUH_

#include "gdn/kernels/fused_decode.h"
#include "kernels/cuda/fused_prefill_chunk.cuh"
#include "kernels/cuda/fused_prefill_math.cuh"
#include "kernels/cuda/vector.cuh"

namespace gdn::cuda::chunk {

constexpr int kConvRows = 16;  // Tokens of a warp.
constexpr int kConvAhead = 4;  // Of those, under way.
constexpr int kPast = 3;

using Channels = float[kVectorElements];

template <typename X>
__device__ inline void WidenAll(const Vector<X>& from, Channels& to) {
  const auto* pairs = reinterpret_cast<const typename Pair<X>::Raw*>(from.element);
#pragma unroll
  for (int i = 0; i < kVectorElements / 2; ++i) {
    const float2 x = Pair<X>::Widen(pairs[i]);
    to[2 * i] = x.x;
    to[2 * i + 1] = x.y;
  }
}

// The lane's eight channels of a head: where they are in x, and in the convolution's order.
template <typename X>
struct Columns {
  const X* x;
  int64_t channel;
};

// The last kPast inputs before a sequence, and, in the pool, after it.
template <typename X>
__device__ inline void CarryState(const gdn_fused_decode_args& a, const SlotChunk& chunk,
                                  const Columns<X>& at, Channels (&window)[kPast]) {
  const int64_t channels = (2 * a.key_heads + a.value_heads) * kDim;
  X* const state = static_cast<X*>(a.conv_state) + at.channel;
  const int64_t read = a.read_index[chunk.sequence];
  const int64_t write = a.write_index[chunk.sequence];
  const bool fresh = a.fresh != nullptr && a.fresh[chunk.sequence] != 0;
  Vector<X> old[kPast] = {};
  if (!fresh) {
#pragma unroll
    for (int j = 0; j < kPast; ++j) {
      old[j] = LoadVector(state + read * a.conv_slot_stride + j * channels);
    }
  }
#pragma unroll
  for (int j = 0; j < kPast; ++j) WidenAll(old[j], window[j]);
  if (chunk.length == 0 && read == write) return;
#pragma unroll
  for (int j = 0; j < kPast; ++j) {
    // Entry j is input length - kPast + j, or where the sequence is shorter an old entry.
    Vector<X> entry = old[j];
    if (chunk.length == 1) entry = old[j + 1 < kPast ? j + 1 : j];
    if (chunk.length == 2) entry = old[j + 2 < kPast ? j + 2 : j];
    if (chunk.length + j >= kPast) {
      entry = LoadVector(at.x + (chunk.begin + chunk.length - kPast + j) * a.x_token_stride);
    }
    StoreVector(state + write * a.conv_slot_stride + j * channels, entry);
  }
}

// The lane's filter, newest input last.
using Filter = Channels[kPast + 1];
__device__ inline void LoadFilter(const gdn_fused_decode_args& a, int64_t channel, Filter& weight) {
#pragma unroll
  for (int e = 0; e < kVectorElements; ++e) {
    const float4 w = reinterpret_cast<const float4*>(a.conv_weight)[channel + e];
    weight[0][e] = w.x;
    weight[1][e] = w.y;
    weight[2][e] = w.z;
    weight[3][e] = w.w;
  }
}

// The warp's tokens of the lane's channels. sink(row, y, inside) gets a token's outputs, rounded to
// the layer's type and widened again, or of a row past the sequence's end, not inside, anything.
template <typename X, typename Sink>
__device__ inline void Convolve(const gdn_fused_decode_args& a, const SlotChunk& chunk,
                                const Columns<X>& at, const Filter& weight, int warp,
                                const Sink& sink) {
  const int first = warp * kConvRows;
  const int count = chunk.count - first;
  Channels window[kPast] = {};
  if (chunk.first + first == 0) {
    CarryState(a, chunk, at, window);
  } else if (count > 0) {
#pragma unroll
    for (int j = 0; j < kPast; ++j) {
      WidenAll(LoadVector(at.x + (chunk.begin + first - kPast + j) * a.x_token_stride), window[j]);
    }
  }
  const X* line = at.x + (chunk.begin + first) * a.x_token_stride;
  const auto load = [&](int row) {
    const bool inside = row < kConvRows && row < count;
    const Vector<X> vector = inside ? LoadVector(line) : Vector<X>{};
    line += a.x_token_stride;
    return vector;
  };
  Vector<X> now[kConvAhead];
#pragma unroll
  for (int r = 0; r < kConvAhead; ++r) now[r] = load(r);
#pragma unroll 1
  for (int batch = 0; batch < kConvRows; batch += kConvAhead) {
#pragma unroll
    for (int r = 0; r < kConvAhead; ++r) {
      Channels y;
      Channels input;
      WidenAll(now[r], input);
      now[r] = load(batch + r + kConvAhead);
#pragma unroll
      for (int e = 0; e < kVectorElements; ++e) {
        float sum = weight[0][e] * window[0][e];
        sum = fmaf(weight[1][e], window[1][e], sum);
        sum = fmaf(weight[2][e], window[2][e], sum);
        sum = fmaf(weight[3][e], input[e], sum);
        y[e] = sum * FastSigmoid(sum);
        window[0][e] = window[1][e];
        window[1][e] = window[2][e];
        window[2][e] = input[e];
      }
#pragma unroll
      for (int e = 0; e < kVectorElements; e += 2) RoundPair<X>(&y[e]);
      sink(first + batch + r, y, batch + r < count);
    }
  }
}

}  // namespace gdn::cuda::chunk

#endif  // KERNELS_CUDA_FUSED_PREFILL_CONV_CUH_
