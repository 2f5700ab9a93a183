// Chunks between the two kernels of the fused prefill, prepared so that what is left to do one
// chunk after the other is short. With the formulas of delta_rule_chunk.cuh, of chunks aligned to
// their sequence's start, rows past its end zeros:
//     Keys         k and q of unit norm, FP16, of a key head
//     values       beta v as FP16, two panels of 64 columns, unless the walk convolves them
//     Triangle     T, and P times the scale of the output, two after each other
//     WalkScalars  the coefficients
#ifndef KERNELS_CUDA_FUSED_PREFILL_CHUNK_CUH_
#define KERNELS_CUDA_FUSED_PREFILL_CHUNK_CUH_

#include <algorithm>
#include <cstdint>

#include "gdn/kernels/fused_prefill.h"
#include "kernels/cuda/delta_rule_chunk.cuh"

namespace gdn::cuda::chunk {

constexpr int kPast = 3;  // Inputs of the convolution before a token.

struct alignas(16) WalkScalars {
  float beta[kChunk];
  float query[kChunk];        // exp(G) times the scale of the output.
  __half remembered[kChunk];  // beta exp(G): of what the state predicts.
  __half to_end[kChunk];      // exp(G_63 - G).
  float end;                  // exp(G_63).
};

// A lower triangle of 64 by 64 as FP16, without its quarter of zeros: of rows of 32 columns, 64
// bytes whose 16-byte vectors are permuted by the row's index as the 64-byte swizzle does.
constexpr int kHalf = kChunk / 2;
struct Triangle {
  uint16_t late[kHalf * kHalf];    // Rows and columns from 32 on.
  uint16_t early[kChunk * kHalf];  // All rows of the columns before.
};
// In the walk's shared memory, where zeros stay before what is loaded.
struct PaddedTriangle {
  uint16_t zeros[kHalf * kHalf];
  Triangle triangle;

  // Operand descriptors of the columns from 16 i on, as if all 64 rows were there.
  __device__ uint64_t Columns(int i) const {
    constexpr uint64_t kSwizzle64 = uint64_t{2} << 62;
    constexpr uint64_t kEightRows = uint64_t{8 * 2 * kHalf / 16} << 32;
    const uint32_t at = SharedAddress(i < 2 ? triangle.early : zeros);
    return (kSwizzle64 | kEightRows | uint64_t{1} << 16 | ((at & 0x3ffffu) >> 4)) +
           i % 2 * kNextColumns;
  }
};

// All coefficients that the preparation itself uses, of keys of unit norm.
struct InScalars {
  WalkScalars walk;
  float log_decay[kChunk];
  __half to_block_end[kChunk];  // exp(G_e - G), e the last token of the same 16.
};

// Where the states after some of the chunks go.
struct Checkpoints {
  // The slot for the states after `chunks` whole chunks of a sequence; negative for none.
  __device__ int64_t SlotAfter(int64_t sequence, int chunks) const {
    if (every == 0 || chunks % every != 0) return -1;
    return slots[begin[sequence] + chunks / every - 1];
  }

  int32_t every;  // In chunks; 0: there are none.
  const int64_t* begin;
  const int64_t* slots;
};
inline Checkpoints CheckpointsOf(const gdn_fused_prefill_args& args) {
  // No sequence has more chunks.
  const int64_t every = std::min<int64_t>(args.checkpoint_every / kChunk, INT32_MAX);
  return {static_cast<int32_t>(every), args.checkpoint_begin, args.checkpoint_slots};
}

constexpr int64_t kValueTileBytes = 2 * kPanelElements * 2;

}  // namespace gdn::cuda::chunk

#endif  // KERNELS_CUDA_FUSED_PREFILL_CHUNK_CUH_
