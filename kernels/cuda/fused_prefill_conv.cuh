// The convolution on the way into the fused prefill's chunks. A warp takes 16 tokens of two heads'
// columns, half a warp each, a lane eight channels, and keeps the last inputs in registers.
#ifndef KERNELS_CUDA_FUSED_PREFILL_CONV_CUH_
#define KERNELS_CUDA_FUSED_PREFILL_CONV_CUH_

#include "gdn/kernels/fused_decode.h"
#include "kernels/cuda/async_copy.cuh"
#include "kernels/cuda/fused_prefill_chunk.cuh"
#include "kernels/cuda/fused_prefill_math.cuh"
#include "kernels/cuda/vector.cuh"

namespace gdn::cuda::chunk {

constexpr int kConvRows = 16;  // Tokens of a warp.
constexpr int kConvStage = 4;  // Of those, whose arrival is awaited together.
constexpr int kConvRound = 2;  // Rounded together.
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
  bool exist;  // Otherwise those of another head, of which nothing may be written.
};

// The last inputs before some token, oldest first.
template <typename X>
using Past = Vector<X>[kPast];

// The last inputs before a sequence, and, in the pool, after it.
template <typename X>
__device__ inline void CarryState(const gdn_fused_decode_args& a, const SlotChunk& chunk,
                                  const Columns<X>& at, Past<X>& old) {
  const int64_t channels = (2 * a.key_heads + a.value_heads) * kDim;
  X* const state = static_cast<X*>(a.conv_state) + at.channel;
  const int64_t read = a.read_index[chunk.sequence];
  const int64_t write = a.write_index[chunk.sequence];
  const bool fresh = a.fresh != nullptr && a.fresh[chunk.sequence] != 0;
  if (!fresh) {
#pragma unroll
    for (int j = 0; j < kPast; ++j) {
      old[j] = LoadVector(state + read * a.conv_slot_stride + j * channels);
    }
  }
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

// The inputs that a sequence would carry if it ended with this whole chunk, in a slot of the pool.
template <typename X>
__device__ inline void StoreCheckpoint(const gdn_fused_decode_args& a, const SlotChunk& chunk,
                                       const Columns<X>& at, int64_t slot) {
  const int64_t channels = (2 * a.key_heads + a.value_heads) * kDim;
  X* const state = static_cast<X*>(a.conv_state) + at.channel + slot * a.conv_slot_stride;
#pragma unroll
  for (int j = 0; j < kPast; ++j) {
    const int64_t token = chunk.begin + kChunk - kPast + j;
    StoreVector(state + j * channels, LoadVector(at.x + token * a.x_token_stride));
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

// Waits for the lane's copies of a stage and those before it.
__device__ inline void WaitForStage(int stage) {
  static_assert(kConvRows == 4 * kConvStage);
  switch (stage) {
    case 0:
      return WaitForCopies<3>();
    case 1:
      return WaitForCopies<2>();
    case 2:
      return WaitForCopies<1>();
    default:
      return WaitForCopies<0>();
  }
}

// Starts the copies of the warp's inputs to where its outputs will be: `tile` + PanelOffset(row,
// vector). A lane reads and overwrites only what it has copied itself.
template <typename X>
__device__ inline void FetchInputs(const gdn_fused_decode_args& a, const SlotChunk& chunk,
                                   const Columns<X>& at, int warp, int vector, uint32_t tile) {
  const X* line = at.x + (chunk.begin + warp * kConvRows) * a.x_token_stride;
#pragma unroll
  for (int r = 0; r < kConvRows; ++r, line += a.x_token_stride) {
    const int row = warp * kConvRows + r;
    if (row < chunk.count) CopyAsync<16>(tile + PanelOffset(row, vector), line);
    if (r % kConvStage == kConvStage - 1) CommitCopies();
  }
}

// The last inputs before the warp's tokens.
template <typename X>
__device__ inline void LoadPast(const gdn_fused_decode_args& a, const SlotChunk& chunk,
                                const Columns<X>& at, int warp, Past<X>& past) {
  const int first = warp * kConvRows;
#pragma unroll
  for (int j = 0; j < kPast; ++j) past[j] = Vector<X>{};
  if (chunk.first + first == 0) {
    if (at.exist) CarryState(a, chunk, at, past);
  } else if (first < chunk.count) {
#pragma unroll
    for (int j = 0; j < kPast; ++j) {
      past[j] = LoadVector(at.x + (chunk.begin + first - kPast + j) * a.x_token_stride);
    }
  }
}

// The warp's tokens of the lane's channels, in place: sink(row, y, words) makes 16 bytes of each of
// kConvRound tokens from `row` on, of their outputs, rounded to the layer's type and widened again.
// Rows past the sequence's end are zeros.
template <typename X, typename Sink>
__device__ inline void Convolve(const SlotChunk& chunk, const Filter& weight, const Past<X>& past,
                                int warp, int vector, char* tile, const Sink& sink) {
  Channels window[kPast];
#pragma unroll
  for (int j = 0; j < kPast; ++j) WidenAll(past[j], window[j]);
#pragma unroll 1
  for (int stage = 0; stage < kConvRows; stage += kConvStage) {
    WaitForStage(stage / kConvStage);
#pragma unroll
    for (int round = 0; round < kConvStage; round += kConvRound) {
      const int first = warp * kConvRows + stage + round;
      Channels y[kConvRound];
#pragma unroll
      for (int r = 0; r < kConvRound; ++r) {
        Channels input;
        WidenAll(*reinterpret_cast<const Vector<X>*>(tile + PanelOffset(first + r, vector)), input);
#pragma unroll
        for (int e = 0; e < kVectorElements; ++e) {
          float sum = weight[0][e] * window[0][e];
          sum = fmaf(weight[1][e], window[1][e], sum);
          sum = fmaf(weight[2][e], window[2][e], sum);
          sum = fmaf(weight[3][e], input[e], sum);
          y[r][e] = sum * FastSigmoid(sum);
          window[0][e] = window[1][e];
          window[1][e] = window[2][e];
          window[2][e] = input[e];
        }
#pragma unroll
        for (int e = 0; e < kVectorElements; e += 2) RoundPair<X>(&y[r][e]);
      }
      uint4 words[kConvRound];
      sink(first, y, words);
#pragma unroll
      for (int r = 0; r < kConvRound; ++r) {
        if (first + r >= chunk.count) words[r] = make_uint4(0, 0, 0, 0);
        *reinterpret_cast<uint4*>(tile + PanelOffset(first + r, vector)) = words[r];
      }
    }
  }
}

// Eight channels as FP16.
__device__ inline uint4 Scaled(const Channels& y, float factor) {
  return make_uint4(
      PackHalves(y[0] * factor, y[1] * factor), PackHalves(y[2] * factor, y[3] * factor),
      PackHalves(y[4] * factor, y[5] * factor), PackHalves(y[6] * factor, y[7] * factor));
}

// Rows of a head, shared by half a warp, to unit norm.
struct UnitNorm {
  __device__ void operator()(int, const Channels (&y)[kConvRound],
                             uint4 (&words)[kConvRound]) const {
    float sums[kConvRound];
#pragma unroll
    for (int r = 0; r < kConvRound; ++r) {
      float squares[2] = {};
#pragma unroll
      for (int e = 0; e < kVectorElements; ++e) {
        squares[e % 2] = fmaf(y[r][e], y[r][e], squares[e % 2]);
      }
      sums[r] = squares[0] + squares[1];
    }
    // The rows cover for each other's waits.
#pragma unroll
    for (int bit = 8; bit > 0; bit /= 2) {
      float other[kConvRound];
#pragma unroll
      for (int r = 0; r < kConvRound; ++r) other[r] = __shfl_xor_sync(kFullMask, sums[r], bit);
#pragma unroll
      for (int r = 0; r < kConvRound; ++r) sums[r] += other[r];
    }
#pragma unroll
    for (int r = 0; r < kConvRound; ++r) words[r] = Scaled(y[r], rsqrtf(sums[r] + kQkNormEps));
  }
};

}  // namespace gdn::cuda::chunk

#endif  // KERNELS_CUDA_FUSED_PREFILL_CONV_CUH_
