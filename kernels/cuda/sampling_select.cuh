// Selection within a row by a team of blocks: histograms over monotone bins, exact refinement, and
// lists of the ranks that remain. All sums are of integers, or in a fixed order.
#ifndef KERNELS_CUDA_SAMPLING_SELECT_CUH_
#define KERNELS_CUDA_SAMPLING_SELECT_CUH_

#include <cstdint>

#include "kernels/cuda/sampling_row.cuh"
#include "kernels/cuda/sampling_team.cuh"

namespace gdn::cuda {

constexpr int kChooseThreads = 512;
constexpr int kChooseWarps = kChooseThreads / 32;
constexpr int kBins = 2048;
// Additions to a bin's 32-bit counters before they move to the 64-bit one.
constexpr uint32_t kHistogramChunk = 65536;
// The unit of masses in a histogram.
constexpr float kMassOne = 2147483648.0f;

struct ChooseShared {
  union {
    struct {
      union {
        struct {
          uint32_t low[kBins];
          uint32_t high[kBins];
        };
        uint64_t merged[kBins];  // Over the team.
      };
      uint64_t total[kBins];  // Of this block.
    };
    uint64_t list[kSharedList];
  };
  double warp_value[kChooseWarps];
  double prefix[kChooseThreads];
  Candidate warp_best[kChooseWarps];
  uint32_t warp_index[kChooseWarps];
  uint64_t boundary;
  uint32_t list_size;  // Of the team's list, in rank 0.
};
static_assert(sizeof(uint64_t) * kSharedList == 4 * sizeof(uint64_t) * kBins / 2);

// ---- Block-wide reductions; every thread gets the result.

__device__ inline float BlockMax(ChooseShared& s, float value) {
  value = WarpMax(value);
  __syncthreads();
  if (threadIdx.x % 32 == 0) s.warp_value[threadIdx.x / 32] = value;
  __syncthreads();
  double max = s.warp_value[0];
  for (int i = 1; i < kChooseWarps; ++i) max = fmax(max, s.warp_value[i]);
  return static_cast<float>(max);
}

__device__ inline double BlockSum(ChooseShared& s, double value) {
#pragma unroll
  for (int bit = 16; bit > 0; bit >>= 1) value += __shfl_xor_sync(kFullMask, value, bit);
  __syncthreads();
  if (threadIdx.x % 32 == 0) s.warp_value[threadIdx.x / 32] = value;
  __syncthreads();
  double sum = 0.0;
  for (int i = 0; i < kChooseWarps; ++i) sum += s.warp_value[i];
  return sum;
}

__device__ inline uint32_t BlockMaxIndex(ChooseShared& s, uint32_t value) {
  value = __reduce_max_sync(kFullMask, value);
  __syncthreads();
  if (threadIdx.x % 32 == 0) s.warp_index[threadIdx.x / 32] = value;
  __syncthreads();
  uint32_t max = 0;
  for (int i = 0; i < kChooseWarps; ++i) max = umax(max, s.warp_index[i]);
  return max;
}

// The id with the largest score, the lowest of equal ones; -1 if every id is.
__device__ inline int32_t BlockBest(ChooseShared& s, double score, int32_t id) {
  auto better = [](double sa, uint32_t a, double sb, uint32_t b) {
    return static_cast<int32_t>(a) >= 0 &&
           (static_cast<int32_t>(b) < 0 || sa > sb || (sa == sb && a < b));
  };
  auto best = static_cast<uint32_t>(id);
#pragma unroll
  for (int bit = 16; bit > 0; bit >>= 1) {
    const double other_score = __shfl_xor_sync(kFullMask, score, bit);
    const uint32_t other = __shfl_xor_sync(kFullMask, best, bit);
    if (better(other_score, other, score, best)) {
      score = other_score;
      best = other;
    }
  }
  __syncthreads();
  if (threadIdx.x % 32 == 0) {
    s.warp_value[threadIdx.x / 32] = score;
    s.warp_index[threadIdx.x / 32] = best;
  }
  __syncthreads();
  score = s.warp_value[0];
  best = s.warp_index[0];
  for (int i = 1; i < kChooseWarps; ++i) {
    if (better(s.warp_value[i], s.warp_index[i], score, best)) {
      score = s.warp_value[i];
      best = s.warp_index[i];
    }
  }
  return static_cast<int32_t>(best);
}

struct Pick {
  uint32_t item;
  double before;  // Sum of the weights before it.
};

// The first of `count` items at which the running sum of weight(i) reaches `target`, or the last
// one with a weight.
template <typename Weight>
__device__ Pick PickFirst(ChooseShared& s, uint32_t count, double target, const Weight& weight) {
  const uint32_t share = (count + kChooseThreads - 1) / kChooseThreads;
  const uint32_t begin = min(threadIdx.x * share, count);
  const uint32_t end = min(begin + share, count);
  double own = 0.0;
  uint32_t last = 0;  // 1 + the last index with a weight.
  for (uint32_t i = begin; i < end; ++i) {
    const double w = weight(i);
    own += w;
    if (w > 0.0) last = i + 1;
  }
  last = BlockMaxIndex(s, last);
  double inclusive = own;
#pragma unroll
  for (int distance = 1; distance < 32; distance <<= 1) {
    const double lower = __shfl_up_sync(kFullMask, inclusive, distance);
    if (threadIdx.x % 32 >= static_cast<uint32_t>(distance)) inclusive = lower + inclusive;
  }
  __syncthreads();
  if (threadIdx.x % 32 == 31) s.warp_value[threadIdx.x / 32] = inclusive;
  __syncthreads();
  double before = 0.0;
  for (uint32_t i = 0; i < threadIdx.x / 32; ++i) before += s.warp_value[i];
  before += inclusive - own;
  s.prefix[threadIdx.x] = before;
  // The last thread that starts below the target holds the crossing.
  const bool starts_below = begin < end && (threadIdx.x == 0 || before < target);
  const uint32_t owner = BlockMaxIndex(s, starts_below ? threadIdx.x : 0);
  Pick pick = {owner * share, s.prefix[owner]};
  const uint32_t stop = last == 0 ? 0 : last - 1;
  for (; pick.item < stop; ++pick.item) {
    const double w = weight(pick.item);
    if (pick.before + w >= target) break;
    pick.before += w;
  }
  return pick;
}

// Sorts descending. The list, in shared memory or global memory that only this block touches, has
// room for the next power of two.
template <bool kIsShared>
__device__ void SortBlock(uint64_t* list, uint32_t count) {
  auto get = [&](uint32_t i) {
    if constexpr (kIsShared) return list[i];
    return static_cast<uint64_t>(__ldcg(reinterpret_cast<const unsigned long long*>(list + i)));
  };
  auto put = [&](uint32_t i, uint64_t value) {
    if constexpr (kIsShared) {
      list[i] = value;
    } else {
      __stcg(reinterpret_cast<unsigned long long*>(list + i),
             static_cast<unsigned long long>(value));
    }
  };
  uint32_t size = 1;
  while (size < count) size <<= 1;
  for (uint32_t i = count + threadIdx.x; i < size; i += kChooseThreads) put(i, 0);
  for (uint32_t run = 2; run <= size; run <<= 1) {
    for (uint32_t distance = run / 2; distance > 0; distance >>= 1) {
      __syncthreads();
      for (uint32_t i = threadIdx.x; i < size / 2; i += kChooseThreads) {
        const uint32_t a = 2 * i - (i & (distance - 1));
        const uint32_t b = a + distance;
        const uint64_t x = get(a);
        const uint64_t y = get(b);
        if ((x < y) == ((a & run) == 0)) {
          put(a, y);
          put(b, x);
        }
      }
    }
  }
  __syncthreads();
}

// ---- Passes of a team over a row. All its threads call them with the same arguments.

struct Team {
  uint32_t rank;
  uint32_t size;
  uint64_t* list;  // In device memory.
  uint32_t list_capacity;
};

// Calls visit(id, logit) for the block's share of the row.
template <typename Visit>
__device__ void VisitShare(const Team& team, const RowView& view, const Visit& visit) {
  const uint32_t quads = (view.vocab - 1) / 4 + 1;
  const uint32_t step = team.size * kChooseThreads;
  uint32_t quad = team.rank * kChooseThreads + threadIdx.x;
  for (; quad < quads && quad + step < quads; quad += 2 * step) {  // Two loads in flight.
    const float4 v = view.Load(4 * quad);
    const float4 w = view.Load(4 * (quad + step));
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) visit(4 * quad + i, At(v, i));
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) visit(4 * (quad + step) + i, At(w, i));
  }
  if (quad < quads) {
    const float4 v = view.Load(4 * quad);
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) visit(4 * quad + i, At(v, i));
  }
}

// merged[bin] becomes the sum over the row of amount, for all (bin, amount) = place(id, logit);
// bins from kBins on are left out.
template <typename Place>
__device__ void Histogram(ChooseShared& s, const Team& team, const RowView& view,
                          const Place& place) {
  TeamSync();  // Nobody reads what is overwritten.
  for (int i = threadIdx.x; i < kBins; i += kChooseThreads) {
    s.low[i] = 0;
    s.high[i] = 0;
    s.total[i] = 0;
  }
  __syncthreads();
  auto fold = [&] {
    __syncthreads();
    for (int i = threadIdx.x; i < kBins; i += kChooseThreads) {
      s.total[i] += (uint64_t{s.high[i]} << 16) + s.low[i];
      s.low[i] = 0;
      s.high[i] = 0;
    }
    __syncthreads();
  };
  auto add = [&](uint32_t id, float logit) {
    if (id >= view.vocab) return;
    uint32_t amount = 0;
    const uint32_t bin = place(id, logit, &amount);
    if (bin >= kBins || amount == 0) return;
    if ((amount & 0xffffu) != 0) atomicAdd(&s.low[bin], amount & 0xffffu);
    if (amount >> 16 != 0) atomicAdd(&s.high[bin], amount >> 16);
  };
  // As VisitShare, in chunks.
  const uint32_t quads = (view.vocab - 1) / 4 + 1;
  const uint32_t step = team.size * kChooseThreads;
  constexpr uint32_t kRounds = kHistogramChunk / (4 * kChooseThreads);
  for (uint32_t base = team.rank * kChooseThreads; base < quads; base += kRounds * step) {
    const uint32_t end = quads - base < kRounds * step ? quads : base + kRounds * step;
    uint32_t quad = base + threadIdx.x;
    for (; quad < end && quad + step < end; quad += 2 * step) {  // Two loads in flight.
      const float4 v = view.Load(4 * quad);
      const float4 w = view.Load(4 * (quad + step));
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) add(4 * quad + i, At(v, i));
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) add(4 * (quad + step) + i, At(w, i));
    }
    if (quad < end) {
      const float4 v = view.Load(4 * quad);
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) add(4 * quad + i, At(v, i));
    }
    fold();
  }
  TeamSync();
  const uint32_t share = (kBins + team.size - 1) / team.size;
  const uint32_t end = umin((team.rank + 1) * share, kBins);
  for (uint32_t bin = team.rank * share + threadIdx.x; bin < end; bin += kChooseThreads) {
    uint64_t sum = 0;
    for (uint32_t rank = 0; rank < team.size; ++rank) sum += Remote(s.total, rank)[bin];
    for (uint32_t rank = 0; rank < team.size; ++rank) Remote(s.merged, rank)[bin] = sum;
  }
  TeamSync();
}

// Puts the ranks of the row that wanted(logit, rank) accepts into the team's list, in any order,
// and returns how many there are; those that did not fit are lost.
template <typename Wanted>
__device__ uint32_t Gather(ChooseShared& s, const Team& team, const RowView& view,
                           const Wanted& wanted) {
  if (team.rank == 0 && threadIdx.x == 0) s.list_size = 0;
  TeamSync();
  uint32_t* const size = Remote(&s.list_size, 0);
  VisitShare(team, view, [&](uint32_t id, float logit) {
    if (id >= view.vocab) return;
    const uint64_t rank = RankOf(logit, id);
    if (!wanted(logit, rank)) return;
    const uint32_t place = atomicAdd(size, 1u);
    if (place < team.list_capacity) team.list[place] = rank;
  });
  TeamSync();
  const uint32_t count = *size;
  TeamSync();  // Everybody has read it.
  return count;
}

// The sorted list, for rank 0 alone: in shared memory if it fits.
__device__ inline const uint64_t* SortedList(ChooseShared& s, const Team& team, uint32_t count) {
  if (count > kSharedList) {
    SortBlock<false>(team.list, count);
    return team.list;
  }
  for (uint32_t i = threadIdx.x; i < count; i += kChooseThreads) {
    s.list[i] = __ldcg(reinterpret_cast<const unsigned long long*>(team.list + i));
  }
  __syncthreads();
  SortBlock<true>(s.list, count);
  return s.list;
}

// The smallest of [low, high] that `holds`, which is monotone and holds for high. By one warp.
template <typename Holds>
__device__ uint32_t SmallestKey(uint32_t low, uint32_t high, const Holds& holds) {
  const uint32_t lane = threadIdx.x % 32;
  while (low < high) {
    const uint32_t step = (high - low) / 32 + 1;
    const uint64_t probe = uint64_t{low} + uint64_t{lane} * step;
    const bool held = probe >= high || holds(static_cast<uint32_t>(probe));
    const uint32_t first = __ffs(static_cast<int>(__ballot_sync(kFullMask, held)));  // 0: none.
    if (first == 1) return low;
    // Between the last probe that does not hold and the first that does.
    const uint32_t failed = low + (first == 0 ? 31 : first - 2) * step;
    if (first != 0) {
      const uint64_t next = uint64_t{failed} + step;
      if (next < high) high = static_cast<uint32_t>(next);
    }
    low = failed + 1;
  }
  return low;
}

}  // namespace gdn::cuda

#endif  // KERNELS_CUDA_SAMPLING_SELECT_CUH_
