// Where the chunks of packed sequences lie in a workspace, found on the device: the host does not
// know the lengths.
#ifndef KERNELS_CUDA_CHUNK_SLOTS_CUH_
#define KERNELS_CUDA_CHUNK_SLOTS_CUH_

#include <cstdint>

namespace gdn::cuda::chunk {

constexpr int kChunk = 64;

// Chunk c of sequence i takes slot begin_i / 64 + i + c. Slots are distinct, some stay empty, and
// every sequence has its first, even one without tokens.
__host__ __device__ constexpr int64_t ChunkSlots(int64_t tokens, int64_t sequences) {
  return tokens / kChunk + sequences;
}
__device__ inline int64_t ChunkSlot(int64_t begin, int64_t sequence, int chunk) {
  return begin / kChunk + sequence + chunk;
}

struct SlotChunk {
  int64_t sequence;
  int64_t begin;   // First token of the chunk, in the packed order.
  int32_t first;   // The same within the sequence.
  int32_t count;   // Tokens in the chunk.
  int32_t length;  // Of the sequence.
};

// The chunk of a slot; false for a slot that stays empty. Called by whole warps.
__device__ inline bool ChunkOfSlot(const int32_t* cu_seqlens, int64_t sequences, int64_t slot,
                                   SlotChunk* chunk) {
  const int64_t lane = threadIdx.x % 32;
  int64_t low = 0;
  int64_t high = sequences;  // The sequence is in [low, high).
  while (high - low > 1) {
    const int64_t step = (high - low + 31) / 32;
    const int64_t probe = low + lane * step;
    const bool begun = probe < high && ChunkSlot(cu_seqlens[probe], probe, 0) <= slot;
    // Lane 0 always says yes.
    low += (31 - __clz(static_cast<int>(__ballot_sync(0xffffffffu, begun)))) * step;
    high = low + step < high ? low + step : high;
  }
  const int32_t begin = cu_seqlens[low];
  chunk->sequence = low;
  chunk->length = cu_seqlens[low + 1] - begin;
  const int64_t first = (slot - ChunkSlot(begin, low, 0)) * kChunk;
  if (first > 0 && first >= chunk->length) return false;
  chunk->first = static_cast<int32_t>(first);
  chunk->begin = begin + first;
  const int32_t left = chunk->length - chunk->first;
  chunk->count = left < kChunk ? left : kChunk;
  return true;
}

}  // namespace gdn::cuda::chunk

#endif  // KERNELS_CUDA_CHUNK_SLOTS_CUH_
