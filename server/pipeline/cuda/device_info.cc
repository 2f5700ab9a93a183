#include "server/pipeline/cuda/device_info.h"

#include <cuda_runtime_api.h>

#include "absl/strings/str_cat.h"
#include "server/pipeline/cuda/cuda_status.h"
#include "server/pipeline/kernel_status.h"

namespace gdn::pipeline {
namespace {

constexpr int32_t kLeastCapability = 80;

}  // namespace

absl::StatusOr<DeviceInfo> UseDevice(int32_t index) {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess || count == 0) {
    (void)cudaGetLastError();
    return absl::FailedPreconditionError(
        absl::StrCat("no usable CUDA device: ",
                     error == cudaSuccess ? "the driver reports none" : cudaGetErrorString(error)));
  }
  if (index < 0 || index >= count) {
    return absl::FailedPreconditionError(
        absl::StrCat("there is no CUDA device ", index, ": the driver reports ", count));
  }
  GDN_RETURN_IF_ERROR(CudaStatus(cudaSetDevice(index), "cannot use the device"));
  cudaDeviceProp properties{};
  GDN_RETURN_IF_ERROR(
      CudaStatus(cudaGetDeviceProperties(&properties, index), "cannot read device properties"));
  DeviceInfo info;
  info.name = properties.name;
  info.capability = 10 * properties.major + properties.minor;
  info.multiprocessors = properties.multiProcessorCount;
  if (info.capability < kLeastCapability) {
    return absl::FailedPreconditionError(absl::StrCat(info.name, " has compute capability ",
                                                      properties.major, ".", properties.minor,
                                                      "; 8.0 or newer is needed"));
  }
  if (const cudaError_t found = FindKernelImage(); found != cudaSuccess) {
    return absl::FailedPreconditionError(absl::StrCat(
        "this build has no code for ", info.name, " (compute capability ", properties.major, ".",
        properties.minor, "): ", cudaGetErrorString(found),
        "; build with -DCMAKE_CUDA_ARCHITECTURES=", info.capability, " or the release preset"));
  }
  size_t free_bytes = 0;
  size_t total_bytes = 0;
  GDN_RETURN_IF_ERROR(
      CudaStatus(cudaMemGetInfo(&free_bytes, &total_bytes), "cannot read the free memory"));
  info.free_bytes = static_cast<int64_t>(free_bytes);
  info.total_bytes = static_cast<int64_t>(total_bytes);
  return info;
}

}  // namespace gdn::pipeline
