// The kernels of linear_argmax.cu.
#ifndef KERNELS_CUDA_LINEAR_ARGMAX_CUH_
#define KERNELS_CUDA_LINEAR_ARGMAX_CUH_

#include "kernels/cuda/cluster.cuh"
#include "kernels/cuda/element.cuh"
#include "kernels/cuda/linear_argmax.h"
#include "kernels/cuda/math.cuh"
#include "kernels/cuda/tensor_copy.cuh"
#include "kernels/cuda/wgmma_panels.cuh"

namespace gdn::cuda::argmax {

constexpr int kColumns = 64;  // Rows of the weight of a tile: the M of the instruction.
constexpr int kStage = 64;    // Elements of K: 128 bytes, the swizzle's width.
constexpr int kWeightBytes = kColumns * kStage * 2;
constexpr int kConsumers = 128;
constexpr int kThreads = kConsumers + 32;  // One warp fetches.
constexpr int kMaxSlots = 24;
constexpr int kMaxStages = 64;
constexpr int kAlignment = 1024;
constexpr int kJoinRows = 8;  // Of a block that joins: a warp each.

struct Barriers {
  ArrivalBarrier w_full[kMaxSlots];
  ArrivalBarrier w_empty[kMaxSlots];
  ArrivalBarrier n_full[kMaxStages];
};

// exp(logit - max) where max may be -inf, and then so is the logit. NaN where either is +inf.
__device__ inline float Exp(float logit, float max) {
  return __expf(logit - (max == -INFINITY ? 0.0f : max));
}

// Of disjoint sets of logits; the result does not depend on which is which.
__device__ inline ArgmaxPart Joined(const ArgmaxPart& a, const ArgmaxPart& b) {
  const float max = fmaxf(a.max, b.max);
  const bool first = a.max > b.max || (a.max == b.max && a.id < b.id);
  return {max, a.sum * Exp(a.max, max) + b.sum * Exp(b.max, max), first ? a.id : b.id, 0};
}
__device__ inline ArgmaxPart JoinedWithLane(const ArgmaxPart& part, int distance) {
  const ArgmaxPart other = {__shfl_xor_sync(kFullMask, part.max, distance),
                            __shfl_xor_sync(kFullMask, part.sum, distance),
                            __shfl_xor_sync(kFullMask, part.id, distance), 0};
  return Joined(part, other);
}

// The block's share of the weight, tile after tile, and all of n, which stays.
template <int kRows>
__device__ inline void Feed(const LinearArgmaxParams& p, unsigned char* n_panels,
                            unsigned char* w_slots, Barriers& barriers) {
  const int tiles = (p.outputs + kColumns - 1) / kColumns;
  const int first = static_cast<int>(blockIdx.x);
  const int count = first < tiles ? (tiles - 1 - first) / static_cast<int>(gridDim.x) + 1 : 0;
  const int loads = count * p.stages;
  int tile = first;
  int stage = 0;
  const auto load = [&](int slot) {
    barriers.w_full[slot].ArriveExpecting(kWeightBytes);
    TensorLoad(w_slots + slot * kWeightBytes, p.weight, stage * kStage, tile * kColumns,
               &barriers.w_full[slot]);
    if (++stage == p.stages) {
      stage = 0;
      tile += static_cast<int>(gridDim.x);
    }
  };
  // The weight needs nothing of the kernel before this one.
  const int early = min(loads, p.w_slots);
  for (int i = 0; i < early; ++i) load(i);
  WaitForPreviousKernel();
  AllowNextKernel();
  constexpr int kPanelBytes = kRows * kStage * 2;
  for (int i = 0; count > 0 && i < p.stages; ++i) {
    barriers.n_full[i].ArriveExpecting(kPanelBytes);
    TensorLoad(n_panels + i * kPanelBytes, p.n, i * kStage, 0, &barriers.n_full[i]);
  }
  int slot = 0;
  uint32_t parity = 0;
  for (int i = early; i < loads; ++i) {
    barriers.w_empty[slot].Wait(parity);
    load(slot);
    if (++slot == p.w_slots) {
      slot = 0;
      parity ^= 1;
    }
  }
}

// What a thread has seen of the rows of n that its sums belong to.
template <int kRows>
struct Seen {
  static constexpr int kCount = kRows / 4;
  float max[kCount];
  float sum[kCount];
  int32_t id[kCount];

  __device__ Seen() {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      max[i] = -INFINITY;
      sum[i] = 0.0f;
      id[i] = 0x7fffffff;
    }
  }
  // d as the matrix instruction leaves it; the thread's first weight row is `row`, its second 8
  // rows on.
  __device__ void Add(const float (&d)[kRows / 2], int row, int outputs) {
    const bool has_first = row < outputs;
    const bool has_second = row + 8 < outputs;
#pragma unroll
    for (int j = 0; j < kRows / 8; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int at = 2 * j + i;
        // -0 as +0, which it equals.
        const float first = has_first ? d[4 * j + i] + 0.0f : -INFINITY;
        const float second = has_second ? d[4 * j + 2 + i] + 0.0f : -INFINITY;
        const float larger = fmaxf(first, second);
        const float before = max[at];
        if (larger > before) {
          id[at] = first == larger ? row : row + 8;
          max[at] = larger;
        }
        sum[at] = sum[at] * Exp(before, max[at]) + (Exp(first, max[at]) + Exp(second, max[at]));
      }
    }
  }
};

template <typename W, int kRows>
__global__ void __launch_bounds__(kThreads, 1)
    ArgmaxKernel(const __grid_constant__ LinearArgmaxParams p) {
  extern __shared__ unsigned char dynamic[];
  __shared__ Barriers barriers;
  __shared__ ArgmaxPart found[kConsumers / 32][kRows];
  unsigned char* const shared =
      dynamic + (-static_cast<uint32_t>(__cvta_generic_to_shared(dynamic)) % kAlignment);
  constexpr int kPanelBytes = kRows * kStage * 2;
  unsigned char* const n_panels = shared;
  unsigned char* const w_slots = shared + p.stages * kPanelBytes;
  const int tid = static_cast<int>(threadIdx.x);
  const int warp = tid / 32;
  const int lane = tid % 32;
  if (tid == 0) {
    for (int i = 0; i < p.w_slots; ++i) {
      barriers.w_full[i].Init();
      barriers.w_empty[i].Init(kConsumers / 32);
    }
    for (int i = 0; i < p.stages; ++i) barriers.n_full[i].Init();
    ArrivalBarrier::FenceInit();
  }
  __syncthreads();

  if (warp == kConsumers / 32) {
    if (lane == 0) {
      PrefetchTensorMap(p.weight);
      PrefetchTensorMap(p.n);
      Feed<kRows>(p, n_panels, w_slots, barriers);
    }
    return;
  }
  Seen<kRows> seen;
  int slot = 0;
  uint32_t parity = 0;
  bool n_is_there = false;
  for (int tile = static_cast<int>(blockIdx.x); tile * kColumns < p.outputs;
       tile += static_cast<int>(gridDim.x)) {
    float d[kRows / 2] = {};
    int last = -1;
#pragma unroll 1
    for (int stage = 0; stage < p.stages; ++stage) {
      barriers.w_full[slot].Wait(parity);
      if (!n_is_there) barriers.n_full[stage].Wait(0);
      const uint64_t a = PanelDescriptor(SharedAddress(w_slots + slot * kWeightBytes));
      const uint64_t b = PanelDescriptor(SharedAddress(n_panels + stage * kPanelBytes));
      ProductFence();
#pragma unroll
      for (int step = 0; step < kStage / 16; ++step) {
        Wgmma<W, kRows>::Multiply(d, a + kNextColumns * step, b + kNextColumns * step);
      }
      CommitProducts();
      WaitForProducts<1>();  // The stage before this one has been read.
      if (last >= 0 && lane == 0) barriers.w_empty[last].Arrive();
      last = slot;
      if (++slot == p.w_slots) {
        slot = 0;
        parity ^= 1;
      }
    }
    n_is_there = true;
    WaitForProducts<0>();
    if (lane == 0) barriers.w_empty[last].Arrive();
    seen.Add(d, tile * kColumns + 16 * warp + lane / 4, p.outputs);
  }

  // Rows of n lie along the lanes' lowest two bits; the other lanes and the warps hold other rows
  // of the weight.
#pragma unroll
  for (int at = 0; at < Seen<kRows>::kCount; ++at) {
    ArgmaxPart part = {seen.max[at], seen.sum[at], seen.id[at], 0};
    for (int distance = 4; distance < 32; distance *= 2) part = JoinedWithLane(part, distance);
    if (lane < 4) found[warp][8 * (at / 2) + 2 * lane + at % 2] = part;
  }
  asm volatile("bar.sync 1, %0;" ::"n"(kConsumers) : "memory");
  // A block without tiles has waited for nothing, and the workspace may still be in use.
  WaitForPreviousKernel();
  if (tid < kRows && tid < p.rows) {
    const ArgmaxPart low = Joined(found[0][tid], found[1][tid]);
    p.parts[int64_t{tid} * gridDim.x + blockIdx.x] =
        Joined(low, Joined(found[2][tid], found[3][tid]));
  }
}

// A warp for each row.
__global__ void __launch_bounds__(32 * kJoinRows)
    JoinKernel(const ArgmaxPart* parts, int blocks, int rows, const int64_t* position,
               int32_t* token, float* logprob) {
  WaitForPreviousKernel();
  AllowNextKernel();
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int row = static_cast<int>(blockIdx.x * kJoinRows + threadIdx.x / 32);
  if (row >= rows) return;
  ArgmaxPart part = {-INFINITY, 0.0f, 0x7fffffff, 0};
  for (int i = lane; i < blocks; i += 32) part = Joined(part, parts[int64_t{row} * blocks + i]);
  for (int distance = 1; distance < 32; distance *= 2) part = JoinedWithLane(part, distance);
  if (lane != 0) return;
  if (position[row] < 0) {
    token[row] = -1;
    return;
  }
  const bool valid = isfinite(part.max) && !isnan(part.sum);
  token[row] = valid ? part.id : -1;
  if (logprob == nullptr) return;
  const double log_sum = log(static_cast<double>(part.sum));
  logprob[row] = valid ? static_cast<float>(-log_sum) : __int_as_float(0x7fffffff);
}

}  // namespace gdn::cuda::argmax

#endif  // KERNELS_CUDA_LINEAR_ARGMAX_CUH_
