// Thread-block clusters and programmatic dependent launch, in the few forms used here. Both need
// sm_90; on older devices the launchers never ask for them and these compile to nothing.
#ifndef KERNELS_CUDA_CLUSTER_CUH_
#define KERNELS_CUDA_CLUSTER_CUH_

#include <cstdint>

#include "kernels/cuda/bulk_copy.cuh"

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

// The two halves of the barrier over all threads of a cluster. Relaxed: it orders execution, not
// memory.
__device__ inline void ClusterArrive() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}
__device__ inline void ClusterWait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// Sends a value to the place that `local` has in a block of the cluster; its four bytes count
// towards that block's copy of `barrier`.
__device__ inline void SendFloat(float* local, uint32_t rank, float value,
                                 ArrivalBarrier* barrier) {
#if __CUDA_ARCH__ >= 900
  const uint32_t here = static_cast<uint32_t>(__cvta_generic_to_shared(local));
  uint32_t there;
  uint32_t barrier_there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(here), "r"(rank));
  asm("mapa.shared::cluster.u32 %0, %1, %2;"
      : "=r"(barrier_there)
      : "r"(barrier->Address()), "r"(rank));
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(there),
      "r"(__float_as_uint(value)), "r"(barrier_there)
      : "memory");
#endif
}

// By one thread: sends bytes to the place that `local` has in a block of the cluster; they count
// towards that block's copy of `barrier`. As for BulkStore the writers of `from` fence first.
__device__ inline void SendBulk(void* local, const void* from, uint32_t bytes, uint32_t rank,
                                ArrivalBarrier* barrier) {
#if __CUDA_ARCH__ >= 900
  uint32_t there;
  uint32_t barrier_there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;"
      : "=r"(there)
      : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(local))), "r"(rank));
  asm("mapa.shared::cluster.u32 %0, %1, %2;"
      : "=r"(barrier_there)
      : "r"(barrier->Address()), "r"(rank));
  asm volatile(
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, "
      "[%3];" ::"r"(there),
      "r"(static_cast<uint32_t>(__cvta_generic_to_shared(from))), "r"(bytes), "r"(barrier_there)
      : "memory");
#endif
}

// Arrives at a block's copy of `barrier`. Relaxed: a release would wait for all memory of the
// device.
__device__ inline void ArriveAt(uint32_t rank, ArrivalBarrier* barrier) {
#if __CUDA_ARCH__ >= 900
  uint32_t there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(barrier->Address()), "r"(rank));
  asm volatile("mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [%0];" ::"r"(there)
               : "memory");
#endif
}

// Blocks until the kernels before this one have finished and their writes are visible.
__device__ inline void WaitForPreviousKernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next kernel of the stream start its prologue, if it was launched to do so. To be called
// after WaitForPreviousKernel, so that the next kernel overlaps this one only. A kernel that calls
// it before may be overlapped together with the one before it: then the next kernel may write
// nothing, not even a workspace, before its own wait.
__device__ inline void AllowNextKernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace gdn::cuda

#endif  // KERNELS_CUDA_CLUSTER_CUH_
