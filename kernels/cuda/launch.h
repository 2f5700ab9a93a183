// Launch helpers shared by the CUDA ops.
#ifndef KERNELS_CUDA_LAUNCH_H_
#define KERNELS_CUDA_LAUNCH_H_

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "gdn/kernels/types.h"
#include "kernels/common/check.h"

namespace gdn::cuda {

inline cudaStream_t Stream(const gdn_exec& exec) { return static_cast<cudaStream_t>(exec.stream); }

// GDN_OK, or GDN_DEVICE_ERROR with the runtime's sentence.
inline gdn_status CheckCuda(const char* op, cudaError_t error) {
  if (error != cudaSuccess) (void)cudaGetLastError();  // Or the next op would report it.
  GDN_CHECK_ARG(error == cudaSuccess, GDN_DEVICE_ERROR, "%s: CUDA reported %s: %s", op,
                cudaGetErrorName(error), cudaGetErrorString(error));
  return GDN_OK;
}

// To be called after each launch: reports a failed one and clears the error.
inline gdn_status CheckLaunch(const char* op) { return CheckCuda(op, cudaGetLastError()); }

// What the launchers need to know of the current device. Read from the runtime on the first use of
// a device in the process and kept.
struct Device {
  int compute_capability;  // 10 * major + minor.
  int multiprocessors;
};
gdn_status CurrentDevice(const char* op, Device* device);
// Whether the device takes sm_90a's instructions, and this build has them.
inline bool RunsSm90a([[maybe_unused]] const Device& device) {
#ifdef GDN_SM90A
  return device.compute_capability == 90;
#else
  return false;
#endif
}

// Lets a kernel have this much dynamic shared memory on the current device, and, with `no_l1`, have
// the multiprocessors give it all they can at the cost of their L1. Asked of the runtime on the
// first use of a device.
template <auto kKernel>
cudaError_t AllowSharedMemory(size_t bytes, bool no_l1) {
  static std::atomic<uint64_t> prepared{0};  // One bit per device.
  int device = 0;
  if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  const uint64_t bit = uint64_t{1} << (device % 64);
  if ((prepared.load(std::memory_order_acquire) & bit) != 0) return cudaSuccess;
  const auto kernel = reinterpret_cast<const void*>(kKernel);
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                           static_cast<int>(bytes));
  if (error == cudaSuccess && no_l1) {
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                 cudaSharedmemCarveoutMaxShared);
  }
  if (error == cudaSuccess) prepared.fetch_or(bit, std::memory_order_release);
  return error;
}

// Whole blocks of `size` that cover `count`, for a grid-stride loop: at most 2^16.
inline unsigned GridFor(int64_t count, int64_t size) {
  const int64_t blocks = (count + size - 1) / size;
  return static_cast<unsigned>(blocks < 65536 ? (blocks > 0 ? blocks : 1) : 65536);
}

}  // namespace gdn::cuda

#endif  // KERNELS_CUDA_LAUNCH_H_
