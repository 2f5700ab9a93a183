// Asynchronous copies from global to shared memory.
#ifndef KERNELS_CUDA_ASYNC_COPY_CUH_
#define KERNELS_CUDA_ASYNC_COPY_CUH_

#include <cstdint>

namespace gdn::cuda {

// 4 or 16 bytes, aligned to their size; 16 bypass the L1.
template <int kBytes>
__device__ inline void CopyAsync(uint32_t to, const void* global) {
  static_assert(kBytes == 4 || kBytes == 16);
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(global) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(global) : "memory");
  }
}

template <int kBytes>
__device__ inline void CopyAsync(void* shared, const void* global) {
  CopyAsync<kBytes>(static_cast<uint32_t>(__cvta_generic_to_shared(shared)), global);
}

__device__ inline void PrefetchToL2(const void* global) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(global));
}

// Closes the group of the copies that this thread has issued since the last one.
__device__ inline void CommitCopies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until all but this thread's last kPending groups have arrived.
template <int kPending>
__device__ inline void WaitForCopies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace gdn::cuda

#endif  // KERNELS_CUDA_ASYNC_COPY_CUH_
