// Chunks between the two kernels of the fused prefill, prepared so that what is left to do one
// chunk after the other is short. With the formulas of delta_rule_chunk.cuh, of chunks aligned to
// their sequence's start, rows past its end zeros:
//     Keys         k and q of unit norm, FP16, of a key head
//     values       beta v as FP16, two panels of 64 columns
//     Mix          T, and P times the scale of the output
//     WalkScalars  the coefficients
#ifndef KERNELS_CUDA_FUSED_PREFILL_CHUNK_CUH_
#define KERNELS_CUDA_FUSED_PREFILL_CHUNK_CUH_

#include "kernels/cuda/delta_rule_chunk.cuh"

namespace gdn::cuda::chunk {

struct alignas(16) WalkScalars {
  float query[kChunk];        // exp(G) times the scale of the output.
  __half remembered[kChunk];  // beta exp(G): of what the state predicts.
  __half to_end[kChunk];      // exp(G_63 - G).
  float end;                  // exp(G_63).
};

// All coefficients that the preparation itself uses, of keys of unit norm.
struct InScalars {
  WalkScalars walk;
  float beta[kChunk];
  float log_decay[kChunk];
};
__device__ inline float2 KeySizes(const InScalars&, int) { return make_float2(1.0f, 1.0f); }
__device__ inline float KeySize(const InScalars&, int) { return 1.0f; }

constexpr int64_t kValueTileBytes = 2 * kPanelElements * 2;

}  // namespace gdn::cuda::chunk

#endif  // KERNELS_CUDA_FUSED_PREFILL_CHUNK_CUH_
