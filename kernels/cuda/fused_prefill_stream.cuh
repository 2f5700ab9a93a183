// How the way in hands its items over to a walk that runs at the same time.
#ifndef KERNELS_CUDA_FUSED_PREFILL_STREAM_CUH_
#define KERNELS_CUDA_FUSED_PREFILL_STREAM_CUH_

#include <cstdint>

#include "kernels/cuda/chunk_slots.cuh"
#include "kernels/cuda/math.cuh"

namespace gdn::cuda::chunk {

// Waits until this thread's bulk stores are done.
__device__ inline void WaitForBulkStores() {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
#endif
}

// Orders bulk copies and ordinary accesses to global memory.
__device__ inline void FenceGlobalForBulk() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.global;" ::: "memory");
#endif
}

// By the thread that has stored an item, once the stores are done.
__device__ inline void Publish(uint32_t* ready) {
  FenceGlobalForBulk();
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(ready), "r"(1) : "memory");
}

// Watches for a unit's chunks, by a warp: which of the next 32 after `chunk` are there. Two items
// make a chunk; first[c] and second[c] are 1 once chunk c is there. The kernel that clears them has
// ended by then, but nothing that this one awaits says so: its zeros are seen because these loads
// do not stop at the L1.
__device__ inline uint32_t ReadyChunks(const uint32_t* first, const uint32_t* second, int chunk,
                                       int chunks, int lane) {
  const int at = chunk + lane;
  uint32_t ready = 0;
  if (at < chunks) {
    uint32_t other;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(ready) : "l"(first + at) : "memory");
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(other) : "l"(second + at) : "memory");
    ready &= other;
  }
  return __ballot_sync(kFullMask, ready != 0);
}

// All chunks in the order in which walks that start together need them: the first of each sequence,
// then the second of each that has one. Found one after the other.
class ChunkOrder {
 public:
  __device__ void Init(const int32_t* cu_seqlens, int sequences) {
    cu_seqlens_ = cu_seqlens;
    sequences_ = sequences;
    most_ = at_ = sequence_ = chunk_ = 0;
    for (int i = 0; i < sequences; ++i) {
      const int chunks = Chunks(i);
      most_ = chunks > most_ ? chunks : most_;
    }
  }

  // The chunk at `position`, not before the last one asked for; false past the end.
  __device__ bool Find(int position, int64_t* slot, SlotChunk* chunk) {
    if (sequences_ == 1) at_ = chunk_ = position;
    while (chunk_ < most_ && (at_ < position || chunk_ >= Chunks(sequence_))) {
      if (chunk_ < Chunks(sequence_)) ++at_;
      if (++sequence_ == sequences_) {
        sequence_ = 0;
        ++chunk_;
      }
    }
    if (chunk_ >= most_) return false;
    const int begin = cu_seqlens_[sequence_];
    chunk->sequence = sequence_;
    chunk->first = chunk_ * kChunk;
    chunk->begin = begin + chunk->first;
    chunk->length = cu_seqlens_[sequence_ + 1] - begin;
    const int left = chunk->length - chunk->first;
    chunk->count = left < kChunk ? left : kChunk;
    *slot = ChunkSlot(begin, sequence_, chunk_);
    return true;
  }

 private:
  // Even an empty sequence has one, for its convolution state.
  __device__ int Chunks(int sequence) const {
    const int length = cu_seqlens_[sequence + 1] - cu_seqlens_[sequence];
    return length > kChunk ? (length + kChunk - 1) / kChunk : 1;
  }

  const int32_t* cu_seqlens_;
  int sequences_;
  int most_;  // Chunks of the longest.
  int at_;    // The position of (sequence_, chunk_), if there is such a chunk.
  int sequence_;
  int chunk_;
};

}  // namespace gdn::cuda::chunk

#endif  // KERNELS_CUDA_FUSED_PREFILL_STREAM_CUH_
