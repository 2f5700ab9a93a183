// The backward kernels of the gated RMSNorm for training.
#ifndef KERNELS_CUDA_GATED_RMS_NORM_BACKWARD_CUH_
#define KERNELS_CUDA_GATED_RMS_NORM_BACKWARD_CUH_

#include "kernels/cuda/block_sum.cuh"
#include "kernels/cuda/cluster.cuh"
#include "kernels/cuda/gated_rms_norm_rows.cuh"
#include "kernels/cuda/partial_sums.cuh"

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
  int64_t partial_rows;  // Rows of the input behind each partial row of dgamma, a block's.
  float* partial;        // In tiles.
};

__device__ inline float* PartialPlace(const GatedBackward& p, int64_t column) {
  return p.partial + TiledPlace(gridDim.x, blockIdx.x, column);
}

// A partial row of dgamma is the sum of this many streams, one after the other; stream j takes
// every 16th row from the j-th on. That order holds for both kernels of up to 256 elements.
constexpr int kStreams = 16;
constexpr int64_t kStreamsMaxDim = 256;

template <int kStride>
__device__ inline void StorePartial(const GatedBackward& p, const float* streams, int dim) {
  const int i = static_cast<int>(threadIdx.x);  // A block has more threads than a row elements.
  if (i >= dim) return;
  float sum = 0.0f;
#pragma unroll
  for (int j = 0; j < kStreams; ++j) sum += streams[j * kStride + i];
  *PartialPlace(p, i) = sum;
}

// Threads of a block for rows of kDim elements: kDim / 8 lanes a row.
template <int kDim>
constexpr int kBackwardThreads = kDim / kVectorElements* kStreams;

// Rows of kDim neighbouring elements, read by accesses of Unit; a block a partial row. 1024 threads
// share a multiprocessor: the registers of more rows a thread would cost more than they hide. Bound
// by its instructions as much as by memory: dense inputs have instances of their own, whose rows
// need one offset.
template <typename X, typename G, typename Unit, bool kDense, int kDim, bool kSilu>
__global__ void __launch_bounds__(kBackwardThreads<kDim>, 1024 / kBackwardThreads<kDim>)
    BackwardRows(const __grid_constant__ GatedBackward p) {
  constexpr int kLanes = kDim / kVectorElements;
  __shared__ __align__(16) float streams[kStreams * kDim];
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
#pragma unroll 1
  for (uint32_t first = begin; first < end; first += kStreams) {
    // What a row too many gives is neither stored nor added.
    const bool counts = first + stream < end;
    const uint32_t row = counts ? first + stream : end - 1;
    const int64_t at = int64_t{row} * kDim + column;
    int64_t x_at = at;
    int64_t gate_at = at;
    int64_t dy_at = at;
    if constexpr (!kDense) {
      const RowIndex index = IndexOf(p.axes, row);
      x_at = OffsetOf(a.in.x_strides, index) + column;
      gate_at = OffsetOf(a.in.gate_strides, index) + column;
      dy_at = OffsetOf(a.dy_strides, index) + column;
    }
    const Vector<X> x = LoadUnits<Unit>(static_cast<const X*>(a.in.x) + x_at);
    const Vector<G> gate = LoadUnits<Unit>(static_cast<const G*>(a.in.gate) + gate_at);
    const Vector<X> dy = LoadUnits<Unit>(static_cast<const X*>(a.dy) + dy_at);
    const float rstd = a.rstd[row];
    Floats8 values, gates, gradient, weighted, dgate;
    WidenWords(x, values);
    WidenWords(gate, gates);
    WidenWords(dy, gradient);
    float sum = 0.0f;
    GatedGradient<X, kSilu>(values, gates, gradient, weight, rstd, counts, weighted, dgate, dgamma,
                            &sum);
    const float c = LaneSum<kLanes - 1>(sum) / static_cast<float>(kDim);
    if (!counts) continue;
    StoreVector(static_cast<G*>(a.dgate) + at, NarrowAll<G>(dgate));
    StoreVector(static_cast<X*>(a.dx) + at, InputGradient<X>(values, weighted, rstd, c));
  }
  float4* const to = reinterpret_cast<float4*>(&streams[stream * kDim + column]);
  to[0] = make_float4(dgamma[0], dgamma[1], dgamma[2], dgamma[3]);
  to[1] = make_float4(dgamma[4], dgamma[5], dgamma[6], dgamma[7]);
  __syncthreads();
  StorePartial<kDim>(p, streams, kDim);
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
  if constexpr (kWarpRows) {
#pragma unroll
    for (int e = 0; e < kVectorElements; ++e) {
      streams[threadIdx.x / 32 * kStreamsMaxDim + thread * kVectorElements + e] = dgamma[0][e];
    }
    __syncthreads();
    StorePartial<kStreamsMaxDim>(p, streams, static_cast<int>(dim));
  } else {
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      const int64_t i = (thread + k * kRowThreads) * kVectorElements;
#pragma unroll
      for (int e = 0; e < kVectorElements; ++e) {
        if (i + e < dim) *PartialPlace(p, i + e) = dgamma[k][e];
      }
    }
  }
}

}  // namespace gdn::cuda

#endif  // KERNELS_CUDA_GATED_RMS_NORM_BACKWARD_CUH_
