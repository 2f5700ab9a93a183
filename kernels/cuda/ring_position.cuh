// Where a ring of buffers in shared memory stands.
#ifndef KERNELS_CUDA_RING_POSITION_CUH_
#define KERNELS_CUDA_RING_POSITION_CUH_

#include <cstdint>

namespace gdn::cuda {

struct RingPosition {
  int slot = 0;
  uint32_t parity = 0;  // Of the slot's use.

  __device__ void Advance(int slots) {
    if (++slot == slots) {
      slot = 0;
      parity ^= 1;
    }
  }
};

}  // namespace gdn::cuda

#endif  // KERNELS_CUDA_RING_POSITION_CUH_
