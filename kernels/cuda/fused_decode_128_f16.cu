#include "kernels/cuda/fused_decode_128.cuh"

template cudaError_t gdn::cuda::LaunchDecode128<gdn::cuda::F16>(const DecodeParams&, gdn_dtype, int,
                                                                cudaStream_t);
