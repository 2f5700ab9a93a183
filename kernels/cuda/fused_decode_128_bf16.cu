#include "kernels/cuda/fused_decode_128.cuh"

template cudaError_t gdn::cuda::LaunchDecode128<gdn::cuda::Bf16>(const FusedParams&, int,
                                                                 cudaStream_t);
