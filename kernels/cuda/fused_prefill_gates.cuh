// The gates on the way into the fused prefill's chunks, and what follows from them.
#ifndef KERNELS_CUDA_FUSED_PREFILL_GATES_CUH_
#define KERNELS_CUDA_FUSED_PREFILL_GATES_CUH_

#include "gdn/kernels/fused_decode.h"
#include "kernels/cuda/fused_prefill_chunk.cuh"
#include "kernels/cuda/fused_prefill_math.cuh"

namespace gdn::cuda::chunk {

// The gates of a value head's chunk, by a warp; a lane has tokens lane and lane + 32.
struct RawGates {
  float a[2];
  float b[2];
  float dt_bias;
  float a_log;
};
template <typename X>
__device__ inline RawGates LoadGates(const gdn_fused_decode_args& a, const SlotChunk& chunk,
                                     int head, int lane) {
  RawGates raw;
  raw.dt_bias = a.dt_bias[head];
  raw.a_log = a.a_log[head];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int i = lane + 32 * half;
    const X* const line = static_cast<const X*>(a.x) + (chunk.begin + i) * a.x_token_stride + head;
    raw.a[half] = i < chunk.count ? Widen(line[a.a_offset]) : 0.0f;
    raw.b[half] = i < chunk.count ? Widen(line[a.b_offset]) : 0.0f;
  }
  return raw;
}
__device__ inline void FormGates(const RawGates& raw, float beta_scale, float scale, int count,
                                 int lane, InScalars* to) {
  float g[2];
  float beta[2];
  const float size = -expf(raw.a_log);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const bool inside = lane + 32 * half < count;
    g[half] = inside ? size * FastSoftplus(raw.a[half] + raw.dt_bias) : 0.0f;
    beta[half] = inside ? beta_scale * FastSigmoid(raw.b[half]) : 0.0f;
  }
  float prefix[2];
  const float end = PrefixSums(g, lane, prefix);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int i = lane + 32 * half;
    const float decay = DecayBetween(prefix[half], 0.0f);
    to->walk.query[i] = scale * decay;
    to->walk.remembered[i] = __float2half_rn(beta[half] * decay);
    to->walk.to_end[i] = __float2half_rn(DecayBetween(end, prefix[half]));
    const float block_end = __shfl_sync(kFullMask, prefix[half], lane | 15);
    to->to_block_end[i] = __float2half_rn(DecayBetween(block_end, prefix[half]));
    to->beta[i] = beta[half];
    to->log_decay[i] = prefix[half];
  }
  if (lane == 0) to->walk.end = DecayBetween(end, 0.0f);
}

}  // namespace gdn::cuda::chunk

#endif  // KERNELS_CUDA_FUSED_PREFILL_GATES_CUH_
