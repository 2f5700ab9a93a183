// The product for up to sixteen rows: bound by reading the weights once.
//
// The unit of work is a tile of eight weight rows. A block takes a contiguous share of the tiles,
// kTiles at a time; its eight warps divide K (linear_rows.cuh), so that each sees all rows but only
// its slice of x and of the weights, and needs the others only for the norm and for the sum of the
// eight partial products of an element. A warp streams its slice through a ring in shared memory by
// asynchronous copies of 16 bytes; nobody else reads that ring. Where a block's whole share fits
// the ring, all of it is on its way before the kernel waits for x.
//
// One m16n8k16 multiplies sixteen rows of x by eight rows of the weight: the weight is the operand
// with eight, so that an output of a thousand columns still makes work for every multiprocessor.
// Rows of x that do not exist are zero operands.
//
// Bits: an element is the sum over the warps, in order, of the sum over the steps of a slice, in
// order. Neither depends on kTiles, the number of rows or the grid.
#include <algorithm>

#include "kernels/cuda/async_copy.cuh"
#include "kernels/cuda/cluster.cuh"
#include "kernels/cuda/linear_launch.h"
#include "kernels/cuda/linear_mma.cuh"
#include "kernels/cuda/linear_rows.cuh"

namespace gdn::cuda {
namespace linear {
namespace {

// A slot of a warp's ring holds kTiles tiles of kSteps steps: 512 bytes each.
constexpr int kTileBytes = kGroupRows * kStep * 2;
__host__ __device__ constexpr int SlotSteps(int tiles) { return tiles == 4 ? 4 : 8; }
__host__ __device__ constexpr int SlotBytes(int tiles) {
  return tiles * SlotSteps(tiles) * kTileBytes;
}
constexpr int kMaxSlots = 8;

// Shared memory: the rings; n as pieces of 16 bytes [warp][step][row][4]; the partial products of
// a group [2][warp][row][column], for two groups in turn; the norm's sums.
__host__ __device__ constexpr int PartialPitch(int tiles) {
  return tiles == 1 ? 8 : kGroupRows * tiles + 8;
}
struct Layout {
  int64_t slots;
  int64_t rows;
  int64_t partials;
  int64_t scratch;
  int64_t bytes;
};
__host__ __device__ inline Layout MakeLayout(int tiles, int slots, int k, int rows) {
  Layout layout;
  layout.slots = 0;
  layout.rows = int64_t{kWarps} * slots * SlotBytes(tiles);
  layout.partials = layout.rows + int64_t{kWarps} * StepsPerWarp(k) * rows * kStep * 2;
  const int partial_rows = rows <= kGroupRows ? kGroupRows : 2 * kGroupRows;
  layout.scratch = layout.partials + int64_t{2} * kWarps * partial_rows * PartialPitch(tiles) * 4;
  layout.bytes = layout.scratch + kWarps * 2 * kGroupRows * 4;
  return layout;
}

// The weight row behind row r of a tile. With a gate, even rows are gate rows and odd rows the up
// rows of the same columns of y. Rows beyond the last repeat it.
__device__ inline int64_t WeightRow(const LinearSkinnyParams& p, int tile, int r) {
  if (!p.silu) return min(tile * kGroupRows + r, p.outputs - 1);
  const int j = min(tile * (kGroupRows / 2) + r / 2, p.outputs - 1);
  return j + int64_t{r % 2} * p.outputs;
}

template <typename W, int kTiles>
__global__ void __launch_bounds__(kThreads, 2)
    SkinnyKernel(const __grid_constant__ LinearSkinnyParams p) {
  constexpr int kSteps = SlotSteps(kTiles);
  constexpr int kPieces = 4 * kSteps;  // Of a row in a slot.
  constexpr int kPitch = PartialPitch(kTiles);
  extern __shared__ __align__(128) unsigned char shared[];

  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int g = lane / 4;
  const int t = lane % 4;
  const int k = p.rows.k;
  const int rows = p.rows.rows;
  const Slice slice = SliceOf(k, warp);
  const Layout layout = MakeLayout(kTiles, p.slots, k, rows);
  unsigned char* const ring = shared + layout.slots + warp * p.slots * SlotBytes(kTiles);
  uint4* const n = reinterpret_cast<uint4*>(shared + layout.rows) +
                   static_cast<int64_t>(warp) * StepsPerWarp(k) * rows * 4;
  float* const partials = reinterpret_cast<float*>(shared + layout.partials);
  float* const scratch = reinterpret_cast<float*>(shared + layout.scratch);
  const int partial_rows = rows <= kGroupRows ? kGroupRows : 2 * kGroupRows;

  const int tile_columns = p.silu ? kGroupRows / 2 : kGroupRows;
  const int tiles = (p.outputs + tile_columns - 1) / tile_columns;
  const int first_tile = static_cast<int>(int64_t{blockIdx.x} * tiles / gridDim.x);
  const int end_tile = static_cast<int>((int64_t{blockIdx.x} + 1) * tiles / gridDim.x);
  const int groups = (end_tile - first_tile + kTiles - 1) / kTiles;
  // Every warp goes through the same items (group, chunk), though the last may have no steps there.
  const int chunks = (StepsPerWarp(k) + kSteps - 1) / kSteps;

  // Starts the copy of one item, as far as it exists; always closes a group of copies.
  int next_tile = first_tile;
  int next_chunk = 0;
  int next_slot = 0;
  const auto load_next = [&] {
    if (next_tile < end_tile) {
      unsigned char* const slot = ring + next_slot * SlotBytes(kTiles);
      const int steps = slice.count - next_chunk * kSteps;
      const int k0 = (slice.first + next_chunk * kSteps) * kStep;
      const int piece = lane % kPieces;  // The same row position for all of this lane's copies.
      const int step = piece / 4;
      const int piece_k = k0 + piece * kPiece;
      if (step < steps) {
        const bool inside = piece_k < k;
        const W* const from = static_cast<const W*>(p.weight) + (inside ? piece_k : 0);
#pragma unroll
        for (int i = 0; i < kTiles * kGroupRows * kPieces / 32; ++i) {
          const int line = i * (32 / kPieces) + lane / kPieces;
          const int tile = line / kGroupRows;
          const int r = line % kGroupRows;
          if (next_tile + tile < end_tile) {
            // Odd steps swap neighbouring rows: then the eight lanes that a pass of the memory
            // serves meet no bank twice, here and in the read below.
            void* const to = slot + (tile * kSteps + step) * kTileBytes +
                             ((r ^ (step & 1)) * 4 + piece % 4) * 16;
            CopyAsyncOrZero(to, from + WeightRow(p, next_tile + tile, r) * k, inside);
          }
        }
      }
      if (++next_chunk == chunks) {
        next_chunk = 0;
        next_tile += kTiles;
      }
      next_slot = next_slot + 1 == p.slots ? 0 : next_slot + 1;
    }
    CommitCopies();
  };
  for (int i = 0; i < p.slots; ++i) load_next();

  if (p.order.early_release) AllowNextKernel();
  HeldNormWeights norm_weights;
  norm_weights.Load(p.rows, slice, lane);
  WaitForPreviousKernel();
  AllowNextKernel();
  PrepareRows<W>(p.rows, 0, slice, norm_weights, scratch,
                 [&](int row, int step, uint4 piece) { n[(step * rows + row) * 4 + t] = piece; });
  // A lane reads what it wrote itself: no barrier.

  const bool low = g < rows;
  const bool high = g + kGroupRows < rows;
  const uint4 zero = {0, 0, 0, 0};
  int slot_index = 0;
  int tile0 = first_tile;
#pragma unroll 1
  for (int group = 0; group < groups; ++group, tile0 += kTiles) {
    // This thread's elements of y: their old values are on their way while the product runs.
    const int group_columns = kTiles * tile_columns;
    constexpr int kOutputs = (kTiles * 2 * kGroupRows * kGroupRows + kThreads - 1) / kThreads;
    const int column0 = tile0 * tile_columns;
    const int columns = min(group_columns, min(end_tile * tile_columns, p.outputs) - column0);
    float old[kOutputs];
    if (p.accumulate) {
#pragma unroll
      for (int i = 0; i < kOutputs; ++i) {
        const int index = i * kThreads + static_cast<int>(threadIdx.x);
        const int row = index / group_columns;
        const int column = index % group_columns;
        if (row < rows && column < columns) {
          old[i] = __ldcg(static_cast<const float*>(p.y) + row * p.y_row_stride + column0 + column);
        }
      }
    }

    float sum[kTiles][4];
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sum[tile][i] = 0.0f;
    }
#pragma unroll 1
    for (int chunk = 0; chunk < chunks; ++chunk) {
      WaitForCopiesBut(p.slots - 1);
      __syncwarp();
      const uint4* const slot =
          reinterpret_cast<const uint4*>(ring + slot_index * SlotBytes(kTiles));
      const int steps = slice.count - chunk * kSteps;
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        if (step < steps) {
          const uint4* const from = n + ((chunk * kSteps + step) * rows + g) * 4 + t;
          const uint4 a_low = low ? from[0] : zero;
          const uint4 a_high = high ? from[4 * kGroupRows] : zero;
#pragma unroll
          for (int tile = 0; tile < kTiles; ++tile) {
            const uint4 b = slot[(tile * kSteps + step) * 32 + (g ^ (step & 1)) * 4 + t];
            MultiplyStep<W>(sum[tile], a_low, a_high, b);
          }
        }
      }
      __syncwarp();  // All have read the slot before it is filled again.
      load_next();
      slot_index = slot_index + 1 == p.slots ? 0 : slot_index + 1;
    }

    float* const own = partials + ((group % 2) * kWarps + warp) * partial_rows * kPitch;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      float* const to = own + g * kPitch + tile * kGroupRows + 2 * t;
      *reinterpret_cast<float2*>(to) = {sum[tile][0], sum[tile][1]};
      if (rows > kGroupRows) {
        *reinterpret_cast<float2*>(to + kGroupRows * kPitch) = {sum[tile][2], sum[tile][3]};
      }
    }
    __syncthreads();  // Two buffers: the next group's barrier keeps a third from coming early.
    const float* const all = partials + (group % 2) * kWarps * partial_rows * kPitch;
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) {
      const int index = i * kThreads + static_cast<int>(threadIdx.x);
      const int row = index / group_columns;
      const int column = index % group_columns;
      if (row < rows && column < columns) {
        float value;
        if (p.silu) {
          float2 pair = {0.0f, 0.0f};
#pragma unroll
          for (int w = 0; w < kWarps; ++w) {
            const float2 part = *reinterpret_cast<const float2*>(
                all + (w * partial_rows + row) * kPitch + 2 * column);
            pair.x += part.x;
            pair.y += part.y;
          }
          value = Silu(pair.x) * pair.y;
        } else {
          value = 0.0f;
#pragma unroll
          for (int w = 0; w < kWarps; ++w) {
            value += all[(w * partial_rows + row) * kPitch + column];
          }
          if (p.accumulate) value = old[i] + value;
        }
        const int64_t at = row * p.y_row_stride + column0 + column;
        if (p.y_is_f32) {
          static_cast<float*>(p.y)[at] = value;
        } else {
          static_cast<W*>(p.y)[at] = Narrow<W>(value);
        }
      }
    }
  }
}

// The block size in tiles for a number of them, and the ring that fits.
struct Shape {
  int tiles;
  int grid;
  int slots;
};

int SlotsThatFit(int tiles, int k, int rows, int shared_bytes) {
  const int64_t others = MakeLayout(tiles, 0, k, rows).bytes;
  const int64_t slots = (shared_bytes - others) / (int64_t{kWarps} * SlotBytes(tiles));
  return static_cast<int>(std::clamp<int64_t>(slots, 0, kMaxSlots));
}

Shape ChooseShape(const LinearSkinnyParams& p, int multiprocessors, int shared_bytes) {
  const int tile_columns = p.silu ? kGroupRows / 2 : kGroupRows;
  const int tiles = (p.outputs + tile_columns - 1) / tile_columns;
  Shape shape;
  shape.grid = std::min(tiles, multiprocessors);
  const int per_block = (tiles + shape.grid - 1) / shape.grid;
  shape.tiles = per_block >= 3 ? 4 : per_block;
  while (shape.tiles > 1 && SlotsThatFit(shape.tiles, p.rows.k, p.rows.rows, shared_bytes) < 2) {
    shape.tiles /= 2;
  }
  const int chunks = (StepsPerWarp(p.rows.k) + SlotSteps(shape.tiles) - 1) / SlotSteps(shape.tiles);
  const int items = (per_block + shape.tiles - 1) / shape.tiles * chunks;
  shape.slots = std::min(items, SlotsThatFit(shape.tiles, p.rows.k, p.rows.rows, shared_bytes));
  return shape;
}

template <typename W>
cudaError_t Prepare(int shared_bytes) {
  for (const auto kernel : {SkinnyKernel<W, 1>, SkinnyKernel<W, 2>, SkinnyKernel<W, 4>}) {
    const cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

template <typename W>
cudaError_t Launch(LinearSkinnyParams p, const Shape& shape, cudaStream_t stream) {
  p.slots = shape.slots;
  const Layout layout = MakeLayout(shape.tiles, shape.slots, p.rows.k, p.rows.rows);
  const auto kernel = shape.tiles == 4   ? SkinnyKernel<W, 4>
                      : shape.tiles == 2 ? SkinnyKernel<W, 2>
                                         : SkinnyKernel<W, 1>;
  return LaunchMaybeEarly(p.order.early_start, dim3(static_cast<unsigned>(shape.grid)),
                          dim3(kThreads), static_cast<size_t>(layout.bytes), stream, kernel, p);
}

}  // namespace
}  // namespace linear

int64_t LinearSkinnyRows(int64_t k, int shared_bytes) {
  for (int64_t rows = kLinearSkinnyRows; rows > 0; rows /= 2) {
    if (linear::SlotsThatFit(1, static_cast<int>(k), static_cast<int>(rows), shared_bytes) >= 2) {
      return rows;
    }
  }
  return 0;
}

cudaError_t PrepareLinearSkinny(int shared_bytes) {
  const cudaError_t error = linear::Prepare<Bf16>(shared_bytes);
  return error != cudaSuccess ? error : linear::Prepare<F16>(shared_bytes);
}

cudaError_t LaunchLinearSkinny(gdn_dtype weight_dtype, const LinearSkinnyParams& params,
                               int multiprocessors, int shared_bytes, cudaStream_t stream) {
  const linear::Shape shape = linear::ChooseShape(params, multiprocessors, shared_bytes);
  return weight_dtype == GDN_BF16 ? linear::Launch<Bf16>(params, shape, stream)
                                  : linear::Launch<F16>(params, shape, stream);
}

}  // namespace gdn::cuda
