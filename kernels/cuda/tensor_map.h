// Tensor maps: how the copy engine of sm_90 finds a tile of an array, and how it lays it out in
// shared memory.
#ifndef KERNELS_CUDA_TENSOR_MAP_H_
#define KERNELS_CUDA_TENSOR_MAP_H_

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <array>
#include <cstdint>

#include "gdn/kernels/types.h"

namespace gdn::cuda {

// An array of 16-bit elements, the innermost dimension first. A tile of `box` elements is laid out
// dense, its innermost dimension 128 bytes whose 16-byte pieces are swizzled as the matrix
// instructions expect them; what lies outside the array arrives as zeros.
struct TensorMapShape {
  int rank;
  std::array<uint64_t, 4> size;
  std::array<uint64_t, 3> stride_bytes;  // Of the dimensions from the second on, multiples of 16.
  std::array<uint32_t, 4> box;           // box[0] is 64.
};

// `data` is 16-byte aligned. Neither allocates nor synchronises.
cudaError_t EncodeTensorMap(gdn_dtype dtype, const void* data, const TensorMapShape& shape,
                            CUtensorMap* map);

// Of rows [rows, k], tiles of `box_rows` rows by 64 elements.
cudaError_t EncodeRowsMap(gdn_dtype dtype, const void* data, int64_t k, int64_t rows,
                          int64_t row_stride, int64_t box_rows, CUtensorMap* map);

// Finds the driver's function; once in the process, before the first EncodeTensorMap.
cudaError_t PrepareTensorMaps();

}  // namespace gdn::cuda

#endif  // KERNELS_CUDA_TENSOR_MAP_H_
