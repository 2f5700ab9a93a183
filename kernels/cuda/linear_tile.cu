// The product for any number of rows, with the bits of the skinny one: for batch_invariant.
//
// A block multiplies 64 rows of n by 64 rows of the weight, or by 16 where there would be few
// blocks; its eight warps are four by two. K streams through shared memory in stages of two steps,
// each row 128 bytes whose halves change places in odd rows, so that the eight lanes one pass of
// the memory serves meet no bank twice. An element is summed as the skinny product does it: two
// sums over the steps of a slice, the slices' in order.
#include "kernels/cuda/async_copy.cuh"
#include "kernels/cuda/linear_mma.cuh"
#include "kernels/cuda/linear_rows.cuh"

namespace gdn::cuda {
namespace linear {
namespace {

constexpr int kTile = 64;  // Rows of n.
constexpr int kStageSteps = 2;
constexpr int kLineBytes = kStageSteps * kStep * 2;
constexpr int kLinePieces = kLineBytes / 16;

// kWarpTiles: tiles of eight columns of each warp.
template <int kWarpTiles>
struct TileShape {
  static constexpr int kColumns = 2 * kWarpTiles * kGroupRows;
  static constexpr int kXBytes = kTile * kLineBytes;
  static constexpr int kStageBytes = kXBytes + kColumns * kLineBytes;
  static constexpr int kStages = kWarpTiles == 1 ? 10 : 6;  // Two blocks a multiprocessor.
  static constexpr int kBytes = kStages * kStageBytes;
};

// 16 bytes, or zeros without reading `global`.
__device__ inline void CopyAsyncOrZero(void* shared, const void* global, bool copy) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(
                   static_cast<uint32_t>(__cvta_generic_to_shared(shared))),
               "l"(global), "r"(copy ? 16 : 0)
               : "memory");
}

__device__ inline int PlaceOf(int line, int piece) {
  return line * kLineBytes + (piece ^ ((line & 1) * 4)) * 16;
}

// The weight row of a column of the product; with a gate, gate and up take turns.
template <bool kGate>
__device__ inline int64_t RowOfColumn(int outputs, int column) {
  if (!kGate) return column < outputs ? column : -1;
  return column / 2 < outputs ? column / 2 + int64_t{column % 2} * outputs : -1;
}

template <typename W>
__device__ inline void StorePair(const LinearTileParams& p, int row, int column, float first,
                                 float second) {
  const int64_t at = row * p.y_row_stride + column;
  const bool has_second = column + 1 < p.outputs;
  if (p.y_is_f32) {
    float* const y = static_cast<float*>(p.y) + at;
    y[0] = p.accumulate ? y[0] + first : first;
    if (has_second) y[1] = p.accumulate ? y[1] + second : second;
  } else {
    W* const y = static_cast<W*>(p.y) + at;
    y[0] = Narrow<W>(first);
    if (has_second) y[1] = Narrow<W>(second);
  }
}

template <typename W, bool kGate, int kWarpTiles>
__global__ void __launch_bounds__(kThreads, 2)
    TileKernel(const __grid_constant__ LinearTileParams p) {
  using Shape = TileShape<kWarpTiles>;
  constexpr int kStages = Shape::kStages;
  extern __shared__ __align__(128) unsigned char shared[];
  const int tid = static_cast<int>(threadIdx.x);
  const int lane = tid % 32;
  const int warp = tid / 32;
  const int g = lane / 4;
  const int t = lane % 4;
  const int row0 = static_cast<int>(blockIdx.y) * kTile;
  const int column0 = static_cast<int>(blockIdx.x) * Shape::kColumns;

  // Each thread copies the same piece of the same lines of either operand, stage after stage.
  constexpr int kLines = kThreads / kLinePieces;
  constexpr int kXCopies = kTile / kLines;
  constexpr int kWCopies = (Shape::kColumns + kLines - 1) / kLines;
  const int piece = tid % kLinePieces;
  const int line0 = tid / kLinePieces;
  const W* x_from[kXCopies];
  const W* w_from[kWCopies];
  bool x_there[kXCopies];
  bool w_there[kWCopies];
#pragma unroll
  for (int i = 0; i < kXCopies; ++i) {
    const int row = row0 + line0 + i * kLines;
    x_there[i] = row < p.rows;
    x_from[i] = static_cast<const W*>(p.n) + (x_there[i] ? row : 0) * p.n_row_stride;
  }
#pragma unroll
  for (int i = 0; i < kWCopies; ++i) {
    const int64_t row = RowOfColumn<kGate>(p.outputs, column0 + line0 + i * kLines);
    w_there[i] = row >= 0;
    w_from[i] = static_cast<const W*>(p.weight) + (w_there[i] ? row : 0) * p.k;
  }
  const int stages = (p.k + kStageSteps * kStep - 1) / (kStageSteps * kStep);
  const auto load = [&](int stage) {
    if (stage < stages) {
      unsigned char* const to = shared + stage % kStages * Shape::kStageBytes;
      const int k = (stage * kLinePieces + piece) * kPiece;
      const bool inside = k < p.k;
#pragma unroll
      for (int i = 0; i < kXCopies; ++i) {
        CopyAsyncOrZero(to + PlaceOf(line0 + i * kLines, piece), x_from[i] + (inside ? k : 0),
                        inside && x_there[i]);
      }
#pragma unroll
      for (int i = 0; i < kWCopies; ++i) {
        const int line = line0 + i * kLines;
        if (line >= Shape::kColumns) break;
        CopyAsyncOrZero(to + Shape::kXBytes + PlaceOf(line, piece), w_from[i] + (inside ? k : 0),
                        inside && w_there[i]);
      }
    }
    CommitCopies();
  };

#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) load(i);

  float total[kWarpTiles][4] = {};
  float sum[kWarpTiles][2][4] = {};
  const int per_slice = StepsPerWarp(p.k);
  int left = per_slice;  // Steps of the current slice.
  const int x_line = warp % 4 * 16 + g;
  const int w_line = warp / 4 * (kWarpTiles * kGroupRows) + g;
#pragma unroll 1
  for (int stage = 0; stage < stages; ++stage) {
    WaitForCopies<kStages - 2>();
    __syncthreads();  // The stage has come for all, and all have left the one that is filled next.
    load(stage + kStages - 1);
    const unsigned char* const x = shared + stage % kStages * Shape::kStageBytes;
    const unsigned char* const w = x + Shape::kXBytes;
#pragma unroll
    for (int step = 0; step < kStageSteps; ++step) {
      const auto read = [&](const unsigned char* from, int line) {
        return *reinterpret_cast<const uint4*>(from + PlaceOf(line, step * 4 + t));
      };
      const uint4 low = read(x, x_line);
      const uint4 high = read(x, x_line + kGroupRows);
#pragma unroll
      for (int tile = 0; tile < kWarpTiles; ++tile) {
        MultiplyStep<W>(sum[tile][0], sum[tile][1], low, high, read(w, w_line + tile * kGroupRows));
      }
      if (--left == 0) {
        left = per_slice;
#pragma unroll
        for (int tile = 0; tile < kWarpTiles; ++tile) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            total[tile][i] += sum[tile][0][i] + sum[tile][1][i];
            sum[tile][0][i] = sum[tile][1][i] = 0.0f;
          }
        }
      }
    }
  }
#pragma unroll
  for (int tile = 0; tile < kWarpTiles; ++tile) {
    const int column = column0 + (warp / 4 * kWarpTiles + tile) * kGroupRows + 2 * t;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = row0 + x_line + half * kGroupRows;
      float value[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int at = 2 * half + i;
        value[i] = total[tile][at] + (sum[tile][0][at] + sum[tile][1][at]);
      }
      if (row >= p.rows) continue;
      if constexpr (kGate) {
        if (column / 2 < p.outputs) {
          const float out = Silu(value[0]) * value[1];
          const int64_t at = row * p.y_row_stride + column / 2;
          if (p.y_is_f32) {
            static_cast<float*>(p.y)[at] = out;
          } else {
            static_cast<W*>(p.y)[at] = Narrow<W>(out);
          }
        }
      } else {
        if (column < p.outputs) StorePair<W>(p, row, column, value[0], value[1]);
      }
    }
  }
}

template <typename W, bool kGate, int kWarpTiles>
cudaError_t LaunchShape(const LinearTileParams& p, cudaStream_t stream) {
  using Shape = TileShape<kWarpTiles>;
  const int columns = kGate ? 2 * p.outputs : p.outputs;
  const dim3 grid(static_cast<unsigned>((columns + Shape::kColumns - 1) / Shape::kColumns),
                  static_cast<unsigned>((p.rows + kTile - 1) / kTile));
  TileKernel<W, kGate, kWarpTiles><<<grid, kThreads, Shape::kBytes, stream>>>(p);
  return cudaGetLastError();
}

template <typename W, bool kGate>
cudaError_t Launch(const LinearTileParams& p, int multiprocessors, cudaStream_t stream) {
  const int64_t columns = kGate ? 2 * int64_t{p.outputs} : p.outputs;
  const int64_t blocks = ((columns + 63) / 64) * ((p.rows + kTile - 1) / kTile);
  return blocks < multiprocessors / 2 ? LaunchShape<W, kGate, 1>(p, stream)
                                      : LaunchShape<W, kGate, 4>(p, stream);
}

template <typename W, int kWarpTiles>
cudaError_t PrepareShape() {
  for (const auto kernel : {TileKernel<W, false, kWarpTiles>, TileKernel<W, true, kWarpTiles>}) {
    cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                             TileShape<kWarpTiles>::kBytes);
    if (error != cudaSuccess) return error;
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                 cudaSharedmemCarveoutMaxShared);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

template <typename W>
cudaError_t Prepare() {
  const cudaError_t error = PrepareShape<W, 1>();
  return error != cudaSuccess ? error : PrepareShape<W, 4>();
}

}  // namespace
}  // namespace linear

cudaError_t PrepareLinearTile(gdn_dtype weight_dtype) {
  return weight_dtype == GDN_BF16 ? linear::Prepare<Bf16>() : linear::Prepare<F16>();
}

cudaError_t LaunchLinearTile(gdn_dtype weight_dtype, const LinearTileParams& p, int multiprocessors,
                             cudaStream_t stream) {
  const auto launch = weight_dtype == GDN_BF16
                          ? (p.silu ? linear::Launch<Bf16, true> : linear::Launch<Bf16, false>)
                          : (p.silu ? linear::Launch<F16, true> : linear::Launch<F16, false>);
  return launch(p, multiprocessors, stream);
}

}  // namespace gdn::cuda
