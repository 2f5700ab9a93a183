// What the parts of the wide product's kernel (linear_wide.cu) share: its block, its parameters,
// and its place in a cluster.
#ifndef KERNELS_CUDA_LINEAR_WIDE_BLOCK_CUH_
#define KERNELS_CUDA_LINEAR_WIDE_BLOCK_CUH_

#include "kernels/cuda/cluster.cuh"
#include "kernels/cuda/tensor_copy.cuh"

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
constexpr int kTwoSplits = 2;
// A cluster of so few blocks exchanges its sums in quads (QuadSums), where its rings were, once all
// are through them.
__host__ __device__ constexpr bool SumsInQuads(int splits) {
  return splits == kFewSplits || splits == kTwoSplits;
}

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
  // The warps that find the norm's factors while the others multiply.
  static constexpr int kFactorWarps = 2;
  static constexpr int kThreads = kConsumers + (2 + kFactorWarps) * 32;
  static constexpr int kPerMultiprocessor = kGroups == 1 ? 2 : 1;

  __device__ static void SyncConsumers() {
    asm volatile("bar.sync 1, %0;" ::"n"(kConsumers) : "memory");
  }
  // The factors are there: said by the warps that found them, awaited by the consumers.
  static constexpr int kMeetAtFactors = kConsumers + kFactorWarps * 32;
  __device__ static void FoundFactors() {
    asm volatile("bar.arrive 2, %0;" ::"n"(kMeetAtFactors) : "memory");
  }
  __device__ static void AwaitFactors() {
    asm volatile("bar.sync 2, %0;" ::"n"(kMeetAtFactors) : "memory");
  }
};

// The blocks of 65 to 128 rows, but for those that divide K in eight, and of those with more rows
// the ones that divide K in four or two: no two of them share a copy.
// All rows come by ordinary copies, which the L2 serves together where many ask for the same. With
// fewer rows the form of copy that sends to several blocks is the faster one, even to one.
template <int kRows, int kSplits, int kGroups>
constexpr bool kCopiesAlone = kGroups == 1 &&
                              (SumsInQuads(kSplits) || (kSplits == 1 && kRows == 128));
// Beside these, the rows of n of 129 to 767.
template <int kRows, int kSplits, int kGroups>
constexpr bool kCopiesNAlone = kCopiesAlone<kRows, kSplits, kGroups> ||
                               (kGroups == 2 && kSplits == 1 && kRows == 128);

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

}  // namespace gdn::cuda::linear

#endif  // KERNELS_CUDA_LINEAR_WIDE_BLOCK_CUH_
