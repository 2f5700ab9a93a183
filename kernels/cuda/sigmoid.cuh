// The sigmoid of kernels that are bound by their instructions.
#ifndef KERNELS_CUDA_SIGMOID_CUH_
#define KERNELS_CUDA_SIGMOID_CUH_

namespace gdn::cuda {

// Sigmoid of math.cuh, with its bits, but 0 for results below 2^-126. e: e^-x.
__device__ inline float FastSigmoid(float x, float* e) {
  float sigmoid;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(*e) : "f"(-x * 1.44269504f));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(sigmoid) : "f"(1.0f + *e));
  return sigmoid;
}

}  // namespace gdn::cuda

#endif  // KERNELS_CUDA_SIGMOID_CUH_
