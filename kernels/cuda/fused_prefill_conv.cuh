// The convolution on the way into the fused prefill's chunks, on the matrix units. A warp takes 32
// tokens of a head. Of eight channels, a diagonal matrix for each tap of the filter multiplies the
// inputs of as many tokens before; two taps make the 16 steps of a product. Weights are the sums of
// two numbers of the inputs' type: within 2^-17 of the weight in BF16, 2^-24 absolute in FP16.
#ifndef KERNELS_CUDA_FUSED_PREFILL_CONV_CUH_
#define KERNELS_CUDA_FUSED_PREFILL_CONV_CUH_

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "gdn/kernels/fused_decode.h"
#include "kernels/cuda/delta_rule_chunk_solve.cuh"
#include "kernels/cuda/fused_prefill_chunk.cuh"
#include "kernels/cuda/fused_prefill_math.cuh"
#include "kernels/cuda/vector.cuh"

namespace gdn::cuda::chunk {

constexpr int kConvRows = 32;  // Tokens of a warp.
constexpr int kConvTiles = kDim / 8;
constexpr int kPast = 3;

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

// The filters of two heads' channels: for each, the four taps of half of its weights as words of a
// B operand, oldest first, and what their rounding left.
struct Filters {
  struct Tile {
    uint4 high[8];
    uint4 low[8];
  };
  Tile tiles[2 * kConvTiles];
  // For the lanes that hold nothing of a diagonal: read as eight rows of a tile, each by lanes of
  // which none reads the same banks of one.
  uint4 zeros[16];
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
template <typename X>
__device__ inline void FormFilter(const RawFilter& raw, int thread, Filters* filters) {
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const float taps[4] = {raw.taps[e].x, raw.taps[e].y, raw.taps[e].z, raw.taps[e].w};
    uint32_t high[4];
    uint32_t low[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      // The diagonal's place in a pair of steps.
      const auto word = [&](float x) {
        return e == 0 ? PackPair<X>(x, 0.0f) : PackPair<X>(0.0f, x);
      };
      const float half = 0.5f * taps[j];
      high[j] = word(half);
      const float2 rounded = WidenPair<X>(high[j]);
      low[j] = word(half - (e == 0 ? rounded.x : rounded.y));
    }
    Filters::Tile& tile = filters->tiles[thread / 4];
    const int channel = thread % 4 * 2 + e;
    tile.high[channel] = make_uint4(high[0], high[1], high[2], high[3]);
    tile.low[channel] = make_uint4(low[0], low[1], low[2], low[3]);
  }
  if (thread < 16) filters->zeros[thread] = make_uint4(0, 0, 0, 0);
}

// The rows before a warp's first, of two panels, each 16 bytes of a row where PanelOffset would put
// them.
struct alignas(128) RowsBefore {
  uint16_t rows[2][kPast][kPanelColumns];

  __device__ uint32_t At(int row, int vector) const {
    return SharedAddress(rows) + static_cast<uint32_t>(row + kPast) * kPanelRowBytes +
           (static_cast<uint32_t>(vector ^ (row & 7)) << 4);
  }
};

// Loads the eight channels' inputs before a token from x.
template <typename X>
__device__ inline void LoadPast(const gdn_fused_decode_args& a, const Columns<X>& at, int64_t token,
                                uint4 (&past)[kPast]) {
  const X* line = at.x + (token - kPast) * a.x_token_stride;
#pragma unroll
  for (int j = 0; j < kPast; ++j, line += a.x_token_stride)
    past[j] = *reinterpret_cast<const uint4*>(line);
}

// Stores the head's vector of them.
__device__ inline void StorePast(const uint4 (&past)[kPast], int vector, const RowsBefore& to) {
  const uint32_t panel = static_cast<uint32_t>(vector / 8) * uint32_t{sizeof(to.rows[0])};
#pragma unroll
  for (int j = 0; j < kPast; ++j) {
    const uint32_t at = to.At(j - kPast, vector % 8) + panel;
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(past[j].x),
                 "r"(past[j].y), "r"(past[j].z), "r"(past[j].w)
                 : "memory");
  }
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

__device__ inline void LoadWords(uint32_t address, uint32_t (&out)[4]) {
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(address)
               : "memory");
}

// What 16 columns of the warp's rows take: of each tile of 8 columns the filter's words, of each
// block of 16 rows the inputs of two taps and of the next two.
struct ConvOperands {
  uint32_t high[2][4];
  uint32_t low[2][4];
  uint32_t x[2][2][2][4];
};
class ConvLoader {
 public:
  __device__ ConvLoader(const Filters& filters, const RowsBefore& before, int head,
                        const Panel& panel, int first, int lane) {
    const uint32_t rows = SharedAddress(panel);
    // An A operand: two taps' inputs of 16 rows, the older tap's first.
    const int row = lane % 16 + lane / 16 - kPast;
#pragma unroll
    for (int taps = 0; taps < 2; ++taps) {
      const int at = row + 2 * taps;
      const bool is_before = at < 0;
      x_[0][taps] = is_before ? before.At(at, 0) : rows + PanelOffset(first + at, 0);
      skip_[taps] = is_before ? sizeof(before.rows[0]) : sizeof(Panel);
      x_[1][taps] = rows + PanelOffset(first + 16 + at, 0);
    }
    // A B operand: lane 4 g + c holds steps 2 c and 2 c + 1 of column g.
    const bool diagonal = lane % 4 == lane / 8;
    weights_ = SharedAddress(diagonal ? &filters.tiles[head * kConvTiles].high[lane / 4]
                                      : &filters.zeros[(lane / 8 * 2 + 2) % 8]);
    step_ = diagonal ? sizeof(Filters::Tile) : 0;
  }

  // The operands of columns 16 n on, for n = 0, 1, ... one after the other. Past the last, what
  // lies there.
  __device__ void Load(int n, ConvOperands& to) {
#pragma unroll
    for (int taps = 0; taps < 2; ++taps) {
      x_[0][taps] += n == 4 ? skip_[taps] : 0;
      x_[1][taps] += n == 4 ? uint32_t{sizeof(Panel)} : 0;
    }
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      const uint32_t vector = static_cast<uint32_t>(n % 4 * 2 + t) * 16;
      LoadWords(weights_, to.high[t]);
      LoadWords(weights_ + offsetof(Filters::Tile, low), to.low[t]);
      weights_ += step_;
#pragma unroll
      for (int b = 0; b < 2; ++b) {
#pragma unroll
        for (int taps = 0; taps < 2; ++taps) {
          LoadMatrices(x_[b][taps] ^ vector, to.x[t][b][taps]);
        }
      }
    }
  }

 private:
  uint32_t x_[2][2];
  uint32_t skip_[2];
  uint32_t weights_;
  uint32_t step_;
};

// Half of the convolution of 16 columns and 32 rows, and the pairs of its SiLU, rounded to X, as
// the A operands of two blocks of 16 rows.
template <typename X>
__device__ inline void ConvolveColumns(const ConvOperands& from, float (&h)[2][2][4]) {
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    const int taps = step % 2;
#pragma unroll
    for (int t = 0; t < 2; ++t) {
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        if (step < 2) {
          ProductOf<X>(h[b][t], from.x[t][b][taps], from.low[t][2 * taps],
                       from.low[t][2 * taps + 1]);
        } else {
          ProductOf<X>(h[b][t], from.x[t][b][taps], from.high[t][2 * taps],
                       from.high[t][2 * taps + 1]);
        }
      }
    }
  }
}

// What the lane's rows of the warp's outputs are multiplied by, of blocks of 16 rows.
using Factors = float[2][2];

__device__ inline void RowFactors(const float* rows, int lane, Factors& factors) {
#pragma unroll
  for (int b = 0; b < 2; ++b) {
    factors[b][0] = rows[16 * b + lane / 4];
    factors[b][1] = rows[16 * b + 8 + lane / 4];
  }
}

// Two pairs of columns of a block of 16 rows, an A operand in X, multiplied as FP16.
template <typename X>
__device__ inline void ScaleBlock(uint32_t (&word)[4], const float (&factors)[2]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = WidenPair<X>(word[i]);
    word[i] = PackHalves(pair.x * factors[i % 2], pair.y * factors[i % 2]);
  }
}

// Convolution and SiLU of the warp's rows from `first` on, in place. kScaled: times the factors, as
// FP16. Otherwise in X, and the factors are set to what brings the rows to unit norm: the sums of
// squares are the diagonals of products with the outputs' own transpose.
template <typename X, bool kScaled>
__device__ inline void Convolve(const Filters& filters, const RowsBefore& before, int head,
                                int first, int lane, Panel (&panels)[2], Factors& factors) {
  ConvLoader loader(filters, before, head, panels[0], first, lane);
  ConvOperands operands;
  loader.Load(0, operands);
  const uint32_t to = BlockAddress(SharedAddress(panels[0]), first, 0, lane);
  float sums[2][2][4] = {};
#pragma unroll 1
  for (int n = 0; n < kDim / 16; ++n) {
    float h[2][2][4] = {};
    ConvolveColumns<X>(operands, h);
    loader.Load(n + 1, operands);
    const uint32_t place = (to ^ (n % 4 * 32)) + n / 4 * uint32_t{sizeof(Panel)};
#pragma unroll
    for (int b = 0; b < 2; ++b) {
      uint32_t word[4];
#pragma unroll
      for (int t = 0; t < 2; ++t) {
        SiluOfTwice(h[b][t]);
        word[2 * t] = PackPair<X>(h[b][t][0], h[b][t][1]);
        word[2 * t + 1] = PackPair<X>(h[b][t][2], h[b][t][3]);
      }
      if constexpr (kScaled) {
        ScaleBlock<X>(word, factors[b]);
      } else {
        ProductOf<X>(sums[b][0], word, word[0], word[2]);
        ProductOf<X>(sums[b][1], word, word[1], word[3]);
      }
      StoreMatrices(place + b * 16 * kPanelRowBytes, word[0], word[1], word[2], word[3]);
    }
  }
  if constexpr (!kScaled) {
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
}

// The warp's rows, in X, multiplied as FP16, in place.
template <typename X>
__device__ inline void ScaleRows(const Factors& factors, int first, int lane, Panel (&panels)[2]) {
  const uint32_t at = BlockAddress(SharedAddress(panels[0]), first, 0, lane);
  __syncwarp();  // Other lanes have stored what this one loads.
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
