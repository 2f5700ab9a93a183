// The walk over prepared chunks (fused_prefill_chunk.cuh): what its roles share. A block takes a
// sequence's value head, or half of the head's value columns; the two halves are then a cluster.
//
// Roles, a warpgroup each, a pipeline through shared memory:
//     load:   one thread has the copy engine bring the chunks
//     state:  64 value columns of S; one or two of these        (fused_prefill_walk_state.cuh)
//     output: the gated norm of a chunk's output; two or one    (fused_prefill_walk_output.cuh)
#ifndef KERNELS_CUDA_FUSED_PREFILL_WALK_CUH_
#define KERNELS_CUDA_FUSED_PREFILL_WALK_CUH_

#include "gdn/kernels/fused_decode.h"
#include "kernels/cuda/cluster.cuh"
#include "kernels/cuda/fused_prefill_chunk.cuh"
#include "kernels/cuda/fused_prefill_stream.cuh"

namespace gdn::cuda::chunk {

// Warpgroups of the output role.
template <int kStates>
constexpr int kOutputs = 3 - kStates;

struct WalkParams : Params {
  gdn_fused_decode_args layer;
  const char* keys;
  const char* values;
  const char* mixes;
  const char* scalars;
  const uint32_t* ready;  // Of the items, where they come one by one, [parts, slots]; or NULL.
  int64_t slots;
  Checkpoints checkpoints;
};

// A chunk's output as FP32, 64 tokens of 64 columns, in place of its queries and values: see
// OutputPlace.
constexpr int kOutputRow = kPanelColumns;
constexpr uint32_t kOutputBytes = kChunk * kOutputRow * 4;

template <int kStates>
struct WalkSlot {
  uint16_t k[2][kPanelElements];
  PaddedTriangle t;
  PaddedTriangle p;
  uint16_t q[2][kPanelElements];
  uint16_t values[kStates][kPanelElements];
  static_assert(sizeof(q) == kOutputBytes);

  __device__ uint32_t Output(int state) const {
    return SharedAddress(q) + static_cast<uint32_t>(state) * kOutputBytes;
  }
};

// Sums of squares of the other half of a head's columns, sent by the block that has it.
struct OtherHalf {
  float squares[2][kChunk];
  ArrivalBarrier arrived[2];
};

template <int kStates>
struct WalkShared {
  WalkSlot<kStates> slots[kSlots];
  WalkScalars scalars[kSlots];
  OtherHalf other;
  // Each phase of a slot is a chunk.
  ArrivalBarrier keys_loaded[kSlots];  // load -> state: k, matrices and scalars; q and values.
  ArrivalBarrier rest_loaded[kSlots];
  ArrivalBarrier rest_read[kSlots];  // state -> state: q and values may be overwritten.
  ArrivalBarrier output[kSlots];     // state -> output: it is there.
  ArrivalBarrier keys_done[kSlots];  // state -> load, output -> load: the slot's part is free.
  ArrivalBarrier rest_done[kSlots];
  uint32_t there;  // Chunks of the block that are known to be there, where they come one by one.

  // By all threads: the zeros of the triangles.
  __device__ void ClearTriangles() {
    for (WalkSlot<kStates>& slot : slots) {
      for (PaddedTriangle* triangle : {&slot.t, &slot.p}) {
        auto* const words = reinterpret_cast<uint32_t*>(triangle->zeros);
        for (unsigned i = threadIdx.x; i < sizeof(triangle->zeros) / 4; i += blockDim.x)
          words[i] = 0;
      }
    }
    FenceForBulk();
  }
  __device__ void Init() {
    constexpr int kWarps = kStates * kGroup / 32;
    for (int i = 0; i < kSlots; ++i) {
      keys_loaded[i].Init();
      rest_loaded[i].Init();
      rest_read[i].Init(kWarps);
      output[i].Init(kWarps);
      keys_done[i].Init(kWarps);
      rest_done[i].Init(kOutputs<kStates> * kGroup / 32);
    }
    for (ArrivalBarrier& arrived : other.arrived) arrived.Init();
    there = 0;
    ArrivalBarrier::FenceInit();
  }
};

// The 4-byte word of an output row that holds a column, permuted so that neither the state's nor
// the output's accesses meet in a bank.
__device__ inline int OutputPlace(int token, int column) {
  return column ^ (token / 2 % 4 * 8) ^ (column / 32 * 4);
}

// Arrives for a warp, whose accesses to shared memory come before.
__device__ inline void ArriveOnce(ArrivalBarrier& barrier, int lane) {
  __syncwarp();
  if (lane == 0) barrier.Arrive();
}

// Where a chunk's parts lie.
template <int kStates>
struct ChunkParts {
  static constexpr uint32_t kKeyBytes = sizeof(Keys) / 2;
  static constexpr uint32_t kValueBytes = kStates * kPanelElements * 2;

  __device__ ChunkParts(const WalkParams& p, const Cursor& at) {
    const int64_t chunk = ChunkSlot(at.begin, at.sequence, at.first / kChunk);
    const int64_t value_head = chunk * p.args.value_heads + at.head;
    keys = p.keys + (chunk * p.args.key_heads + at.head / p.ratio) * int64_t{sizeof(Keys)};
    values = p.values + value_head * kValueTileBytes + at.part * int64_t{kValueBytes};
    mix = p.mixes + value_head * int64_t{2 * sizeof(Triangle)};
    scalars = p.scalars + value_head * int64_t{sizeof(WalkScalars)};
  }
  const char* keys;
  const char* values;
  const char* mix;
  const char* scalars;
};

// Brings the state of a unit to the L2.
template <int kStates>
__device__ inline void PrefetchState(const WalkParams& p, const Cursor& at) {
  const gdn_delta_rule_args& a = p.args;
  if (a.fresh != nullptr && a.fresh[at.sequence] != 0) return;
  const int64_t element = a.state_dtype == GDN_F32 ? 4 : 2;
  const int64_t rows = (2 * at.head + at.part) * int64_t{kPanelColumns};
  const char* const from =
      static_cast<const char*>(a.state) +
      (a.read_index[at.sequence] * a.state_slot_stride + rows * kDim) * element;
  if (reinterpret_cast<uintptr_t>(from) % 16 == 0) {
    PrefetchBulk(from, static_cast<uint32_t>(kStates * kPanelColumns * kDim * element));
  }
}

// Where chunks come one by one, a warp of the load role watches for them.
template <int kStates>
__device__ inline void WatchRole(const WalkParams& p, WalkShared<kStates>& shared, int lane) {
  constexpr int kParts = 2 / kStates;
  uint32_t there = 0;
  Cursor at;
  for (bool more = EnterChunks<kParts>(p, static_cast<int>(blockIdx.x), &at); more;
       more = EnterChunks<kParts>(p, at.unit + static_cast<int>(gridDim.x), &at)) {
    const int chunks = (at.length + kChunk - 1) / kChunk;
    const uint32_t* const items = p.ready + ChunkSlot(at.begin, at.sequence, 0);
    const uint32_t* const keys = items + at.head / p.ratio * p.slots;
    const uint32_t* const values = items + (p.args.key_heads + at.head / 2) * p.slots;
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
      if (lane == 0) {
        asm volatile("st.release.cta.shared.u32 [%0], %1;" ::"r"(SharedAddress(&shared.there)),
                     "r"(there)
                     : "memory");
      }
    }
  }
}

// Waits until more than n chunks are there; returns how many are.
template <int kStates>
__device__ inline uint32_t WaitForChunk(const WalkShared<kStates>& shared, uint32_t n) {
  uint32_t there;
  do {
    asm volatile("ld.acquire.cta.shared.u32 %0, [%1];"
                 : "=r"(there)
                 : "r"(SharedAddress(&shared.there))
                 : "memory");
  } while (there <= n);
  FenceGlobalForBulk();
  return there;
}

// The load role, by one thread. kStream: the chunks come one by one.
template <int kStates, bool kStream>
__device__ inline void LoadRole(const WalkParams& p, WalkShared<kStates>& shared) {
  constexpr int kParts = 2 / kStates;
  using Chunk = ChunkParts<kStates>;
  if constexpr (!kStream) WaitForPreviousKernel();
  Cursor at;
  bool more = EnterChunks<kParts>(p, static_cast<int>(blockIdx.x), &at);
  uint32_t there = 0;
  for (uint32_t n = 0; more; ++n, more = NextChunk<kParts>(p, &at)) {
    if constexpr (kStream) {
      if (n >= there) there = WaitForChunk(shared, n);
    }
    const Chunk chunk(p, at);
    if (at.first == 0) {
      Cursor next;
      if (EnterChunks<kParts>(p, at.unit + static_cast<int>(gridDim.x), &next)) {
        PrefetchState<kStates>(p, next);
      }
    }
    WalkSlot<kStates>& slot = shared.slots[n % kSlots];
    if (n >= kSlots) WaitFor(shared.keys_done, n - kSlots);
    ArrivalBarrier* loaded = &shared.keys_loaded[n % kSlots];
    loaded->ArriveExpecting(Chunk::kKeyBytes + 2 * sizeof(Triangle) + sizeof(WalkScalars));
    BulkLoad(slot.k, chunk.keys + offsetof(Keys, k), Chunk::kKeyBytes, loaded);
    BulkLoad(&shared.scalars[n % kSlots], chunk.scalars, sizeof(WalkScalars), loaded);
    BulkLoad(&slot.t.triangle, chunk.mix, sizeof(Triangle), loaded);
    BulkLoad(&slot.p.triangle, chunk.mix + sizeof(Triangle), sizeof(Triangle), loaded);
    if (n >= kSlots) WaitFor(shared.rest_done, n - kSlots);
    loaded = &shared.rest_loaded[n % kSlots];
    loaded->ArriveExpecting(Chunk::kKeyBytes + Chunk::kValueBytes);
    BulkLoad(slot.q, chunk.keys + offsetof(Keys, q), Chunk::kKeyBytes, loaded);
    BulkLoad(slot.values, chunk.values, Chunk::kValueBytes, loaded);
  }
  // The walk has ended only when the way in has.
  if constexpr (kStream) WaitForPreviousKernel();
}

}  // namespace gdn::cuda::chunk

#endif  // KERNELS_CUDA_FUSED_PREFILL_WALK_CUH_
