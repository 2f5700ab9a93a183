// Thread-block clusters and programmatic dependent launch, in the few forms used here. Both need
// sm_90; on older devices the launchers never ask for them and these compile to nothing.
#ifndef KERNELS_CUDA_CLUSTER_CUH_
#define KERNELS_CUDA_CLUSTER_CUH_

#include <cstdint>

namespace gdn::cuda {

// Index of the cluster along x; the block's index where blocks are launched alone.
__device__ inline uint32_t ClusterX() {
#if __CUDA_ARCH__ >= 900
  uint32_t value;
  asm("mov.u32 %0, %%clusterid.x;" : "=r"(value));
  return value;
#else
  return blockIdx.x;
#endif
}

__device__ inline uint32_t ClusterRank() {
#if __CUDA_ARCH__ >= 900
  uint32_t value;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(value));
  return value;
#else
  return 0;
#endif
}

// The two halves of the barrier over all threads of a cluster. What a thread has read and written
// before its arrival happens before what any thread does after its wait.
__device__ inline void ClusterArrive() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}
__device__ inline void ClusterWait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// Stores into the shared memory of another block of the cluster, at the place that `local` has
// here.
__device__ inline void StoreRemote(float* local, uint32_t rank, float value) {
#if __CUDA_ARCH__ >= 900
  const uint32_t here = static_cast<uint32_t>(__cvta_generic_to_shared(local));
  uint32_t there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(here), "r"(rank));
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(there), "f"(value) : "memory");
#endif
}

// Blocks until the kernels before this one have finished and their writes are visible.
__device__ inline void WaitForPreviousKernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next kernel of the stream start its prologue, if it was launched to do so. To be called
// after WaitForPreviousKernel, so that the next kernel overlaps this one only.
__device__ inline void AllowNextKernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace gdn::cuda

#endif  // KERNELS_CUDA_CLUSTER_CUH_
