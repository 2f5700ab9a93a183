// The parts of the CUDA linear op; see linear.cc for which runs when.
#ifndef KERNELS_CUDA_LINEAR_H_
#define KERNELS_CUDA_LINEAR_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "gdn/kernels/types.h"

namespace gdn::cuda {

// Rows of x on their way to n, their form in the product.
struct LinearRows {
  const void* x;
  int64_t x_row_stride;
  const float* norm_weight;  // Null: no norm.
  float norm_eps;
  float inverse_k;  // A division would take the slow path for rows that do not exist.
  int32_t k;
  int32_t rows;
  bool x_is_f32;
};

// x: the first of `rows` rows.
inline LinearRows MakeLinearRows(const void* x, gdn_dtype x_dtype, int64_t x_row_stride,
                                 const float* norm_weight, float norm_eps, int64_t k,
                                 int64_t rows) {
  LinearRows made = {};
  made.x = x;
  made.x_row_stride = x_row_stride;
  made.norm_weight = norm_weight;
  made.norm_eps = norm_eps;
  made.x_is_f32 = x_dtype == GDN_F32;
  made.k = static_cast<int32_t>(k);
  made.inverse_k = 1.0f / static_cast<float>(k);
  made.rows = static_cast<int32_t>(rows);
  return made;
}

struct LinearSkinnyParams {
  LinearRows rows;
  const void* weight;
  void* y;
  int64_t y_row_stride;
  bool y_is_f32;
  bool silu;
  bool accumulate;
  bool early_start;
  int32_t outputs;  // Columns of y.

  // How the launcher divides the work (linear_skinny.cu).
  int32_t tiles_each;
  int32_t tiles_more;
  int32_t slots;
};

// The product for few rows: one launch for norm, product, gate and residual. Each block keeps all
// rows of n in shared memory while the weights stream past.
constexpr int64_t kLinearSkinnyRows = 16;
// How many rows one launch takes at this K on a device with so much shared memory a block; 0: none.
int64_t LinearSkinnyRows(int64_t k, int shared_bytes);
// Before the first launch for such weights on a device.
cudaError_t PrepareLinearSkinny(gdn_dtype weight_dtype, int64_t k, int shared_bytes);
cudaError_t LaunchLinearSkinny(gdn_dtype weight_dtype, const LinearSkinnyParams& params,
                               int multiprocessors, int shared_bytes, cudaStream_t stream);

// The product for any number of rows, n given; for each row the bits of the skinny product.
struct LinearTileParams {
  const void* n;  // In the weight's type, 16-byte aligned rows.
  int64_t n_row_stride;
  const void* weight;
  void* y;
  int64_t y_row_stride;
  int32_t k;
  int32_t rows;     // At most 65535 * 64.
  int32_t outputs;  // Columns of y.
  bool y_is_f32;
  bool silu;
  bool accumulate;
};
// Before the first launch on a device.
cudaError_t PrepareLinearTile(gdn_dtype weight_dtype);
cudaError_t LaunchLinearTile(gdn_dtype weight_dtype, const LinearTileParams& params,
                             int multiprocessors, cudaStream_t stream);

// n [rows, k], dense, in the weight's type: the same bits as inside the skinny product.
cudaError_t LaunchLinearRows(gdn_dtype weight_dtype, const LinearRows& rows, void* n, bool early,
                             cudaStream_t stream);

// y[m, j] = silu(p[m, j]) * p[m, outputs + j]; p has the row stride p_row_stride.
struct LinearGateParams {
  const float* p;
  int64_t p_row_stride;
  void* y;
  int64_t y_row_stride;
  gdn_dtype y_dtype;
  int64_t outputs;
  int64_t rows;
};
cudaError_t LaunchLinearGate(const LinearGateParams& params, cudaStream_t stream);

}  // namespace gdn::cuda

#endif  // KERNELS_CUDA_LINEAR_H_
