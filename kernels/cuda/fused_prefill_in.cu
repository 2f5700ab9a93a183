#include <algorithm>
#include <cstddef>
#include <cstring>

#include "kernels/cuda/cluster.cuh"
#include "kernels/cuda/fused_prefill.h"
#include "kernels/cuda/fused_prefill_conv.cuh"
#include "kernels/cuda/fused_prefill_gates.cuh"
#include "kernels/cuda/fused_prefill_matrices.cuh"
#include "kernels/cuda/fused_prefill_stream.cuh"
#include "kernels/cuda/tensor_copy.cuh"
#include "kernels/cuda/tensor_map.h"

// The way into the chunks. An item is a chunk of a key head, with all that its value heads need of
// it, or of the values of two value heads. A warpgroup works on one. Five share a multiprocessor,
// beside a walk four, so that some compute while others wait for memory.

namespace gdn::cuda {
namespace {

using namespace chunk;  // NOLINT(build/namespaces)

constexpr char kOp[] = "fused_prefill";
constexpr int kBlocks = 5;       // Of a multiprocessor.
constexpr int kGroups = 4;       // Of a block that streams: five have too few registers.
constexpr int kSharedHeads = 2;  // Value heads whose gates are formed at once, a warp each.

struct InParams {
  CUtensorMap x;  // Tiles of the size of a panel.
  gdn_fused_prefill_args args;
  Checkpoints checkpoints;
  float scale;
  int32_t ratio;
  int32_t parts;  // Items of a slot: see ChunkItems.
  char* keys;
  char* values;
  char* mixes;
  char* scalars;
  int64_t slots;
  // Where items are handed over one by one: a word each, [parts, slots], and the number of the
  // next.
  uint32_t* ready;
  uint32_t* ticket;
};

struct alignas(1024) InShared {
  Panel panels[2][2];  // Of two heads: a key's and its query's, or two of values.
  union {
    struct {
      Filters filters;
      float betas[2][kChunk];  // Of values.
    } conv;
    struct {
      PackedSystem system;
      InScalars scalars[kSharedHeads];
    } solve;
  };
  ArrivalBarrier loaded;  // A phase an item.
  // T and P of value head r of a key head, once the keys are stored.
  __device__ Triangle (&Mix(int r))[2] { return reinterpret_cast<Triangle(&)[2]>(panels[r % 2]); }
};

// What a warpgroup works on: a chunk, and which of its parts.
struct Item {
  int64_t slot;
  SlotChunk chunk;
  int32_t part;
  bool exists;
};

// The warpgroup that works on an item.
struct Group {
  int index;  // In the block.
  int thread;
  __device__ int Lane() const { return thread & 31; }
  __device__ int Warp() const { return thread >> 5 & 3; }
  __device__ void Sync() const { NamedBarrier(1 + index, kGroup); }
};

// What a warp convolves: a key or its query, or the values of one of two heads, of which the second
// may not be there.
template <typename X>
__device__ inline Columns<X> ColumnsOf(const InParams& p, int part, int second) {
  const gdn_fused_decode_args& a = p.args.layer;
  const int keys = static_cast<int>(a.key_heads);
  const X* const x = static_cast<const X*>(a.x);
  if (part < keys) {
    const int channel = ((1 - second) * keys + part) * kDim;
    return {x + (second == 0 ? a.k_offset : a.q_offset) + part * kDim, channel, true};
  }
  const int head = 2 * (part - keys) + second;
  const bool exists = head < a.value_heads;
  const int from = exists ? head : head - 1;
  return {x + a.v_offset + from * kDim, (2 * keys + from) * kDim, exists};
}

// Starts loading an item's inputs, by one thread. Rows of later sequences and of none arrive too,
// and are not used.
__device__ inline void StartLoad(const InParams& p, const SlotChunk& chunk, int part,
                                 InShared& shared) {
  const gdn_fused_decode_args& a = p.args.layer;
  const int keys = static_cast<int>(a.key_heads);
  int column[2];
  if (part < keys) {
    column[0] = static_cast<int>(a.k_offset) + part * kDim;
    column[1] = static_cast<int>(a.q_offset) + part * kDim;
  } else {
    const int head = 2 * (part - keys);
    column[0] = static_cast<int>(a.v_offset) + head * kDim;
    column[1] = head + 1 < a.value_heads ? column[0] + kDim : column[0];
  }
  shared.loaded.ArriveExpecting(chunk.count > 0 ? sizeof(shared.panels) : 0);
  if (chunk.count == 0) return;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    TensorLoad(&shared.panels[i / 2][i % 2], p.x, column[i / 2] + i % 2 * kPanelColumns,
               static_cast<int>(chunk.begin), &shared.loaded);
  }
}

// What an item takes of the gates: of a key head those of its first value heads, a warp each; of
// two heads of values a write strength a thread.
template <typename X>
__device__ inline RawGates<X> LoadItemGates(const InParams& p, const SlotChunk& chunk, bool is_key,
                                            int head, const Group& group) {
  const gdn_fused_decode_args& a = p.args.layer;
  if (is_key) {
    return group.Warp() < min(kSharedHeads, p.ratio)
               ? LoadGates<X>(a, chunk, head + group.Warp(), group.Lane())
               : RawGates<X>{};
  }
  RawGates<X> raw = {};
  const int token = group.thread % kChunk;
  head += group.thread / kChunk;
  if (head < a.value_heads && token < chunk.count) {
    const X* const line = static_cast<const X*>(a.x) + (chunk.begin + token) * a.x_token_stride;
    raw.b[0] = line[a.b_offset + head];
  }
  return raw;
}

// The matrices of a key head's value heads, once the keys are there and being stored.
template <typename X>
__device__ inline void DoMatrices(const InParams& p, const Item& item, int key_head,
                                  InShared& shared, const Group& group) {
#ifdef GDN_WGMMA
  const gdn_fused_decode_args& a = p.args.layer;
  const int thread = group.thread;
  const int lane = group.Lane();
  const int warp = group.Warp();
  const int first_head = key_head * p.ratio;
  uint32_t kk[16];
  uint32_t qk[16];
  Grams(shared.panels[0], shared.panels[1], p.scale, kk, qk);
  PackedSystem& system = shared.solve.system;
#pragma unroll 1
  for (int r = 0; r < p.ratio; ++r) {
    // The tiles of this head: free once the keys, or the head before the last, are stored.
    if (thread == 0) {
      if (r == 0) {
        WaitForBulkReads<0>();
      } else {
        WaitForBulkReads<2>();
      }
    }
    group.Sync();
    if (r > 0 && r % kSharedHeads == 0) {
      if (thread == 0) WaitForBulkReads<0>();
      group.Sync();
      if (warp < kSharedHeads && r + warp < p.ratio) {
        const int head = first_head + r + warp;
        const RawGates<X> raw = LoadGates<X>(a, item.chunk, head, lane);
        FormGates(raw, LoadGateWeights(a, head), a.beta_scale, p.scale, item.chunk.count, lane,
                  &shared.solve.scalars[warp]);
      }
      group.Sync();
    }
    // Keeps the compiler from widening them outside of the loop, for which there is no room.
#pragma unroll
    for (int i = 0; i < 16; ++i) asm volatile("" : "+r"(kk[i]), "+r"(qk[i]));
    const Triangle(&mix)[2] = shared.Mix(r);
    const TriangleTile t = {SharedAddress(&mix[0])};
    const InScalars& scalars = shared.solve.scalars[r % kSharedHeads];
    FormMatrices(scalars, system, t, {SharedAddress(&mix[1])}, warp, lane, kk, qk);
    __syncwarp();
    InvertDiagonal(system.diagonal[warp], t, warp, lane);
    group.Sync();
    MergeSixteens(system, t, warp, lane);
    group.Sync();
    MergeThirtyTwos(system, t, warp, lane);
    FenceForBulk();
    group.Sync();
    if (thread == 0) {
      const int64_t at = item.slot * a.value_heads + first_head + r;
      BulkStore(p.mixes + at * int64_t{sizeof(mix)}, mix, sizeof(mix));
      BulkStore(p.scalars + at * int64_t{sizeof(WalkScalars)}, &scalars.walk, sizeof(WalkScalars));
    }
  }
#endif
}

// What does not depend on a chunk is loaded before the chunk is known: find() may wait for memory.
// meanwhile() is called once, where the inputs are awaited.
template <typename X, typename Find, typename Meanwhile>
__device__ inline void DoItem(const InParams& p, int part, const Find& find,
                              const Meanwhile& meanwhile, uint32_t phase, InShared& shared,
                              const Group& group) {
  const gdn_fused_decode_args& a = p.args.layer;
  const int lane = group.Lane();
  const int warp = group.Warp();
  const int first = warp % 2 * kConvRows;
  const Columns<X> columns = ColumnsOf<X>(p, part, warp / 2);
  Panel(&panels)[2] = shared.panels[warp / 2];
  const RawFilter filter = LoadFilter(a, columns.channel, group.thread);
  const Item& item = find();
  if (!item.exists) return;
  const SlotChunk& chunk = item.chunk;
  if (group.thread == 0) StartLoad(p, chunk, part, shared);
  const bool is_key = part < a.key_heads;
  const int value_head = is_key ? part * p.ratio : 2 * (part - static_cast<int>(a.key_heads));
  const RawGates<X> raw = LoadItemGates<X>(p, chunk, is_key, value_head, group);
  // The inputs before the warp's first, by half a warp.
  const Columns<X> at = columns.From(lane % 16 * kVectorElements);
  uint4 past[kPast] = {};
  if (lane < 16 && chunk.first + first > 0 && first < chunk.count) {
    LoadPast(a, at, chunk.begin + first, past);
  }
  StoreFilter(filter, group.thread, shared.conv.filters);
  const bool padding = a.read_index[chunk.sequence] < 0 || a.write_index[chunk.sequence] < 0;
  if (padding || chunk.count == 0) {
    group.Sync();
    shared.loaded.Wait(phase);
    if (padding) {
      meanwhile();
      return;
    }
  }
  if (lane < 16 && first == 0) {
    if (chunk.first == 0) {
      Past<X> old;
#pragma unroll
      for (Vector<X>& entry : old) entry = Vector<X>{};
      if (at.exist) CarryState(a, chunk, at, old);
      memcpy(past, old, sizeof(past));
    }
    if (p.checkpoints.every != 0 && at.exist && chunk.count == kChunk) {
      const int64_t to = p.checkpoints.SlotAfter(chunk.sequence, chunk.first / kChunk + 1);
      if (to >= 0) StoreCheckpoint(a, chunk, at, to);
    }
  }
  if (chunk.count == 0) {  // Of an empty sequence nothing but its convolution state.
    meanwhile();
    return;
  }
  if (!is_key) {
    shared.conv.betas[group.thread / kChunk][group.thread % kChunk] =
        a.beta_scale * FastSigmoid(Widen(raw.b[0]));
  }
  group.Sync();
  meanwhile();
  shared.loaded.Wait(phase);
  const bool forms_gates = is_key && warp < min(kSharedHeads, p.ratio);
  GateWeights gate_weights = {};
  if (is_key) {
    Convolve<X, false>(shared.conv.filters, past, nullptr, warp / 2, first, lane, panels);
    Factors factors;
    NormFactors<X>(first, lane, panels, factors);
    if (forms_gates) gate_weights = LoadGateWeights(a, value_head + warp);
    ScaleRows<X>(factors, first, lane, panels);
  } else {
    Convolve<X, true>(shared.conv.filters, past, shared.conv.betas[warp / 2], warp / 2, first, lane,
                      panels);
  }
  if (first + kConvRows > chunk.count) {
    __syncwarp();
    ClearRows(first, chunk.count, lane, panels);
  }
  FenceForBulk();
  group.Sync();
  if (is_key) {
    if (group.thread == 0) {
      BulkStore(p.keys + (item.slot * a.key_heads + part) * int64_t{sizeof(Keys)}, shared.panels,
                sizeof(Keys));
    }
    if (forms_gates) {
      FormGates(raw, gate_weights, a.beta_scale, p.scale, chunk.count, lane,
                &shared.solve.scalars[warp]);
    }
    DoMatrices<X>(p, item, part, shared, group);
  } else if (group.thread == 0) {
    const int heads = value_head + 1 < a.value_heads ? 2 : 1;
    BulkStore(p.values + (item.slot * a.value_heads + value_head) * kValueTileBytes, shared.panels,
              static_cast<uint32_t>(heads * kValueTileBytes));
  }
  if (group.thread == 0) WaitForBulkReads<0>();
}

// An item a block: its part, and its slot in two coordinates.
constexpr unsigned kMostSlots = 65535;
template <typename X>
__global__ void __launch_bounds__(kGroup, kBlocks) InKernel(const __grid_constant__ InParams p) {
  AllowNextKernel();
  extern __shared__ __align__(1024) char raw[];
  const Group group = {0, static_cast<int>(threadIdx.x)};
  Item item;
  const auto find = [&]() -> const Item& {
    item.slot = blockIdx.y + int64_t{kMostSlots} * blockIdx.z;
    item.exists = ChunkOfSlot(p.args.cu_seqlens, p.args.layer.rows, item.slot, &item.chunk);
    return item;
  };
  InShared& shared = *reinterpret_cast<InShared*>(raw);
  if (threadIdx.x == 0) {
    if (p.args.tokens > 0) PrefetchTensorMap(p.x);
    shared.loaded.Init();
    ArrivalBarrier::FenceInit();
  }
  DoItem<X>(
      p, static_cast<int>(blockIdx.x), find, [] {}, 0, shared, group);
}

__device__ inline void FindItem(const InParams& p, uint32_t ticket, ChunkOrder* order, Item* item) {
  const auto parts = static_cast<uint32_t>(p.parts);
  item->part = static_cast<int32_t>(ticket % parts);
  item->exists = order->Find(static_cast<int>(ticket / parts), &item->slot, &item->chunk);
}

constexpr int kMostShared = 128;  // Sequences whose lengths a block that streams keeps.

// By the thread that has stored the item.
__device__ inline void HandOver(const InParams& p, const Item& item) {
  WaitForBulkStores();
  Publish(p.ready + item.part * p.slots + item.slot);
}

// A few blocks that keep their multiprocessors, and hand their items over one by one, to a walk
// that runs beside them: each while the next one's inputs are awaited.
template <typename X>
__global__ void __launch_bounds__(kGroups* kGroup, 1)
    StreamKernel(const __grid_constant__ InParams p) {
  AllowNextKernel();
  extern __shared__ __align__(1024) char raw[];
  __shared__ Item items[2][kGroups];
  __shared__ ChunkOrder orders[kGroups];
  __shared__ int32_t cu_seqlens[kMostShared + 1];
  const int sequences = static_cast<int>(p.args.layer.rows);
  const int thread = static_cast<int>(threadIdx.x);
  const Group group = {thread / kGroup, thread % kGroup};
  InShared& shared = reinterpret_cast<InShared*>(raw)[group.index];
  if (sequences <= kMostShared) {
    for (int i = thread; i <= sequences; i += kGroups * kGroup) {
      cu_seqlens[i] = p.args.cu_seqlens[i];
    }
  }
  __syncthreads();
  if (group.thread == 0) {
    shared.loaded.Init();
    ArrivalBarrier::FenceInit();
    orders[group.index].Init(sequences <= kMostShared ? cu_seqlens : p.args.cu_seqlens, sequences);
    FindItem(p, atomicAdd(p.ticket, 1u), &orders[group.index], &items[0][group.index]);
    items[1][group.index].exists = false;
  }
  group.Sync();
  for (uint32_t turn = 0;; turn ^= 1) {
    const Item& item = items[turn][group.index];
    Item& other = items[turn ^ 1][group.index];  // The one before, then the next.
    if (!item.exists) {
      if (group.thread == 0 && other.exists) HandOver(p, other);
      return;
    }
    uint32_t next = 0;
    if (group.thread == 0) next = atomicAdd(p.ticket, 1u);
    const auto meanwhile = [&] {
      if (group.thread != 0) return;
      if (other.exists) HandOver(p, other);
      FindItem(p, next, &orders[group.index], &other);
    };
    // What depends on the thread is computed anew: there is no room to keep it.
    DoItem<X>(p, item.part, [&]() -> const Item& { return item; }, meanwhile, turn, shared,
              {group.index, Opaque(group.thread)});
    group.Sync();
  }
}

template <typename X>
gdn_status Launch(const gdn_exec& exec, const InParams& p, int stream_blocks) {
  constexpr size_t kBytes = sizeof(InShared);
  if (stream_blocks > 0) {
    constexpr size_t kStreamBytes = kGroups * sizeof(InShared);
    const cudaError_t error = AllowSharedMemory<StreamKernel<X>>(kStreamBytes, false);
    if (const gdn_status status = CheckCuda(kOp, error); status != GDN_OK) return status;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(stream_blocks));
    config.blockDim = dim3(kGroups * kGroup);
    config.dynamicSmemBytes = kStreamBytes;
    config.stream = Stream(exec);
    // In pairs, as the walk's: singly they share each pair of multiprocessors with a block of the
    // walk, and both take longer.
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {2, 1, 1};
    config.attrs = &attribute;
    config.numAttrs = stream_blocks % 2 == 0 ? 1 : 0;
    cudaLaunchKernelEx(&config, StreamKernel<X>, p);
    return CheckLaunch(kOp);
  }
  const cudaError_t error = AllowSharedMemory<InKernel<X>>(kBytes, false);
  if (const gdn_status status = CheckCuda(kOp, error); status != GDN_OK) return status;
  const auto rows = static_cast<unsigned>(p.slots < kMostSlots ? p.slots : kMostSlots);
  const dim3 grid(static_cast<unsigned>(p.parts), rows,
                  static_cast<unsigned>((p.slots + kMostSlots - 1) / kMostSlots));
  InKernel<X><<<grid, kGroup, kBytes, Stream(exec)>>>(p);
  return CheckLaunch(kOp);
}

}  // namespace

gdn_status LaunchWayIn(const gdn_exec& exec, const gdn_fused_prefill_args& args,
                       const PreparedChunks& chunks, const PrefillPlan& plan) {
  const gdn_fused_decode_args& a = args.layer;
  InParams p{};
  p.args = args;
  p.checkpoints = CheckpointsOf(args);
  p.scale = OutputScale(a.scale);
  p.ratio = static_cast<int32_t>(a.value_heads / a.key_heads);
  p.parts = static_cast<int32_t>(ChunkItems(a.key_heads, a.value_heads, plan));
  p.keys = static_cast<char*>(chunks.keys);
  p.values = static_cast<char*>(chunks.values);
  p.mixes = static_cast<char*>(chunks.mixes);
  p.scalars = static_cast<char*>(chunks.scalars);
  p.slots = ChunkSlots(args.tokens, a.rows);
  const int64_t items = p.slots * p.parts;
  p.ready = chunks.ready;
  p.ticket = chunks.ready + items;
  if (plan.stream_blocks > 0) {
    const size_t bytes = static_cast<size_t>(items + 1) * sizeof(uint32_t);
    const cudaError_t error = cudaMemsetAsync(chunks.ready, 0, bytes, Stream(exec));
    if (const gdn_status status = CheckCuda(kOp, error); status != GDN_OK) return status;
  }
  if (args.tokens > 0) {
    const int64_t columns =
        std::max({a.q_offset + a.key_heads * kDim, a.k_offset + a.key_heads * kDim,
                  a.v_offset + a.value_heads * kDim});
    cudaError_t error = PrepareTensorMaps();
    if (error == cudaSuccess) {
      error = EncodeRowsMap(a.dtype, a.x, columns, args.tokens, a.x_token_stride, kChunk, &p.x);
    }
    if (const gdn_status status = CheckCuda(kOp, error); status != GDN_OK) return status;
  }
  return a.dtype == GDN_BF16 ? Launch<Bf16>(exec, p, plan.stream_blocks)
                             : Launch<F16>(exec, p, plan.stream_blocks);
}

}  // namespace gdn::cuda
