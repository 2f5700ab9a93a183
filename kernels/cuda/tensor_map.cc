#include "kernels/cuda/tensor_map.h"

#include <atomic>

namespace gdn::cuda {
namespace {

using Encode = decltype(&cuTensorMapEncodeTiled);

// The driver library is not linked: a process without a GPU must start too.
std::atomic<Encode> encode_tiled{nullptr};

}  // namespace

cudaError_t PrepareTensorMaps() {
  if (encode_tiled.load(std::memory_order_acquire) != nullptr) return cudaSuccess;
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
  const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found,
                                                             12000, cudaEnableDefault, &result);
  if (error != cudaSuccess) return error;
  if (result != cudaDriverEntryPointSuccess || found == nullptr) return cudaErrorSymbolNotFound;
  encode_tiled.store(reinterpret_cast<Encode>(found), std::memory_order_release);
  return cudaSuccess;
}

cudaError_t EncodeTensorMap(gdn_dtype dtype, const void* data, const TensorMapShape& shape,
                            CUtensorMap* map) {
  const Encode encode = encode_tiled.load(std::memory_order_acquire);
  if (encode == nullptr) return cudaErrorInitializationError;
  constexpr std::array<uint32_t, 4> kDense = {1, 1, 1, 1};
  const CUresult result = encode(
      map, dtype == GDN_BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
      static_cast<cuuint32_t>(shape.rank), const_cast<void*>(data), shape.size.data(),
      shape.stride_bytes.data(), shape.box.data(), kDense.data(), CU_TENSOR_MAP_INTERLEAVE_NONE,
      CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

cudaError_t EncodeRowsMap(gdn_dtype dtype, const void* data, int64_t k, int64_t rows,
                          int64_t row_stride, int64_t box_rows, CUtensorMap* map) {
  TensorMapShape shape = {};
  shape.rank = 2;
  shape.size = {static_cast<uint64_t>(k), static_cast<uint64_t>(rows), 1, 1};
  shape.stride_bytes = {static_cast<uint64_t>(row_stride) * 2, 0, 0};
  shape.box = {64, static_cast<uint32_t>(box_rows), 1, 1};
  return EncodeTensorMap(dtype, data, shape, map);
}

}  // namespace gdn::cuda
