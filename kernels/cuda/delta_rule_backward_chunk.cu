#include "kernels/common/rule_args.h"
#include "kernels/cuda/delta_rule_backward_chunk.h"

#include <algorithm>
#include <cmath>

#include "kernels/cuda/delta_rule_backward_chunk.cuh"
#include "kernels/cuda/delta_rule_backward_chunk_keys.cuh"
#include "kernels/cuda/delta_rule_backward_chunk_prepare.cuh"
#include "kernels/cuda/delta_rule_backward_chunk_walk.cuh"
#include "kernels/cuda/shared_launch.cuh"
#include "kernels/cuda/vector.cuh"

namespace gdn::cuda {
namespace {

using namespace chunk;  // NOLINT(build/namespaces)

constexpr char kOp[] = "delta_rule_backward";

template <auto kKernel, typename Shared>
gdn_status Launch(const BackwardParams& params, dim3 grid, int threads, cudaStream_t stream) {
  return LaunchWithShared<kKernel>(kOp, params, grid, threads, sizeof(Shared) + kPanelAlignment,
                                   stream);
}

template <typename X, int kPanels, int kGroups>
gdn_status LaunchWalks(const BackwardParams& params, cudaStream_t stream) {
  const auto blocks =
      static_cast<unsigned>(params.args.sequences * params.args.value_heads * (kPanels / kGroups));
  const gdn_status status =
      Launch<StatesKernel<X, kPanels, kGroups>, StatesShared<kPanels, kGroups>>(
          params, blocks, kGroups * kGroup, stream);
  if (status != GDN_OK) return status;
  return Launch<StateGradientsKernel<X, kPanels, kGroups>, StateGradientsShared<kPanels, kGroups>>(
      params, blocks, kGroups * kGroup, stream);
}

template <typename X, int kPanels>
gdn_status LaunchAll(const BackwardParams& params, const Device& device, bool halves,
                     cudaStream_t stream) {
  const gdn_delta_rule_backward_args& args = params.args;
  const dim3 chunks(static_cast<unsigned>(ChunkSlots(args.tokens, args.sequences)),
                    static_cast<unsigned>(args.key_heads));
  gdn_status status =
      Launch<PrepareKernel<X, kPanels>, PrepareShared<kPanels>>(params, chunks, kGroup, stream);
  if (status != GDN_OK) return status;
  status = halves ? LaunchWalks<X, kPanels, 1>(params, stream)
                  : LaunchWalks<X, kPanels, kPanels>(params, stream);
  if (status != GDN_OK) return status;
  const int64_t units = int64_t{chunks.x} * chunks.y;
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(units, device.multiprocessors));
  return Launch<KeysKernel<X, kPanels>, KeysShared<kPanels>>(params, blocks, kKeysThreads<kPanels>,
                                                             stream);
}

template <typename X>
gdn_status LaunchDim(const BackwardParams& params, const Device& device, bool halves,
                     cudaStream_t stream) {
  return params.args.key_dim == kDim ? LaunchAll<X, 2>(params, device, halves, stream)
                                     : LaunchAll<X, 1>(params, device, halves, stream);
}

}  // namespace

bool MayCoverChunkedBackward(const gdn_delta_rule_backward_args& a) {
#ifndef GDN_SM90A
  return false;
#endif
  if (a.key_dim != a.value_dim) return false;
  if (a.key_dim != kDim && a.key_dim != kDim / 2) return false;
  if (a.qkv_dtype != GDN_BF16 && a.qkv_dtype != GDN_F16) return false;
  if (a.d_o_dtype != a.qkv_dtype || a.d_qkv_dtype != a.qkv_dtype) return false;
  constexpr int64_t kVector = 8;
  for (int64_t stride : {a.q_token_stride, a.k_token_stride, a.v_token_stride, a.d_o_token_stride,
                         a.d_q_token_stride, a.d_k_token_stride, a.d_v_token_stride}) {
    if (stride % kVector != 0) return false;
  }
  // Extents of the grids.
  constexpr int64_t kMaxHeads = 65535;
  return a.key_heads <= kMaxHeads && a.tokens <= INT32_MAX &&
         a.sequences <= INT32_MAX / 2 / a.value_heads;
}

bool CoversChunkedBackward(const Device& device, const gdn_delta_rule_backward_args& a) {
  if (device.compute_capability != 90 || !MayCoverChunkedBackward(a)) return false;
  for (const void* rows : {a.q, a.k, a.v, a.d_o, static_cast<const void*>(a.d_q),
                           static_cast<const void*>(a.d_k), static_cast<const void*>(a.d_v)}) {
    if (!IsAligned(rows, 16)) return false;
  }
  return IsAligned(a.initial_state, 8) && IsAligned(a.d_final_state, 8) &&
         IsAligned(a.d_initial_state, 8);
}

size_t ChunkedBackwardWorkspace(const gdn_delta_rule_backward_args& args) {
  return static_cast<size_t>(ChunkSlots(args.tokens, args.sequences) * args.value_heads *
                             BackwardBytes(args.key_dim / kPanelColumns));
}

gdn_status LaunchChunkedBackward(const gdn_exec& exec, const Device& device,
                                 const gdn_delta_rule_backward_args& args, BackwardSplit split) {
  BackwardParams params{};
  params.args = args;
  params.scale = static_cast<float>(kernels::RuleScale(args.scale, args.key_dim));
  params.ratio = static_cast<int32_t>(args.value_heads / args.key_heads);
  params.workspace = LayOutBackward(args, exec.workspace);
  if (split == BackwardSplit::kAuto) {
    // Halves use twice the blocks, which pays while they would be idle.
    const int64_t units = args.sequences * args.value_heads;
    split = 2 * units <= device.multiprocessors ? BackwardSplit::kHalves : BackwardSplit::kWhole;
  }
  const bool halves = split == BackwardSplit::kHalves;
  return args.qkv_dtype == GDN_BF16 ? LaunchDim<Bf16>(params, device, halves, Stream(exec))
                                    : LaunchDim<F16>(params, device, halves, Stream(exec));
}

}  // namespace gdn::cuda
