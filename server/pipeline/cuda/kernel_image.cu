// Whether this build holds code that the current device can run.
#include "server/pipeline/cuda/device_info.h"

namespace gdn::pipeline {
namespace {

__global__ void Probe() {}

}  // namespace

cudaError_t FindKernelImage() {
  cudaFuncAttributes attributes;
  const cudaError_t error = cudaFuncGetAttributes(&attributes, Probe);
  (void)cudaGetLastError();
  return error;
}

}  // namespace gdn::pipeline
