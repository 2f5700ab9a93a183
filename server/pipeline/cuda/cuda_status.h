// From the CUDA runtime's errors to absl::Status.
#ifndef SERVER_PIPELINE_CUDA_CUDA_STATUS_H_
#define SERVER_PIPELINE_CUDA_CUDA_STATUS_H_

#include <cuda_runtime_api.h>

#include <string_view>

#include "absl/status/status.h"

namespace gdn::pipeline {

// OK, or an error that names what failed. Out of memory is RESOURCE_EXHAUSTED, a missing device or
// driver FAILED_PRECONDITION, anything else INTERNAL. Clears the runtime's last error.
absl::Status CudaStatus(cudaError_t error, std::string_view what);

}  // namespace gdn::pipeline

#endif  // SERVER_PIPELINE_CUDA_CUDA_STATUS_H_
