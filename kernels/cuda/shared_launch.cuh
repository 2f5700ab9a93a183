// A launch with dynamic shared memory, whatever its size.
#ifndef KERNELS_CUDA_SHARED_LAUNCH_CUH_
#define KERNELS_CUDA_SHARED_LAUNCH_CUH_

#include "kernels/cuda/launch.h"

namespace gdn::cuda {

template <auto kKernel, typename Params>
gdn_status LaunchWithShared(const char* op, const Params& params, dim3 grid, int threads,
                            size_t shared_bytes, cudaStream_t stream) {
  const cudaError_t error = AllowSharedMemory<kKernel>(shared_bytes, /*no_l1=*/false);
  if (const gdn_status status = CheckCuda(op, error); status != GDN_OK) return status;
  kKernel<<<grid, static_cast<unsigned>(threads), shared_bytes, stream>>>(params);
  return CheckLaunch(op);
}

}  // namespace gdn::cuda

#endif  // KERNELS_CUDA_SHARED_LAUNCH_CUH_
