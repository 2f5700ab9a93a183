#include "gdn/kernels/l2_norm.h"

#include "kernels/common/row_groups.h"
#include "kernels/cuda/block_sum.cuh"
#include "kernels/cuda/element.cuh"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/sum_of_squares.cuh"
#include "kernels/cuda/vector.cuh"

namespace gdn::cuda {
namespace {

constexpr char kOp[] = "l2_norm";
constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;

__device__ inline int64_t XOffset(const gdn_l2_norm_args& a, int64_t row) {
  return kernels::RowOffset(row, a.x_row_stride, a.group_rows, a.x_group_stride);
}
__device__ inline int64_t YOffset(const gdn_l2_norm_args& a, int64_t row) {
  return kernels::RowOffset(row, a.y_row_stride, a.group_rows, a.y_group_stride);
}

// One block per row. In place is safe: the sum over the block separates reads from writes, and each
// element is read again by the thread that writes it.
__global__ void __launch_bounds__(kThreads) Kernel(const __grid_constant__ gdn_l2_norm_args a) {
  for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x) {
    const int64_t x_at = XOffset(a, row);
    const int64_t y_at = YOffset(a, row);
    float sum = 0.0f;
    for (int64_t i = threadIdx.x; i < a.dim; i += kThreads) {
      const float x = LoadAs(a.x, a.x_dtype, x_at + i);
      sum = fmaf(x, x, sum);
    }
    const float square = BlockSum<kWarps>(sum) + a.eps;
    const float rstd = square == 0.0f ? 0.0f : rsqrtf(square);  // With eps 0 zeros stay zeros.
    for (int64_t i = threadIdx.x; i < a.dim; i += kThreads) {
      const float x = LoadAs(a.x, a.x_dtype, x_at + i);
      StoreAs(a.y, a.y_dtype, y_at + i, x * rstd * a.scale);
    }
    if (a.rstd != nullptr && threadIdx.x == 0) a.rstd[row] = rstd;
  }
}

// Heads of 64 or 128 elements of one 16-bit type, aligned to vectors: the same bits. In place is
// safe: a thread reads its elements before it writes them, and nobody else does.
template <typename T, int kDim>
__global__ void __launch_bounds__(kThreads)
    VectorKernel(const __grid_constant__ gdn_l2_norm_args a) {
  constexpr int kLanes = kDim / kVectorElements;
  const int column = static_cast<int>(threadIdx.x) % kLanes * kVectorElements;
  const int64_t row = blockIdx.x * int64_t{kThreads / kLanes} + threadIdx.x / kLanes;
  Vector<T> vector = {};
  if (row < a.rows) vector = LoadVector(static_cast<const T*>(a.x) + XOffset(a, row) + column);
  float x[kVectorElements];
#pragma unroll
  for (int e = 0; e < kVectorElements; ++e) x[e] = Widen(vector.element[e]);
  const float square = VectorSumOfSquares<kLanes>(x) + a.eps;
  const float rstd = square == 0.0f ? 0.0f : rsqrtf(square);
  if (row >= a.rows) return;
#pragma unroll
  for (int e = 0; e < kVectorElements; ++e) {
    vector.element[e] = Narrow<T>(x[e] * rstd * a.scale);
  }
  StoreVector(static_cast<T*>(a.y) + YOffset(a, row) + column, vector);
  if (a.rstd != nullptr && column == 0) a.rstd[row] = rstd;
}

bool CoversVectors(const gdn_l2_norm_args& a) {
  return (a.dim == 64 || a.dim == 128) && a.x_dtype != GDN_F32 && a.y_dtype == a.x_dtype &&
         IsVectorAligned(a.x, a.x_row_stride) && IsVectorAligned(a.y, a.y_row_stride) &&
         (a.group_rows == 0 ||
          (IsVectorAligned(a.x, a.x_group_stride) && IsVectorAligned(a.y, a.y_group_stride))) &&
         a.rows < int64_t{1} << 31;
}

template <typename T>
void LaunchVectors(const gdn_l2_norm_args& args, cudaStream_t stream) {
  const int64_t block_rows = kThreads / (args.dim / kVectorElements);
  const auto grid = static_cast<unsigned>((args.rows + block_rows - 1) / block_rows);
  if (args.dim == 64) {
    VectorKernel<T, 64><<<grid, kThreads, 0, stream>>>(args);
  } else {
    VectorKernel<T, 128><<<grid, kThreads, 0, stream>>>(args);
  }
}

}  // namespace

gdn_status L2Norm(const gdn_exec& exec, const gdn_l2_norm_args& args) {
  if (args.rows == 0) return GDN_OK;
  Device device;
  if (const gdn_status status = CurrentDevice(kOp, &device); status != GDN_OK) return status;
  if (!CoversVectors(args)) {
    Kernel<<<GridFor(args.rows, 1), kThreads, 0, Stream(exec)>>>(args);
  } else if (args.x_dtype == GDN_BF16) {
    LaunchVectors<Bf16>(args, Stream(exec));
  } else {
    LaunchVectors<F16>(args, Stream(exec));
  }
  return CheckLaunch(kOp);
}

}  // namespace gdn::cuda
