#include "kernels/cuda/gdn2_chunk.h"

#include "kernels/common/rule_args.h"
#include "kernels/cuda/gdn2_chunk.cuh"
#include "kernels/cuda/gdn2_chunk_prepare.cuh"
#include "kernels/cuda/gdn2_chunk_walk.cuh"
#include "kernels/cuda/shared_launch.cuh"
#include "kernels/cuda/vector.cuh"

namespace gdn::cuda {
namespace {

using gdn2::ChunkTile;
using gdn2::Params;
using gdn2::ValueTile;

constexpr char kOp[] = "gdn2_prefill";

int64_t Slots(const gdn2_args& args) { return chunk::ChunkSlots(args.tokens, args.sequences); }

template <typename X, typename E>
gdn_status LaunchPrepare(const Params& params, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(Slots(params.args) * params.args.gate_heads);
  return LaunchWithShared<gdn2::PrepareKernel<X, E>>(kOp, params, blocks, gdn2::kPrepareThreads,
                                                     sizeof(gdn2::PrepareShared), stream);
}
template <typename X>
gdn_status LaunchPrepareOf(const Params& params, cudaStream_t stream) {
  switch (params.args.gate_dtype) {
    case GDN_F32:
      return LaunchPrepare<X, float>(params, stream);
    case GDN_BF16:
      return LaunchPrepare<X, Bf16>(params, stream);
    default:
      return LaunchPrepare<X, F16>(params, stream);
  }
}

template <int kGroups>
gdn_status LaunchWalk(const Params& params, cudaStream_t stream) {
  const auto blocks =
      static_cast<unsigned>(params.args.sequences * params.args.value_heads * (2 / kGroups));
  return LaunchWithShared<gdn2::WalkKernel<kGroups>>(
      kOp, params, blocks, gdn2::kWalkThreads<kGroups>,
      sizeof(gdn2::WalkShared<kGroups>) + kPanelAlignment, stream);
}

}  // namespace

bool MayCoverChunkedGdn2(const gdn2_args& args) {
#ifndef GDN_SM90A
  return false;
#endif
  if (args.key_dim != chunk::kDim || args.value_dim != chunk::kDim) return false;
  if (args.qkv_dtype != GDN_BF16 && args.qkv_dtype != GDN_F16) return false;
  constexpr int64_t kVector = 8;
  if (args.q_token_stride % kVector != 0 || args.k_token_stride % kVector != 0 ||
      args.v_token_stride % kVector != 0) {
    return false;
  }
  // Extents of the grids.
  return args.tokens <= INT32_MAX && args.sequences <= INT32_MAX / 2 / args.value_heads &&
         Slots(args) <= INT32_MAX / args.gate_heads;
}

bool CoversChunkedGdn2(const Device& device, const gdn2_args& args) {
  if (device.compute_capability != 90 || !MayCoverChunkedGdn2(args)) return false;
  for (const void* vectors :
       {args.q, args.k, args.v, static_cast<const void*>(args.g), args.erase, args.write}) {
    if (!IsAligned(vectors, 16)) return false;
  }
  return args.state_slot_stride % 2 == 0 &&
         IsAligned(args.state, args.state_dtype == GDN_F32 ? 8 : 4);
}

size_t ChunkedGdn2Workspace(const gdn2_args& args) {
  const int64_t bytes = args.gate_heads * static_cast<int64_t>(sizeof(ChunkTile)) +
                        args.value_heads * static_cast<int64_t>(sizeof(ValueTile));
  return static_cast<size_t>(Slots(args) * bytes);
}

gdn_status LaunchChunkedGdn2(const gdn_exec& exec, const Device& device, const gdn2_args& args,
                             Gdn2Split split) {
  Params params{};
  params.args = args;
  params.scale = static_cast<float>(kernels::RuleScale(args.scale, args.key_dim));
  params.ratio = static_cast<int32_t>(args.value_heads / args.key_heads);
  params.gate_ratio = static_cast<int32_t>(args.value_heads / args.gate_heads);
  params.tiles = static_cast<ChunkTile*>(exec.workspace);
  params.values = reinterpret_cast<ValueTile*>(params.tiles + Slots(args) * args.gate_heads);
  const cudaStream_t stream = Stream(exec);
  const gdn_status status = args.qkv_dtype == GDN_BF16 ? LaunchPrepareOf<Bf16>(params, stream)
                                                       : LaunchPrepareOf<F16>(params, stream);
  if (status != GDN_OK) return status;
  if (split == Gdn2Split::kAuto) {
    // Halves use twice the blocks, which pays while multiprocessors would be idle.
    const int64_t units = args.sequences * args.value_heads;
    split = 2 * units <= device.multiprocessors ? Gdn2Split::kHalves : Gdn2Split::kWhole;
  }
  return split == Gdn2Split::kHalves ? LaunchWalk<1>(params, stream)
                                     : LaunchWalk<2>(params, stream);
}

}  // namespace gdn::cuda
