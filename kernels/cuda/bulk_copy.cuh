// Bulk copies between global and shared memory by the copy engine of sm_90, with the barrier that
// tells their arrival. Sizes and addresses are multiples of 16 bytes. On older devices the kernel
// that uses them is never launched, and these compile to nothing.
#ifndef KERNELS_CUDA_BULK_COPY_CUH_
#define KERNELS_CUDA_BULK_COPY_CUH_

#include <cstdint>

namespace gdn::cuda {

// Counts arrivals, one a phase unless told otherwise, and the bytes announced with them; phases
// alternate between 0 and 1.
struct ArrivalBarrier {
  uint64_t word;

  __device__ uint32_t Address() const {
    return static_cast<uint32_t>(__cvta_generic_to_shared(&word));
  }
  // By one thread, before any other use; then a fence and a barrier of the block.
  __device__ void Init(uint32_t arrivals = 1) {
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(Address()), "r"(arrivals)
                 : "memory");
#endif
  }
  __device__ static void FenceInit() {
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
  }
  __device__ void Arrive() {
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(Address()) : "memory");
#endif
  }
  __device__ void ArriveExpecting(uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(Address()),
                 "r"(bytes)
                 : "memory");
#endif
  }
  // Waits for the end of the phase of this parity.
  __device__ void Wait(uint32_t parity) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}\n" ::"r"(Address()),
        "r"(parity)
        : "memory");
#endif
  }
};

// By one thread. The bytes count towards the barrier's current phase.
__device__ inline void BulkLoad(void* shared, const void* global, uint32_t bytes,
                                ArrivalBarrier* barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(static_cast<uint32_t>(__cvta_generic_to_shared(shared))),
      "l"(global), "r"(bytes), "r"(barrier->Address())
      : "memory");
#endif
}

// Brings bytes to the L2.
__device__ inline void PrefetchBulk(const void* global, uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(global), "r"(bytes) : "memory");
#endif
}

// By one thread, after every thread that wrote the shared bytes has called FenceForBulk() and
// synchronised with it. Closes a group of this thread's stores.
__device__ inline void BulkStore(void* global, const void* shared, uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global),
               "r"(static_cast<uint32_t>(__cvta_generic_to_shared(shared))), "r"(bytes)
               : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
#endif
}

// Orders ordinary accesses to shared memory, this thread's and those that it has awaited, before
// later bulk copies of it.
__device__ inline void FenceForBulk() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// Waits until this thread's bulk stores, but for the last kPending groups, have read their source.
template <int kPending>
__device__ inline void WaitForBulkReads() {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
#endif
}

}  // namespace gdn::cuda

#endif  // KERNELS_CUDA_BULK_COPY_CUH_
