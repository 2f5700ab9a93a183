// The product of some tens to hundreds of rows: one launch for product, gate and residual, on
// sm_90a. See linear_wide.cu.
#ifndef KERNELS_CUDA_LINEAR_WIDE_H_
#define KERNELS_CUDA_LINEAR_WIDE_H_

#include <cstdint>

#include "gdn/kernels/linear.h"
#include "kernels/cuda/tensor_map.h"

namespace gdn::cuda {

struct LinearWideArgs {
  const void* n;  // [rows, k] in the weight's type, 16-byte aligned rows.
  int64_t n_row_stride;
  const void* weight;
  void* y;
  int64_t y_row_stride;
  int64_t k;
  int64_t rows;
  int64_t outputs;  // Columns of y; with a gate a multiple of 8.
  bool y_is_f32;
  bool silu;
  bool accumulate;
  bool early_start;
  bool batch_invariant;

  // As in linear.h.
  const float* squares;
  float norm_eps;
  const float* after_norm;
  void* after_n;
  float* after_squares;
};

// How the work is divided. A row's bits depend on `splits` alone, and with batch_invariant that on
// the weight.
struct LinearWideTiling {
  int rows;     // Of n in a block: 16, 32, 64, 128 or 256.
  int groups;   // Of 64 rows of the weight in a block: 2 with 256 rows of n, 1 or 2 with 128,
                // else 1.
  int splits;   // Blocks of a cluster that share the sum over K: 1, 2, 4 or 8.
  int share_n;  // Blocks of a cluster that share rows of n.
  int share_w;  // Blocks of a cluster that share rows of the weight.
  int n_slots;  // Stages of 64 elements of K in flight.
  int w_slots;
};
LinearWideTiling ChooseLinearWide(const LinearWideArgs& args, int multiprocessors);
// Whether its blocks occupy at least half of the multiprocessors, and all find room at the same
// time. Depends on the shape and the device alone.
bool LinearWideFillsDevice(const LinearWideArgs& args, int multiprocessors);

// Before the first launch on a device.
cudaError_t PrepareLinearWide(gdn_dtype weight_dtype);
cudaError_t LaunchLinearWide(gdn_dtype weight_dtype, const LinearWideArgs& args,
                             const LinearWideTiling& tiling, cudaStream_t stream);

}  // namespace gdn::cuda

#endif  // KERNELS_CUDA_LINEAR_WIDE_H_
