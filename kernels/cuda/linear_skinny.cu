// The product for up to sixteen rows: bound by reading the weights once.
//
// The unit of work is a tile of eight weight rows. A block takes a contiguous share of the tiles,
// kTiles at a time; its eight consumer warps divide K (linear_rows.cuh), so that each sees all rows
// but only its slice of x and of the weights, and needs the others only for the norm and for the
// sum of the eight partial products of an element. A ninth warp streams the weights through a ring
// in shared memory (linear_ring.cuh). Where a block's whole share fits the ring, all of it is on
// its way before anybody waits for x.
//
// One m16n8k16 multiplies sixteen rows of x by eight rows of the weight: the weight is the operand
// with eight, so that an output of a thousand columns still makes work for every multiprocessor.
// Rows of x that do not exist are zero operands.
//
// Bits: an element is the sum over the warps, in order, of a warp's two sums over the steps of its
// slice, in order. None of it depends on kTiles, the number of rows or the grid.
#include <algorithm>

#include "kernels/cuda/cluster.cuh"
#include "kernels/cuda/linear_launch.h"
#include "kernels/cuda/linear_mma.cuh"
#include "kernels/cuda/linear_ring.cuh"
#include "kernels/cuda/linear_rows.cuh"

namespace gdn::cuda {
namespace linear {
namespace {

// Shared memory: the ring; n as pieces of 16 bytes [warp][step][row][4]; the partial products of
// a group [warp][row][column]; what the norm needs; the barriers.
__host__ __device__ constexpr int PartialPitch(int tiles) {
  return tiles == 1 ? 8 : kGroupRows * tiles + 8;
}
struct Layout {
  int rows;
  int partials;
  int scratch;
  int barriers;
  int bytes;
};
__host__ __device__ inline Layout MakeLayout(int tiles, int slots, int k, int rows, bool norm) {
  const int per_warp = StepsPerWarp(k);
  Layout layout;
  layout.rows = slots * SlotBytes(tiles, ChunksOf(per_warp).steps);
  layout.partials = layout.rows + kWarps * per_warp * rows * kStep * 2;
  const int partial_rows = rows <= kGroupRows ? kGroupRows : 2 * kGroupRows;
  layout.scratch = layout.partials + kWarps * partial_rows * PartialPitch(tiles) * 4;
  layout.barriers = layout.scratch + (norm ? static_cast<int>(sizeof(NormScratch)) : 0);
  layout.bytes = layout.barriers + slots * static_cast<int>(sizeof(SlotBarriers));
  return layout;
}

// n in the lanes' order, from the warp's part of shared memory.
template <int kHalves>
struct Operand {
  uint4 half[kHalves];

  __device__ void Load(const uint4* n, int step, int rows, int g, int t) {
    const uint4* const from = n + (step * rows + g) * 4 + t;
#pragma unroll
    for (int i = 0; i < kHalves; ++i) {
      half[i] = g + i * kGroupRows < rows ? from[4 * i * kGroupRows] : uint4{0, 0, 0, 0};
    }
  }
  __device__ uint4 low() const { return half[0]; }
  __device__ uint4 high() const {
    if constexpr (kHalves == 2) return half[1];
    return {0, 0, 0, 0};
  }
};

// The barrier that tells the consumers that the ring's barriers are set up; the producer does not
// wait at it.
constexpr int kSkinnyThreads = kThreads + 32;
__device__ inline void ArriveSetUp() {
  asm volatile("bar.arrive 2, %0;" ::"n"(kSkinnyThreads) : "memory");
}
__device__ inline void WaitForSetUp() {
  asm volatile("bar.sync 2, %0;" ::"n"(kSkinnyThreads) : "memory");
}

template <typename W, int kTiles, bool kGate, bool kChunked>
__device__ inline void Produce(const LinearSkinnyParams& p, Chunks chunks, Share share,
                               unsigned char* slots, SlotBarriers* barriers) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int slot_bytes = SlotBytes(kTiles, chunks.steps);
  if (lane < p.slots) {
    barriers[lane].full.Init();
    InitForConsumers(barriers[lane].empty);
  }
  ArrivalBarrier::FenceInit();
  __syncwarp();
  RingPosition ring;
  int tile = share.first;
  int chunk = 0;
  const auto fill_next = [&] {
    FillSlot<W, kTiles, kGate, kChunked>(p, chunks, tile, share.end, chunk,
                                         slots + ring.slot * slot_bytes, &barriers[ring.slot].full);
    ring.Advance(p.slots);
    if (!kChunked || ++chunk == chunks.count) {
      chunk = 0;
      tile += kTiles;
    }
  };
  for (int i = 0; i < p.slots && tile < share.end; ++i) fill_next();
  ArriveSetUp();
  if (p.order.early_release) AllowNextKernel();
  WaitForPreviousKernel();
  AllowNextKernel();
  while (tile < share.end) {
    barriers[ring.slot].empty.Wait(ring.parity ^ 1);
    fill_next();
  }
}

// kHeld: a slice has at most kHeldSteps steps, and x stays in registers.
template <typename W, int kHalves, int kTiles, bool kGate, bool kHeld>
__global__ void __launch_bounds__(kSkinnyThreads, kTiles == 4 ? 1 : 2)
    SkinnyKernel(const __grid_constant__ LinearSkinnyParams p) {
  constexpr int kPitch = PartialPitch(kTiles);
  constexpr int kTileColumns = kGate ? kGroupRows / 2 : kGroupRows;
  constexpr int kGroupColumns = kTiles * kTileColumns;
  constexpr int kPartialRows = kHalves * kGroupRows;
  extern __shared__ __align__(128) unsigned char shared[];

  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int k = p.rows.k;
  const int rows = p.rows.rows;
  const int per_warp = StepsPerWarp(k);
  const Chunks chunks = kHeld ? Chunks{1, per_warp} : ChunksOf(per_warp);
  const Layout layout = MakeLayout(kTiles, p.slots, k, rows, p.rows.norm_weight != nullptr);
  SlotBarriers* const barriers = reinterpret_cast<SlotBarriers*>(shared + layout.barriers);
  const Share share = Share::OfBlock(p.tiles_each, p.tiles_more);

  if (warp == kWarps) {
    if (kHeld || chunks.count == 1) {
      Produce<W, kTiles, kGate, false>(p, chunks, share, shared, barriers);
    } else {
      Produce<W, kTiles, kGate, true>(p, chunks, share, shared, barriers);
    }
    return;
  }

  const int g = lane / 4;
  const int t = lane % 4;
  const Slice slice = SliceOf(k, warp);
  uint4* const n = reinterpret_cast<uint4*>(shared + layout.rows) + warp * per_warp * rows * 4;
  float* const partials = reinterpret_cast<float*>(shared + layout.partials);
  NormScratch* const scratch = reinterpret_cast<NormScratch*>(shared + layout.scratch);
  LoadNormWeights(p.rows, slice, scratch);
  if (p.order.early_release) AllowNextKernel();
  WaitForPreviousKernel();
  AllowNextKernel();
  PrepareRows<W, kHalves>(p.rows, 0, slice, scratch, [&](int row, int step, uint4 piece) {
    n[(step * rows + row) * 4 + t] = piece;
  });
  __syncwarp();
  Operand<kHalves> held[kHeld ? kHeldSteps : 1];
  if constexpr (kHeld) {
#pragma unroll
    for (int s = 0; s < kHeldSteps; ++s) {
      if (s < slice.count) held[s].Load(n, s, rows, g, t);
    }
  }

  // A consumer's part of row g of a tile in a slot.
  const int pitch = RowPitch(chunks.steps);
  const unsigned char* const own =
      shared + g * pitch + warp * chunks.steps * kStep * 2 + t * kPiece * 2;
  // The step of this warp of which only a part lies within K: what follows it in the slot is not
  // the weight's.
  const int partial_step =
      k % kStep != 0 && slice.first + slice.count == (k + kStep - 1) / kStep ? slice.count - 1 : -1;
  const bool lane_inside = t * kPiece < k % kStep;
  RingPosition ring;
  WaitForSetUp();
#pragma unroll 1
  for (int tile0 = share.first; tile0 < share.end; tile0 += kTiles) {
    // This thread's elements of y: their old values are on their way while the product runs.
    constexpr int kOutputs = (kPartialRows * kGroupColumns + kThreads - 1) / kThreads;
    const int column0 = tile0 * kTileColumns;
    const int columns = min(kGroupColumns, min(share.end * kTileColumns, p.outputs) - column0);
    float old[kOutputs];
    if (!kGate && p.accumulate) {
#pragma unroll
      for (int i = 0; i < kOutputs; ++i) {
        const int index = i * kThreads + static_cast<int>(threadIdx.x);
        const int row = index / kGroupColumns;
        const int column = index % kGroupColumns;
        if (row < rows && column < columns) {
          old[i] = __ldcg(static_cast<const float*>(p.y) + row * p.y_row_stride + column0 + column);
        }
      }
    }

    float sum[kTiles][2][4];
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sum[tile][0][i] = sum[tile][1][i] = 0.0f;
    }
    const auto multiply = [&](const unsigned char* at, const Operand<kHalves>& a, int step) {
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        uint4 b = *reinterpret_cast<const uint4*>(at + tile * kGroupRows * pitch);
        if (step == partial_step && !lane_inside) b = {0, 0, 0, 0};
        MultiplyStep<W>(sum[tile][0], sum[tile][1], a.low(), a.high(), b);
      }
    };
    if constexpr (kHeld) {
      const unsigned char* const slot = own + ring.slot * SlotBytes(kTiles, chunks.steps);
      barriers[ring.slot].full.Wait(ring.parity);
#pragma unroll
      for (int s = 0; s < kHeldSteps; ++s) {
        if (s < slice.count) multiply(slot + s * kStep * 2, held[s], s);
      }
      __syncwarp();
      if (lane == 0) barriers[ring.slot].empty.Arrive();
      ring.Advance(p.slots);
    } else {
      for (int first = 0; first < per_warp; first += chunks.steps) {
        const unsigned char* const slot = own + ring.slot * SlotBytes(kTiles, chunks.steps);
        const int steps = min(chunks.steps, slice.count - first);
        barriers[ring.slot].full.Wait(ring.parity);
#pragma unroll 4
        for (int s = 0; s < steps; ++s) {
          Operand<kHalves> a;
          a.Load(n, first + s, rows, g, t);
          multiply(slot + s * kStep * 2, a, first + s);
        }
        __syncwarp();
        if (lane == 0) barriers[ring.slot].empty.Arrive();
        ring.Advance(p.slots);
      }
    }

    if (tile0 != share.first) SyncConsumers();  // All have read the sums of the group before.
    float* const mine = partials + warp * kPartialRows * kPitch;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      float(&s)[2][4] = sum[tile];
      float* const to = mine + g * kPitch + tile * kGroupRows + 2 * t;
      *reinterpret_cast<float2*>(to) = {s[0][0] + s[1][0], s[0][1] + s[1][1]};
      if constexpr (kHalves == 2) {
        *reinterpret_cast<float2*>(to + kGroupRows * kPitch) = {s[0][2] + s[1][2],
                                                                s[0][3] + s[1][3]};
      }
    }
    SyncConsumers();
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) {
      const int index = i * kThreads + static_cast<int>(threadIdx.x);
      const int row = index / kGroupColumns;
      const int column = index % kGroupColumns;
      if (row < rows && column < columns) {
        const float* const from = partials + row * kPitch + (kGate ? 2 * column : column);
        float value;
        if constexpr (kGate) {
          float2 pair = {0.0f, 0.0f};
#pragma unroll
          for (int w = 0; w < kWarps; ++w) {
            const float2 part = *reinterpret_cast<const float2*>(from + w * kPartialRows * kPitch);
            pair.x += part.x;
            pair.y += part.y;
          }
          value = Silu(pair.x) * pair.y;
        } else {
          value = 0.0f;
#pragma unroll
          for (int w = 0; w < kWarps; ++w) value += from[w * kPartialRows * kPitch];
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

// Tiles of a group, blocks, slots of their rings.
struct Division {
  int tiles;
  int grid;
  int slots;
  int tiles_each;
  int tiles_more;
};

int SlotsThatFit(int tiles, int k, int rows, bool norm, int shared_bytes) {
  const int others = MakeLayout(tiles, 0, k, rows, norm).bytes;
  const int slot =
      SlotBytes(tiles, ChunksOf(StepsPerWarp(k)).steps) + static_cast<int>(sizeof(SlotBarriers));
  return std::clamp((shared_bytes - others) / slot, 0, kMaxSlots);
}

Division Divide(const LinearSkinnyParams& p, int multiprocessors, int shared_bytes) {
  const int tile_columns = p.silu ? kGroupRows / 2 : kGroupRows;
  const int tiles = (p.outputs + tile_columns - 1) / tile_columns;
  Division division;
  division.grid = std::min(tiles, multiprocessors);
  division.tiles_each = tiles / division.grid;
  division.tiles_more = tiles % division.grid;
  const int most = division.tiles_each + (division.tiles_more > 0 ? 1 : 0);
  const auto slots = [&] {
    return SlotsThatFit(division.tiles, p.rows.k, p.rows.rows, p.rows.norm_weight != nullptr,
                        shared_bytes);
  };
  division.tiles = most >= 16 ? 4 : most >= 2 ? 2 : 1;
  while (division.tiles > 1 && slots() < 3) division.tiles /= 2;
  const int items =
      (most + division.tiles - 1) / division.tiles * ChunksOf(StepsPerWarp(p.rows.k)).count;
  division.slots = std::min(items, slots());
  return division;
}

using Kernel = void (*)(LinearSkinnyParams);

template <typename W, int kHalves, bool kHeld>
Kernel KernelWith(int tiles, bool gate) {
  if (gate) {
    return tiles == 4   ? SkinnyKernel<W, kHalves, 4, true, kHeld>
           : tiles == 2 ? SkinnyKernel<W, kHalves, 2, true, kHeld>
                        : SkinnyKernel<W, kHalves, 1, true, kHeld>;
  }
  return tiles == 4   ? SkinnyKernel<W, kHalves, 4, false, kHeld>
         : tiles == 2 ? SkinnyKernel<W, kHalves, 2, false, kHeld>
                      : SkinnyKernel<W, kHalves, 1, false, kHeld>;
}

template <typename W>
Kernel KernelFor(int rows, int k, int tiles, bool gate) {
  if (StepsPerWarp(k) <= kHeldSteps) {
    return rows <= kGroupRows ? KernelWith<W, 1, true>(tiles, gate)
                              : KernelWith<W, 2, true>(tiles, gate);
  }
  return rows <= kGroupRows ? KernelWith<W, 1, false>(tiles, gate)
                            : KernelWith<W, 2, false>(tiles, gate);
}

template <typename W>
cudaError_t Prepare(int k, int shared_bytes) {
  for (const int rows : {kGroupRows, 2 * kGroupRows}) {
    for (const int tiles : {1, 2, 4}) {
      for (const bool gate : {false, true}) {
        const cudaError_t error =
            cudaFuncSetAttribute(KernelFor<W>(rows, k, tiles, gate),
                                 cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
        if (error != cudaSuccess) return error;
      }
    }
  }
  return cudaSuccess;
}

template <typename W>
cudaError_t Launch(LinearSkinnyParams p, const Division& division, cudaStream_t stream) {
  p.slots = division.slots;
  p.tiles_each = division.tiles_each;
  p.tiles_more = division.tiles_more;
  const Layout layout = MakeLayout(division.tiles, division.slots, p.rows.k, p.rows.rows,
                                   p.rows.norm_weight != nullptr);
  return LaunchMaybeEarly(p.order.early_start, dim3(static_cast<unsigned>(division.grid)),
                          dim3(kSkinnyThreads), static_cast<size_t>(layout.bytes), stream,
                          KernelFor<W>(p.rows.rows, p.rows.k, division.tiles, p.silu), p);
}

}  // namespace
}  // namespace linear

int64_t LinearSkinnyRows(int64_t k, int shared_bytes) {
  for (int64_t rows = kLinearSkinnyRows; rows > 0; rows /= 2) {
    if (linear::SlotsThatFit(1, static_cast<int>(k), static_cast<int>(rows), true, shared_bytes) >=
        2) {
      return rows;
    }
  }
  return 0;
}

cudaError_t PrepareLinearSkinny(gdn_dtype weight_dtype, int64_t k, int shared_bytes) {
  return weight_dtype == GDN_BF16 ? linear::Prepare<Bf16>(static_cast<int>(k), shared_bytes)
                                  : linear::Prepare<F16>(static_cast<int>(k), shared_bytes);
}

cudaError_t LaunchLinearSkinny(gdn_dtype weight_dtype, const LinearSkinnyParams& params,
                               int multiprocessors, int shared_bytes, cudaStream_t stream) {
  const linear::Division division = linear::Divide(params, multiprocessors, shared_bytes);
  return weight_dtype == GDN_BF16 ? linear::Launch<Bf16>(params, division, stream)
                                  : linear::Launch<F16>(params, division, stream);
}

}  // namespace gdn::cuda
