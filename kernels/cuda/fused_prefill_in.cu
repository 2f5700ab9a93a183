#include <algorithm>
#include <cstddef>

#include "kernels/cuda/cluster.cuh"
#include "kernels/cuda/fused_prefill.h"
#include "kernels/cuda/fused_prefill_in_item.cuh"
#include "kernels/cuda/fused_prefill_in_stream.cuh"
#include "kernels/cuda/tensor_map.h"

// The way into the chunks. Five warpgroups share a multiprocessor, beside a walk four, so that some
// compute while others wait for memory.

namespace gdn::cuda {
namespace {

using namespace chunk;  // NOLINT(build/namespaces)

constexpr char kOp[] = "fused_prefill";
constexpr int kBlocks = 5;  // Of a multiprocessor.

// An item a block: its part, and its slot in two coordinates.
constexpr unsigned kMostSlots = 65535;
template <typename X, bool kOnlyKeys>
__global__ void __launch_bounds__(kGroup, kBlocks) InKernel(const __grid_constant__ InParams p) {
  AllowNextKernel();
  extern __shared__ __align__(1024) char raw[];
  const Group group = {0, static_cast<int>(threadIdx.x)};
  Item item;
  const auto find = [&]() -> const Item& {
    item.slot = blockIdx.y + int64_t{kMostSlots} * blockIdx.z;
    item.exists = ChunkOfSlot(p.args.cu_seqlens, p.args.layer.rows, item.slot, &item.chunk);
    return item;
  };
  InShared& shared = *reinterpret_cast<InShared*>(raw);
  if (threadIdx.x == 0) {
    if (p.args.tokens > 0) PrefetchTensorMap(p.x);
    shared.loaded.Init();
    ArrivalBarrier::FenceInit();
  }
  DoItem<X, InTurn<kOnlyKeys>>(
      p, static_cast<int>(blockIdx.x), find, [] {}, NoTurns{}, 0, shared, group);
}

// Zeros for a kernel that may start at once, and waits before it needs them. To be launched without
// an early start of its own: that kernel reads x and writes chunks before it waits.
__global__ void ClearWords(uint4* words, int64_t count) {
  AllowNextKernel();
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * blockDim.x) {
    words[i] = make_uint4(0, 0, 0, 0);
  }
}

template <typename X, bool kOnlyKeys>
gdn_status LaunchInTurn(const gdn_exec& exec, const InParams& p) {
  constexpr size_t kBytes = sizeof(InShared);
  const cudaError_t error = AllowSharedMemory<InKernel<X, kOnlyKeys>>(kBytes, false);
  if (const gdn_status status = CheckCuda(kOp, error); status != GDN_OK) return status;
  const auto rows = static_cast<unsigned>(p.slots < kMostSlots ? p.slots : kMostSlots);
  const dim3 grid(static_cast<unsigned>(p.parts), rows,
                  static_cast<unsigned>((p.slots + kMostSlots - 1) / kMostSlots));
  InKernel<X, kOnlyKeys><<<grid, kGroup, kBytes, Stream(exec)>>>(p);
  return CheckLaunch(kOp);
}

template <typename X>
gdn_status Launch(const gdn_exec& exec, const InParams& p, const PrefillPlan& plan) {
  if (plan.stream_blocks > 0) {
    // With three value heads of a key the half pair of the last cost more than pairs gained, where
    // it was measured.
    const bool pairs = p.ratio == 1 || p.ratio % 2 == 0;
    return pairs ? LaunchStream<X, true>(exec, kOp, p, plan.stream_blocks)
                 : LaunchStream<X, false>(exec, kOp, p, plan.stream_blocks);
  }
  return plan.walk_convolves ? LaunchInTurn<X, true>(exec, p) : LaunchInTurn<X, false>(exec, p);
}

}  // namespace

gdn_status LaunchWayIn(const gdn_exec& exec, const gdn_fused_prefill_args& args,
                       const PreparedChunks& chunks, const PrefillPlan& plan) {
  const gdn_fused_decode_args& a = args.layer;
  GDN_CHECK_ARG(plan.stream_blocks == 0 || !plan.walk_convolves, GDN_INVALID_ARGUMENT,
                "%s: a walk beside the way in does not convolve", kOp);
  InParams p{};
  p.args = args;
  p.checkpoints = CheckpointsOf(args);
  p.scale = OutputScale(a.scale);
  p.ratio = static_cast<int32_t>(a.value_heads / a.key_heads);
  p.parts = static_cast<int32_t>(ChunkItems(a.key_heads, a.value_heads, plan));
  p.keys = static_cast<char*>(chunks.keys);
  p.values = static_cast<char*>(chunks.values);
  p.mixes = static_cast<char*>(chunks.mixes);
  p.scalars = static_cast<char*>(chunks.scalars);
  p.slots = ChunkSlots(args.tokens, a.rows);
  const int64_t items = p.slots * p.parts;
  p.ready = chunks.ready;
  p.ticket = chunks.ready + items;
  if (plan.stream_blocks > 0) {
    constexpr int64_t kThreads = 256;
    constexpr unsigned kMostBlocks = 64;
    const int64_t count = (items + 1 + 3) / 4;  // The workspace has room for whole vectors.
    ClearWords<<<std::min(GridFor(count, kThreads), kMostBlocks), kThreads, 0, Stream(exec)>>>(
        reinterpret_cast<uint4*>(chunks.ready), count);
    if (const gdn_status status = CheckLaunch(kOp); status != GDN_OK) return status;
  }
  if (args.tokens > 0) {
    const int64_t columns =
        std::max({a.q_offset + a.key_heads * kDim, a.k_offset + a.key_heads * kDim,
                  a.v_offset + a.value_heads * kDim});
    cudaError_t error = PrepareTensorMaps();
    if (error == cudaSuccess) {
      error = EncodeRowsMap(a.dtype, a.x, columns, args.tokens, a.x_token_stride, kChunk, &p.x);
    }
    if (const gdn_status status = CheckCuda(kOp, error); status != GDN_OK) return status;
  }
  return a.dtype == GDN_BF16 ? Launch<Bf16>(exec, p, plan) : Launch<F16>(exec, p, plan);
}

}  // namespace gdn::cuda
