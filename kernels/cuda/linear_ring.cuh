// The stream of weights through shared memory: one warp asks for them, eight consume them.
//
// The ring's unit is a group of up to kTiles tiles of eight weight rows, over one chunk of K: the
// whole of it, or an equal share of each consumer's slice. A row in a slot holds the consumers'
// shares one after the other, each kShare = chunk_steps * 64 bytes; without chunks that is the row
// as it lies in memory, and one copy brings it. Rows are 64 bytes modulo 128 apart: then the eight
// lanes that one pass of the memory serves, which read 64 bytes of two rows, meet no bank twice.
#ifndef KERNELS_CUDA_LINEAR_RING_CUH_
#define KERNELS_CUDA_LINEAR_RING_CUH_

#include <algorithm>

#include "kernels/cuda/bulk_copy.cuh"
#include "kernels/cuda/linear_rows.cuh"

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

__host__ __device__ inline int RowPitch(int chunk_steps) {
  return kWarps * chunk_steps * kStep * 2 + 64;
}
__host__ __device__ inline int SlotBytes(int tiles, int chunk_steps) {
  return tiles * kGroupRows * RowPitch(chunk_steps);
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

// Where a ring stands: its slot, and the parity of the slot's use.
struct RingPosition {
  int slot = 0;
  uint32_t parity = 0;

  __device__ void Advance(int slots) {
    if (++slot == slots) {
      slot = 0;
      parity ^= 1;
    }
  }
};

// The weight row behind row r of a tile. With a gate, even rows are gate rows and odd rows the up
// rows of the same columns of y. -1 beyond the last.
template <bool kGate>
__device__ inline int64_t WeightRow(int outputs, int tile, int r) {
  const int column = kGate ? tile * (kGroupRows / 2) + r / 2 : tile * kGroupRows + r;
  if (column >= outputs) return -1;
  return kGate ? column + int64_t{r % 2} * outputs : column;
}

// By one warp: fills a slot with chunk `chunk` of the tiles [tile, tile + kTiles) below `end`.
template <typename W, int kTiles, bool kGate, bool kChunked>
__device__ inline void FillSlot(const LinearSkinnyParams& p, Chunks chunks, int tile, int end,
                                int chunk, unsigned char* slot, ArrivalBarrier* full) {
  static_assert(kTiles * kGroupRows <= 32);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int k = p.rows.k;
  tile += lane / kGroupRows;
  const int64_t row = WeightRow<kGate>(p.outputs, tile, lane % kGroupRows);
  const bool mine = lane < kTiles * kGroupRows && tile < end && row >= 0;
  const int rows = __popc(__ballot_sync(kFullMask, mine));
  const W* const from = static_cast<const W*>(p.weight) + row * k;
  unsigned char* const to = slot + lane * RowPitch(chunks.steps);
  if constexpr (!kChunked) {
    const auto bytes = static_cast<uint32_t>(k) * 2;
    if (lane == 0) full->ArriveExpecting(static_cast<uint32_t>(rows) * bytes);
    __syncwarp();
    if (mine) BulkLoad(to, from, bytes, full);
  } else {
    const int per_warp = StepsPerWarp(k);
    const int steps = min(chunks.steps, per_warp - chunk * chunks.steps);
    const auto first = [&](int w) { return (w * per_warp + chunk * chunks.steps) * kStep; };
    const auto count = [&](int w) { return max(0, min(steps * kStep, k - first(w))); };
    int elements = 0;
    for (int w = 0; w < kWarps; ++w) elements += count(w);
    if (lane == 0) full->ArriveExpecting(static_cast<uint32_t>(rows * elements) * 2);
    __syncwarp();
    for (int w = 0; w < kWarps; ++w) {
      if (mine && count(w) > 0) {
        BulkLoad(to + w * chunks.steps * kStep * 2, from + first(w),
                 static_cast<uint32_t>(count(w)) * 2, full);
      }
    }
  }
}

}  // namespace gdn::cuda::linear

#endif  // KERNELS_CUDA_LINEAR_RING_CUH_
