// The backward kernels of the gated RMSNorm for training.
#ifndef KERNELS_CUDA_GATED_RMS_NORM_BACKWARD_CUH_
#define KERNELS_CUDA_GATED_RMS_NORM_BACKWARD_CUH_

#include "kernels/cuda/block_sum.cuh"
#include "kernels/cuda/cluster.cuh"
#include "kernels/cuda/gated_rms_norm_rows.cuh"
#include "kernels/cuda/tiled_sums.cuh"

namespace gdn::cuda {

// What dense rows need comes first: each further line of a launch's arguments is one more load that
// its first blocks wait for.
struct GatedBackward {
  const void* x;
  const void* gate;
  const void* dy;
  const float* rstd;
  void* dx;
  void* dgate;
  float* partial;  // In tiles.
  Gamma gamma;
  int64_t partial_rows;  // Rows of the input behind each partial row of dgamma, a block's.
  RowAxes axes;
  int64_t dim;
  gdn_row_strides x_strides;
  gdn_row_strides gate_strides;
  gdn_row_strides dy_strides;
  bool dense;  // x, gate and dy.
  int x_unit;  // Of UnitOf.
  int gate_unit;
  int dy_unit;
  bool dx_vectors;
  bool dgate_vectors;
};

__device__ inline void StorePartial(const GatedBackward& p, int64_t column, float value) {
  StoreKept(p.partial + TiledPlace(gridDim.x, blockIdx.x, column), value);
}

// A partial row of dgamma is the sum of this many streams, one after the other; stream j takes
// every 16th row from the j-th on. That order holds for both kernels of up to 256 elements.
constexpr int kStreams = 16;
constexpr int64_t kStreamsMaxDim = 256;

template <int kStride>
__device__ inline void StoreStreams(const GatedBackward& p, const float* streams, int dim) {
  const int i = static_cast<int>(threadIdx.x);  // A block has more threads than a row elements.
  if (i >= dim) return;
  float sum = 0.0f;
#pragma unroll
  for (int j = 0; j < kStreams; ++j) sum += streams[j * kStride + i];
  StorePartial(p, i, sum);
}

// Threads of a block for rows of kDim elements: kDim / 8 lanes a row.
template <int kDim>
constexpr int kBackwardThreads = kDim / kVectorElements* kStreams;

// Brings the next rows of dense inputs to the L2. Two steps ahead is too early.
template <typename X, typename G, int kDim>
__device__ inline void PrefetchRows(const GatedBackward& p, uint32_t first, uint32_t end) {
  if (threadIdx.x != 0 || first >= end) return;
  const int64_t at = int64_t{first} * kDim;
  const uint32_t count = min(uint32_t{kStreams}, end - first) * kDim;
  PrefetchBulk(static_cast<const X*>(p.x) + at, count * sizeof(X));
  PrefetchBulk(static_cast<const G*>(p.gate) + at, count * sizeof(G));
  PrefetchBulk(static_cast<const X*>(p.dy) + at, count * sizeof(X));
}

// Rows of kDim neighbouring elements, read by accesses of Unit; a block a partial row. 1024 threads
// share a multiprocessor: the registers of more rows a thread would cost more than they hide. Bound
// by its instructions as much as by memory: dense inputs have instances of their own, whose rows
// need one offset.
template <typename X, typename G, typename Unit, bool kDense, int kDim, bool kSilu>
__global__ void __launch_bounds__(kBackwardThreads<kDim>, 1024 / kBackwardThreads<kDim>)
    BackwardRows(const __grid_constant__ GatedBackward p) {
  constexpr int kLanes = kDim / kVectorElements;
  __shared__ __align__(16) float streams[kStreams * kDim];
  const int column = static_cast<int>(threadIdx.x) % kLanes * kVectorElements;
  const uint32_t stream = threadIdx.x / kLanes;
  const auto begin = static_cast<uint32_t>(blockIdx.x * p.partial_rows);
  const auto end = static_cast<uint32_t>(min(p.axes.rows, begin + p.partial_rows));
  WaitForPreviousKernel();
  AllowNextKernel();  // The partial sums wait for this kernel, but not to be launched.
  Floats8 weight;
  LoadWeight(p.gamma, column, kDim, weight);
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
      x_at = OffsetOf(p.x_strides, index) + column;
      gate_at = OffsetOf(p.gate_strides, index) + column;
      dy_at = OffsetOf(p.dy_strides, index) + column;
    }
    const Vector<X> x = LoadUnits<Unit>(static_cast<const X*>(p.x) + x_at);
    const Vector<G> gate = LoadUnits<Unit>(static_cast<const G*>(p.gate) + gate_at);
    const Vector<X> dy = LoadUnits<Unit>(static_cast<const X*>(p.dy) + dy_at);
    const float rstd = p.rstd[row];
    if constexpr (kDense) PrefetchRows<X, G, kDim>(p, first + kStreams, end);
    Floats8 values, gates, gradient, weighted, dgate;
    WidenWords(x, values);
    WidenWords(gate, gates);
    WidenWords(dy, gradient);
    float sum = 0.0f;
    GatedGradient<X, kSilu>(values, gates, gradient, weight, rstd, counts, weighted, dgate, dgamma,
                            &sum);
    const float c = LaneSum<kLanes - 1>(sum) / static_cast<float>(kDim);
    if (!counts) continue;
    StoreVector(static_cast<G*>(p.dgate) + at, NarrowAll<G>(dgate));
    StoreVector(static_cast<X*>(p.dx) + at, InputGradient<X>(values, weighted, rstd, c));
  }
  float4* const to = reinterpret_cast<float4*>(&streams[stream * kDim + column]);
  to[0] = make_float4(dgamma[0], dgamma[1], dgamma[2], dgamma[3]);
  to[1] = make_float4(dgamma[4], dgamma[5], dgamma[6], dgamma[7]);
  __syncthreads();
  StoreStreams<kDim>(p, streams, kDim);
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
  const int64_t dim = p.dim;
  const int64_t thread = threadIdx.x % kRowThreads;
  const int64_t begin = blockIdx.x * p.partial_rows;
  const int64_t end = min(p.axes.rows, begin + p.partial_rows);
  WaitForPreviousKernel();
  AllowNextKernel();
  Floats8 dgamma[kVectors] = {};
  for (int64_t row = begin + threadIdx.x / kRowThreads; row < end; row += kThreads / kRowThreads) {
    const RowIndex index = IndexOfAny(p.axes, row);
    const X* const x = static_cast<const X*>(p.x) + OffsetOf(p.x_strides, index);
    const G* const gate = static_cast<const G*>(p.gate) + OffsetOf(p.gate_strides, index);
    const X* const dy = static_cast<const X*>(p.dy) + OffsetOf(p.dy_strides, index);
    const float rstd = p.rstd[row];
    Floats8 values[kVectors];
    Floats8 weighted[kVectors];
    float sum = 0.0f;
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      const int64_t i = (thread + k * kRowThreads) * kVectorElements;
      Floats8 gates, gradient, weight, dgate;
      LoadRow(x, p.x_strides.element, p.x_unit == 16, i, dim, values[k]);
      LoadRow(gate, p.gate_strides.element, p.gate_unit == 16, i, dim, gates);
      LoadRow(dy, p.dy_strides.element, p.dy_unit == 16, i, dim, gradient);
      LoadWeight(p.gamma, i, dim, weight);
      // Beyond the row's end dy and x are zeros, and so are all of these.
      GatedGradient<X, kSilu>(values[k], gates, gradient, weight, rstd, true, weighted[k], dgate,
                              dgamma[k], &sum);
      StoreRow(static_cast<G*>(p.dgate) + row * dim, p.dgate_vectors, i, dim, NarrowAll<G>(dgate));
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
      StoreRow(static_cast<X*>(p.dx) + row * dim, p.dx_vectors, i, dim,
               InputGradient<X>(values[k], weighted[k], rstd, c));
    }
  }
  if constexpr (kWarpRows) {
#pragma unroll
    for (int e = 0; e < kVectorElements; ++e) {
      streams[threadIdx.x / 32 * kStreamsMaxDim + thread * kVectorElements + e] = dgamma[0][e];
    }
    __syncthreads();
    StoreStreams<kStreamsMaxDim>(p, streams, static_cast<int>(dim));
  } else {
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      const int64_t i = (thread + k * kRowThreads) * kVectorElements;
#pragma unroll
      for (int e = 0; e < kVectorElements; ++e) {
        if (i + e < dim) StorePartial(p, i + e, dgamma[k][e]);
      }
    }
  }
}

}  // namespace gdn::cuda

#endif  // KERNELS_CUDA_GATED_RMS_NORM_BACKWARD_CUH_
