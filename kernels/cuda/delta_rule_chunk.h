// The chunked path of the CUDA prefill.
#ifndef KERNELS_CUDA_DELTA_RULE_CHUNK_H_
#define KERNELS_CUDA_DELTA_RULE_CHUNK_H_

#include "gdn/kernels/delta_rule.h"
#include "kernels/cuda/launch.h"

namespace gdn::cuda {

// Whether the chunked kernel covers a prefill; depends on the call's shape and addresses alone.
bool CoversChunked(const Device& device, const gdn_delta_rule_args& args);

// Value columns of a head that a block takes; the results are the same bits.
enum class ChunkedSplit { kAuto, kWhole, kHalves };

// CoversChunked has said yes.
gdn_status LaunchChunked(const gdn_exec& exec, const Device& device,
                         const gdn_delta_rule_args& args, ChunkedSplit split = ChunkedSplit::kAuto);

}  // namespace gdn::cuda

#endif  // KERNELS_CUDA_DELTA_RULE_CHUNK_H_
