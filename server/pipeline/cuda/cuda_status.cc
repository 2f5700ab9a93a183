#include "server/pipeline/cuda/cuda_status.h"

#include <string>

#include "absl/strings/str_cat.h"

namespace gdn::pipeline {

absl::Status CudaStatus(cudaError_t error, std::string_view what) {
  if (error == cudaSuccess) return absl::OkStatus();
  (void)cudaGetLastError();
  const std::string message =
      absl::StrCat("CUDA: ", std::string(what), ": ", cudaGetErrorString(error), " (",
                   cudaGetErrorName(error), ")");
  switch (error) {
    case cudaErrorMemoryAllocation:
      return absl::ResourceExhaustedError(message);
    case cudaErrorNoDevice:
    case cudaErrorInsufficientDriver:
    case cudaErrorInvalidDevice:
    case cudaErrorNoKernelImageForDevice:
      return absl::FailedPreconditionError(message);
    default:
      return absl::InternalError(message);
  }
}

}  // namespace gdn::pipeline
