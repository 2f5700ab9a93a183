#include "kernels/cuda/fused_prefill_walk.cuh"

#include <algorithm>

#include "kernels/cuda/fused_prefill.h"
#include "kernels/cuda/fused_prefill_walk_load.cuh"
#include "kernels/cuda/fused_prefill_walk_output.cuh"
#include "kernels/cuda/fused_prefill_walk_state.cuh"
#include "kernels/cuda/fused_prefill_walk_values.cuh"
#include "kernels/cuda/tensor_map.h"

namespace gdn::cuda {
namespace {

using namespace chunk;  // NOLINT(build/namespaces)

constexpr char kOp[] = "fused_prefill";
constexpr int kSharedAlignment = kPanelAlignment;

constexpr int kThreads = kGroup * 4;
// Registers of a role's threads: together all that a multiprocessor has.
constexpr int kStateRegisters = 240;
constexpr int kLoadRegisters = 48;
constexpr int kValueRegisters = 96;
// Alone the output role keeps the 128 that it starts with.
constexpr int kOutputRegisters = 112;

template <typename X, bool kPlain, Form kForm>
__global__ void __launch_bounds__(kThreads, 1) WalkKernel(const __grid_constant__ WalkParams p) {
#ifdef GDN_WGMMA
  extern __shared__ char raw[];
  auto& shared = *reinterpret_cast<WalkShared*>(
      raw + (kSharedAlignment - SharedAddress(raw) % kSharedAlignment) % kSharedAlignment);
  if (threadIdx.x == 0) shared.Init(kMovers<kForm>, kOutputs<kForm>);
  shared.ClearTriangles();
  __syncthreads();  // The cluster's barrier orders no memory.
  // The other block sends to this one's barriers.
  ClusterArrive();
  ClusterWait();
  const int thread = static_cast<int>(threadIdx.x);
  const int group = thread / kGroup;
  if (group == 0) {
    ShrinkRegisters<kLoadRegisters>();
    constexpr int kFirstMover = kGroup - kMovers<kForm>;
    if (thread == 0) LoadRole<kForm>(p, shared);
    if (kForm == Form::kStreamed && thread / 32 == 1) WatchRole(p, shared, thread % 32);
    if (thread >= kFirstMover) MoveRole<kMovers<kForm>>(p, shared, thread - kFirstMover);
  } else if (kForm == Form::kConvolved && group == 1) {
    ShrinkRegisters<kValueRegisters>();
    WalkValues<X>(p, shared, thread - kGroup).Run();
  } else if (group < 3) {
    if constexpr (kForm != Form::kConvolved) ShrinkRegisters<kOutputRegisters>();
    constexpr int kFirst = (3 - kOutputs<kForm>)*kGroup;
    WalkOutput<X, kPlain, kForm>(p, shared, thread - kFirst).Run();
  } else {
    GrowRegisters<kStateRegisters>();
    WalkState<kForm>(p, shared, thread % kGroup).Run();
  }
#endif
}

template <typename X, bool kPlain, Form kForm>
gdn_status LaunchKernel(const gdn_exec& exec, const Device& device, WalkParams& p) {
  constexpr size_t kBytes = sizeof(WalkShared) + kSharedAlignment;
  static_assert(kBytes <= 232448);
  const cudaError_t error = AllowSharedMemory<WalkKernel<X, kPlain, kForm>>(kBytes, false);
  if (const gdn_status status = CheckCuda(kOp, error); status != GDN_OK) return status;
  p.units = static_cast<int32_t>(p.args.sequences * p.args.value_heads * kParts);
  const int most = device.multiprocessors / kParts * kParts;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(p.units < most ? p.units : most));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = kBytes;
  config.stream = Stream(exec);
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {kParts, 1, 1};
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  config.attrs = attributes;
  config.numAttrs = 2;
  cudaLaunchKernelEx(&config, WalkKernel<X, kPlain, kForm>, p);
  return CheckLaunch(kOp);
}

template <typename X, Form kForm>
gdn_status LaunchForm(const gdn_exec& exec, const Device& device, WalkParams& p) {
  const bool plain =
      p.layer.round_o == 0 && p.layer.round_before_gate == 0 && p.layer.activation == GDN_GATE_SILU;
  return plain ? LaunchKernel<X, true, kForm>(exec, device, p)
               : LaunchKernel<X, false, kForm>(exec, device, p);
}

template <typename X>
gdn_status Launch(const gdn_exec& exec, const Device& device, const PrefillPlan& plan,
                  WalkParams& p) {
  if (plan.stream_blocks > 0) return LaunchForm<X, Form::kStreamed>(exec, device, p);
  if (plan.walk_convolves) return LaunchForm<X, Form::kConvolved>(exec, device, p);
  return LaunchForm<X, Form::kTiles>(exec, device, p);
}

bool IsVector(const void* data, int64_t stride, int64_t offset = 0) {
  return IsVectorAligned(data, stride) && offset % kVectorElements == 0;
}

}  // namespace

bool CoversFusedPrefill(const Device& device, const gdn_fused_prefill_args& args) {
#ifdef GDN_SM90A
  if (device.compute_capability != 90) return false;
#else
  return false;
#endif
  const gdn_fused_decode_args& a = args.layer;
  if (a.key_dim != kDim || a.value_dim != kDim || a.conv_width != 4) return false;
  if (a.dtype == GDN_F32 || a.use_qk_l2norm == 0) return false;
  if (a.rows > INT32_MAX / 2 / a.value_heads) return false;
  // What a tensor map and its coordinates address.
  if (args.tokens > INT32_MAX || a.x_token_stride > INT32_MAX) return false;
  const int64_t element = a.state_dtype == GDN_F32 ? 4 : 2;
  return IsVector(a.x, a.x_token_stride, a.q_offset) &&
         IsVector(a.x, a.x_token_stride, a.k_offset) &&
         IsVector(a.x, a.x_token_stride, a.v_offset) &&
         IsVector(a.x, a.x_token_stride, a.z_offset) && IsVector(a.y, a.y_token_stride) &&
         IsVector(a.conv_state, a.conv_slot_stride) &&
         reinterpret_cast<uintptr_t>(a.conv_weight) % 16 == 0 &&
         reinterpret_cast<uintptr_t>(a.state) % static_cast<uintptr_t>(2 * element) == 0 &&
         a.state_slot_stride % 2 == 0;
}

PrefillPlan PlanPrefill(const Device& device, const gdn_fused_prefill_args& args) {
  // The way in runs beside the walk where the multiprocessors that the walk leaves free let it keep
  // pace, within a third. Measured: on one of them it takes 0.9 of what the walk takes for a chunk
  // for each value head, and 2.7 for each key head. On more than it needs it runs ahead of the
  // walk, whose chunks then have left the L2. The first chunks come some 25 us late, as much as it
  // takes for kLeastWork on the whole device.
  constexpr int64_t kLeastWork = 150000;
  constexpr int64_t kLeastBlocks = 32;
  const gdn_fused_decode_args& a = args.layer;
  const int64_t heads = 3 * a.key_heads + a.value_heads;
  const int64_t work = a.rows * heads;
  const int64_t left = device.multiprocessors - 2 * a.rows * a.value_heads;
  if (3 * work > 4 * left || args.tokens < kLeastWork / heads) {
    // Where most multiprocessors walk, memory is the bound, and the walk convolves v; where few do,
    // its chain of chunks is, which that makes longer.
    return {0, 3 * kParts * a.rows * a.value_heads >= 2 * device.multiprocessors};
  }
  return {static_cast<int>(std::min(left, std::max(kLeastBlocks, work + work % 2))), false};
}

gdn_status LaunchWalk(const gdn_exec& exec, const Device& device,
                      const gdn_fused_prefill_args& args, const PreparedChunks& chunks,
                      const PrefillPlan& plan) {
  const gdn_fused_decode_args& a = args.layer;
  WalkParams p{};
  p.checkpoints = CheckpointsOf(args);
  p.args.sequences = a.rows;
  p.args.cu_seqlens = args.cu_seqlens;
  p.args.key_heads = a.key_heads;
  p.args.value_heads = a.value_heads;
  p.args.state = a.state;
  p.args.state_dtype = a.state_dtype;
  p.args.state_slot_stride = a.state_slot_stride;
  p.args.read_index = a.read_index;
  p.args.write_index = a.write_index;
  p.args.fresh = a.fresh;
  p.ratio = static_cast<int32_t>(a.value_heads / a.key_heads);
  const int64_t element = a.state_dtype == GDN_F32 ? 4 : 2;
  p.moves =
      reinterpret_cast<uintptr_t>(a.state) % 16 == 0 && a.state_slot_stride * element % 16 == 0;
  p.layer = a;
  p.keys = static_cast<const char*>(chunks.keys);
  p.values = static_cast<const char*>(chunks.values);
  p.mixes = static_cast<const char*>(chunks.mixes);
  p.scalars = static_cast<const char*>(chunks.scalars);
  p.ready = plan.stream_blocks > 0 ? chunks.ready : nullptr;
  p.slots = ChunkSlots(args.tokens, a.rows);
  if (plan.walk_convolves && args.tokens > 0) {
    cudaError_t error = PrepareTensorMaps();
    if (error == cudaSuccess) {
      error = EncodeRowsMap(a.dtype, a.x, a.v_offset + a.value_heads * kDim, args.tokens,
                            a.x_token_stride, kValueRows, &p.x);
    }
    if (const gdn_status status = CheckCuda(kOp, error); status != GDN_OK) return status;
  }
  return a.dtype == GDN_BF16 ? Launch<Bf16>(exec, device, plan, p)
                             : Launch<F16>(exec, device, plan, p);
}

}  // namespace gdn::cuda
