#include "server/pipeline/cuda/device_memory.h"

namespace gdn::pipeline {

absl::StatusOr<CudaStream> CreateStream() {
  cudaStream_t stream = nullptr;
  GDN_RETURN_IF_ERROR(CudaStatus(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking),
                                 "cannot create a stream"));
  return CudaStream(stream);
}

absl::StatusOr<CudaEvent> CreateEvent(unsigned flags) {
  cudaEvent_t event = nullptr;
  GDN_RETURN_IF_ERROR(
      CudaStatus(cudaEventCreateWithFlags(&event, flags), "cannot create an event"));
  return CudaEvent(event);
}

}  // namespace gdn::pipeline
