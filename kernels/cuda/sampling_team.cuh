// A team of blocks that works on one row: a thread-block cluster where the device has them (sm_90),
// else a single block.
#ifndef KERNELS_CUDA_SAMPLING_TEAM_CUH_
#define KERNELS_CUDA_SAMPLING_TEAM_CUH_

#include <cstdint>

#include "kernels/cuda/cluster.cuh"

namespace gdn::cuda {

constexpr int kTeamBlocks = 8;

__device__ inline uint32_t TeamSize() {
#if __CUDA_ARCH__ >= 900
  uint32_t value;
  asm("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(value));
  return value;
#else
  return 1;
#endif
}

// Barrier over the team's threads; what they wrote before it, to shared or device memory, the
// others see behind it.
__device__ inline void TeamSync() {
#if __CUDA_ARCH__ >= 900
  __threadfence();
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#else
  __syncthreads();
#endif
}

// Where the block of that rank holds what `local`, in shared memory, holds here.
template <typename T>
__device__ inline T* Remote(T* local, uint32_t rank) {
#if __CUDA_ARCH__ >= 900
  uint64_t address;
  asm("mapa.u64 %0, %1, %2;" : "=l"(address) : "l"(reinterpret_cast<uint64_t>(local)), "r"(rank));
  return reinterpret_cast<T*>(address);
#else
  return local;
#endif
}

}  // namespace gdn::cuda

#endif  // KERNELS_CUDA_SAMPLING_TEAM_CUH_
