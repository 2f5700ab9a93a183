// The way into the chunks beside the walk: a few blocks that keep their multiprocessors, and hand
// their items over one by one.
#ifndef KERNELS_CUDA_FUSED_PREFILL_IN_STREAM_CUH_
#define KERNELS_CUDA_FUSED_PREFILL_IN_STREAM_CUH_

#include "kernels/cuda/cluster.cuh"
#include "kernels/cuda/fused_prefill_in_item.cuh"
#include "kernels/cuda/fused_prefill_stream.cuh"
#include "kernels/cuda/launch.h"

namespace gdn::cuda::chunk {

constexpr int kStreamGroups = 4;  // Of a block; five have too few registers.
constexpr int kMostShared = 128;  // Sequences of which a block keeps what it needs.

__device__ inline bool IsPadding(const gdn_fused_decode_args& a, int64_t sequence) {
  return a.read_index[sequence] < 0 || a.write_index[sequence] < 0;
}

// What a block knows of the call.
struct StreamCall {
  int32_t cu_seqlens[kMostShared + 1];
  bool padding[kMostShared];
};

// The item at a place in the order in which the walk needs them.
__device__ inline void FindItem(const InParams& p, uint32_t ticket, const StreamCall& call,
                                ChunkOrder* order, Item* item) {
  const auto parts = static_cast<uint32_t>(p.parts);
  item->part = static_cast<int32_t>(ticket % parts);
  item->exists = order->Find(static_cast<int>(ticket / parts), &item->slot, &item->chunk);
  if (!item->exists) return;
  const int64_t sequence = item->chunk.sequence;
  item->padding =
      p.args.layer.rows <= kMostShared ? call.padding[sequence] : IsPadding(p.args.layer, sequence);
}

// The first items of a block are there earlier if not all convolve at once, for which they need the
// special function unit: each group of the later half waits until one of the other has.
struct FirstTurns {
  static constexpr int kBarrier = 1 + kStreamGroups;
  static constexpr int kHalf = kStreamGroups / 2;
  __device__ void Wait() const {
    if (matter && group >= kHalf) NamedBarrier(kBarrier + group - kHalf, 2 * kGroup);
  }
  __device__ void Pass() const {
    if (matter && group < kHalf) {
      asm volatile("bar.arrive %0, %1;" ::"r"(kBarrier + group), "n"(2 * kGroup) : "memory");
    }
  }
  int group;
  bool matter;
};

// By the thread that has stored an item.
__device__ inline void HandOver(uint32_t* ready) {
  WaitForBulkStores();
  Publish(ready);
}

// A group's first item follows from its place, later ones are drawn. An item is handed over while
// the next one's inputs are awaited, the first at once.
template <typename X, bool kPairs>
__global__ void __launch_bounds__(kStreamGroups* kGroup, 1)
    StreamKernel(const __grid_constant__ InParams p) {
  using Way = Streaming<kPairs>;
  extern __shared__ __align__(1024) char raw[];
  __shared__ Item items[2][kStreamGroups];
  __shared__ ChunkOrder orders[kStreamGroups];
  __shared__ StreamCall call;
  const int sequences = static_cast<int>(p.args.layer.rows);
  const int thread = static_cast<int>(threadIdx.x);
  const Group group = {thread / kGroup, thread % kGroup};
  InShared& shared = reinterpret_cast<InShared*>(raw)[group.index];
  const bool kept = sequences <= kMostShared;
  if (thread == 0 && p.args.tokens > 0) PrefetchTensorMap(p.x);
  if (kept) {
    for (int i = thread; i <= sequences; i += kStreamGroups * kGroup) {
      call.cu_seqlens[i] = p.args.cu_seqlens[i];
      if (i < sequences) call.padding[i] = IsPadding(p.args.layer, i);
    }
  }
  __syncthreads();
  if (group.thread == 0) {
    shared.loaded.Init();
    ArrivalBarrier::FenceInit();
    orders[group.index].Init(kept ? call.cu_seqlens : p.args.cu_seqlens, sequences);
    FindItem(p, static_cast<uint32_t>(group.index) * gridDim.x + blockIdx.x, call,
             &orders[group.index], &items[0][group.index]);
  }
  // The walk may start once the words are zeros, and with it what waits for this kernel's end.
  if (thread == kStreamGroups * kGroup - 1) {
    WaitForPreviousKernel();
    AllowNextKernel();
  }
  group.Sync();
  const uint32_t drawn = kStreamGroups * gridDim.x;
  uint32_t* stored = nullptr;  // By the thread that stores: of an item not yet handed over.
  bool is_first = true;
  for (uint32_t turn = 0;; turn ^= 1) {
    const Item& item = items[turn][group.index];
    if (stored != nullptr) {
      HandOver(stored);
      stored = nullptr;
    }
    const FirstTurns turns = {group.index, is_first};
    if (!item.exists) {
      turns.Wait();
      turns.Pass();
      return;
    }
    uint32_t ticket = 0;
    if (group.thread == 0 && !is_first) ticket = atomicAdd(p.ticket, 1u);
    const auto meanwhile = [&] {
      if (group.thread != 0) return;
      if (is_first) {
        WaitForPreviousKernel();
        ticket = atomicAdd(p.ticket, 1u);
      }
      FindItem(p, drawn + ticket, call, &orders[group.index], &items[turn ^ 1][group.index]);
    };
    // What depends on the thread is computed anew: there is no room to keep it.
    DoItem<X, Way>(p, item.part, [&]() -> const Item& { return item; }, meanwhile, turns, turn,
                   shared, {group.index, Opaque(group.thread)});
    if (group.thread == Way::kStorer) {
      stored = p.ready + item.part * p.slots + item.slot;
      if (is_first) {
        WaitForPreviousKernel();
        HandOver(stored);
        stored = nullptr;
      }
    }
    is_first = false;
    group.Sync();
  }
}

template <typename X, bool kPairs>
gdn_status LaunchStream(const gdn_exec& exec, const char* op, const InParams& p, int blocks) {
  constexpr size_t kBytes = kStreamGroups * sizeof(InShared);
  const cudaError_t error = AllowSharedMemory<StreamKernel<X, kPairs>>(kBytes, false);
  if (const gdn_status status = CheckCuda(op, error); status != GDN_OK) return status;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(kStreamGroups * kGroup);
  config.dynamicSmemBytes = kBytes;
  config.stream = Stream(exec);
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  // In pairs, as the walk's: singly they share each pair of multiprocessors with a block of the
  // walk, and both take longer.
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {2, 1, 1};
  config.attrs = attributes;
  config.numAttrs = blocks % 2 == 0 ? 2 : 1;
  cudaLaunchKernelEx(&config, StreamKernel<X, kPairs>, p);
  return CheckLaunch(op);
}

}  // namespace gdn::cuda::chunk

#endif  // KERNELS_CUDA_FUSED_PREFILL_IN_STREAM_CUH_
