#include "kernels/cuda/cluster.cuh"
#include "kernels/cuda/fused_prefill.h"
#include "kernels/cuda/fused_prefill_conv.cuh"
#include "kernels/cuda/fused_prefill_gates.cuh"
#include "kernels/cuda/fused_prefill_matrices.cuh"
#include "kernels/cuda/fused_prefill_stream.cuh"

// The way into the chunks. An item is a chunk of a key head, with all that its value heads need of
// it, or of the values of two value heads. A warpgroup works on one. Four share a multiprocessor,
// so that some compute while others wait for memory.

namespace gdn::cuda {
namespace {

using namespace chunk;  // NOLINT(build/namespaces)

constexpr char kOp[] = "fused_prefill";
constexpr int kBlocks = 4;       // Of a multiprocessor.
constexpr int kSharedHeads = 4;  // Value heads whose gates are formed at once, a warp each.

struct InParams {
  gdn_fused_prefill_args args;
  Checkpoints checkpoints;
  float scale;
  int32_t ratio;
  int32_t parts;  // Items of a slot: key heads, then pairs of value heads.
  char* keys;
  char* values;
  char* mixes;
  char* scalars;
  // Where items are handed over one by one: a word each, and the number of the next.
  uint32_t* ready;
  uint32_t* ticket;
};

struct alignas(1024) InShared {
  Keys keys;  // Of value head r then T in k[r % 2] and P in q[r % 2].
  Solve solve;
  InScalars scalars[kSharedHeads];
};

// The warpgroup that works on an item.
struct Group {
  int index;  // In the block.
  int thread;
  __device__ void Sync() const { NamedBarrier(1 + index, kGroup); }
};

// What half warps convolve: q by the lower and k by the upper half of each warp, or the
// values of two heads, of which the second may not be there.
template <typename X>
__device__ inline Columns<X> ColumnsOf(const InParams& p, int part, int lane) {
  const gdn_fused_decode_args& a = p.args.layer;
  const int keys = static_cast<int>(a.key_heads);
  const int second = lane / 16;
  const int column = lane % 16 * kVectorElements;
  const X* const x = static_cast<const X*>(a.x);
  Columns<X> at;
  at.exist = true;
  if (part < keys) {
    at.x = x + (second != 0 ? a.k_offset : a.q_offset) + part * kDim + column;
    at.channel = (second * a.key_heads + part) * kDim + column;
  } else {
    int head = 2 * (part - keys) + second;
    at.exist = head < a.value_heads;
    if (!at.exist) head = 0;
    at.x = x + a.v_offset + head * kDim + column;
    at.channel = (2 * a.key_heads + head) * kDim + column;
  }
  return at;
}

// The panel of the lane's columns: first inputs, then outputs.
__device__ inline char* PanelOf(InShared& shared, bool is_key, int lane) {
  const int panel = lane / 8;
  // Queries are convolved first, and lie behind the keys.
  return reinterpret_cast<char*>(&shared.keys) +
         (is_key ? panel ^ 2 : panel) * int64_t{kPanelElements * 2};
}

// A key head and its value heads.
template <typename X>
__device__ inline void DoKeys(const InParams& p, const SlotChunk& chunk, int64_t slot, int key_head,
                              const Columns<X>& columns, const Filter& filter, InShared& shared,
                              const Group& group) {
#ifdef GDN_WGMMA
  const gdn_fused_decode_args& a = p.args.layer;
  const int thread = group.thread;
  const int lane = thread % 32;
  const int warp = thread / 32;
  Keys& keys = shared.keys;
  const int first_head = key_head * p.ratio;
  RawGates raw = {};
  if (warp < p.ratio) raw = LoadGates<X>(a, chunk, first_head + warp, lane);
  Past<X> past;
  LoadPast(a, chunk, columns, warp, past);
  if (chunk.count == 0) return;  // Of an empty sequence nothing but its convolution state.
  if (warp < p.ratio) {
    FormGates(raw, a.beta_scale, p.scale, chunk.count, lane, &shared.scalars[warp]);
  }
  Convolve<X>(chunk, filter, past, warp, lane % 8, PanelOf(shared, true, lane), UnitNorm());
  FenceForBulk();
  group.Sync();
  if (thread == 0) {
    BulkStore(p.keys + (slot * a.key_heads + key_head) * int64_t{sizeof(Keys)}, &keys,
              sizeof(Keys));
  }
  uint32_t kk[16];
  uint32_t qk[16];
  Grams(keys, p.scale, kk, qk);
  const uint32_t system = SharedAddress(shared.solve.system);
#pragma unroll 1
  for (int r = 0; r < p.ratio; ++r) {
    // The tiles of this head: free once the keys, or the head before the last, are stored.
    if (thread == 0) {
      if (r == 0) {
        WaitForBulkReads<0>();
      } else {
        WaitForBulkReads<3>();
      }
    }
    group.Sync();
    if (r > 0 && r % kSharedHeads == 0) {
      if (thread == 0) WaitForBulkReads<0>();
      group.Sync();
      if (r + warp < p.ratio) {
        raw = LoadGates<X>(a, chunk, first_head + r + warp, lane);
        FormGates(raw, a.beta_scale, p.scale, chunk.count, lane, &shared.scalars[warp]);
      }
      group.Sync();
    }
    // Keeps the compiler from widening them outside of the loop, for which there is no room.
#pragma unroll
    for (int i = 0; i < 16; ++i) asm volatile("" : "+r"(kk[i]), "+r"(qk[i]));
    const uint32_t t = SharedAddress(keys.k[r % 2]);
    const InScalars& scalars = shared.scalars[r % kSharedHeads];
    FormMatrices(scalars, shared.solve, SharedAddress(keys.q[r % 2]), warp, lane, kk, qk);
    ClearAbove(t, warp, lane);
    __syncwarp();
    InvertDiagonal(shared.solve.diagonal[warp], t, warp, lane);
    group.Sync();
    MergeSixteens(system, t, warp, lane);
    group.Sync();
    MergeThirtyTwos(system, t, warp, lane);
    FenceForBulk();
    group.Sync();
    if (thread == 0) {
      const int64_t at = slot * a.value_heads + first_head + r;
      char* const mix = p.mixes + at * int64_t{sizeof(Mix)};
      BulkStore(mix + offsetof(Mix, t), keys.k[r % 2], sizeof(Mix::t));
      BulkStore(mix + offsetof(Mix, p), keys.q[r % 2], sizeof(Mix::p));
      BulkStore(p.scalars + at * int64_t{sizeof(WalkScalars)}, &scalars.walk, sizeof(WalkScalars));
    }
  }
  if (thread == 0) WaitForBulkReads<0>();
#endif
}

// The values of two heads.
template <typename X>
__device__ inline void DoValues(const InParams& p, const SlotChunk& chunk, int64_t slot, int pair,
                                const Columns<X>& columns, const Filter& filter, InShared& shared,
                                const Group& group) {
  const gdn_fused_decode_args& a = p.args.layer;
  const int thread = group.thread;
  const int lane = thread % 32;
  const int warp = thread / 32;
  float(&betas)[2][kChunk] = reinterpret_cast<float(&)[2][kChunk]>(shared.scalars);
  const int gate_head = 2 * pair + thread / kChunk;
  const int token = thread % kChunk;
  float raw = 0.0f;
  if (gate_head < a.value_heads && token < chunk.count) {
    const X* const line = static_cast<const X*>(a.x) + (chunk.begin + token) * a.x_token_stride;
    raw = Widen(line[a.b_offset + gate_head]);
  }
  Past<X> past;
  LoadPast(a, chunk, columns, warp, past);
  if (chunk.count == 0) return;
  betas[thread / kChunk][token] = a.beta_scale * FastSigmoid(raw);
  group.Sync();
  Convolve<X>(chunk, filter, past, warp, lane % 8, PanelOf(shared, false, lane),
              [&](int row, const Channels(&y)[kConvRound], uint4(&words)[kConvRound]) {
#pragma unroll
                for (int r = 0; r < kConvRound; ++r) {
                  words[r] = Scaled(y[r], betas[lane / 16][row + r]);
                }
              });
  FenceForBulk();
  group.Sync();
  if (thread == 0) {
    const int heads = 2 * pair + 1 < a.value_heads ? 2 : 1;
    BulkStore(p.values + (slot * a.value_heads + 2 * pair) * kValueTileBytes, &shared.keys,
              static_cast<uint32_t>(heads * kValueTileBytes));
    WaitForBulkReads<0>();
  }
}

// What does not depend on a chunk is loaded before the chunk is known; find(&slot, &chunk) may wait
// for memory, and says no where there is none.
template <typename X, typename Find>
__device__ inline void DoItem(const InParams& p, int part, const Find& find, InShared& shared,
                              const Group& group) {
  const gdn_fused_decode_args& a = p.args.layer;
  const Columns<X> columns = ColumnsOf<X>(p, part, group.thread % 32);
  Filter filter;
  LoadFilter(a, columns.channel, filter);
  int64_t slot;
  SlotChunk chunk;
  if (!find(&slot, &chunk)) return;
  const int lane = group.thread % 32;
  FetchInputs(a, chunk, columns, group.thread / 32, lane % 8,
              SharedAddress(PanelOf(shared, part < a.key_heads, lane)));
  if (a.read_index[chunk.sequence] < 0 || a.write_index[chunk.sequence] < 0) {
    WaitForCopies<0>();
    return;
  }
  if (p.checkpoints.every != 0 && group.thread < 32 && columns.exist && chunk.count == kChunk) {
    const int64_t to = p.checkpoints.SlotAfter(chunk.sequence, chunk.first / kChunk + 1);
    if (to >= 0) StoreCheckpoint(a, chunk, columns, to);
  }
  if (part < a.key_heads) {
    DoKeys<X>(p, chunk, slot, part, columns, filter, shared, group);
  } else {
    DoValues<X>(p, chunk, slot, part - static_cast<int>(a.key_heads), columns, filter, shared,
                group);
  }
}

__device__ inline InShared& SharedOf(char* raw, int group) {
  const uint32_t past = SharedAddress(raw) % alignof(InShared);
  return reinterpret_cast<InShared*>(raw + (alignof(InShared) - past) % alignof(InShared))[group];
}

// An item a block.
template <typename X>
__global__ void __launch_bounds__(kGroup, kBlocks) InKernel(const __grid_constant__ InParams p) {
  AllowNextKernel();
  extern __shared__ char raw[];
  const Group group = {0, static_cast<int>(threadIdx.x)};
  const int part = static_cast<int>(blockIdx.x % static_cast<unsigned>(p.parts));
  const auto find = [&](int64_t* slot, SlotChunk* chunk) {
    *slot = blockIdx.x / static_cast<unsigned>(p.parts);
    return ChunkOfSlot(p.args.cu_seqlens, p.args.layer.rows, *slot, chunk);
  };
  DoItem<X>(p, part, find, SharedOf(raw, 0), group);
}

// What a warpgroup of such blocks works on.
struct Item {
  int64_t slot;
  SlotChunk chunk;
  int32_t part;
  bool exists;
};
__device__ inline void FindItem(const InParams& p, uint32_t ticket, ChunkOrder* order, Item* item) {
  const auto parts = static_cast<uint32_t>(p.parts);
  item->part = static_cast<int32_t>(ticket % parts);
  item->exists = order->Find(static_cast<int>(ticket / parts), &item->slot, &item->chunk);
}

// A few blocks that keep their multiprocessors, and hand each item over as soon as it is done, to a
// walk that runs beside them.
template <typename X>
__global__ void __launch_bounds__(kBlocks* kGroup, 1)
    StreamKernel(const __grid_constant__ InParams p) {
  AllowNextKernel();
  extern __shared__ char raw[];
  __shared__ Item items[2][kBlocks];
  __shared__ ChunkOrder orders[kBlocks];
  const int thread = static_cast<int>(threadIdx.x);
  const Group group = {thread / kGroup, thread % kGroup};
  InShared& shared = SharedOf(raw, group.index);
  if (group.thread == 0) {
    orders[group.index].Init(p.args.cu_seqlens, static_cast<int>(p.args.layer.rows));
    FindItem(p, atomicAdd(p.ticket, 1u), &orders[group.index], &items[0][group.index]);
  }
  group.Sync();
  for (int turn = 0;; turn ^= 1) {
    const Item& item = items[turn][group.index];
    if (!item.exists) return;
    uint32_t next = 0;
    if (group.thread == 0) next = atomicAdd(p.ticket, 1u);  // Arrives while this one is done.
    const auto find = [&](int64_t* slot, SlotChunk* chunk) {
      *slot = item.slot;
      *chunk = item.chunk;
      return true;
    };
    DoItem<X>(p, item.part, find, shared, group);
    if (group.thread == 0) {
      FindItem(p, next, &orders[group.index], &items[turn ^ 1][group.index]);
    }
    group.Sync();
    if (group.thread == 0) {
      WaitForBulkStores();
      Publish(p.ready + item.slot * p.parts + item.part);
    }
  }
}

template <typename X>
gdn_status Launch(const gdn_exec& exec, const InParams& p, int64_t items, int stream_blocks) {
  constexpr size_t kBytes = sizeof(InShared) + alignof(InShared);
  if (stream_blocks > 0) {
    constexpr size_t kStreamBytes = kBlocks * sizeof(InShared) + alignof(InShared);
    const cudaError_t error = AllowSharedMemory<StreamKernel<X>>(kStreamBytes, false);
    if (const gdn_status status = CheckCuda(kOp, error); status != GDN_OK) return status;
    StreamKernel<X>
        <<<static_cast<unsigned>(stream_blocks), kBlocks * kGroup, kStreamBytes, Stream(exec)>>>(p);
    return CheckLaunch(kOp);
  }
  const cudaError_t error = AllowSharedMemory<InKernel<X>>(kBytes, false);
  if (const gdn_status status = CheckCuda(kOp, error); status != GDN_OK) return status;
  InKernel<X><<<static_cast<unsigned>(items), kGroup, kBytes, Stream(exec)>>>(p);
  return CheckLaunch(kOp);
}

}  // namespace

gdn_status LaunchWayIn(const gdn_exec& exec, const gdn_fused_prefill_args& args,
                       const PreparedChunks& chunks, const PrefillPlan& plan) {
  const gdn_fused_decode_args& a = args.layer;
  InParams p;
  p.args = args;
  p.checkpoints = CheckpointsOf(args);
  p.scale = OutputScale(a.scale);
  p.ratio = static_cast<int32_t>(a.value_heads / a.key_heads);
  p.parts = static_cast<int32_t>(ChunkItems(a.key_heads, a.value_heads));
  p.keys = static_cast<char*>(chunks.keys);
  p.values = static_cast<char*>(chunks.values);
  p.mixes = static_cast<char*>(chunks.mixes);
  p.scalars = static_cast<char*>(chunks.scalars);
  const int64_t items = ChunkSlots(args.tokens, a.rows) * p.parts;
  p.ready = chunks.ready;
  p.ticket = chunks.ready + items;
  if (plan.stream_blocks > 0) {
    const size_t bytes = static_cast<size_t>(items + 1) * sizeof(uint32_t);
    const cudaError_t error = cudaMemsetAsync(chunks.ready, 0, bytes, Stream(exec));
    if (const gdn_status status = CheckCuda(kOp, error); status != GDN_OK) return status;
  }
  return a.dtype == GDN_BF16 ? Launch<Bf16>(exec, p, items, plan.stream_blocks)
                             : Launch<F16>(exec, p, items, plan.stream_blocks);
}

}  // namespace gdn::cuda
