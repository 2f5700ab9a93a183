// The chunked path of the delta rule's backward.
#ifndef KERNELS_CUDA_DELTA_RULE_BACKWARD_CHUNK_H_
#define KERNELS_CUDA_DELTA_RULE_BACKWARD_CHUNK_H_

#include "gdn/kernels/delta_rule_backward.h"
#include "kernels/cuda/launch.h"

namespace gdn::cuda {

// Whether the chunked kernels cover a call. The first depends on its shape, types and strides
// alone, and on the build; the second on the device and the addresses too.
bool MayCoverChunkedBackward(const gdn_delta_rule_backward_args& args);
bool CoversChunkedBackward(const Device& device, const gdn_delta_rule_backward_args& args);

size_t ChunkedBackwardWorkspace(const gdn_delta_rule_backward_args& args);

// Value columns of a head that a block of the walks over the chunks takes; the results are the same
// bits.
enum class BackwardSplit { kAuto, kWhole, kHalves };

// CoversChunkedBackward has said yes.
gdn_status LaunchChunkedBackward(const gdn_exec& exec, const Device& device,
                                 const gdn_delta_rule_backward_args& args,
                                 BackwardSplit split = BackwardSplit::kAuto);

}  // namespace gdn::cuda

#endif  // KERNELS_CUDA_DELTA_RULE_BACKWARD_CHUNK_H_
