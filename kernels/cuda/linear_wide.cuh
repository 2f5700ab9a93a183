// The kernel of the wide product (linear_wide.cu).
#ifndef KERNELS_CUDA_LINEAR_WIDE_CUH_
#define KERNELS_CUDA_LINEAR_WIDE_CUH_

#include "kernels/cuda/cluster.cuh"
#include "kernels/cuda/element.cuh"
#include "kernels/cuda/linear_rows.cuh"
#include "kernels/cuda/linear_wide.h"
#include "kernels/cuda/math.cuh"
#include "kernels/cuda/tensor_copy.cuh"
#include "kernels/cuda/wgmma_panels.cuh"

namespace gdn::cuda::linear {

constexpr int kGroupColumns = 64;  // Rows of the weight of a group: the M of the instruction.
constexpr int kWideStage = 64;     // Elements of K: 128 bytes, the swizzle's width.
constexpr int kWideStageBytes = 2 * kWideStage;
constexpr int kGroupThreads = 128;
constexpr int kMaxWideSlots = 16;
constexpr int kWideAlignment = 1024;
// Blocks of a cluster that share the sum over K.
constexpr int kMostSplits = 8;
constexpr int kFewSplits = 4;

// All threads of the cluster. Nothing needs a release: before it, what the rings held has been read
// by products that are waited for, and after it others write there.
__device__ inline void MeetCluster() {
  ClusterArrive();
  ClusterWait();
}

// A block of one group, of which two may fit into a multiprocessor, or of two groups.
template <int kGroups>
struct WideBlock {
  static constexpr int kColumns = kGroups * kGroupColumns;  // Rows of the weight.
  static constexpr int kWeightBytes = kColumns * kWideStageBytes;
  static constexpr int kConsumers = kGroups * kGroupThreads;
  static constexpr int kFetchesWeight = kConsumers / 32;  // The warp that fetches the weight,
  static constexpr int kFetchesN = kFetchesWeight + 1;    // and the one for n.
  static constexpr int kThreads = kConsumers + 2 * 32;
  static constexpr int kPerMultiprocessor = kGroups == 1 ? 2 : 1;

  __device__ static void SyncConsumers() {
    asm volatile("bar.sync 1, %0;" ::"n"(kConsumers) : "memory");
  }
};

struct LinearWideParams {
  CUtensorMap weight;
  CUtensorMap n;
  void* y;
  int64_t y_row_stride;
  int32_t rows;
  int32_t outputs;
  int32_t stages;            // Of K, whole.
  int32_t stages_per_split;  // Of each block of a cluster.
  int32_t n_slots;
  int32_t w_slots;
  int32_t sums_offset;  // Bytes: where the partial sums of the cluster meet.
  bool y_is_f32;
  bool accumulate;
  bool y_vectors;  // Rows of y begin at multiples of 16 bytes.

  // A norm in two parts (linear.h): the second of the one before, the first of the one behind.
  const float* squares;  // Or null.
  int32_t square_groups;
  float inverse_k;
  float norm_eps;
  const float* after_norm;  // Or null.
  void* after_n;
  float* after_squares;
};

// Where a ring stands: its slot, and the parity of the slot's use.
struct WidePosition {
  int slot = 0;
  uint32_t parity = 0;

  __device__ void Advance(int slots) {
    if (++slot == slots) {
      slot = 0;
      parity ^= 1;
    }
  }
};

struct WideBarriers {
  ArrivalBarrier w_full[kMaxWideSlots];
  ArrivalBarrier w_empty[kMaxWideSlots];
  ArrivalBarrier n_full[kMaxWideSlots];
  ArrivalBarrier n_empty[kMaxWideSlots];
  ArrivalBarrier sums;
};

// Where a block stands in its cluster, whose ranks count along x, then y, then z.
struct WidePlace {
  uint32_t x, y, z;  // Which rows of the weight, which rows of n, which part of K.
  uint32_t size_x, size_y, size_z;

  __device__ static WidePlace Here() {
    WidePlace p = {};
#if __CUDA_ARCH__ >= 900
    asm("mov.u32 %0, %%cluster_ctaid.x;" : "=r"(p.x));
    asm("mov.u32 %0, %%cluster_ctaid.y;" : "=r"(p.y));
    asm("mov.u32 %0, %%cluster_ctaid.z;" : "=r"(p.z));
    asm("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(p.size_x));
    asm("mov.u32 %0, %%cluster_nctaid.y;" : "=r"(p.size_y));
    asm("mov.u32 %0, %%cluster_nctaid.z;" : "=r"(p.size_z));
#endif
    return p;
  }
  __device__ uint32_t Rank(uint32_t at_x, uint32_t at_y, uint32_t at_z) const {
    return at_x + size_x * (at_y + size_y * at_z);
  }
  // The blocks that read the same rows of n, of the weight.
  __device__ uint16_t SameN() const {
    return static_cast<uint16_t>(((1u << size_x) - 1) << Rank(0, y, z));
  }
  __device__ uint16_t SameWeight() const {
    uint32_t mask = 0;
    for (uint32_t i = 0; i < size_y; ++i) mask |= 1u << Rank(x, i, z);
    return static_cast<uint16_t>(mask);
  }
};

template <bool kGate, int kGroups>
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
    if constexpr (kGate) {
      TensorLoad(to, p.weight, k, 0, 0, Row() / 16, &barriers.w_full[slot], place.SameWeight());
    } else {
      TensorLoad(to, p.weight, k, Row(), &barriers.w_full[slot], place.SameWeight());
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
    WidePosition at;
    for (int i = p.w_slots; i < count; ++i) {
      barriers.w_empty[at.slot].Wait(at.parity);
      Load(i, at.slot);
      at.Advance(p.w_slots);
    }
  }
};

template <int kRows>
__device__ inline void FeedN(const LinearWideParams& p, const WidePlace& place,
                             unsigned char* slots, WideBarriers& barriers, int first_stage,
                             int count) {
  constexpr int kSlotBytes = kRows * kWideStageBytes;
  const int part_rows = kRows / static_cast<int>(place.size_x);
  const int part = static_cast<int>(place.x) * part_rows;
  const int row = static_cast<int>(blockIdx.y) * kRows + part;
  WidePosition at;
  for (int i = 0; i < count; ++i) {
    if (i >= p.n_slots) barriers.n_empty[at.slot].Wait(at.parity ^ 1);
    barriers.n_full[at.slot].ArriveExpecting(kSlotBytes);
    TensorLoad(slots + at.slot * kSlotBytes + part * kWideStageBytes, p.n,
               (first_stage + i) * kWideStage, row, &barriers.n_full[at.slot], place.SameN());
    at.Advance(p.n_slots);
  }
}

// The norm's factors of the block's rows of n, by its consumers, before the main loop.
template <int kRows, int kConsumers>
__device__ inline void FindFactors(const LinearWideParams& p, float* factors) {
  const int row0 = static_cast<int>(blockIdx.y) * kRows;
  for (int row = static_cast<int>(threadIdx.x); row < kRows; row += kConsumers) {
    if (row0 + row >= p.rows) break;
    const float* const from = p.squares + row0 + row;
    constexpr int kTogether = 16;  // Loads under way.
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

// y in the weight's type, through shared memory, so that it is written in whole lines.
template <typename W, int kRows, bool kGate, int kGroups>
__device__ inline void StoreNarrow(const LinearWideParams& p, unsigned char* shared,
                                   const float (&d)[kRows / 2]) {
  using Block = WideBlock<kGroups>;
  constexpr int kColumns = kGate ? Block::kColumns / 2 : Block::kColumns;
  constexpr int kVector = 16 / sizeof(W);
  constexpr int kPitch = kColumns + kVector;  // Moves each row to other banks.
  const int tid = static_cast<int>(threadIdx.x);
  const int lane = tid % 32;
  const int warp = tid / 32;
  W* const staged = reinterpret_cast<W*>(shared);
#pragma unroll
  for (int j = 0; j < kRows / 8; ++j) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      W* const row = staged + (8 * j + 2 * (lane % 4) + i) * kPitch;
      if constexpr (kGate) {
        row[8 * warp + lane / 4] = Narrow<W>(Silu(d[4 * j + i]) * d[4 * j + 2 + i]);
      } else {
        row[16 * warp + lane / 4] = Narrow<W>(d[4 * j + i]);
        row[16 * warp + 8 + lane / 4] = Narrow<W>(d[4 * j + 2 + i]);
      }
    }
  }
  Block::SyncConsumers();
  constexpr int kVectors = kColumns / kVector;
  const int row0 = static_cast<int>(blockIdx.y) * kRows;
  const int column0 = static_cast<int>(blockIdx.x) * kColumns;
#pragma unroll
  for (int i = tid; i < kRows * kVectors; i += Block::kConsumers) {
    const int row = i / kVectors;
    const int column = i % kVectors * kVector;
    if (row0 + row >= p.rows) break;
    const W* const from = staged + row * kPitch + column;
    W* const to = static_cast<W*>(p.y) + (row0 + row) * p.y_row_stride + column0 + column;
    const int left = p.outputs - column0 - column;
    if (p.y_vectors && left >= kVector) {
      *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
    } else {
      for (int e = 0; e < min(left, kVector); ++e) to[e] = from[e];
    }
  }
}

// How the sums of a block lie in shared memory: by owner, each with its rows of every column.
template <int kRows, bool kGate, int kSplits, int kGroups>
struct SumsLayout {
  static constexpr int kColumns = WideBlock<kGroups>::kColumns / (kGate ? 2 : 1);
  static constexpr int kOwnRows = kRows / kSplits;
  static constexpr int kPitch = kOwnRows + 2;        // Moves each column to other banks.
  static constexpr int kFloats = kColumns * kPitch;  // Of one owner.
};

// Each block of a cluster sends its partial sums to their owners, of which each has kOwnRows rows
// of n. They wait in `staged` until they are gone, and arrive at `sums`, block after block; the
// owner's own stay in `staged`.
template <int kRows, bool kGate, int kSplits, int kGroups>
__device__ inline void SendSums(const WidePlace& place, float* staged, float* sums,
                                ArrivalBarrier* arrived, const float (&d)[kRows / 2]) {
  using Block = WideBlock<kGroups>;
  using Layout = SumsLayout<kRows, kGate, kSplits, kGroups>;
  const int tid = static_cast<int>(threadIdx.x);
  const int lane = tid % 32;
  const int warp = tid / 32;
#pragma unroll
  for (int j = 0; j < kRows / 8; ++j) {
    const int row = 8 * j + 2 * (lane % 4);
    float* const to = staged + row / Layout::kOwnRows * Layout::kFloats + row % Layout::kOwnRows;
    const auto store = [&](int column, float first, float second) {
      *reinterpret_cast<float2*>(to + column * Layout::kPitch) = {first, second};
    };
    if constexpr (kGate) {
      store(8 * warp + lane / 4, Silu(d[4 * j]) * d[4 * j + 2], Silu(d[4 * j + 1]) * d[4 * j + 3]);
    } else {
      store(16 * warp + lane / 4, d[4 * j], d[4 * j + 1]);
      store(16 * warp + 8 + lane / 4, d[4 * j + 2], d[4 * j + 3]);
    }
  }
  if constexpr (kSplits > 1) FenceForBulk();
  Block::SyncConsumers();
  if constexpr (kSplits > 1) {
    constexpr int kApart = Block::kConsumers / kSplits;  // Not all by one warp.
    const int owner = tid / kApart;
    if (tid % kApart == 0 && owner != static_cast<int>(place.z)) {
      SendBulk(sums + static_cast<int>(place.z) * Layout::kFloats, staged + owner * Layout::kFloats,
               Layout::kFloats * 4, place.Rank(place.x, place.y, static_cast<uint32_t>(owner)),
               arrived);
    }
    arrived->Wait(0);
  }
}

// The first part of the norm behind: v of rows row, row + kStep, ... and a column, the lanes of a
// warp in neighbouring columns of one group.
template <typename W, int kBatch, int kStep>
__device__ inline void StoreAfter(const LinearWideParams& p, int row, int column, float weight,
                                  const float (&v)[kBatch]) {
  static_assert(GDN_LINEAR_SQUARES_COLUMNS == 32);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const bool inside = column < p.outputs;
  float square[kBatch];
#pragma unroll
  for (int i = 0; i < kBatch; ++i) {
    square[i] = inside ? v[i] * v[i] : 0.0f;
    const int at = row + i * kStep;
    if (inside && at < p.rows) {
      static_cast<W*>(p.after_n)[int64_t{at} * p.outputs + column] = Narrow<W>(v[i] * weight);
    }
  }
  const float sum = SumLanes<kBatch>(square, lane);
  const int at = row + lane * kBatch / 32 * kStep;
  if (lane % (32 / kBatch) == 0 && column - lane < p.outputs && at < p.rows) {
    p.after_squares[int64_t{column / 32} * p.rows + at] = sum;
  }
}

// Any y: the sums of the cluster's blocks, added in the blocks' order.
template <typename W, int kRows, bool kGate, int kSplits, int kGroups>
__device__ inline void StoreSums(const LinearWideParams& p, const WidePlace& place,
                                 unsigned char* shared, ArrivalBarrier* arrived,
                                 const float (&d)[kRows / 2]) {
  using Layout = SumsLayout<kRows, kGate, kSplits, kGroups>;
  constexpr int kStep = WideBlock<kGroups>::kConsumers / Layout::kColumns;  // Rows at once.
  constexpr int kRowsEach = Layout::kOwnRows / kStep;                       // Of a thread.
  constexpr int kBatch = kRowsEach < 8 ? kRowsEach : 8;  // Rows a thread has in flight.
  const int tid = static_cast<int>(threadIdx.x);
  float* const staged = reinterpret_cast<float*>(shared);
  float* const sums = reinterpret_cast<float*>(shared + p.sums_offset);

  const int column = tid % Layout::kColumns;
  const int at_column = static_cast<int>(blockIdx.x) * Layout::kColumns + column;
  const int first_row = tid / Layout::kColumns;
  const int row0 =
      static_cast<int>(blockIdx.y) * kRows + static_cast<int>(place.z) * Layout::kOwnRows;
  const int rows = at_column < p.outputs ? p.rows - row0 : 0;
  float* const y32 = static_cast<float*>(p.y) + row0 * p.y_row_stride + at_column;
  W* const y16 = static_cast<W*>(p.y) + row0 * p.y_row_stride + at_column;
  float old[kBatch];
  const auto load_old = [&](int first) {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int row = first + i * kStep;
      old[i] = p.accumulate && row < rows ? __ldcg(y32 + row * p.y_row_stride) : 0.0f;
    }
  };
  load_old(first_row);
  float after_weight = 0.0f;
  if (p.after_norm != nullptr && at_column < p.outputs) {
    after_weight = __ldg(p.after_norm + at_column);
  }
  SendSums<kRows, kGate, kSplits, kGroups>(place, staged, sums, arrived, d);
  const float* from[kSplits];
#pragma unroll
  for (int s = 0; s < kSplits; ++s) {
    from[s] = (s == static_cast<int>(place.z) ? staged : sums) + s * Layout::kFloats +
              column * Layout::kPitch;
  }
#pragma unroll 1
  for (int batch = 0; batch < kRowsEach / kBatch; ++batch) {
    const int first = first_row + batch * kBatch * kStep;
    if (batch > 0) load_old(first);
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int row = first + i * kStep;
      float sum = 0.0f;
#pragma unroll
      for (int s = 0; s < kSplits; ++s) sum += from[s][row];
      old[i] += sum;
    }
    if (p.after_norm != nullptr) {
      StoreAfter<W, kBatch, kStep>(p, row0 + first, at_column, after_weight, old);
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int row = first + i * kStep;
      if (row >= rows) break;
      if (p.y_is_f32) {
        y32[row * p.y_row_stride] = old[i];
      } else {
        y16[row * p.y_row_stride] = Narrow<W>(old[i]);
      }
    }
  }
}

// A cluster of so few blocks exchanges its sums where its rings were, once all are through them.
__host__ __device__ constexpr bool SumsInPlace(int splits) { return splits == kFewSplits; }

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
  constexpr bool kMeets = SumsInPlace(kSplits);

  const WidePlace place = WidePlace::Here();
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int first_stage = static_cast<int>(place.z) * p.stages_per_split;
  const int count = max(0, min(p.stages_per_split, p.stages - first_stage));

  if (warp == Block::kFetchesWeight && lane == 0) PrefetchTensorMap(p.weight);
  if (threadIdx.x == 0) {
    constexpr uint32_t kConsumerWarps = Block::kConsumers / 32;
    for (int i = 0; i < kMaxWideSlots; ++i) {
      barriers.w_full[i].Init();
      barriers.n_full[i].Init();
      barriers.w_empty[i].Init(kConsumerWarps * place.size_y);
      barriers.n_empty[i].Init(kConsumerWarps * place.size_x);
    }
    barriers.sums.Init();
    ArrivalBarrier::FenceInit();
    if constexpr (kSplits > 1) {
      // What the owners of rows get: a block's sums from each other block.
      constexpr int kFloats = SumsLayout<kRows, kGate, kSplits, kGroups>::kFloats;
      barriers.sums.ArriveExpecting((kSplits - 1) * kFloats * 4);
    }
  }
  __syncthreads();
  ClusterArrive();

  if (warp == Block::kFetchesWeight) {
    const WideWeightFeed<kGate, kGroups> feed = {p, place, w_slots, barriers, first_stage, count};
    if (place.size_y > 1) ClusterWait();
    if (lane == 0) feed.LoadFirst();
    __syncwarp();
    if (place.size_y == 1) ClusterWait();
    if (lane == 0) feed.LoadOthers();
    __syncwarp();
    if (kMeets) MeetCluster();
  } else if (warp == Block::kFetchesN) {
    if (lane == 0) PrefetchTensorMap(p.n);
    ClusterWait();
    if (lane == 0) {
      WaitForPreviousKernel();
      AllowNextKernel();
      FeedN<kRows>(p, place, n_slots, barriers, first_stage, count);
    }
    __syncwarp();
    if (kMeets) MeetCluster();
  } else {
    ClusterWait();
    if (p.squares != nullptr) {
      WaitForPreviousKernel();
      FindFactors<kRows, Block::kConsumers>(p, factors);
    }
    float d[kRows / 2] = {};
    WidePosition w;
    WidePosition n;
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
    if (p.squares != nullptr) ApplyFactors<kRows>(factors, d);
    if (kSplits == 1 && !p.y_is_f32) {
      StoreNarrow<W, kRows, kGate, kGroups>(p, shared, d);
    } else {
      StoreSums<W, kRows, kGate, kSplits, kGroups>(p, place, shared, &barriers.sums, d);
    }
  }
  // No block leaves while others may still reach into its memory.
  __syncwarp();
  ClusterArrive();
  ClusterWait();
}

}  // namespace gdn::cuda::linear

#endif  // KERNELS_CUDA_LINEAR_WIDE_CUH_
