#include "gdn/kernels/l2_norm_backward.h"

#include "kernels/cuda/block_sum.cuh"
#include "kernels/cuda/cluster.cuh"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/linear_launch.h"
#include "kernels/cuda/math.cuh"
#include "kernels/cuda/vector.cuh"

namespace gdn::cuda {
namespace {

constexpr char kOp[] = "l2_norm_backward";
constexpr int kThreads = 128;
constexpr int kRows = 1;

__device__ inline float Gradient(float y, float scaled_dy, float rstd, float c) {
  return rstd * fmaf(-y, c, scaled_dy);
}

// Any types and length, one block a row. In place is safe: the sum over the block separates the
// reads of the first pass from the writes, and the thread that writes an element reads it again
// first.
__global__ void __launch_bounds__(kThreads)
    AnyRows(const __grid_constant__ gdn_l2_norm_backward_args a) {
  for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x) {
    float sum = 0.0f;
    for (int64_t i = threadIdx.x; i < a.dim; i += kThreads) {
      sum = fmaf(LoadAs(a.y, a.y_dtype, row * a.y_row_stride + i),
                 LoadAs(a.dy, a.dy_dtype, row * a.dy_row_stride + i), sum);
    }
    const float c = BlockSum<kThreads / 32>(sum) / a.scale;
    const float rstd = a.rstd[row];
    for (int64_t i = threadIdx.x; i < a.dim; i += kThreads) {
      const float y = LoadAs(a.y, a.y_dtype, row * a.y_row_stride + i);
      const float dy = a.scale * LoadAs(a.dy, a.dy_dtype, row * a.dy_row_stride + i);
      StoreAs(a.dx, a.dx_dtype, row * a.dx_row_stride + i, Gradient(y, dy, rstd, c));
    }
  }
}

// Heads of kDim elements of one 16-bit type, aligned to vectors: kDim / 8 lanes a row. In place is
// safe: a thread reads its elements before it writes them, and nobody else does.
template <typename T, int kDim>
__global__ void __launch_bounds__(kThreads)
    VectorRows(const __grid_constant__ gdn_l2_norm_backward_args a) {
  constexpr int kLanes = kDim / kVectorElements;
  constexpr int kGroups = kThreads / kLanes;
  const int column = static_cast<int>(threadIdx.x) % kLanes * kVectorElements;
  const int64_t first = blockIdx.x * int64_t{kGroups * kRows} + threadIdx.x / kLanes;
  WaitForPreviousKernel();
  Vector<T> y[kRows] = {};
  Vector<T> dy[kRows] = {};
  float rstd[kRows] = {};
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int64_t row = first + i * kGroups;
    if (row >= a.rows) continue;
    y[i] = LoadVector(static_cast<const T*>(a.y) + row * a.y_row_stride + column);
    dy[i] = LoadVector(static_cast<const T*>(a.dy) + row * a.dy_row_stride + column);
    rstd[i] = a.rstd[row];
  }
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int64_t row = first + i * kGroups;
    float sum = 0.0f;
#pragma unroll
    for (int e = 0; e < kVectorElements; ++e) {
      sum = fmaf(Widen(y[i].element[e]), Widen(dy[i].element[e]), sum);
    }
    const float c = LaneSum<kLanes - 1>(sum) / a.scale;
    if (row >= a.rows) continue;
    Vector<T> dx;
#pragma unroll
    for (int e = 0; e < kVectorElements; ++e) {
      dx.element[e] = Narrow<T>(
          Gradient(Widen(y[i].element[e]), a.scale * Widen(dy[i].element[e]), rstd[i], c));
    }
    StoreVector(static_cast<T*>(a.dx) + row * a.dx_row_stride + column, dx);
  }
}

bool CoversVectors(const gdn_l2_norm_backward_args& a) {
  return (a.dim == 64 || a.dim == 128 || a.dim == 256) && a.y_dtype != GDN_F32 &&
         a.dy_dtype == a.y_dtype && a.dx_dtype == a.y_dtype &&
         IsVectorAligned(a.y, a.y_row_stride) && IsVectorAligned(a.dy, a.dy_row_stride) &&
         IsVectorAligned(a.dx, a.dx_row_stride) && a.rows < int64_t{1} << 31;
}

template <typename T>
cudaError_t LaunchVectors(const gdn_l2_norm_backward_args& args, bool early, cudaStream_t stream) {
  const int64_t block_rows = kThreads / (args.dim / kVectorElements) * kRows;
  const dim3 grid(static_cast<unsigned>((args.rows + block_rows - 1) / block_rows));
  return LaunchMaybeEarly(early, grid, dim3(kThreads), 0, stream,
                          args.dim == 64    ? VectorRows<T, 64>
                          : args.dim == 128 ? VectorRows<T, 128>
                                            : VectorRows<T, 256>,
                          args);
}

}  // namespace

gdn_status L2NormBackward(const gdn_exec& exec, const gdn_l2_norm_backward_args& args) {
  if (args.rows == 0) return GDN_OK;
  Device device;
  if (const gdn_status status = CurrentDevice(kOp, &device); status != GDN_OK) return status;
  if (!CoversVectors(args)) {
    AnyRows<<<GridFor(args.rows, 1), kThreads, 0, Stream(exec)>>>(args);
    return CheckLaunch(kOp);
  }
  const bool early = device.compute_capability >= 90;
  const cudaError_t error = args.y_dtype == GDN_BF16
                                ? LaunchVectors<Bf16>(args, early, Stream(exec))
                                : LaunchVectors<F16>(args, early, Stream(exec));
  return CheckCuda(kOp, error);
}

}  // namespace gdn::cuda
