// The stream of weights through shared memory: one warp asks for them, eight consume them.
//
// The ring's unit is a tile of eight weight rows, over one chunk of K: the whole of it, or an equal
// share of each consumer's slice. A tile is two runs of four consecutive rows of the weight, with a
// gate those of gate and up; its even columns come from the first run, its odd ones from the
// second. Without chunks each run is one copy, which matters: copies are issued one after the
// other. And as the second run begins 64 bytes modulo 128 behind the first, the eight lanes that
// one pass of the memory serves, which read 64 bytes of an even and an odd column, meet no bank
// twice. With chunks a row in a slot holds the consumers' shares one after the other.
#ifndef KERNELS_CUDA_LINEAR_RING_CUH_
#define KERNELS_CUDA_LINEAR_RING_CUH_

#include <algorithm>

#include "kernels/cuda/bulk_copy.cuh"
#include "kernels/cuda/linear_rows.cuh"
#include "kernels/cuda/ring_position.cuh"

namespace gdn::cuda::linear {

constexpr int kMaxSlots = 16;
constexpr int kMaxChunkSteps = 16;

// How a slice of `per_warp` steps is divided.
struct Chunks {
  int count;
  int steps;
};
__host__ __device__ inline Chunks ChunksOf(int per_warp) {
  const int count = (per_warp + kMaxChunkSteps - 1) / kMaxChunkSteps;
  return {count, (per_warp + count - 1) / count};
}

// Bytes of a row in a slot, of a run, of a slot.
__host__ __device__ inline int RowBytes(int k, Chunks chunks) {
  return chunks.count == 1 ? k * 2 : kWarps * chunks.steps * kStep * 2;
}
constexpr int kRunRows = kGroupRows / 2;
__host__ __device__ inline int RunBytes(int row_bytes) {
  return (kRunRows * row_bytes + 127) / 128 * 128 + 64;
}
__host__ __device__ inline int SlotBytes(int row_bytes) {
  // What a lane reads of the last row's last step may lie behind it, but not behind the slot.
  return 2 * RunBytes(row_bytes);
}

// A block's share of the tiles: `each`, and one more for the first `more` blocks.
struct Share {
  int first;
  int end;

  __device__ static Share OfBlock(int each, int more) {
    const int block = static_cast<int>(blockIdx.x);
    const int first = block * each + min(block, more);
    return {first, first + each + (block < more ? 1 : 0)};
  }
};

// The barriers of a slot: filled, and emptied by every consumer.
struct SlotBarriers {
  ArrivalBarrier full;
  ArrivalBarrier empty;
};

__device__ inline void InitForConsumers(ArrivalBarrier& barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier.Address()), "n"(kWarps)
               : "memory");
#endif
}

// The columns of y of some tiles, and the rows of a tile's runs.
template <bool kGate>
struct Columns {
  static constexpr int kOfTile = kGate ? kGroupRows / 2 : kGroupRows;

  int first;
  int count;

  // Of the tiles [tile, tile + tiles) below `end`.
  __device__ Columns(const LinearSkinnyParams& p, int tile, int tiles, int end)
      : first(tile * kOfTile),
        count(min(min(tile + tiles, end) * kOfTile, p.outputs) - tile * kOfTile) {}
  __device__ int RunFirst(const LinearSkinnyParams& p, int run) const {
    return first + run * (kGate ? p.outputs : kRunRows);
  }
  __device__ int RunCount(int run) const {
    return kGate ? count : min(kRunRows, max(0, count - run * kRunRows));
  }
  // Where the tiles hold a column, counted from their first; without a gate.
  __device__ static int Place(int column) {
    return column / kGroupRows * kGroupRows + column % kRunRows * 2 +
           column % kGroupRows / kRunRows;
  }
};

// Fills a slot with chunk `chunk` of a tile below `end`: by one thread, or with chunks by one warp.
template <typename W, bool kGate, bool kChunked>
__device__ inline void FillSlot(const LinearSkinnyParams& p, Chunks chunks, int tile, int end,
                                [[maybe_unused]] int chunk, unsigned char* slot,
                                ArrivalBarrier* full) {
  const int k = p.rows.k;
  const Columns<kGate> columns(p, tile, 1, end);
  const int row_bytes = RowBytes(k, chunks);
  const int run_bytes = RunBytes(row_bytes);
  const W* const weight = static_cast<const W*>(p.weight);
  if constexpr (!kChunked) {
    const uint32_t first = static_cast<uint32_t>(columns.RunCount(0) * row_bytes);
    const uint32_t second = static_cast<uint32_t>(columns.RunCount(1) * row_bytes);
    full->ArriveExpecting(first + second);
    BulkLoad(slot, weight + int64_t{columns.RunFirst(p, 0)} * k, first, full);
    if (second > 0) {
      BulkLoad(slot + run_bytes, weight + int64_t{columns.RunFirst(p, 1)} * k, second, full);
    }
  } else {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int per_warp = StepsPerWarp(k);
    const int steps = min(chunks.steps, per_warp - chunk * chunks.steps);
    const auto first = [&](int w) { return (w * per_warp + chunk * chunks.steps) * kStep; };
    const auto count = [&](int w) { return max(0, min(steps * kStep, k - first(w))); };
    int elements = 0;
    for (int w = 0; w < kWarps; ++w) elements += count(w);
    const int rows = columns.RunCount(0) + columns.RunCount(1);
    if (lane == 0) full->ArriveExpecting(static_cast<uint32_t>(rows * elements) * 2);
    __syncwarp();
    const int run = lane / kRunRows;
    const int row = lane % kRunRows;
    if (run > 1 || row >= columns.RunCount(run)) return;
    const W* const from = weight + int64_t{columns.RunFirst(p, run) + row} * k;
    for (int w = 0; w < kWarps; ++w) {
      if (count(w) == 0) continue;
      BulkLoad(slot + run * run_bytes + row * row_bytes + w * chunks.steps * kStep * 2,
               from + first(w), static_cast<uint32_t>(count(w)) * 2, full);
    }
  }
}

}  // namespace gdn::cuda::linear

#endif  // KERNELS_CUDA_LINEAR_RING_CUH_
