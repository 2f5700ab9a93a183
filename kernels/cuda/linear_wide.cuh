// The kernel of the wide product (linear_wide.cu).
#ifndef KERNELS_CUDA_LINEAR_WIDE_CUH_
#define KERNELS_CUDA_LINEAR_WIDE_CUH_

#include "kernels/cuda/linear_wide_store.cuh"
#include "kernels/cuda/ring_position.cuh"
#include "kernels/cuda/wgmma_panels.cuh"

namespace gdn::cuda::linear {

template <bool kGate, int kGroups, bool kAlone>
struct WideWeightFeed {
  using Block = WideBlock<kGroups>;
  const LinearWideParams& p;
  const WidePlace& place;
  unsigned char* slots;
  WideBarriers& barriers;
  int first_stage;
  int count;

  // Each of the blocks that share rows of the weight fetches an equal part of them for all. With a
  // gate eight rows of gate and eight of up take turns.
  __device__ int Part() const {
    return static_cast<int>(place.y) * (Block::kColumns / static_cast<int>(place.size_y));
  }
  __device__ int Row() const { return static_cast<int>(blockIdx.x) * Block::kColumns + Part(); }
  __device__ void Load(int stage, int slot) const {
    barriers.w_full[slot].ArriveExpecting(Block::kWeightBytes);
    unsigned char* const to = slots + slot * Block::kWeightBytes + Part() * kWideStageBytes;
    const int k = (first_stage + stage) * kWideStage;
    ArrivalBarrier* const full = &barriers.w_full[slot];
    if constexpr (kGate && kAlone) {
      TensorLoad(to, p.weight, k, 0, 0, Row() / 16, full);
    } else if constexpr (kGate) {
      TensorLoad(to, p.weight, k, 0, 0, Row() / 16, full, place.SameWeight());
    } else if constexpr (kAlone) {
      TensorLoad(to, p.weight, k, Row(), full);
    } else {
      TensorLoad(to, p.weight, k, Row(), full, place.SameWeight());
    }
  }
  __device__ void Prefetch(int stage) const {
    const int k = (first_stage + stage) * kWideStage;
    if constexpr (kGate) {
      TensorPrefetch(p.weight, k, 0, 0, Row() / 16);
    } else {
      TensorPrefetch(p.weight, k, Row());
    }
  }
  // The stages that fit into the ring need nothing of the kernel before this one; the others come
  // as far as the L2 meanwhile.
  __device__ void LoadFirst() const {
    for (int i = 0; i < min(count, p.w_slots); ++i) Load(i, i);
    for (int i = p.w_slots; i < count; ++i) Prefetch(i);
  }
  __device__ void LoadOthers() const {
    RingPosition at;
    for (int i = p.w_slots; i < count; ++i) {
      barriers.w_empty[at.slot].Wait(at.parity);
      Load(i, at.slot);
      at.Advance(p.w_slots);
    }
  }
};

template <int kRows, bool kAlone>
__device__ inline void FeedN(const LinearWideParams& p, const WidePlace& place,
                             unsigned char* slots, WideBarriers& barriers, int first_stage,
                             int count) {
  constexpr int kSlotBytes = kRows * kWideStageBytes;
  const int part_rows = kRows / static_cast<int>(place.size_x);
  const int part = static_cast<int>(place.x) * part_rows;
  const int row = static_cast<int>(blockIdx.y) * kRows + part;
  RingPosition at;
  for (int i = 0; i < count; ++i) {
    if (i >= p.n_slots) barriers.n_empty[at.slot].Wait(at.parity ^ 1);
    ArrivalBarrier* const full = &barriers.n_full[at.slot];
    full->ArriveExpecting(kSlotBytes);
    unsigned char* const to = slots + at.slot * kSlotBytes + part * kWideStageBytes;
    const int k = (first_stage + i) * kWideStage;
    if constexpr (kAlone) {
      TensorLoad(to, p.n, k, row, full);
    } else {
      TensorLoad(to, p.n, k, row, full, place.SameN());
    }
    at.Advance(p.n_slots);
  }
}

// The norm's factors of the block's rows of n, by kThreads threads from `thread` 0 on.
template <int kRows, int kThreads>
__device__ inline void FindFactors(const LinearWideParams& p, int thread, float* factors) {
  const int row0 = static_cast<int>(blockIdx.y) * kRows;
  for (int row = thread; row < kRows; row += kThreads) {
    if (row0 + row >= p.rows) break;
    const float* const from = p.squares + row0 + row;
    constexpr int kTogether = 32;  // Loads under way.
    float sum = 0.0f;
    for (int first = 0; first < p.square_groups; first += kTogether) {
      float square[kTogether];
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        square[i] = 0.0f;
        if (first + i < p.square_groups) square[i] = __ldcg(from + int64_t{first + i} * p.rows);
      }
#pragma unroll
      for (int i = 0; i < kTogether; ++i) sum += square[i];
    }
    factors[row] = rsqrtf(fmaf(sum, p.inverse_k, p.norm_eps));
  }
}
template <int kRows>
__device__ inline void ApplyFactors(const float* factors, float (&d)[kRows / 2]) {
  const float2* const mine = reinterpret_cast<const float2*>(factors) + threadIdx.x % 4;
#pragma unroll
  for (int j = 0; j < kRows / 8; ++j) {
    const float2 f = mine[4 * j];
    d[4 * j] *= f.x;
    d[4 * j + 1] *= f.y;
    d[4 * j + 2] *= f.x;
    d[4 * j + 3] *= f.y;
  }
}

template <typename W, int kRows, bool kGate, int kSplits, int kGroups>
__global__ void __launch_bounds__(WideBlock<kGroups>::kThreads,
                                  WideBlock<kGroups>::kPerMultiprocessor)
    WideKernel(const __grid_constant__ LinearWideParams p) {
  using Block = WideBlock<kGroups>;
  extern __shared__ unsigned char dynamic[];
  __shared__ WideBarriers barriers;
  __shared__ alignas(8) float factors[kRows];
  unsigned char* const shared =
      dynamic + (-static_cast<uint32_t>(__cvta_generic_to_shared(dynamic)) % kWideAlignment);
  unsigned char* const w_slots = shared;
  unsigned char* const n_slots = shared + p.w_slots * Block::kWeightBytes;
  constexpr int kNBytes = kRows * kWideStageBytes;
  constexpr bool kMeets = SumsInQuads(kSplits);
  constexpr bool kAlone = kCopiesAlone<kRows, kSplits, kGroups>;

  const WidePlace place = WidePlace::Here();
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int first_stage = static_cast<int>(place.z) * p.stages_per_split;
  const int count = max(0, min(p.stages_per_split, p.stages - first_stage));

  if (warp == Block::kFetchesWeight && lane == 0) PrefetchTensorMap(p.weight);
  const auto init = [&](int slot) {
    constexpr uint32_t kConsumerWarps = Block::kConsumers / 32;
    barriers.w_full[slot].Init();
    barriers.n_full[slot].Init();
    barriers.w_empty[slot].Init(kConsumerWarps * place.size_y);
    barriers.n_empty[slot].Init(kConsumerWarps * place.size_x);
  };
  if constexpr (kAlone) {
    static_assert(kMaxWideSlots <= 32);
    if (threadIdx.x < kMaxWideSlots) {
      init(static_cast<int>(threadIdx.x));
      if (threadIdx.x == 0) barriers.sums.Init();
      ArrivalBarrier::FenceInit();
    }
  } else if (threadIdx.x == 0) {
    for (int i = 0; i < kMaxWideSlots; ++i) init(i);
    barriers.sums.Init();
    ArrivalBarrier::FenceInit();
  }
  if constexpr (kSplits > 1) {
    // What the owners of rows get: a block's sums from each other block.
    constexpr int kBytes = SumsInQuads(kSplits)
                               ? QuadSums<kRows, kSplits, kGroups>::kBytes
                               : SumsLayout<kRows, kGate, kSplits, kGroups>::kFloats * 4;
    if (threadIdx.x == 0) barriers.sums.ArriveExpecting((kSplits - 1) * kBytes);
  }
  __syncthreads();
  constexpr bool kClustered = !kAlone || kSplits > 1;
  if (kClustered) ClusterArrive();

  if (warp == Block::kFetchesWeight) {
    const WideWeightFeed<kGate, kGroups, kAlone> feed = {p,        place,       w_slots,
                                                         barriers, first_stage, count};
    if (place.size_y > 1) ClusterWait();
    if (lane == 0) feed.LoadFirst();
    __syncwarp();
    if (kClustered && place.size_y == 1) ClusterWait();
    if (lane == 0) feed.LoadOthers();
    __syncwarp();
    if (kMeets) MeetCluster();
  } else if (warp == Block::kFetchesN) {
    if (lane == 0) PrefetchTensorMap(p.n);
    if (kClustered) ClusterWait();
    if (lane == 0) {
      WaitForPreviousKernel();
      AllowNextKernel();
      FeedN<kRows, kCopiesNAlone<kRows, kSplits, kGroups>>(p, place, n_slots, barriers, first_stage,
                                                           count);
    }
    __syncwarp();
    if (kMeets) MeetCluster();
  } else if (warp > Block::kFetchesN) {
    if (kClustered) ClusterWait();
    if (p.squares != nullptr) {
      WaitForPreviousKernel();
      FindFactors<kRows, 32 * Block::kFactorWarps>(
          p, static_cast<int>(threadIdx.x) - (Block::kFetchesN + 1) * 32, factors);
      __syncwarp();  // Lanes leave their rows at different turns.
      Block::FoundFactors();
    }
    if (kMeets) MeetCluster();
  } else {
    if (kClustered) ClusterWait();
    float d[kRows / 2] = {};
    RingPosition w;
    RingPosition n;
    const uint32_t group = static_cast<uint32_t>(warp / 4 * kGroupColumns * kWideStageBytes);
    // Which block this lane tells that a slot is free: the fetchers of n, then those of w.
    const bool tells_n = lane < static_cast<int>(place.size_x);
    const bool tells_w = lane >= 16 && lane - 16 < static_cast<int>(place.size_y);
    const uint32_t told = tells_n ? place.Rank(static_cast<uint32_t>(lane), place.y, place.z)
                                  : place.Rank(place.x, static_cast<uint32_t>(lane - 16), place.z);
    const auto release = [&](int stage, int w_slot, int n_slot) {
      if (tells_n && stage + p.n_slots < count) ArriveAt(told, &barriers.n_empty[n_slot]);
      if (tells_w && stage + p.w_slots < count) ArriveAt(told, &barriers.w_empty[w_slot]);
    };
    int last_w = 0;
    int last_n = 0;
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      barriers.w_full[w.slot].Wait(w.parity);
      barriers.n_full[n.slot].Wait(n.parity);
      const uint64_t a =
          PanelDescriptor(SharedAddress(w_slots + w.slot * Block::kWeightBytes) + group);
      const uint64_t b = PanelDescriptor(SharedAddress(n_slots + n.slot * kNBytes));
      ProductFence();
#pragma unroll
      for (int step = 0; step < kWideStage / 16; ++step) {
        Wgmma<W, kRows>::Multiply(d, a + kNextColumns * step, b + kNextColumns * step);
      }
      CommitProducts();
      WaitForProducts<1>();  // The stage before this one has been read.
      if (i > 0) release(i - 1, last_w, last_n);
      last_w = w.slot;
      last_n = n.slot;
      w.Advance(p.w_slots);
      n.Advance(p.n_slots);
    }
    WaitForProducts<0>();
    WaitForPreviousKernel();  // y may be what it reads or writes.
    Block::SyncConsumers();   // All have left the slots, which are used again.
    if (kMeets) MeetCluster();
    if (p.squares != nullptr) {
      Block::AwaitFactors();
      ApplyFactors<kRows>(factors, d);
    }
    if (kSplits == 1 && !p.y_is_f32) {
      StoreNarrow<W, kRows, kGate, kGroups>(p, shared, d);
    } else {
      StoreSums<W, kRows, kGate, kSplits, kGroups>(p, place, shared, &barriers.sums, d);
    }
  }
  // No block leaves while others may still reach into its memory. Without sums nothing does that it
  // has not awaited, and the blocks of 128 rows need not meet again.
  if (kSplits > 1 || kRows != 128) {
    __syncwarp();
    MeetCluster();
  }
}

}  // namespace gdn::cuda::linear

#endif  // KERNELS_CUDA_LINEAR_WIDE_CUH_
