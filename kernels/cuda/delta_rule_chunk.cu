#include "kernels/cuda/delta_rule_chunk.h"

#include <atomic>

#include "kernels/cuda/delta_rule_chunk.cuh"
#include "kernels/cuda/delta_rule_chunk_keys.cuh"
#include "kernels/cuda/delta_rule_chunk_solve.cuh"
#include "kernels/cuda/delta_rule_chunk_state.cuh"

namespace gdn::cuda {
namespace {

using namespace chunk;  // NOLINT(build/namespaces)

constexpr char kOp[] = "delta_rule_prefill";
constexpr int kSharedAlignment = kPanelAlignment;

template <int kStates>
constexpr int kThreads = kGroup*(2 + kStates);

// Registers of a role's threads. With two state roles they are all that a multiprocessor has.
template <int kStates>
constexpr int kStateRegisters = kStates == 2 ? 192 : 240;
template <int kStates>
constexpr int kOtherRegisters = kStates == 2 ? 64 : 128;

template <typename X, int kStates>
__global__ void __launch_bounds__(kThreads<kStates>, 1) Kernel(const __grid_constant__ Params p) {
#ifdef GDN_WGMMA
  extern __shared__ char raw[];
  char* const aligned =
      raw + (kSharedAlignment - SharedAddress(raw) % kSharedAlignment) % kSharedAlignment;
  Shared<kStates>& shared = *reinterpret_cast<Shared<kStates>*>(aligned);
  for (int i = static_cast<int>(threadIdx.x); i < kSlots * kPanelElements; i += kThreads<kStates>) {
    shared.mix[i / kPanelElements].t[i % kPanelElements] = 0;
  }
  FenceForBulk();
  if (threadIdx.x == 0) {
    for (int i = 0; i < kSlots; ++i) {
      shared.loaded[i].Init(kGroup);
      shared.ready[i].Init(2 * kGroup);
      shared.done[i].Init(kStates * kGroup / 32);
    }
    ArrivalBarrier::FenceInit();
  }
  __syncthreads();
  const int thread = static_cast<int>(threadIdx.x) % kGroup;
  const int role = static_cast<int>(threadIdx.x) / kGroup;
  if (role == 0) {
    ShrinkRegisters<kOtherRegisters<kStates>>();
    KeysRole<X, kStates>(p, shared, thread);
  } else if (role == 1) {
    ShrinkRegisters<kOtherRegisters<kStates>>();
    SolveRole<kStates>(p, shared, thread);
  } else {
    GrowRegisters<kStateRegisters<kStates>>();
    StateRole<X, kStates>(p, shared, role - 2, thread).Run();
  }
#endif
}

template <typename X, int kStates>
gdn_status Launch(const gdn_exec& exec, const Device& device, Params params) {
  constexpr size_t kBytes = sizeof(Shared<kStates>) + kSharedAlignment;
  // A bit per device.
  static std::atomic<uint64_t> prepared{0};
  int index = 0;
  if (const gdn_status status = CheckCuda(kOp, cudaGetDevice(&index)); status != GDN_OK) {
    return status;
  }
  if ((prepared.load(std::memory_order_relaxed) >> index & 1) == 0) {
    const gdn_status status =
        CheckCuda(kOp, cudaFuncSetAttribute(Kernel<X, kStates>,
                                            cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
    if (status != GDN_OK) return status;
    prepared.fetch_or(uint64_t{1} << index, std::memory_order_relaxed);
  }
  params.units =
      static_cast<int32_t>(params.args.sequences * params.args.value_heads * (2 / kStates));
  const int blocks = params.units < device.multiprocessors ? params.units : device.multiprocessors;
  Kernel<X, kStates>
      <<<static_cast<unsigned>(blocks), kThreads<kStates>, kBytes, Stream(exec)>>>(params);
  return CheckLaunch(kOp);
}

bool IsAligned(const void* data, int64_t stride, int64_t bytes, int64_t element) {
  return reinterpret_cast<uintptr_t>(data) % static_cast<uintptr_t>(bytes) == 0 &&
         stride * element % bytes == 0;
}

}  // namespace

bool CoversChunked(const Device& device, const gdn_delta_rule_args& args) {
#ifdef GDN_SM90A
  if (device.compute_capability != 90) return false;
#else
  return false;
#endif
  if (args.key_dim != kDim || args.value_dim != kDim) return false;
  if (args.qkv_dtype != GDN_BF16 && args.qkv_dtype != GDN_F16) return false;
  if (args.sequences > INT32_MAX / 2 / args.value_heads) return false;
  const int64_t element = args.state_dtype == GDN_F32 ? 4 : 2;
  return IsAligned(args.q, args.q_token_stride, 16, 2) &&
         IsAligned(args.k, args.k_token_stride, 16, 2) &&
         IsAligned(args.v, args.v_token_stride, 16, 2) &&
         IsAligned(args.state, args.state_slot_stride, 2 * element, element);
}

gdn_status LaunchChunked(const gdn_exec& exec, const Device& device,
                         const gdn_delta_rule_args& args, ChunkedSplit split) {
  Params params{};
  params.args = args;
  params.scale = OutputScale(args.scale);
  params.ratio = static_cast<int32_t>(args.value_heads / args.key_heads);
  if (split == ChunkedSplit::kAuto) {
    // Halves use twice the blocks, which pays while they would be idle.
    const int64_t units = args.sequences * args.value_heads;
    split = 2 * units <= device.multiprocessors ? ChunkedSplit::kHalves : ChunkedSplit::kWhole;
  }
  const bool halves = split == ChunkedSplit::kHalves;
  if (args.qkv_dtype == GDN_BF16) {
    return halves ? Launch<Bf16, 1>(exec, device, params) : Launch<Bf16, 2>(exec, device, params);
  }
  return halves ? Launch<F16, 1>(exec, device, params) : Launch<F16, 2>(exec, device, params);
}

}  // namespace gdn::cuda
