// The wide products, by cuBLASLt: y [rows, n] = x [rows, k] w^T, or y +=.
#ifndef KERNELS_CUDA_LINEAR_LT_H_
#define KERNELS_CUDA_LINEAR_LT_H_

#include <cublasLt.h>
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "gdn/kernels/types.h"

namespace gdn::cuda {

struct LtShape {
  int64_t n;
  int64_t k;
  gdn_dtype dtype;  // Of x and w.
  gdn_dtype y_dtype;
  bool accumulate;  // y += instead of y =.
  int64_t min_rows;
  int64_t max_rows;
};

struct LtProduct {
  const void* x;  // 16-byte aligned rows.
  int64_t x_row_stride;
  const void* weight;
  void* y;
  int64_t y_row_stride;
  int64_t rows;
};

// Immutable once made: the algorithm for each bucket of rows (the powers of two from min_rows on,
// and max_rows), for aligned and for unaligned y.
class LtProducts {
 public:
  LtProducts() = default;
  LtProducts(const LtProducts&) = delete;
  LtProducts& operator=(const LtProducts&) = delete;
  ~LtProducts();

  gdn_status Init(const LtShape& shape);
  // What `rows` or fewer rows need, whatever the alignment of y.
  size_t Workspace(int64_t rows) const;
  gdn_status Run(const LtProduct& product, void* workspace, size_t workspace_bytes,
                 cudaStream_t stream) const;

 private:
  struct Algorithm {
    cublasLtMatmulAlgo_t value;
    size_t workspace_bytes;
  };
  struct Bucket {
    int64_t rows;
    Algorithm aligned;
    Algorithm unaligned;
  };

  gdn_status Choose(int64_t rows, bool aligned, Algorithm* algorithm) const;
  const Bucket& BucketFor(int64_t rows) const;

  LtShape shape_ = {};
  cublasLtHandle_t handle_ = nullptr;
  cublasLtMatmulDesc_t operation_ = nullptr;
  std::vector<Bucket> buckets_;
};

}  // namespace gdn::cuda

#endif  // KERNELS_CUDA_LINEAR_LT_H_
