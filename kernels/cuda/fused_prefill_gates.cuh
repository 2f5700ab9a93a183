// The gates on the way into the fused prefill's chunks, and what follows from them.
#ifndef KERNELS_CUDA_FUSED_PREFILL_GATES_CUH_
#define KERNELS_CUDA_FUSED_PREFILL_GATES_CUH_

#include "gdn/kernels/fused_decode.h"
#include "kernels/cuda/fused_prefill_chunk.cuh"
#include "kernels/cuda/fused_prefill_math.cuh"

namespace gdn::cuda::chunk {

// The gates of a value head's chunk, by a warp; a lane has tokens lane and lane + 32.
template <typename X>
struct RawGates {
  X a[2];
  X b[2];
};
struct GateWeights {
  float dt_bias;
  float a_log;
};
__device__ inline GateWeights LoadGateWeights(const gdn_fused_decode_args& a, int head) {
  return {a.dt_bias[head], a.a_log[head]};
}
template <typename X>
__device__ inline RawGates<X> LoadGates(const gdn_fused_decode_args& a, const SlotChunk& chunk,
                                        int head, int lane) {
  RawGates<X> raw = {};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int i = lane + 32 * half;
    const X* const line = static_cast<const X*>(a.x) + (chunk.begin + i) * a.x_token_stride + head;
    if (i < chunk.count) {
      raw.a[half] = line[a.a_offset];
      raw.b[half] = line[a.b_offset];
    }
  }
  return raw;
}
template <typename X>
__device__ inline void FormGates(const RawGates<X>& raw, const GateWeights& weights,
                                 float beta_scale, float scale, int count, int lane,
                                 InScalars* to) {
  float g[2];
  float beta[2];
  const float size = -expf(weights.a_log);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const bool inside = lane + 32 * half < count;
    g[half] = inside ? size * FastSoftplus(Widen(raw.a[half]) + weights.dt_bias) : 0.0f;
    beta[half] = inside ? beta_scale * FastSigmoid(Widen(raw.b[half])) : 0.0f;
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
    to->walk.beta[i] = beta[half];
    to->log_decay[i] = prefix[half];
  }
  if (lane == 0) to->walk.end = DecayBetween(end, 0.0f);
}

}  // namespace gdn::cuda::chunk

#endif  // KERNELS_CUDA_FUSED_PREFILL_GATES_CUH_
