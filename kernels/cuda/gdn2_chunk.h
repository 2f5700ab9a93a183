// The chunked path of GDN2's CUDA prefill.
#ifndef KERNELS_CUDA_GDN2_CHUNK_H_
#define KERNELS_CUDA_GDN2_CHUNK_H_

#include <cstddef>

#include "gdn/kernels/gdn2.h"
#include "kernels/cuda/launch.h"

namespace gdn::cuda {

// Whether the chunked kernels cover a prefill of such extents, types and token strides, and whether
// they do with this state and these addresses on this device.
bool MayCoverChunkedGdn2(const gdn2_args& args);
bool CoversChunkedGdn2(const Device& device, const gdn2_args& args);

// MayCoverChunkedGdn2 has said yes.
size_t ChunkedGdn2Workspace(const gdn2_args& args);

// Value columns of a head that a block of the walk takes; the results are the same bits.
enum class Gdn2Split { kAuto, kWhole, kHalves };

// CoversChunkedGdn2 has said yes.
gdn_status LaunchChunkedGdn2(const gdn_exec& exec, const Device& device, const gdn2_args& args,
                             Gdn2Split split = Gdn2Split::kAuto);

}  // namespace gdn::cuda

#endif  // KERNELS_CUDA_GDN2_CHUNK_H_
