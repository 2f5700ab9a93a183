// The backward kernels of the gated RMSNorm for training.
#ifndef KERNELS_CUDA_GATED_RMS_NORM_BACKWARD_CUH_
#define KERNELS_CUDA_GATED_RMS_NORM_BACKWARD_CUH_

#include "kernels/cuda/block_sum.cuh"
#include "kernels/cuda/cluster.cuh"
#include "kernels/cuda/gated_rms_norm_rows.cuh"

namespace gdn::cuda {

struct GatedBackward {
  gdn_gated_rms_norm_backward_args args;  // With the strides that are used.
  RowAxes axes;
  bool dense;  // x, gate and dy.
  int x_unit;  // Of UnitOf.
  int gate_unit;
  int dy_unit;
  bool gamma_vectors;
  bool dx_vectors;
  bool dgate_vectors;
  int64_t partial_rows;  // Rows of the input behind each partial row of dgamma.
  float* partial;
};

// A partial row of dgamma is the sum of this many streams, one after the other; stream j takes
// every 16th row from the j-th on. That order holds for both kernels of up to 256 elements.
constexpr int kStreams = 16;
constexpr int64_t kStreamsMaxDim = 256;

template <int kThreads, int kStride>
__device__ inline void StorePartial(const float* streams, int dim, float* to) {
  for (int i = static_cast<int>(threadIdx.x); i < dim; i += kThreads) {
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < kStreams; ++j) sum += streams[j * kStride + i];
    to[i] = sum;
  }
}

// Threads of a block for rows of kDim elements: kDim / 8 lanes a row.
template <int kDim>
constexpr int kBackwardThreads = kDim / kVectorElements* kStreams;

// Rows of kDim neighbouring elements, read by accesses of Unit; a block a partial row. 1024 threads
// share a multiprocessor: the registers of more rows a thread would cost more than they hide.
template <typename X, typename G, typename Unit, int kDim, bool kSilu>
__global__ void __launch_bounds__(kBackwardThreads<kDim>, 1024 / kBackwardThreads<kDim>)
    BackwardRows(const __grid_constant__ GatedBackward p) {
  constexpr int kLanes = kDim / kVectorElements;
  constexpr int kThreads = kBackwardThreads<kDim>;
  __shared__ float streams[kStreams * kDim];
  const gdn_gated_rms_norm_backward_args& a = p.args;
  const int column = static_cast<int>(threadIdx.x) % kLanes * kVectorElements;
  const uint32_t stream = threadIdx.x / kLanes;
  const auto begin = static_cast<uint32_t>(blockIdx.x * p.partial_rows);
  const auto end = static_cast<uint32_t>(min(p.axes.rows, begin + p.partial_rows));
  WaitForPreviousKernel();
  AllowNextKernel();  // The partial sums wait for this kernel, but not to be launched.
  Floats8 weight;
  LoadWeight(a.in, p.gamma_vectors, column, weight);
  Floats8 dgamma = {};
  for (uint32_t first = begin; first < end; first += kStreams) {
    // What a row too many gives is neither stored nor added.
    const bool counts = first + stream < end;
    const uint32_t row = counts ? first + stream : end - 1;
    int64_t x0 = int64_t{row} * kDim;
    int64_t gate0 = x0;
    int64_t dy0 = x0;
    if (!p.dense) {
      const RowIndex index = IndexOf(p.axes, row);
      x0 = OffsetOf(a.in.x_strides, index);
      gate0 = OffsetOf(a.in.gate_strides, index);
      dy0 = OffsetOf(a.dy_strides, index);
    }
    const Vector<X> x = LoadUnits<Unit>(static_cast<const X*>(a.in.x) + x0 + column);
    const Vector<G> gate = LoadUnits<Unit>(static_cast<const G*>(a.in.gate) + gate0 + column);
    const Vector<X> dy = LoadUnits<Unit>(static_cast<const X*>(a.dy) + dy0 + column);
    const float rstd = a.rstd[row];
    Floats8 values, gates, gradient, weighted, dgate;
    WidenAll(x, values);
    WidenAll(gate, gates);
    WidenAll(dy, gradient);
    float sum = 0.0f;
    GatedGradient<X, kSilu>(values, gates, gradient, weight, rstd, counts, weighted, dgate, dgamma,
                            &sum);
    const float c = LaneSum<kLanes - 1>(sum) / static_cast<float>(kDim);
    if (!counts) continue;
    const int64_t at = int64_t{row} * kDim + column;
    StoreVector(static_cast<G*>(a.dgate) + at, NarrowAll<G>(dgate));
    StoreVector(static_cast<X*>(a.dx) + at, InputGradient<X>(values, weighted, rstd, c));
  }
#pragma unroll
  for (int e = 0; e < kVectorElements; ++e) streams[stream * kDim + column + e] = dgamma[e];
  __syncthreads();
  StorePartial<kThreads, kDim>(streams, kDim, p.partial + blockIdx.x * int64_t{kDim});
}

// Threads of a block where a row has 32, or all.
template <int kRowThreads>
constexpr int kAnyBackwardThreads = kRowThreads == 32 ? 32 * kStreams : kRowThreads;

// Rows of any layout of up to 8 * kRowThreads * kVectors elements: a warp a row, or a block.
template <typename X, typename G, int kRowThreads, int kVectors, bool kSilu>
__global__ void __launch_bounds__(kAnyBackwardThreads<kRowThreads>)
    BackwardAnyRows(const __grid_constant__ GatedBackward p) {
  constexpr bool kWarpRows = kRowThreads == 32;
  constexpr int kThreads = kAnyBackwardThreads<kRowThreads>;
  __shared__ float streams[kWarpRows ? kStreams * kStreamsMaxDim : 1];
  const gdn_gated_rms_norm_backward_args& a = p.args;
  const int64_t dim = a.in.dim;
  const int64_t thread = threadIdx.x % kRowThreads;
  const int64_t begin = blockIdx.x * p.partial_rows;
  const int64_t end = min(p.axes.rows, begin + p.partial_rows);
  WaitForPreviousKernel();
  AllowNextKernel();
  Floats8 dgamma[kVectors] = {};
  for (int64_t row = begin + threadIdx.x / kRowThreads; row < end; row += kThreads / kRowThreads) {
    const RowIndex index = IndexOfAny(p.axes, row);
    const X* const x = static_cast<const X*>(a.in.x) + OffsetOf(a.in.x_strides, index);
    const G* const gate = static_cast<const G*>(a.in.gate) + OffsetOf(a.in.gate_strides, index);
    const X* const dy = static_cast<const X*>(a.dy) + OffsetOf(a.dy_strides, index);
    const float rstd = a.rstd[row];
    Floats8 values[kVectors];
    Floats8 weighted[kVectors];
    float sum = 0.0f;
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      const int64_t i = (thread + k * kRowThreads) * kVectorElements;
      Floats8 gates, gradient, weight, dgate;
      LoadRow(x, a.in.x_strides.element, p.x_unit == 16, i, dim, values[k]);
      LoadRow(gate, a.in.gate_strides.element, p.gate_unit == 16, i, dim, gates);
      LoadRow(dy, a.dy_strides.element, p.dy_unit == 16, i, dim, gradient);
      LoadWeight(a.in, p.gamma_vectors, i, weight);
      // Beyond the row's end dy and x are zeros, and so are all of these.
      GatedGradient<X, kSilu>(values[k], gates, gradient, weight, rstd, true, weighted[k], dgate,
                              dgamma[k], &sum);
      StoreRow(static_cast<G*>(a.dgate) + row * dim, p.dgate_vectors, i, dim, NarrowAll<G>(dgate));
    }
    if constexpr (kWarpRows) {
      sum = LaneSum(sum);
    } else {
      sum = BlockSum<kThreads / 32>(sum);
    }
    const float c = sum / static_cast<float>(dim);
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      const int64_t i = (thread + k * kRowThreads) * kVectorElements;
      StoreRow(static_cast<X*>(a.dx) + row * dim, p.dx_vectors, i, dim,
               InputGradient<X>(values[k], weighted[k], rstd, c));
    }
  }
  float* const to = p.partial + blockIdx.x * dim;
  if constexpr (kWarpRows) {
#pragma unroll
    for (int e = 0; e < kVectorElements; ++e) {
      streams[threadIdx.x / 32 * kStreamsMaxDim + thread * kVectorElements + e] = dgamma[0][e];
    }
    __syncthreads();
    StorePartial<kThreads, kStreamsMaxDim>(streams, static_cast<int>(dim), to);
  } else {
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      const int64_t i = (thread + k * kRowThreads) * kVectorElements;
#pragma unroll
      for (int e = 0; e < kVectorElements; ++e) {
        if (i + e < dim) to[i + e] = dgamma[k][e];
      }
    }
  }
}

}  // namespace gdn::cuda

#endif  // KERNELS_CUDA_GATED_RMS_NORM_BACKWARD_CUH_
