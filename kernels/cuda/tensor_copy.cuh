// Copies of tiles into shared memory by tensor maps (tensor_map.h), to one or several blocks of a
// cluster. Only on sm_90 and later; elsewhere the kernels that use them are never launched.
#ifndef KERNELS_CUDA_TENSOR_COPY_CUH_
#define KERNELS_CUDA_TENSOR_COPY_CUH_

#include <cuda.h>

#include <cstdint>

#include "kernels/cuda/bulk_copy.cuh"

namespace gdn::cuda {

// By one thread: the tile at (x, y); its bytes count towards the barrier's current phase.
__device__ inline void TensorLoad(void* shared, const CUtensorMap& map, int x, int y,
                                  ArrivalBarrier* barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], "
      "[%1, {%2, %3}], [%4];" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(shared))),
      "l"(&map), "r"(x), "r"(y), "r"(barrier->Address())
      : "memory");
#endif
}

// By one thread: the tile at (x, y) to the same place in every block of the cluster whose bit is
// set in `blocks`; its bytes count towards the barrier at the same place of each. To one block
// alone it is the slower way where many multiprocessors ask for the same: the L2 serves their
// requests at once only in the ordinary form (some 130 GB/s for each multiprocessor instead of 60).
__device__ inline void TensorLoad(void* shared, const CUtensorMap& map, int x, int y,
                                  ArrivalBarrier* barrier, uint16_t blocks) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(
          static_cast<uint32_t>(__cvta_generic_to_shared(shared))),
      "l"(&map), "r"(x), "r"(y), "r"(barrier->Address()), "h"(blocks)
      : "memory");
#endif
}

__device__ inline void TensorLoad(void* shared, const CUtensorMap& map, int x, int y, int z, int w,
                                  ArrivalBarrier* barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], "
      "[%1, {%2, %3, %4, %5}], [%6];" ::"r"(
          static_cast<uint32_t>(__cvta_generic_to_shared(shared))),
      "l"(&map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(barrier->Address())
      : "memory");
#endif
}

__device__ inline void TensorLoad(void* shared, const CUtensorMap& map, int x, int y, int z, int w,
                                  ArrivalBarrier* barrier, uint16_t blocks) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(
          static_cast<uint32_t>(__cvta_generic_to_shared(shared))),
      "l"(&map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(barrier->Address()), "h"(blocks)
      : "memory");
#endif
}

// By one thread: the tile into the L2.
__device__ inline void TensorPrefetch(const CUtensorMap& map, int x, int y) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global [%0, {%1, %2}];" ::"l"(&map), "r"(x),
               "r"(y)
               : "memory");
#endif
}
__device__ inline void TensorPrefetch(const CUtensorMap& map, int x, int y, int z, int w) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global [%0, {%1, %2, %3, %4}];" ::"l"(&map),
               "r"(x), "r"(y), "r"(z), "r"(w)
               : "memory");
#endif
}

__device__ inline void PrefetchTensorMap(const CUtensorMap& map) {
#if __CUDA_ARCH__ >= 900
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
#endif
}

}  // namespace gdn::cuda

#endif  // KERNELS_CUDA_TENSOR_COPY_CUH_
