// What the kernels of the way into the chunks work on. An item is a chunk of a key head, with all
// that its value heads need of it, or of the values of two value heads. A warpgroup works on one.
#ifndef KERNELS_CUDA_FUSED_PREFILL_IN_CUH_
#define KERNELS_CUDA_FUSED_PREFILL_IN_CUH_

#include <cstdint>

#include "kernels/cuda/fused_prefill_chunk.cuh"
#include "kernels/cuda/fused_prefill_conv.cuh"
#include "kernels/cuda/fused_prefill_gates.cuh"
#include "kernels/cuda/fused_prefill_matrices.cuh"
#include "kernels/cuda/tensor_copy.cuh"

namespace gdn::cuda::chunk {

constexpr int kSharedHeads = 2;  // Value heads whose gates are formed at once, a warp each.

// How a kernel takes its items: see DoItem. In turn with the walk, all multiprocessors at once.
template <bool kNoValues>
struct InTurn {
  static constexpr bool kOnlyKeys = kNoValues;  // All items are key heads'.
  static constexpr bool kStreams = false;
  static constexpr bool kPairs = false;
  static constexpr int kStorer = 0;
};
// Beside the walk, on a few multiprocessors, each item as early as can be.
template <bool kPairsOfHeads>
struct Streaming {
  static constexpr bool kOnlyKeys = false;
  static constexpr bool kStreams = true;
  // The matrices of two value heads are formed at once, not those of one after the other.
  static constexpr bool kPairs = kPairsOfHeads;
  // The thread of a group that stores, and hands over what it has stored. Thread 0 loads.
  static constexpr int kStorer = 96;
};

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
  union {
    Panel panels[2][2];  // Of two heads: a key's and its query's, or two of values.
    // Of two value heads that are solved at once, once the keys are stored.
    struct {
      Triangle mixes[2][2];  // T and P.
      PackedSystem second;   // The other head's.
    } solved;
  };
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
  static_assert(sizeof(solved) == sizeof(panels));

  // T and P of value head r of a key head, where one is solved after the other.
  __device__ Triangle (&Mix(int r))[2] { return reinterpret_cast<Triangle(&)[2]>(panels[r % 2]); }
};

// What a warpgroup works on: a chunk, and which of its parts.
struct Item {
  int64_t slot;
  SlotChunk chunk;
  int32_t part;
  bool exists;
  // Of items that are streamed: the sequence is padding, for which nothing is prepared.
  bool padding;
};

// The warpgroup that works on an item.
struct Group {
  int index;  // In the block.
  int thread;
  __device__ int Lane() const { return thread & 31; }
  __device__ int Warp() const { return thread >> 5 & 3; }
  __device__ void Sync() const { NamedBarrier(1 + index, kGroup); }
};

}  // namespace gdn::cuda::chunk

#endif  // KERNELS_CUDA_FUSED_PREFILL_IN_CUH_
