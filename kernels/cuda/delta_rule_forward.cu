// The training forward on a GPU: the norm, then the prefill on dense states.
#include "gdn/kernels/delta_rule_forward.h"

#include "gdn/kernels/delta_rule.h"
#include "kernels/cuda/element.cuh"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/math.cuh"

namespace gdn::cuda {
namespace {

constexpr char kOp[] = "delta_rule_forward";
constexpr int kThreads = 256;
constexpr int kNormBlocks = 2048;  // The number of tokens is known to the device alone.
constexpr size_t kAlignment = 64;

size_t RoundUp(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

size_t IndexBytes(const gdn_delta_rule_forward_args& args) {
  return RoundUp(static_cast<size_t>(args.sequences) * sizeof(int64_t));
}

size_t StateBytes(const gdn_delta_rule_forward_args& args) {
  return static_cast<size_t>(args.sequences * args.value_heads * args.value_dim * args.key_dim) *
         sizeof(float);
}

// A warp for each head of a token of q (blockIdx.y 0) or k (1). The order of the sum is that of
// gdn_l2_norm: 128 threads' parts, over a warp's lanes, then over four warps. Here a lane holds the
// parts of lanes of equal index of those four.
template <typename X>
__global__ void __launch_bounds__(kThreads)
    NormKernel(const __grid_constant__ gdn_delta_rule_forward_args a) {
  const bool key = blockIdx.y != 0;
  const X* const x = static_cast<const X*>(key ? a.k : a.q);
  X* const x_hat = static_cast<X*>(key ? a.k_hat : a.q_hat);
  float* const rstd_out = key ? a.k_rstd : a.q_rstd;
  const int64_t token_stride = key ? a.k_token_stride : a.q_token_stride;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int dim = static_cast<int>(a.key_dim);
  const int64_t rows = a.cu_seqlens[a.sequences] * a.key_heads;
  constexpr int kBlockWarps = kThreads / 32;
  for (int64_t row = blockIdx.x * int64_t{kBlockWarps} + threadIdx.x / 32; row < rows;
       row += int64_t{gridDim.x} * kBlockWarps) {
    const X* const from = x + row / a.key_heads * token_stride + row % a.key_heads * dim;
    float value[2][4];
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      float part = 0.0f;
#pragma unroll
      for (int turn = 0; turn < 2; ++turn) {
        const int i = lane + 32 * w + 128 * turn;
        value[turn][w] = i < dim ? Widen(from[i]) : 0.0f;
        part = fmaf(value[turn][w], value[turn][w], part);
      }
      sum += LaneSum(part);
    }
    const float rstd = rsqrtf(sum + kQkNormEps);
#pragma unroll
    for (int turn = 0; turn < 2; ++turn) {
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const int i = lane + 32 * w + 128 * turn;
        if (i < dim) x_hat[row * dim + i] = Narrow<X>(value[turn][w] * rstd);
      }
    }
    if (lane == 0) rstd_out[row] = rstd;
  }
}

__global__ void __launch_bounds__(kThreads) IndexKernel(int64_t* index, int64_t count) {
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * kThreads) {
    index[i] = i;
  }
}

void LaunchNorm(const gdn_delta_rule_forward_args& args, cudaStream_t stream) {
  const dim3 grid(kNormBlocks, 2);
  switch (args.qkv_dtype) {
    case GDN_F32:
      NormKernel<float><<<grid, kThreads, 0, stream>>>(args);
      break;
    case GDN_BF16:
      NormKernel<Bf16><<<grid, kThreads, 0, stream>>>(args);
      break;
    case GDN_F16:
      NormKernel<F16><<<grid, kThreads, 0, stream>>>(args);
      break;
  }
}

gdn_delta_rule_args PrefillArgs(const gdn_delta_rule_forward_args& args) {
  gdn_delta_rule_args prefill{};
  prefill.sequences = args.sequences;
  prefill.cu_seqlens = args.cu_seqlens;
  prefill.key_heads = args.key_heads;
  prefill.value_heads = args.value_heads;
  prefill.key_dim = args.key_dim;
  prefill.value_dim = args.value_dim;
  const bool saved = args.use_qk_l2norm != 0;
  prefill.q = saved ? args.q_hat : args.q;
  prefill.k = saved ? args.k_hat : args.k;
  prefill.v = args.v;
  prefill.qkv_dtype = args.qkv_dtype;
  prefill.q_token_stride = saved ? args.key_heads * args.key_dim : args.q_token_stride;
  prefill.k_token_stride = saved ? args.key_heads * args.key_dim : args.k_token_stride;
  prefill.v_token_stride = args.v_token_stride;
  prefill.g = args.g;
  prefill.beta = args.beta;
  prefill.scale = args.scale;
  prefill.state_dtype = GDN_F32;
  prefill.state_slot_stride = args.value_heads * args.value_dim * args.key_dim;
  prefill.o = args.o;
  prefill.o_dtype = args.o_dtype;
  prefill.o_token_stride = args.o_token_stride;
  return prefill;
}

}  // namespace

size_t DeltaRuleForwardWorkspace(const gdn_delta_rule_forward_args& args) {
  if (args.sequences == 0) return 0;
  return IndexBytes(args) + StateBytes(args);
}

gdn_status DeltaRuleForward(const gdn_exec& exec, const gdn_delta_rule_forward_args& args) {
  if (args.sequences == 0) return GDN_OK;
  const cudaStream_t stream = Stream(exec);
  if (args.use_qk_l2norm != 0) {
    LaunchNorm(args, stream);
    if (const gdn_status status = CheckLaunch(kOp); status != GDN_OK) return status;
  }
  auto* const index = static_cast<int64_t*>(exec.workspace);
  IndexKernel<<<GridFor(args.sequences, kThreads), kThreads, 0, stream>>>(index, args.sequences);
  if (const gdn_status status = CheckLaunch(kOp); status != GDN_OK) return status;
  // The final states are computed where they are wanted, starting as the initial ones.
  float* const states =
      args.final_state != nullptr
          ? args.final_state
          : reinterpret_cast<float*>(static_cast<char*>(exec.workspace) + IndexBytes(args));
  const cudaError_t error = args.initial_state != nullptr
                                ? cudaMemcpyAsync(states, args.initial_state, StateBytes(args),
                                                  cudaMemcpyDeviceToDevice, stream)
                                : cudaMemsetAsync(states, 0, StateBytes(args), stream);
  if (const gdn_status status = CheckCuda(kOp, error); status != GDN_OK) return status;
  gdn_delta_rule_args prefill = PrefillArgs(args);
  prefill.state = states;
  prefill.read_index = prefill.write_index = index;
  return DeltaRulePrefill(exec, prefill);
}

}  // namespace gdn::cuda
