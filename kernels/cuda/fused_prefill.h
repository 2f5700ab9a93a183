// The kernels of the tuned fused prefill, and what lies between them in its workspace; and the
// norm of the way without them.
#ifndef KERNELS_CUDA_FUSED_PREFILL_H_
#define KERNELS_CUDA_FUSED_PREFILL_H_

#include <cstdint>

#include "gdn/kernels/fused_prefill.h"
#include "kernels/cuda/launch.h"

namespace gdn::cuda {

// Chunks that are prepared, in slots (chunk_slots.cuh) with the layout of fused_prefill_chunk.cuh:
// of each slot Keys of each key head, and a tile of values (unless the walk convolves them), two
// Triangles and WalkScalars of each value head.
struct PreparedChunks {
  void* keys = nullptr;
  void* values = nullptr;
  void* mixes = nullptr;
  void* scalars = nullptr;
  uint32_t* ready = nullptr;  // See LaunchWayIn; a word an item, and one.
};

// How a call is divided. Whatever it is, the results are the same bits.
struct PrefillPlan {
  // Multiprocessors that prepare chunks while the others walk them; 0: all do, one after the other.
  int stream_blocks;
  // The walk convolves v, with its convolution's state, instead of the way in; not with
  // stream_blocks. Less memory traffic, but more work in the walk.
  bool walk_convolves;
};

// Items of a slot that are prepared at once: key heads, then pairs of value heads.
constexpr int64_t ChunkItems(int64_t key_heads, int64_t value_heads, const PrefillPlan& plan) {
  return key_heads + (plan.walk_convolves ? 0 : (value_heads + 1) / 2);
}
PrefillPlan PlanPrefill(const Device& device, const gdn_fused_prefill_args& args);

// Where the op keeps its chunks in a workspace; for the benchmark of its parts.
void FusedPrefillChunks(const gdn_fused_prefill_args& args, void* workspace,
                        PreparedChunks* chunks);

// Whether the two kernels cover a call on this device; depends on its shape and addresses alone.
bool CoversFusedPrefill(const Device& device, const gdn_fused_prefill_args& args);

// All that does not depend on a state: convolution, SiLU, norms of q and k, gates, and the two
// matrices of each chunk. Fills the chunks, and carries the convolution's state; of v only if the
// walk does not.
gdn_status LaunchWayIn(const gdn_exec& exec, const gdn_fused_prefill_args& args,
                       const PreparedChunks& chunks, const PrefillPlan& plan);

// All that does: walks the chunks of each sequence and head, with the gated norm of their output,
// and with plan.walk_convolves v's convolution and its state.
// Follows LaunchWayIn with the same plan, and may start before that has ended.
gdn_status LaunchWalk(const gdn_exec& exec, const Device& device,
                      const gdn_fused_prefill_args& args, const PreparedChunks& chunks,
                      const PrefillPlan& plan);

// Gated norm of o, [T, HV, V] dense, in FP32 or, with round_o, in the layer's type.
void LaunchWayOut(const gdn_fused_prefill_args& args, const void* o, cudaStream_t stream);

}  // namespace gdn::cuda

#endif  // KERNELS_CUDA_FUSED_PREFILL_H_
