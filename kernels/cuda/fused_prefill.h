// The kernels around the chunked rule in the fused prefill: the way into its chunks and out of it.
#ifndef KERNELS_CUDA_FUSED_PREFILL_H_
#define KERNELS_CUDA_FUSED_PREFILL_H_

#include "gdn/kernels/fused_prefill.h"
#include "kernels/cuda/delta_rule_chunk.h"
#include "kernels/cuda/launch.h"

namespace gdn::cuda {

// Where the op keeps its chunks in a workspace; for the benchmark of its parts.
void FusedPrefillChunks(const gdn_fused_prefill_args& args, void* workspace,
                        PreparedChunks* chunks);

// Convolution, SiLU, norms of q and k, gates: fills the chunks. K = V = 128, W = 4, 16-bit x.
void LaunchWayIn(const gdn_fused_prefill_args& args, const PreparedChunks& chunks,
                 cudaStream_t stream);

// Gated norm of o, [T, HV, V] dense, in FP32 or, with round_o, in the layer's type.
void LaunchWayOut(const gdn_fused_prefill_args& args, const void* o, cudaStream_t stream);

}  // namespace gdn::cuda

#endif  // KERNELS_CUDA_FUSED_PREFILL_H_
