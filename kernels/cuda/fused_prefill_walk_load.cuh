// The roles of the fused prefill's walk that bring what the others work on: see
// fused_prefill_walk.cuh.
#ifndef KERNELS_CUDA_FUSED_PREFILL_WALK_LOAD_CUH_
#define KERNELS_CUDA_FUSED_PREFILL_WALK_LOAD_CUH_

#include <cstddef>

#include "kernels/cuda/async_copy.cuh"
#include "kernels/cuda/fused_prefill_stream.cuh"
#include "kernels/cuda/fused_prefill_walk.cuh"
#include "kernels/cuda/tensor_copy.cuh"

namespace gdn::cuda::chunk {

// Where a chunk's parts lie.
struct ChunkParts {
  static constexpr uint32_t kKeyBytes = sizeof(Keys) / 2;
  static constexpr uint32_t kValueBytes = kValueTileBytes / kParts;

  __device__ ChunkParts(const WalkParams& p, const WalkUnit& unit, int index) {
    const int64_t chunk = ChunkSlot(unit.begin, unit.sequence, index);
    const int64_t value_head = chunk * p.args.value_heads + unit.head;
    keys = p.keys + (chunk * p.args.key_heads + unit.head / p.ratio) * int64_t{sizeof(Keys)};
    values = p.values + value_head * kValueTileBytes + PartOfBlock() * int64_t{kValueBytes};
    mix = p.mixes + value_head * int64_t{2 * sizeof(Triangle)};
    scalars = p.scalars + value_head * int64_t{sizeof(WalkScalars)};
  }
  const char* keys;
  const char* values;
  const char* mix;
  const char* scalars;
};

// Brings the state of a unit to the L2.
__device__ inline void PrefetchState(const WalkParams& p, const WalkUnit& unit) {
  if (!p.moves || unit.length == 0 || unit.read < 0) return;
  const int64_t element = p.args.state_dtype == GDN_F32 ? 4 : 2;
  PrefetchBulk(static_cast<const char*>(p.args.state) + unit.read * element,
               static_cast<uint32_t>(kPanelColumns * kDim * element));
}

// How many chunks are there, told by one thread and polled by another. Atomic accesses: racecheck
// reports a plain release and acquire as a hazard.
__device__ inline void Tell(uint32_t* there, uint32_t count) {
  asm volatile(
      "{\n"
      ".reg .u32 before;\n"
      "atom.release.cta.shared.exch.b32 before, [%0], %1;\n"
      "}\n" ::"r"(SharedAddress(there)),
      "r"(count)
      : "memory");
}
__device__ inline uint32_t Told(uint32_t* there) {
  uint32_t count;
  asm volatile("atom.acquire.cta.shared.or.b32 %0, [%1], 0;"
               : "=r"(count)
               : "r"(SharedAddress(there))
               : "memory");
  return count;
}

// Where chunks come one by one: a warp that watches for them.
__device__ inline void WatchRole(const WalkParams& p, WalkShared& shared, int lane) {
  uint32_t there = 0;
  UnitFinder finder(p);
  for (WalkUnit unit = finder.Next(); unit.length > 0; unit = finder.Next()) {
    const int chunks = (unit.length + kChunk - 1) / kChunk;
    const uint32_t* const items = p.ready + ChunkSlot(unit.begin, unit.sequence, 0);
    const uint32_t* const keys = items + unit.head / p.ratio * p.slots;
    const uint32_t* const values = items + (p.args.key_heads + unit.head / 2) * p.slots;
    for (int chunk = 0; chunk < chunks;) {
      const uint32_t missing = ~ReadyChunks(keys, values, chunk, chunks, lane);
      const int count = missing == 0 ? 32 : __ffs(static_cast<int>(missing)) - 1;
      if (count == 0) {
        __nanosleep(100);
        continue;
      }
      chunk += count;
      there += static_cast<uint32_t>(count);
      asm volatile("fence.acq_rel.gpu;" ::: "memory");
      __syncwarp();
      if (lane == 0) Tell(&shared.there, there);
    }
  }
}

// Waits until more than n chunks are there; returns how many are.
__device__ inline uint32_t WaitForChunk(WalkShared& shared, uint32_t n) {
  uint32_t there;
  do {
    there = Told(&shared.there);
  } while (there <= n);
  FenceGlobalForBulk();
  return there;
}

// Brings a chunk's raw values, with a sequence's first what it takes of the convolution.
__device__ inline void LoadValues(const WalkParams& p, WalkShared& shared, const WalkUnit& unit,
                                  int chunk, uint32_t n) {
  const gdn_fused_decode_args& a = p.layer;
  ValueSlot& slot = shared.values[n % kValueSlots];
  ArrivalBarrier* const loaded = &shared.values_loaded[n % kValueSlots];
  const bool first = chunk == 0;
  const bool has_past = first && unit.read >= 0;
  constexpr uint32_t kPastBytes = sizeof(slot.past);
  loaded->ArriveExpecting(kValueRows * kPanelRowBytes + (first ? uint32_t{sizeof(slot.taps)} : 0) +
                          (has_past ? kPastBytes : 0));
  const int column = unit.head * kDim + PartOfBlock() * kPanelColumns;
  TensorLoad(slot.rows, p.x, static_cast<int>(a.v_offset) + column,
             unit.begin + chunk * kChunk - kPast, loaded);
  if (!first) return;
  const int64_t channel = 2 * a.key_heads * kDim + column;
  BulkLoad(slot.taps, a.conv_weight + 4 * channel, sizeof(slot.taps), loaded);
  if (!has_past) return;
#pragma unroll 1
  for (int j = 0; j < kPast; ++j) {
    BulkLoad(slot.past[j], ConvState(a, unit.read_slot, j, channel), kPastBytes / kPast, loaded);
  }
}

// The load role, by one thread.
template <Form kForm>
__device__ inline void LoadRole(const WalkParams& p, WalkShared& shared) {
  UnitFinder finder(p);
  shared.units[0] = finder.Next();
  constexpr bool kConvolves = kForm == Form::kConvolved;
  if (kConvolves && shared.units[0].length > 0) PrefetchTensorMap(p.x);
  if constexpr (kForm == Form::kTiles) WaitForPreviousKernel();
  uint32_t n = 0;
  uint32_t there = 0;  // Chunks of the block, where they come one by one.
  for (uint32_t u = 0; shared.units[u % kUnits].length > 0; ++u) {
    WalkUnit& next = shared.units[(u + 1) % kUnits];
    next = finder.Next();
    PrefetchState(p, next);
    const WalkUnit& unit = shared.units[u % kUnits];
    const int chunks = (unit.length + kChunk - 1) / kChunk;
    if (kConvolves && u == 0) {
      LoadValues(p, shared, unit, 0, 0);
      WaitForPreviousKernel();
    }
    for (int c = 0; c < chunks; ++c, ++n) {
      if (n >= kSlots) WaitFor(shared.keys_done, n - kSlots);
      // What the others wrote to the slot comes before what the copy engine writes.
      FenceForBulk();
      if constexpr (kConvolves) {
        // A chunk ahead: they are to be convolved, and are not the kernel before's.
        static_assert(kValueSlots == kSlots + 1);
        if (c + 1 < chunks) {
          LoadValues(p, shared, unit, c + 1, n + 1);
        } else if (next.length > 0) {
          LoadValues(p, shared, next, 0, n + 1);
        }
      }
      if constexpr (kForm == Form::kStreamed) {
        if (n >= there) there = WaitForChunk(shared, n);
      }
      const ChunkParts chunk(p, unit, c);
      WalkSlot& slot = shared.slots[n % kSlots];
      ArrivalBarrier* loaded = &shared.keys_loaded[n % kSlots];
      loaded->ArriveExpecting(ChunkParts::kKeyBytes + 2 * sizeof(Triangle) + sizeof(WalkScalars));
      BulkLoad(slot.k, chunk.keys + offsetof(Keys, k), ChunkParts::kKeyBytes, loaded);
      BulkLoad(&shared.scalars[n % kSlots], chunk.scalars, sizeof(WalkScalars), loaded);
      BulkLoad(&slot.t.triangle, chunk.mix, sizeof(Triangle), loaded);
      BulkLoad(&slot.p.triangle, chunk.mix + sizeof(Triangle), sizeof(Triangle), loaded);
      if (n >= kSlots) WaitFor(shared.rest_done, n - kSlots);
      FenceForBulk();
      loaded = &shared.rest_loaded[n % kSlots];
      loaded->ArriveExpecting(ChunkParts::kKeyBytes + (kConvolves ? 0 : ChunkParts::kValueBytes));
      BulkLoad(slot.q, chunk.keys + offsetof(Keys, q), ChunkParts::kKeyBytes, loaded);
      if constexpr (!kConvolves) {
        BulkLoad(shared.values[n % kValueSlots].rows, chunk.values, ChunkParts::kValueBytes,
                 loaded);
      }
    }
  }
  // The walk has ended only when the way in has, even where it has no chunks.
  if constexpr (kForm != Form::kTiles) WaitForPreviousKernel();
}

// The move role, by some warps: of all units but a block's first it brings the state to shared
// memory while the unit before is walked. There the state role leaves that one's for it, which it
// takes to the pool; the last unit's the state role stores itself. It may read ahead because no row
// writes what another reads: see fused_decode.h.
template <typename S, int kThreads>
__device__ inline void MoveStates(const WalkParams& p, WalkShared& shared, int thread) {
  constexpr int kRowBytes = kDim * sizeof(S);
  constexpr int kLanes = kRowBytes / 16;    // Of a row.
  constexpr int kRows = kThreads / kLanes;  // At once.
  const int first = thread / kLanes;
  const int column = thread % kLanes * 16;
  char* const staged = shared.state + column;
  const auto pool = [&](int64_t rows) {
    return static_cast<char*>(p.args.state) + rows * int64_t{sizeof(S)} + column;
  };
  UnitFinder finder(p);
  WalkUnit unit = finder.Next();
  for (uint32_t u = 0; unit.length > 0; ++u) {
    const WalkUnit next = finder.Next();
    if (next.length == 0) return;
    const bool reads = next.read >= 0;
    const char* const from = pool(reads ? next.read : next.write);
#pragma unroll 4
    for (int row = first; row < kPanelColumns; row += kRows) {
      CopyOrZero(SharedAddress(staged) + row * kStagedRow<S>, from + row * kRowBytes, reads);
    }
    CommitCopies();
    WaitForCopies<0>();
    shared.state_here.Arrive();
    shared.state_left.Wait(u % 2);
    char* const to = pool(unit.write);
#pragma unroll 4
    for (int row = first; row < kPanelColumns; row += kRows) {
      *reinterpret_cast<uint4*>(to + row * kRowBytes) =
          *reinterpret_cast<const uint4*>(staged + row * kStagedRow<S>);
    }
    unit = next;
  }
}
template <int kThreads>
__device__ inline void MoveRole(const WalkParams& p, WalkShared& shared, int thread) {
  if (!p.moves) return;
  if (p.args.state_dtype == GDN_F32) {
    MoveStates<float, kThreads>(p, shared, thread);
  } else {
    MoveStates<Bf16, kThreads>(p, shared, thread);
  }
}

}  // namespace gdn::cuda::chunk

#endif  // KERNELS_CUDA_FUSED_PREFILL_WALK_LOAD_CUH_
