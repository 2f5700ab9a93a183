// The convolution on the way into the fused prefill's chunks. A warp takes 32 tokens of a head.
#ifndef KERNELS_CUDA_FUSED_PREFILL_CONV_CUH_
#define KERNELS_CUDA_FUSED_PREFILL_CONV_CUH_

#include <cstdint>
#include <type_traits>

#include "gdn/kernels/fused_decode.h"
#include "kernels/cuda/delta_rule_chunk_solve.cuh"
#include "kernels/cuda/fused_prefill_chunk.cuh"
#include "kernels/cuda/fused_prefill_math.cuh"
#include "kernels/cuda/vector.cuh"

namespace gdn::cuda::chunk {

constexpr int kConvRows = 32;  // Tokens of a warp.

using Panel = uint16_t[kPanelElements];

// A head's columns, or eight of them: where they are in x, and in the convolution's order.
template <typename X>
struct Columns {
  const X* x;
  int64_t channel;
  bool exist;  // Otherwise those of another head, of which nothing may be written.

  __device__ Columns From(int column) const { return {x + column, channel + column, exist}; }
};

// The last inputs before some token, oldest first.
template <typename X>
using Past = Vector<X>[kPast];

// The last inputs before a sequence, and, in the pool, after it. kAhead: the latter are asked for
// before anything is waited for, which takes registers.
template <typename X, bool kAhead>
__device__ inline void CarryState(const gdn_fused_decode_args& a, const SlotChunk& chunk,
                                  const Columns<X>& at, Past<X>& old) {
  const int64_t channels = (2 * a.key_heads + a.value_heads) * kDim;
  X* const state = static_cast<X*>(a.conv_state) + at.channel;
  const int64_t read = a.read_index[chunk.sequence];
  const int64_t write = a.write_index[chunk.sequence];
  const auto last_input = [&](int j) {
    return LoadVector(at.x + (chunk.begin + chunk.length - kPast + j) * a.x_token_stride);
  };
  Past<X> ahead;
  if constexpr (kAhead) {
#pragma unroll
    for (int j = 0; j < kPast; ++j) {
      ahead[j] = chunk.length + j >= kPast ? last_input(j) : Vector<X>{};
    }
  }
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
      if constexpr (kAhead) {
        entry = ahead[j];
      } else {
        entry = last_input(j);
      }
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

// The filters of two heads' channels, kSiluScale times the four taps of each, oldest first.
class Filters {
 public:
  // The place of a channel of a head; those of a vector of channels are in different banks, as are
  // those of all vectors' channels of an index.
  __device__ float4& At(int head, int channel) {
    return taps_[head][channel % 8][channel / 8 ^ (channel & 6)];
  }
  __device__ const float4& At(int head, int channel) const {
    return taps_[head][channel % 8][channel / 8 ^ (channel & 6)];
  }

 private:
  float4 taps_[2][kVectorElements][kDim / kVectorElements];
};

// Two neighbouring channels' filters: the thread's, of a head's 64 pairs.
struct RawFilter {
  float4 taps[2];
};
__device__ inline RawFilter LoadFilter(const gdn_fused_decode_args& a, int64_t head_channel,
                                       int thread) {
  const float4* const from =
      reinterpret_cast<const float4*>(a.conv_weight) + head_channel + 2 * (thread % 64);
  return {{from[0], from[1]}};
}
__device__ inline void StoreFilter(const RawFilter& raw, int thread, Filters& filters) {
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const float4 t = raw.taps[e];
    filters.At(thread / 64, 2 * (thread % 64) + e) =
        make_float4(kSiluScale * t.x, kSiluScale * t.y, kSiluScale * t.z, kSiluScale * t.w);
  }
}

// Loads the eight channels' inputs before a token from x.
template <typename X>
__device__ inline void LoadPast(const gdn_fused_decode_args& a, const Columns<X>& at, int64_t token,
                                uint4 (&past)[kPast]) {
  const X* line = at.x + (token - kPast) * a.x_token_stride;
#pragma unroll
  for (int j = 0; j < kPast; ++j, line += a.x_token_stride)
    past[j] = *reinterpret_cast<const uint4*>(line);
}

// d += A B for 16 rows, 16 steps and 8 columns of X.
template <typename X>
__device__ inline void ProductOf(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (std::is_same_v<X, F16>) {
    Product16(d, a, b0, b1);
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

__device__ inline uint4 LoadRow(uint32_t address) {
  uint4 row;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(row.x), "=r"(row.y), "=r"(row.z), "=r"(row.w)
               : "r"(address)
               : "memory");
  return row;
}
__device__ inline void StoreRow(uint32_t address, const uint32_t (&word)[4]) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(word[0]),
               "r"(word[1]), "r"(word[2]), "r"(word[3])
               : "memory");
}

// A lane's eight channels of a head, token after token: what later outputs take of the inputs so
// far is kept as sums.
template <typename X>
class Convolution {
 public:
  __device__ Convolution(const Filters& filters, int head, int vector) {
#pragma unroll
    for (int e = 0; e < kVectorElements; ++e) {
      weights_[e] = filters.At(head, vector * kVectorElements + e);
      next_[0][e] = next_[1][e] = next_[2][e] = 0.0f;
    }
  }

  // The output at the next token, with these inputs, kSiluScale times.
  __device__ void Take(const uint4& inputs, float (&out)[kVectorElements]) {
    const uint32_t words[4] = {inputs.x, inputs.y, inputs.z, inputs.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair = WidenPair<X>(words[i]);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float x = j == 0 ? pair.x : pair.y;
        const int e = 2 * i + j;
        const float4& w = weights_[e];
        out[e] = fmaf(w.w, x, next_[0][e]);
        next_[0][e] = fmaf(w.z, x, next_[1][e]);
        next_[1][e] = fmaf(w.y, x, next_[2][e]);
        next_[2][e] = w.x * x;
      }
    }
  }

 private:
  float4 weights_[kVectorElements];
  float next_[kPast][kVectorElements];
};

// What the lane's rows of the warp's outputs are multiplied by, of blocks of 16 rows.
using Factors = float[2][2];

// Four pairs of columns in X, multiplied as FP16, by turns with one factor and the other: an A
// operand's, of two rows.
template <typename X>
__device__ inline void ScaleBlock(uint32_t (&word)[4], const float (&factors)[2]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = WidenPair<X>(word[i]);
    word[i] = PackHalves(pair.x * factors[i % 2], pair.y * factors[i % 2]);
  }
}

// Convolution and SiLU of the warp's rows from `first` on, in place, in X; kScaled: times the rows'
// factors, as FP16. A lane has eight channels of 16 rows. past: the inputs before the warp's first,
// of lanes below 16.
template <typename X, bool kScaled>
__device__ inline void Convolve(const Filters& filters, const uint4 (&past)[kPast],
                                const float* factors, int head, int first, int lane,
                                Panel (&panels)[2]) {
  constexpr int kRows = kConvRows / 2;
  const int vector = lane % 16;
  const int begin = first + lane / 16 * kRows;
  // Row i of the lane's is at rows + i * kPanelRowBytes, with i % 8 in the vector's bits.
  const uint32_t rows = SharedAddress(panels[vector / 8]) + PanelOffset(begin, vector % 8);
  const auto at = [&](int i) {
    return (rows ^ static_cast<uint32_t>((i & 7) << 4)) + static_cast<uint32_t>(i * kPanelRowBytes);
  };
  Convolution<X> convolution(filters, head, vector);
  float out[kVectorElements];
#pragma unroll
  for (int j = 0; j < kPast; ++j) {
    convolution.Take(lane < 16 ? past[j] : LoadRow(at(j - kPast)), out);
  }
  uint4 inputs = LoadRow(at(0));
  __syncwarp();  // Other lanes have loaded what this one overwrites.
#pragma unroll 2
  for (int i = 0; i < kRows; ++i) {
    convolution.Take(inputs, out);
    if (i + 1 < kRows) inputs = LoadRow(at(i + 1));
    uint32_t word[4];
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      word[w] = PackPair<X>(SiluOfScaled(out[2 * w]), SiluOfScaled(out[2 * w + 1]));
    }
    if constexpr (kScaled) {
      ScaleBlock<X>(word, {factors[begin + i], factors[begin + i]});
    }
    StoreRow(at(i), word);
  }
}

// What brings the warp's rows, in X, to unit norm: the sums of squares are the diagonals of
// products with the rows' own transpose.
template <typename X>
__device__ inline void NormFactors(int first, int lane, const Panel (&panels)[2],
                                   Factors& factors) {
  const uint32_t at = BlockAddress(SharedAddress(panels[0]), first, 0, lane);
  __syncwarp();  // Other lanes have stored what this one loads.
  float sums[2][2][4] = {};
#pragma unroll 2
  for (int n = 0; n < kDim / 16; ++n) {
    const uint32_t place = (at ^ (n % 4 * 32)) + n / 4 * uint32_t{sizeof(Panel)};
#pragma unroll
    for (int b = 0; b < 2; ++b) {
      uint32_t word[4];
      LoadMatrices(place + b * 16 * kPanelRowBytes, word);
      ProductOf<X>(sums[b][0], word, word[0], word[2]);
      ProductOf<X>(sums[b][1], word, word[1], word[3]);
    }
  }
#pragma unroll
  for (int b = 0; b < 2; ++b) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float* const pair = &sums[b][half][2 * half];
      const float mine = lane / 4 % 2 == 0 ? pair[0] : pair[1];
      const float sum = __shfl_sync(kFullMask, mine, lane / 4 * 4 + lane / 8);
      asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(factors[b][half]) : "f"(sum + kQkNormEps));
    }
  }
}

// The warp's rows, in X, multiplied as FP16, in place.
template <typename X>
__device__ inline void ScaleRows(const Factors& factors, int first, int lane, Panel (&panels)[2]) {
  const uint32_t at = BlockAddress(SharedAddress(panels[0]), first, 0, lane);
#pragma unroll 2
  for (int n = 0; n < kDim / 16; ++n) {
    const uint32_t place = (at ^ (n % 4 * 32)) + n / 4 * uint32_t{sizeof(Panel)};
    uint32_t word[2][4];
#pragma unroll
    for (int b = 0; b < 2; ++b) LoadMatrices(place + b * 16 * kPanelRowBytes, word[b]);
#pragma unroll
    for (int b = 0; b < 2; ++b) {
      ScaleBlock<X>(word[b], factors[b]);
      StoreMatrices(place + b * 16 * kPanelRowBytes, word[b][0], word[b][1], word[b][2],
                    word[b][3]);
    }
  }
}

// Zeros in the warp's rows past the sequence's end.
__device__ inline void ClearRows(int first, int count, int lane, Panel (&panels)[2]) {
  char* const panel = reinterpret_cast<char*>(panels[lane / 8 % 2]);
  for (int row = (count > first ? count : first) + lane / 16; row < first + kConvRows; row += 2) {
    *reinterpret_cast<uint4*>(panel + PanelOffset(row, lane % 8)) = make_uint4(0, 0, 0, 0);
  }
}

}  // namespace gdn::cuda::chunk

#endif  // KERNELS_CUDA_FUSED_PREFILL_CONV_CUH_
