// File: device_info.h
//
// Whether there is a GPU that this build can use, and what it is.
#ifndef SERVER_PIPELINE_CUDA_DEVICE_INFO_H_
#define SERVER_PIPELINE_CUDA_DEVICE_INFO_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"

namespace gdn::pipeline {

struct DeviceInfo {
  std::string name;        // "NVIDIA H200"
  int32_t capability = 0;  // 90 for 9.0
  int32_t multiprocessors = 0;
  int64_t total_bytes = 0;
  int64_t free_bytes = 0;  // At the time of the call.
};

// Makes device `index` current for this thread. FAILED_PRECONDITION says in one sentence why it
// cannot be used: no driver, no device, too old, no code for it in this build.
absl::StatusOr<DeviceInfo> UseDevice(int32_t index);

// Success, or what keeps the current device from running this build's kernels.
cudaError_t FindKernelImage();

}  // namespace gdn::pipeline

#endif  // SERVER_PIPELINE_CUDA_DEVICE_INFO_H_
