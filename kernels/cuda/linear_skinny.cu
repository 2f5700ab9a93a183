// The product for up to sixteen rows: bound by reading the weights once.
//
// The unit of work is a tile of eight weight rows. A block takes a contiguous share of the tiles,
// kTiles at a time; its eight consumer warps divide K (linear_rows.cuh), so that each sees all rows
// but only its slice of x and of the weights, and needs the others only for the norm and for the
// sum of the eight partial products of an element. A ninth warp streams the weights through a ring
// in shared memory (linear_ring.cuh). It does not wait for x; but it keeps only so many bytes under
// way: more would stand in the queues before the loads of x, and hold back the wait itself.
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

// Shared memory: the ring; n [warp][row][slice], rows an odd multiple of 64 bytes apart; the
// partial products of a group [warp][row][place]; what the norm needs; the barriers.
__host__ __device__ constexpr int PartialPitch(int tiles) {
  return tiles == 1 ? 8 : kGroupRows * tiles + 8;
}
__host__ __device__ inline int OperandPitch(int k) { return (StepsPerWarp(k) | 1) * kStep * 2; }
struct Layout {
  int rows;
  int partials;
  int scratch;
  int barriers;
  int bytes;
};
__host__ __device__ inline Layout MakeLayout(int slot_bytes, int slots, int tiles, int k, int rows,
                                             bool norm) {
  Layout layout;
  layout.rows = slots * slot_bytes;
  layout.partials = layout.rows + kWarps * rows * OperandPitch(k);
  layout.scratch = layout.partials + kWarps * rows * PartialPitch(tiles) * 4;
  layout.barriers = layout.scratch + (norm ? static_cast<int>(sizeof(NormScratch)) : 0);
  layout.bytes = layout.barriers + slots * static_cast<int>(sizeof(SlotBarriers));
  return layout;
}
inline int SlotBytesFor(int k) { return SlotBytes(RowBytes(k, ChunksOf(StepsPerWarp(k)))); }

// The most steps of a slice whose rows of n a consumer keeps in registers.
constexpr int kHeldSteps = 4;

// n in the lanes' order, from the warp's part of shared memory.
template <int kRows>
struct Operand {
  static constexpr int kHalves = kRows > kGroupRows ? 2 : 1;

  uint4 half[kHalves];

  // `from`: row g at the lane's piece of a step.
  __device__ void Load(const unsigned char* from, int pitch, int rows_from_g) {
#pragma unroll
    for (int i = 0; i < kHalves; ++i) {
      half[i] = {0, 0, 0, 0};
      if (i * kGroupRows < rows_from_g) {
        half[i] = *reinterpret_cast<const uint4*>(from + i * kGroupRows * pitch);
      }
    }
  }
  __device__ uint4 low() const { return half[0]; }
  __device__ uint4 high() const {
    if constexpr (kHalves == 2) {
      return half[1];
    } else {
      return {0, 0, 0, 0};
    }
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

// Bytes that a block has under way before its ring is full for the first time.
constexpr int kWindowBytes = 52 << 10;

// Without chunks by one thread, else by a warp.
template <typename W, bool kGate, bool kChunked>
__device__ inline void Produce(const LinearSkinnyParams& p, Chunks chunks, Share share,
                               unsigned char* slots, SlotBarriers* barriers) {
  const int slot_bytes = SlotBytes(RowBytes(p.rows.k, chunks));
  const int window = max(1, kWindowBytes / slot_bytes);
  RingPosition ring;
  int tile = share.first;
  int chunk = 0;
  const auto fill_next = [&] {
    FillSlot<W, kGate, kChunked>(p, chunks, tile, share.end, chunk, slots + ring.slot * slot_bytes,
                                 &barriers[ring.slot].full);
    ring.Advance(p.slots);
    if (!kChunked || ++chunk == chunks.count) {
      chunk = 0;
      ++tile;
    }
  };
#pragma unroll 1
  for (int i = 0; i < p.slots && tile < share.end; ++i) {
    if (i >= window) barriers[i - window].full.Wait(0);
    fill_next();
  }
  WaitForPreviousKernel();
  AllowNextKernel();
#pragma unroll 1
  while (tile < share.end) {
    barriers[ring.slot].empty.Wait(ring.parity ^ 1);
    fill_next();
  }
}

// kRows: the most rows of x. kHeld: a slice has at most kHeldSteps steps, all of them whole, and
// its part of n stays in registers.
template <typename W, int kRows, int kTiles, bool kGate, bool kHeld>
__global__ void __launch_bounds__(kSkinnyThreads, kRows > kGroupRows ? 1 : 2)
    SkinnyKernel(const __grid_constant__ LinearSkinnyParams p) {
  constexpr int kColumns = kTiles * Columns<kGate>::kOfTile;  // Of a group.
  constexpr int kPitch = PartialPitch(kTiles);
  constexpr bool kHigh = kRows > kGroupRows;
  extern __shared__ __align__(128) unsigned char shared[];
  // Touches the lines of the parameters together, so that their misses overlap.
  asm volatile("" ::"l"(p.rows.x), "l"(p.weight), "r"(p.tiles_each), "r"(p.slots));

  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int k = p.rows.k;
  const int rows = p.rows.rows;
  const int per_warp = StepsPerWarp(k);
  const Chunks chunks = kHeld ? Chunks{1, per_warp} : ChunksOf(per_warp);
  const int row_bytes = RowBytes(k, chunks);
  const int slot_bytes = SlotBytes(row_bytes);
  const Layout layout =
      MakeLayout(slot_bytes, p.slots, kTiles, k, rows, p.rows.norm_weight != nullptr);
  SlotBarriers* const barriers = reinterpret_cast<SlotBarriers*>(shared + layout.barriers);
  const Share share = Share::OfBlock(p.tiles_each, p.tiles_more);

  if (warp == kWarps) {
    if (lane < p.slots) {
      barriers[lane].full.Init();
      InitForConsumers(barriers[lane].empty);
    }
    ArrivalBarrier::FenceInit();
    __syncwarp();
    ArriveSetUp();
    if (kHeld || chunks.count == 1) {
      if (lane == 0) Produce<W, kGate, false>(p, chunks, share, shared, barriers);
    } else {
      Produce<W, kGate, true>(p, chunks, share, shared, barriers);
    }
    return;
  }

  const int g = lane / 4;
  const int t = lane % 4;
  const Slice slice = SliceOf(k, warp);
  const int n_pitch = OperandPitch(k);
  unsigned char* const n = shared + layout.rows + warp * rows * n_pitch;
  const unsigned char* const lane_n = n + g * n_pitch + t * kPiece * 2;
  float* const partials = reinterpret_cast<float*>(shared + layout.partials);

  // This thread's elements of y in a group; their old values are on their way while the product
  // runs.
  constexpr int kOutputs = (kRows * kColumns + kThreads - 1) / kThreads;
  float old[kOutputs];
  const auto load_old = [&](const Columns<kGate>& group) {
    if constexpr (!kGate) {
      if (!p.accumulate) return;
#pragma unroll
      for (int i = 0; i < kOutputs; ++i) {
        const int index = i * kThreads + static_cast<int>(threadIdx.x);
        const int row = index / kColumns;
        const int column = index % kColumns;
        if (row < rows && column < group.count) {
          old[i] =
              __ldcg(static_cast<const float*>(p.y) + row * p.y_row_stride + group.first + column);
        }
      }
    }
  };

  const float4 norm_weight = LoadNormWeight(p.rows, slice);
  WaitForPreviousKernel();
  AllowNextKernel();
  load_old(Columns<kGate>(p, share.first, kTiles, share.end));
  PrepareRows<W, kRows>(p.rows, 0, slice, norm_weight,
                        reinterpret_cast<NormScratch*>(shared + layout.scratch),
                        [&](int row, int element, uint2 values) {
                          *reinterpret_cast<uint2*>(n + row * n_pitch + element * 2) = values;
                        });
  __syncwarp();
  Operand<kRows> held[kHeld ? kHeldSteps : 1];
  if constexpr (kHeld) {
#pragma unroll
    for (int s = 0; s < kHeldSteps; ++s) {
      if (s < slice.count) held[s].Load(lane_n + s * kStep * 2, n_pitch, rows - g);
    }
  }

  // A consumer's part of column g of a tile in a slot: even columns lie in the first run.
  const unsigned char* const own = shared + g % 2 * RunBytes(row_bytes) + g / 2 * row_bytes +
                                   warp * chunks.steps * kStep * 2 + t * kPiece * 2;
  // The step of this warp of which only a part lies within K: what follows it in the slot is not
  // this row's.
  const int partial_step =
      k % kStep != 0 && slice.first + slice.count == (k + kStep - 1) / kStep ? slice.count - 1 : -1;
  const bool lane_inside = t * kPiece < k % kStep;
  RingPosition ring;
  WaitForSetUp();
#pragma unroll 1
  for (int tile0 = share.first; tile0 < share.end; tile0 += kTiles) {
    const Columns<kGate> group(p, tile0, kTiles, share.end);
    float sum[kTiles][2][4];
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sum[tile][0][i] = sum[tile][1][i] = 0.0f;
    }
    // Chunk by chunk, tile by tile.
    const auto multiply_chunk = [&](int first, auto&& operand) {
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        if (tile0 + tile >= share.end) break;
        const unsigned char* const slot = own + ring.slot * slot_bytes;
        const int steps = min(chunks.steps, slice.count - first);
        barriers[ring.slot].full.Wait(ring.parity);
        const auto multiply = [&](int s) {
          uint4 b = *reinterpret_cast<const uint4*>(slot + s * kStep * 2);
          if (!kHeld && first + s == partial_step && !lane_inside) b = {0, 0, 0, 0};
          const Operand<kRows> a = operand(s);
          MultiplyStep<W>(sum[tile][0], sum[tile][1], a.low(), a.high(), b);
        };
        if constexpr (kHeld) {
#pragma unroll
          for (int s = 0; s < kHeldSteps; ++s) {
            if (s < steps) multiply(s);
          }
        } else {
#pragma unroll 4
          for (int s = 0; s < steps; ++s) multiply(s);
        }
        __syncwarp();
        if (lane == 0) barriers[ring.slot].empty.Arrive();
        ring.Advance(p.slots);
      }
    };
    if constexpr (kHeld) {
      multiply_chunk(0, [&](int s) { return held[s]; });
    } else {
      static_assert(kTiles == 1);  // A tile comes with all its chunks.
      for (int first = 0; first < per_warp; first += chunks.steps) {
        multiply_chunk(first, [&](int s) {
          Operand<kRows> a;
          a.Load(lane_n + (first + s) * kStep * 2, n_pitch, rows - g);
          return a;
        });
      }
    }

    if (tile0 != share.first) SyncConsumers();  // All have read the sums of the group before.
    float* const mine = partials + (warp * rows + g) * kPitch + 2 * t;
    if (g < rows) {
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        const float(&s)[2][4] = sum[tile];
        *reinterpret_cast<float2*>(mine + tile * kGroupRows) = {s[0][0] + s[1][0],
                                                                s[0][1] + s[1][1]};
      }
    }
    if (kHigh && g + kGroupRows < rows) {
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        const float(&s)[2][4] = sum[tile];
        *reinterpret_cast<float2*>(mine + kGroupRows * kPitch + tile * kGroupRows) = {
            s[0][2] + s[1][2], s[0][3] + s[1][3]};
      }
    }
    SyncConsumers();
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) {
      const int index = i * kThreads + static_cast<int>(threadIdx.x);
      const int row = index / kColumns;
      const int column = index % kColumns;
      if (row < rows && column < group.count) {
        const float* const from =
            partials + row * kPitch + (kGate ? 2 * column : Columns<kGate>::Place(column));
        float value;
        if constexpr (kGate) {
          float2 pair = {0.0f, 0.0f};
#pragma unroll
          for (int w = 0; w < kWarps; ++w) {
            const float2 part = *reinterpret_cast<const float2*>(from + w * rows * kPitch);
            pair.x += part.x;
            pair.y += part.y;
          }
          value = Silu(pair.x) * pair.y;
        } else {
          value = 0.0f;
#pragma unroll
          for (int w = 0; w < kWarps; ++w) value += from[w * rows * kPitch];
          if (p.accumulate) value = old[i] + value;
        }
        const int64_t at = row * p.y_row_stride + group.first + column;
        if (p.y_is_f32) {
          static_cast<float*>(p.y)[at] = value;
        } else {
          static_cast<W*>(p.y)[at] = Narrow<W>(value);
        }
      }
    }
    if (tile0 + kTiles < share.end) load_old(Columns<kGate>(p, tile0 + kTiles, kTiles, share.end));
  }
}

bool IsHeld(int k) { return StepsPerWarp(k) <= kHeldSteps && k % kStep == 0; }

// Tiles of a group, blocks, slots of their rings.
struct Division {
  int tiles;
  int grid;
  int slots;
  int tiles_each;
  int tiles_more;
};

int SlotsThatFit(int tiles, int k, int rows, bool norm, int shared_bytes) {
  const int others = MakeLayout(0, 0, tiles, k, rows, norm).bytes;
  const int slot = SlotBytesFor(k) + static_cast<int>(sizeof(SlotBarriers));
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
  division.tiles = IsHeld(p.rows.k) && most >= 2 ? 4 : 1;
  const int items = most * ChunksOf(StepsPerWarp(p.rows.k)).count;
  division.slots = std::min(items, slots());
  return division;
}

using Kernel = void (*)(LinearSkinnyParams);

template <typename W, int kRows>
Kernel KernelForRows(bool held, int tiles, bool gate) {
  if (!held) {
    return gate ? SkinnyKernel<W, kRows, 1, true, false> : SkinnyKernel<W, kRows, 1, false, false>;
  }
  if (tiles == 1) {
    return gate ? SkinnyKernel<W, kRows, 1, true, true> : SkinnyKernel<W, kRows, 1, false, true>;
  }
  return gate ? SkinnyKernel<W, kRows, 4, true, true> : SkinnyKernel<W, kRows, 4, false, true>;
}

template <typename W>
Kernel KernelFor(int rows, int k, int tiles, bool gate) {
  const bool held = IsHeld(k);
  return rows == 1            ? KernelForRows<W, 1>(held, tiles, gate)
         : rows <= kGroupRows ? KernelForRows<W, kGroupRows>(held, tiles, gate)
                              : KernelForRows<W, 2 * kGroupRows>(held, tiles, gate);
}

template <typename W>
cudaError_t Prepare(int k, int shared_bytes) {
  for (const int rows : {1, kGroupRows, 2 * kGroupRows}) {
    for (const int tiles : {1, 4}) {
      for (const bool gate : {false, true}) {
        const Kernel kernel = KernelFor<W>(rows, k, tiles, gate);
        cudaError_t error =
            cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
        if (error != cudaSuccess) return error;
        // A multiprocessor changes its division only when idle: kernels that are to overlap must
        // want the same one.
        error = cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                     cudaSharedmemCarveoutMaxShared);
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
  const Layout layout = MakeLayout(SlotBytesFor(p.rows.k), division.slots, division.tiles, p.rows.k,
                                   p.rows.rows, p.rows.norm_weight != nullptr);
  return LaunchMaybeEarly(p.early_start, dim3(static_cast<unsigned>(division.grid)),
                          dim3(kSkinnyThreads), static_cast<size_t>(layout.bytes), stream,
                          KernelFor<W>(p.rows.rows, p.rows.k, division.tiles, p.silu), p);
}

}  // namespace
}  // namespace linear

int64_t LinearSkinnyRows(int64_t k, int shared_bytes) {
  for (int64_t rows = kLinearSkinnyRows; rows > 0; rows /= 2) {
    const int slots =
        linear::SlotsThatFit(4, static_cast<int>(k), static_cast<int>(rows), true, shared_bytes);
    if (slots >= 1) return rows;
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
