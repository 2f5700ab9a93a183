// The kernel of linear_argmax.cu for many rows, or for rows too long to stay in shared memory.
//
// The rows of n lie along M and the weight along N, so that a thread's sums belong to few rows and
// many outputs, and what it knows of them fits into registers. Tiles of both stream through one
// ring; the two blocks of a cluster multiply different tiles of the weight by the same n, and each
// fetches half of n for both.
#ifndef KERNELS_CUDA_LINEAR_ARGMAX_MANY_CUH_
#define KERNELS_CUDA_LINEAR_ARGMAX_MANY_CUH_

#include "kernels/cuda/linear_argmax.cuh"
#include "kernels/cuda/wgmma.cuh"

namespace gdn::cuda::argmax {

constexpr int kManyGroups = 2;  // Of four warps, each with its own rows of n.
constexpr int kManyConsumers = 128 * kManyGroups;
// The warp that fetches comes with three that rest: registers are handed over in groups of four.
constexpr int kManyThreads = kManyConsumers + 128;
constexpr int kConsumerRegisters = 240;
constexpr int kFetcherRegisters = 24;
constexpr int kPair = 2;  // Blocks of a cluster.
constexpr int kMostManyRows = 256;
constexpr int kMaxManySlots = 6;
constexpr int kManySharedBytes = 225 * 1024;

// kBlocks: blocks of 64 rows of n that a group has.
template <int kBlocks>
struct ManyShape {
  // Rows of the weight of a tile, the N of the instruction. With many rows of n what a
  // multiprocessor takes in bounds the product, and larger tiles take in less.
  static constexpr int kColumns = kBlocks == 1 ? 128 : 192;
  static constexpr int kRows = 64 * kBlocks * kManyGroups;
  static constexpr int kWeightBytes = kColumns * kStage * 2;
  static constexpr int kHalfBytes = kRows / kPair * kStage * 2;
  static constexpr int kSlotBytes = kWeightBytes + kPair * kHalfBytes;
  static constexpr int kSlots = (kManySharedBytes - kAlignment) / kSlotBytes < kMaxManySlots
                                    ? (kManySharedBytes - kAlignment) / kSlotBytes
                                    : kMaxManySlots;
};

struct ManyBarriers {
  ArrivalBarrier full[kMaxManySlots];
  ArrivalBarrier empty[kMaxManySlots];
};

// What a thread has seen of one row of n.
struct SeenOfRow {
  float max = -INFINITY;
  float sum = 0.0f;
  int32_t id = 0x7fffffff;

  // Columns 8 j + i of a tile, from `column` on, are v[4 j + i]; kCut: only those before `outputs`
  // count.
  template <int kColumns, bool kCut>
  __device__ void Add(const float* v, int column, int outputs) {
    const auto at = [&](int j, int i) {
      return kCut && column + 8 * j + i >= outputs ? -INFINITY : v[4 * j + i];
    };
    float larger = -INFINITY;
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) larger = fmaxf(larger, fmaxf(at(j, 0), at(j, 1)));
    const float before = max;
    if (larger > before) {
      max = larger;
#pragma unroll
      for (int j = kColumns / 8 - 1; j >= 0; --j) {
        if (at(j, 1) == larger) id = column + 8 * j + 1;
        if (at(j, 0) == larger) id = column + 8 * j;
      }
    }
    // NaN where max is +inf. The difference comes first: it is exactly 0 for the largest, and
    // finite logits of any size stay apart from a rounded product's error.
    constexpr float kLog2E = 1.4426950408889634f;
    const float base = max == -INFINITY ? 0.0f : max;
    float added = 0.0f;
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) {
      added += Exp2((at(j, 0) - base) * kLog2E) + Exp2((at(j, 1) - base) * kLog2E);
    }
    sum = sum * Exp(before, max) + added;
  }
};

template <int kBlocks>
__device__ inline void FeedMany(const LinearArgmaxParams& p, unsigned char* slots,
                                ManyBarriers& barriers, int rounds, int rank) {
  using Shape = ManyShape<kBlocks>;
  const int loads = rounds * p.stages;
  const auto slot_at = [&](int slot) { return slots + slot * Shape::kSlotBytes; };
  const auto load_weight = [&](int i, int slot) {
    const int tile = static_cast<int>(blockIdx.x) + i / p.stages * static_cast<int>(gridDim.x);
    barriers.full[slot].ArriveExpecting(Shape::kSlotBytes);
    TensorLoad(slot_at(slot), p.weight, i % p.stages * kStage, tile * Shape::kColumns,
               &barriers.full[slot]);
  };
  const auto load_half = [&](int i, int slot) {
    TensorLoad(slot_at(slot) + Shape::kWeightBytes + rank * Shape::kHalfBytes, p.n,
               i % p.stages * kStage, rank * (Shape::kRows / kPair), &barriers.full[slot],
               (1 << kPair) - 1);
  };
  // The weight needs nothing of the kernel before this one.
  const int early = min(loads, p.w_slots);
  for (int i = 0; i < early; ++i) load_weight(i, i);
  WaitForPreviousKernel();
  AllowNextKernel();
  for (int i = 0; i < early; ++i) load_half(i, i);
  int slot = 0;
  uint32_t parity = 0;
  for (int i = early; i < loads; ++i) {
    barriers.empty[slot].Wait(parity);
    load_weight(i, slot);
    load_half(i, slot);
    if (++slot == p.w_slots) {
      slot = 0;
      parity ^= 1;
    }
  }
}

template <typename W, int kBlocks>
__global__ void __launch_bounds__(kManyThreads, 1)
    ArgmaxManyKernel(const __grid_constant__ LinearArgmaxParams p) {
  using Shape = ManyShape<kBlocks>;
  extern __shared__ unsigned char dynamic[];
  __shared__ ManyBarriers barriers;
  unsigned char* const slots =
      dynamic + (-static_cast<uint32_t>(__cvta_generic_to_shared(dynamic)) % kAlignment);
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int rank = static_cast<int>(ClusterRank());
  // The same for both blocks of a cluster, whose tiles are neighbours.
  const int tiles = (p.outputs + Shape::kColumns - 1) / Shape::kColumns;
  const int first_of_pair = static_cast<int>(blockIdx.x) - rank;
  const int rounds =
      first_of_pair < tiles ? (tiles - 1 - first_of_pair) / static_cast<int>(gridDim.x) + 1 : 0;
  if (threadIdx.x == 0) {
    for (int i = 0; i < p.w_slots; ++i) {
      barriers.full[i].Init();
      barriers.empty[i].Init(kPair * kManyConsumers / 32);
    }
    ArrivalBarrier::FenceInit();
  }
  __syncthreads();
  ClusterArrive();
  ClusterWait();

  if (warp >= kManyConsumers / 32) {
    ShrinkRegisters<kFetcherRegisters>();
    if (warp == kManyConsumers / 32 && lane == 0) {
      PrefetchTensorMap(p.weight);
      PrefetchTensorMap(p.n);
      FeedMany<kBlocks>(p, slots, barriers, rounds, rank);
    }
    __syncwarp();
  } else {
    GrowRegisters<kConsumerRegisters>();
    const int group = warp / 4;
    SeenOfRow seen[2 * kBlocks];
    int slot = 0;
    uint32_t parity = 0;
    int tile = static_cast<int>(blockIdx.x);
    for (int round = 0; round < rounds; ++round, tile += static_cast<int>(gridDim.x)) {
      float d[kBlocks][Shape::kColumns / 2] = {};
      int last = -1;
      // Both blocks' slots must be free before either fetches its half of n.
      const auto release = [&](int freed) {
        if (lane < kPair) ArriveAt(static_cast<uint32_t>(lane), &barriers.empty[freed]);
      };
#pragma unroll 1
      for (int stage = 0; stage < p.stages; ++stage) {
        barriers.full[slot].Wait(parity);
        unsigned char* const at = slots + slot * Shape::kSlotBytes;
        const uint64_t b = PanelDescriptor(SharedAddress(at));
        ProductFence();
#pragma unroll
        for (int step = 0; step < kStage / 16; ++step) {
#pragma unroll
          for (int block = 0; block < kBlocks; ++block) {
            const uint64_t a = PanelDescriptor(SharedAddress(
                at + Shape::kWeightBytes + (group * kBlocks + block) * 64 * kStage * 2));
            Wgmma<W, Shape::kColumns>::Multiply(d[block], a + kNextColumns * step,
                                                b + kNextColumns * step);
          }
        }
        CommitProducts();
        WaitForProducts<1>();  // The stage before this one has been read.
        if (last >= 0) release(last);
        last = slot;
        if (++slot == p.w_slots) {
          slot = 0;
          parity ^= 1;
        }
      }
      WaitForProducts<0>();
      release(last);
      const int column = tile * Shape::kColumns + 2 * (lane % 4);
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          SeenOfRow& row = seen[2 * block + half];
          if ((tile + 1) * Shape::kColumns <= p.outputs) {
            row.template Add<Shape::kColumns, false>(d[block] + 2 * half, column, p.outputs);
          } else {
            row.template Add<Shape::kColumns, true>(d[block] + 2 * half, column, p.outputs);
          }
        }
      }
    }
    // A block without tiles has waited for nothing, and the workspace may still be in use.
    WaitForPreviousKernel();
    // The other columns of a row are with the neighbouring lanes.
#pragma unroll
    for (int i = 0; i < 2 * kBlocks; ++i) {
      ArgmaxPart part = {seen[i].max, seen[i].sum, seen[i].id, 0};
      part = JoinedWithLane(JoinedWithLane(part, 1), 2);
      const int row = (group * kBlocks + i / 2) * 64 + 16 * (warp % 4) + 8 * (i % 2) + lane / 4;
      if (lane % 4 == 0 && row < p.rows) {
        p.parts[int64_t{row} * gridDim.x + blockIdx.x] = part;
      }
    }
  }
  // No block leaves while the other may still reach into its memory.
  ClusterArrive();
  ClusterWait();
}

}  // namespace gdn::cuda::argmax

#endif  // KERNELS_CUDA_LINEAR_ARGMAX_MANY_CUH_
