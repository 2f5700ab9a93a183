// An item of the way into the chunks, by a warpgroup.
#ifndef KERNELS_CUDA_FUSED_PREFILL_IN_ITEM_CUH_
#define KERNELS_CUDA_FUSED_PREFILL_IN_ITEM_CUH_

#include <cstring>

#include "kernels/cuda/fused_prefill_in_matrices.cuh"

namespace gdn::cuda::chunk {

// What a warp convolves: a key or its query, or the values of one of two heads, of which the second
// may not be there.
template <typename X>
__device__ inline Columns<X> ColumnsOf(const InParams& p, int part, bool is_key, int second) {
  const gdn_fused_decode_args& a = p.args.layer;
  const int keys = static_cast<int>(a.key_heads);
  const X* const x = static_cast<const X*>(a.x);
  if (is_key) {
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
__device__ inline void StartLoad(const InParams& p, const SlotChunk& chunk, int part, bool is_key,
                                 InShared& shared) {
  const gdn_fused_decode_args& a = p.args.layer;
  const int keys = static_cast<int>(a.key_heads);
  int column[2];
  if (is_key) {
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

// A group's turn to convolve, where groups take turns: see FirstTurns.
struct NoTurns {
  __device__ void Wait() const {}
  __device__ void Pass() const {}
};

// Way: InTurn, or Streaming. What does not depend on a chunk is loaded before the chunk is known:
// find() may wait for memory. meanwhile() is called once, where the inputs are awaited.
template <typename X, typename Way, typename Find, typename Meanwhile, typename Turns>
__device__ inline void DoItem(const InParams& p, int part, const Find& find,
                              const Meanwhile& meanwhile, const Turns& turns, uint32_t phase,
                              InShared& shared, const Group& group) {
  const gdn_fused_decode_args& a = p.args.layer;
  const int lane = group.Lane();
  const int warp = group.Warp();
  const int first = warp % 2 * kConvRows;
  const bool is_key = Way::kOnlyKeys || part < a.key_heads;
  const Columns<X> columns = ColumnsOf<X>(p, part, is_key, warp / 2);
  Panel(&panels)[2] = shared.panels[warp / 2];
  const RawFilter filter = LoadFilter(a, columns.channel, group.thread);
  const Item& item = find();
  if (!item.exists) return;
  const SlotChunk& chunk = item.chunk;
  if (group.thread == 0) StartLoad(p, chunk, part, is_key, shared);
  const int value_head = is_key ? part * p.ratio : 2 * (part - static_cast<int>(a.key_heads));
  const RawGates<X> raw = LoadItemGates<X>(p, chunk, is_key, value_head, group);
  // The inputs before the warp's first, by half a warp.
  const Columns<X> at = columns.From(lane % 16 * kVectorElements);
  uint4 past[kPast] = {};
  if (lane < 16 && chunk.first + first > 0 && first < chunk.count) {
    LoadPast(a, at, chunk.begin + first, past);
  }
  meanwhile();
  StoreFilter(filter, group.thread, shared.conv.filters);
  const bool padding = Way::kStreams
                           ? item.padding
                           : a.read_index[chunk.sequence] < 0 || a.write_index[chunk.sequence] < 0;
  if (padding || chunk.count == 0) {
    group.Sync();
    shared.loaded.Wait(phase);
    turns.Wait();
    turns.Pass();
    if (padding) return;
  }
  if (lane < 16 && first == 0) {
    if (chunk.first == 0) {
      Past<X> old;
#pragma unroll
      for (Vector<X>& entry : old) entry = Vector<X>{};
      if (at.exist) CarryState<X, Way::kStreams>(a, chunk, at, old);
      memcpy(past, old, sizeof(past));
    }
    if (p.checkpoints.every != 0 && at.exist && chunk.count == kChunk) {
      const int64_t to = p.checkpoints.SlotAfter(chunk.sequence, chunk.first / kChunk + 1);
      if (to >= 0) StoreCheckpoint(a, chunk, at, to);
    }
  }
  if (chunk.count == 0) return;  // Of an empty sequence nothing but its convolution state.
  if (!is_key) {
    shared.conv.betas[group.thread / kChunk][group.thread % kChunk] =
        a.beta_scale * FastSigmoid(Widen(raw.b[0]));
  }
  group.Sync();
  shared.loaded.Wait(phase);
  turns.Wait();
  const bool forms_gates = is_key && warp < min(kSharedHeads, p.ratio);
  GateWeights gate_weights = {};
  if (is_key) {
    Convolve<X, false>(shared.conv.filters, past, nullptr, warp / 2, first, lane, panels);
    turns.Pass();
    Factors factors;
    NormFactors<X>(first, lane, panels, factors);
    if (forms_gates) gate_weights = LoadGateWeights(a, value_head + warp);
    ScaleRows<X>(factors, first, lane, panels);
  } else {
    Convolve<X, true>(shared.conv.filters, past, shared.conv.betas[warp / 2], warp / 2, first, lane,
                      panels);
    turns.Pass();
  }
  if (first + kConvRows > chunk.count) {
    __syncwarp();
    ClearRows(first, chunk.count, lane, panels);
  }
  FenceForBulk();
  group.Sync();
  if (is_key) {
    if (group.thread == Way::kStorer) {
      BulkStore(p.keys + (item.slot * a.key_heads + part) * int64_t{sizeof(Keys)}, shared.panels,
                sizeof(Keys));
    }
    if (forms_gates) {
      FormGates(raw, gate_weights, a.beta_scale, p.scale, chunk.count, lane,
                &shared.solve.scalars[warp]);
    }
    DoMatrices<X, Way>(p, item, part, shared, group);
  } else if (group.thread == Way::kStorer) {
    const int heads = value_head + 1 < a.value_heads ? 2 : 1;
    BulkStore(p.values + (item.slot * a.value_heads + value_head) * kValueTileBytes, shared.panels,
              static_cast<uint32_t>(heads * kValueTileBytes));
  }
  if (group.thread == Way::kStorer) WaitForBulkReads<0>();
}

}  // namespace gdn::cuda::chunk

#endif  // KERNELS_CUDA_FUSED_PREFILL_IN_ITEM_CUH_
