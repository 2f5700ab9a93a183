#include "kernels/cuda/fused_decode_generic.cuh"

namespace gdn::cuda {

template cudaError_t LaunchDecodeGeneric<float>(const GenericDecodeParams&, cudaStream_t);
template cudaError_t LaunchDecodeGeneric<Bf16>(const GenericDecodeParams&, cudaStream_t);
template cudaError_t LaunchDecodeGeneric<F16>(const GenericDecodeParams&, cudaStream_t);

}  // namespace gdn::cuda
