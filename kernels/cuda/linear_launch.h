// A launch that may start while the kernel before it still runs.
#ifndef KERNELS_CUDA_LINEAR_LAUNCH_H_
#define KERNELS_CUDA_LINEAR_LAUNCH_H_

#include <cuda_runtime.h>

#include <cstddef>

namespace gdn::cuda {

template <typename... Params, typename... Args>
cudaError_t LaunchMaybeEarly(bool early, dim3 grid, dim3 block, size_t shared_bytes,
                             cudaStream_t stream, void (*kernel)(Params...), Args... args) {
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = early ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, args...);
}

}  // namespace gdn::cuda

#endif  // KERNELS_CUDA_LINEAR_LAUNCH_H_
