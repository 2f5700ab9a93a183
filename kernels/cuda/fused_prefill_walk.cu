#include "kernels/cuda/fused_prefill_walk.cuh"

#include "kernels/cuda/fused_prefill.h"
#include "kernels/cuda/fused_prefill_walk_load.cuh"
#include "kernels/cuda/fused_prefill_walk_output.cuh"
#include "kernels/cuda/fused_prefill_walk_state.cuh"

namespace gdn::cuda {
namespace {

using namespace chunk;  // NOLINT(build/namespaces)

constexpr char kOp[] = "fused_prefill";
constexpr int kSharedAlignment = kPanelAlignment;

constexpr int kThreads = kGroup * (1 + kOutputs + 1);
// Registers of a role's threads: together all that a multiprocessor has.
constexpr int kStateRegisters = 240;
constexpr int kOutputRegisters = 112;
constexpr int kLoadRegisters = 48;

template <typename X, bool kPlain>
__global__ void __launch_bounds__(kThreads, 1) WalkKernel(const __grid_constant__ WalkParams p) {
#ifdef GDN_WGMMA
  extern __shared__ char raw[];
  auto& shared = *reinterpret_cast<WalkShared*>(
      raw + (kSharedAlignment - SharedAddress(raw) % kSharedAlignment) % kSharedAlignment);
  if (threadIdx.x == 0) shared.Init();
  shared.ClearTriangles();
  __syncthreads();  // The cluster's barrier orders no memory.
  // The other block sends to this one's barriers.
  ClusterArrive();
  ClusterWait();
  const int thread = static_cast<int>(threadIdx.x);
  const int group = thread / kGroup;
  if (group == 0) {
    ShrinkRegisters<kLoadRegisters>();
    if (thread == 0) LoadRole(p, shared);
    if (thread >= kGroup - kMovers) MoveRole(p, shared, thread - (kGroup - kMovers));
  } else if (group <= kOutputs) {
    ShrinkRegisters<kOutputRegisters>();
    WalkOutput<X, kPlain>(p, shared, thread - kGroup).Run();
  } else {
    GrowRegisters<kStateRegisters>();
    WalkState(p, shared, thread % kGroup).Run();
  }
#endif
}

template <typename X, bool kPlain>
gdn_status LaunchKernel(const gdn_exec& exec, const Device& device, WalkParams& p) {
  constexpr size_t kBytes = sizeof(WalkShared) + kSharedAlignment;
  static_assert(kBytes <= 232448);
  const cudaError_t error = AllowSharedMemory<WalkKernel<X, kPlain>>(kBytes, false);
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
  cudaLaunchKernelEx(&config, WalkKernel<X, kPlain>, p);
  return CheckLaunch(kOp);
}

template <typename X>
gdn_status Launch(const gdn_exec& exec, const Device& device, WalkParams& p) {
  const bool plain =
      p.layer.round_o == 0 && p.layer.round_before_gate == 0 && p.layer.activation == GDN_GATE_SILU;
  return plain ? LaunchKernel<X, true>(exec, device, p) : LaunchKernel<X, false>(exec, device, p);
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

PrefillPlan PlanPrefill(const Device& device, const gdn_fused_decode_args& layer) {
  // A walk of few heads leaves three quarters of the device to the way in, and runs beside it; with
  // less the way in is what it would wait for.
  const int64_t blocks = 2 * layer.rows * layer.value_heads;
  const int streams =
      4 * blocks <= device.multiprocessors ? device.multiprocessors - static_cast<int>(blocks) : 0;
  return {streams};
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
  p.items = ChunkItems(a.key_heads, a.value_heads);
  return a.dtype == GDN_BF16 ? Launch<Bf16>(exec, device, p) : Launch<F16>(exec, device, p);
}

}  // namespace gdn::cuda
