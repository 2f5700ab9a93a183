// The walk over prepared chunks (fused_prefill_chunk.cuh): what its roles share. A block takes half
// of the columns of a sequence's value head; the two halves are a cluster.
//
// Roles, a pipeline through shared memory:
//     load:   one thread has the copy engine bring the chunks   (fused_prefill_walk_load.cuh)
//     move:   states on their way in and out, the other warps   (fused_prefill_walk_load.cuh)
//     watch:  one of these, where chunks come one by one        (fused_prefill_walk_load.cuh)
//     values: v's convolution, unless the way in has done it, a warpgroup
//                                                               (fused_prefill_walk_values.cuh)
//     output: the gated norm of a chunk's output, the other warpgroups
//                                                               (fused_prefill_walk_output.cuh)
//     state:  64 value columns of S, a warpgroup                (fused_prefill_walk_state.cuh)
#ifndef KERNELS_CUDA_FUSED_PREFILL_WALK_CUH_
#define KERNELS_CUDA_FUSED_PREFILL_WALK_CUH_

#include <cuda.h>

#include "gdn/kernels/fused_decode.h"
#include "kernels/cuda/async_copy.cuh"
#include "kernels/cuda/cluster.cuh"
#include "kernels/cuda/fused_prefill_chunk.cuh"

namespace gdn::cuda::chunk {

constexpr int kParts = 2;  // Blocks of a value head.
// Where a chunk's values come from.
enum class Form {
  kTiles,      // The way in has prepared them.
  kStreamed,   // The same, while the walk goes on: its chunks come one by one.
  kConvolved,  // From x: the walk convolves them.
};
// Threads of the move role; where chunks come one by one, a warp watches for them.
template <Form kForm>
constexpr int kMovers = kForm == Form::kStreamed ? 64 : 96;
// Warpgroups of the output role. One suffices, if only just; convolved values need the other.
template <Form kForm>
constexpr int kOutputs = kForm == Form::kConvolved ? 1 : 2;

struct WalkParams : Params {
  CUtensorMap x;  // Tiles of kValueRows tokens; only of convolved values.
  gdn_fused_decode_args layer;
  const char* keys;
  const char* values;
  const char* mixes;
  const char* scalars;
  const uint32_t* ready;  // Of the items, where they come one by one, [parts, slots]; or NULL.
  int64_t slots;
  Checkpoints checkpoints;
  bool moves;  // The move role moves states: their rows begin at multiples of 16 bytes.
};

// A block takes the same part of all of its heads.
__device__ inline int PartOfBlock() { return static_cast<int>(blockIdx.x) % kParts; }

// A unit (sequence, value head, part of its columns) that has chunks.
struct WalkUnit {
  int32_t begin;   // First token of the sequence.
  int32_t length;  // 0: there are no more units.
  int32_t sequence;
  int32_t head;
  int64_t read_slot;
  int64_t write_slot;
  // Where its rows of the state begin, in elements from the pool's start.
  int64_t read;  // Negative: they are zeros.
  int64_t write;
};
// A block's units that are known at once. The load role is less than five units ahead of the
// others.
constexpr int kUnits = 8;

// Where a unit's part of a slot begins.
__device__ inline int64_t RowsOf(int head) {
  return (head * int64_t{kParts} + PartOfBlock()) * (kPanelColumns * kDim);
}

// Finds a block's units that have chunks, one after the other. It asks for a unit's indices when it
// returns the one before.
class UnitFinder {
 public:
  __device__ explicit UnitFinder(const WalkParams& p) : p_(p), unit_(static_cast<int>(blockIdx.x)) {
    Ask();
  }

  __device__ WalkUnit Next() {
    while (unit_ < p_.units) {
      const int pair = unit_ / kParts;
      const int heads = static_cast<int>(p_.args.value_heads);
      const int64_t stride = p_.args.state_slot_stride;
      const int64_t rows = RowsOf(pair % heads);
      const WalkUnit unit = {begin_,
                             end_ - begin_,
                             pair / heads,
                             pair % heads,
                             read_,
                             write_,
                             fresh_ ? -1 : read_ * stride + rows,
                             write_ * stride + rows};
      const bool padding = read_ < 0 || write_ < 0;
      unit_ += static_cast<int>(gridDim.x);
      Ask();
      if (unit.length > 0 && !padding) return unit;
    }
    return {};
  }

 private:
  __device__ void Ask() {
    if (unit_ >= p_.units) return;
    const gdn_delta_rule_args& a = p_.args;
    const int sequence = unit_ / kParts / static_cast<int>(a.value_heads);
    begin_ = a.cu_seqlens[sequence];
    end_ = a.cu_seqlens[sequence + 1];
    read_ = a.read_index[sequence];
    write_ = a.write_index[sequence];
    fresh_ = a.fresh != nullptr && a.fresh[sequence] != 0;
  }

  const WalkParams& p_;
  int unit_;
  int32_t begin_ = 0;
  int32_t end_ = 0;
  int64_t read_ = 0;
  int64_t write_ = 0;
  bool fresh_ = false;
};

// A chunk's output as FP32, 64 tokens of 64 columns, in place of its queries: see OutputPlace.
constexpr int kOutputRow = kPanelColumns;

struct WalkSlot {
  uint16_t k[2][kPanelElements];
  PaddedTriangle t;
  PaddedTriangle p;
  uint16_t q[2][kPanelElements];
  static_assert(sizeof(q) == kChunk * kOutputRow * 4);

  __device__ uint32_t Output() const { return SharedAddress(q); }
};

// A chunk's values: beta v as FP16, in a panel. Where the walk convolves them, before that as they
// are in x, from kPast tokens before the chunk on; rows before a sequence's start are not used.
constexpr int kValueRows = kPast + kChunk;
constexpr int kValueSlots = kSlots + 1;
struct alignas(1024) ValueSlot {
  uint16_t rows[kValueRows * kPanelColumns];
  // With the first chunk of a sequence: the inputs before it, and the filters, oldest tap first.
  uint16_t past[kPast][kPanelColumns];
  float4 taps[kPanelColumns];
};

// Row j of the convolution's state in a slot of the pool, from a channel on; of 16-bit elements.
__device__ inline uint16_t* ConvState(const gdn_fused_decode_args& a, int64_t slot, int j,
                                      int64_t channel) {
  const int64_t channels = (2 * a.key_heads + a.value_heads) * kDim;
  return static_cast<uint16_t*>(a.conv_state) + slot * a.conv_slot_stride + j * channels + channel;
}

// Brings a chunk's gates to the L2, by a warpgroup, a line of 128 bytes a thread.
template <typename X>
__device__ inline void PrefetchGates(const gdn_fused_decode_args& a, const WalkUnit& unit,
                                     int first, int thread) {
  const int token = first + thread;
  if (token >= unit.length || thread >= kChunk) return;
  PrefetchToL2(static_cast<const X*>(a.x) + (int64_t{unit.begin} + token) * a.x_token_stride +
               a.z_offset + int64_t{unit.head} * kDim + PartOfBlock() * kPanelColumns);
}

// Bytes of a row of the state on its way in and out of the registers, padded so that the state
// role's accesses, of pairs of elements, do not meet in a bank.
template <typename S>
constexpr uint32_t kStagedRow = kDim * sizeof(S) * 17 / 16;

// Sums of squares of the other half of a head's columns, sent by the block that has it.
struct OtherHalf {
  float squares[2][kChunk];
  ArrivalBarrier arrived[2];
};

struct WalkShared {
  WalkSlot slots[kSlots];
  ValueSlot values[kValueSlots];
  WalkScalars scalars[kSlots];
  alignas(16) char state[kPanelColumns * kStagedRow<float>];
  OtherHalf other;
  // load -> state, output, values: the next unit's is written before the keys of a unit's first
  // chunk are loaded, which all of them await, or what follows from them.
  WalkUnit units[kUnits];
  // Each phase of a slot is a chunk.
  ArrivalBarrier keys_loaded[kSlots];         // load -> state, values: k, matrices and scalars;
  ArrivalBarrier rest_loaded[kSlots];         // load -> state: q, and values that are prepared.
  ArrivalBarrier values_loaded[kValueSlots];  // load -> values: of those to be convolved;
  ArrivalBarrier values_ready[kValueSlots];   // values -> state: they are.
  ArrivalBarrier output[kSlots];              // state -> output: it is there.
  // state -> load, output -> load: the slot's part is free, with that of the keys the values'.
  ArrivalBarrier keys_done[kSlots];
  ArrivalBarrier rest_done[kSlots];
  // Each phase is a change of units.
  ArrivalBarrier state_here;  // move -> state: the next unit's state is in shared memory,
  ArrivalBarrier state_left;  // state -> move: and now the last one's.
  uint32_t there;  // watch -> load: chunks of the block that are there, where they come one by one.

  // By all threads: the zeros of the triangles.
  __device__ void ClearTriangles() {
    for (WalkSlot& slot : slots) {
      for (PaddedTriangle* triangle : {&slot.t, &slot.p}) {
        auto* const words = reinterpret_cast<uint32_t*>(triangle->zeros);
        for (unsigned i = threadIdx.x; i < sizeof(triangle->zeros) / 4; i += blockDim.x)
          words[i] = 0;
      }
    }
    FenceForBulk();
  }
  __device__ void Init(int movers, int outputs) {
    for (int i = 0; i < kSlots; ++i) {
      keys_loaded[i].Init();
      rest_loaded[i].Init();
      output[i].Init(kGroup);
      keys_done[i].Init(kGroup);
      rest_done[i].Init(outputs * kGroup);
    }
    for (int i = 0; i < kValueSlots; ++i) {
      values_loaded[i].Init();
      values_ready[i].Init(kGroup);
    }
    state_here.Init(movers);
    state_left.Init(kGroup);
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

}  // namespace gdn::cuda::chunk

#endif  // KERNELS_CUDA_FUSED_PREFILL_WALK_CUH_
