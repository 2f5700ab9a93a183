// The training forward on a GPU: the norm, then the prefill on dense states.
#include "gdn/kernels/delta_rule_forward.h"

#include "gdn/kernels/delta_rule.h"
#include "kernels/common/rule_args.h"
#include "kernels/cuda/element.cuh"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/math.cuh"
#include "kernels/cuda/sum_of_squares.cuh"
#include "kernels/cuda/vector.cuh"

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
  return static_cast<size_t>(args.sequences * kernels::StateSize(args)) * sizeof(float);
}

// What is normalised: q where blockIdx.y is 0, k where it is 1.
template <typename X>
struct Normed {
  const X* x;
  X* x_hat;
  float* rstd;
  int64_t token_stride;

  __device__ explicit Normed(const gdn_delta_rule_forward_args& a) {
    const bool key = blockIdx.y != 0;
    x = static_cast<const X*>(key ? a.k : a.q);
    x_hat = static_cast<X*>(key ? a.k_hat : a.q_hat);
    rstd = key ? a.k_rstd : a.q_rstd;
    token_stride = key ? a.k_token_stride : a.q_token_stride;
  }
};

// A warp for each head of a token. The order of the sum is that of gdn_l2_norm: 128 threads' parts,
// over a warp's lanes, then over four warps. Here a lane holds the parts of lanes of equal index of
// those four.
template <typename X>
__global__ void __launch_bounds__(kThreads)
    NormKernel(const __grid_constant__ gdn_delta_rule_forward_args a) {
  const Normed<X> in(a);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int dim = static_cast<int>(a.key_dim);
  const int64_t rows = a.cu_seqlens[a.sequences] * a.key_heads;
  constexpr int kBlockWarps = kThreads / 32;
  for (int64_t row = blockIdx.x * int64_t{kBlockWarps} + threadIdx.x / 32; row < rows;
       row += int64_t{gridDim.x} * kBlockWarps) {
    const X* const from = in.x + row / a.key_heads * in.token_stride + row % a.key_heads * dim;
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
        if (i < dim) in.x_hat[row * dim + i] = Narrow<X>(value[turn][w] * rstd);
      }
    }
    if (lane == 0) in.rstd[row] = rstd;
  }
}

// The same bits for heads of 64 or 128 elements of 16 bits, aligned to vectors: a lane takes eight.
template <typename X, int kDim>
__global__ void __launch_bounds__(kThreads)
    VectorNormKernel(const __grid_constant__ gdn_delta_rule_forward_args a) {
  constexpr int kLanes = kDim / kVectorElements;
  constexpr int kBlockRows = kThreads / kLanes;
  const Normed<X> in(a);
  const int column = static_cast<int>(threadIdx.x) % kLanes * kVectorElements;
  const int64_t rows = a.cu_seqlens[a.sequences] * a.key_heads;
  for (int64_t first = blockIdx.x * int64_t{kBlockRows}; first < rows;
       first += int64_t{gridDim.x} * kBlockRows) {
    const int64_t row = first + threadIdx.x / kLanes;
    const int64_t token = row / a.key_heads;
    const int64_t head = row % a.key_heads;
    Vector<X> vector = {};
    if (row < rows) vector = LoadVector(in.x + token * in.token_stride + head * kDim + column);
    float x[kVectorElements];
#pragma unroll
    for (int e = 0; e < kVectorElements; ++e) x[e] = Widen(vector.element[e]);
    const float rstd = rsqrtf(VectorSumOfSquares<kLanes>(x) + kQkNormEps);
    if (row >= rows) continue;
#pragma unroll
    for (int e = 0; e < kVectorElements; ++e) vector.element[e] = Narrow<X>(x[e] * rstd);
    StoreVector(in.x_hat + row * kDim + column, vector);
    if (column == 0) in.rstd[row] = rstd;
  }
}

__global__ void __launch_bounds__(kThreads) IndexKernel(int64_t* index, int64_t count) {
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * kThreads) {
    index[i] = i;
  }
}

bool CoversVectors(const gdn_delta_rule_forward_args& a) {
  return (a.key_dim == 64 || a.key_dim == 128) && a.qkv_dtype != GDN_F32 &&
         IsVectorAligned(a.q, a.q_token_stride) && IsVectorAligned(a.k, a.k_token_stride) &&
         IsVectorAligned(a.q_hat, 0) && IsVectorAligned(a.k_hat, 0);
}

template <typename X>
void LaunchVectorNorm(const gdn_delta_rule_forward_args& args, cudaStream_t stream) {
  const dim3 grid(kNormBlocks, 2);
  if (args.key_dim == 64) {
    VectorNormKernel<X, 64><<<grid, kThreads, 0, stream>>>(args);
  } else {
    VectorNormKernel<X, 128><<<grid, kThreads, 0, stream>>>(args);
  }
}

void LaunchNorm(const gdn_delta_rule_forward_args& args, cudaStream_t stream) {
  const dim3 grid(kNormBlocks, 2);
  const bool vectors = CoversVectors(args);
  switch (args.qkv_dtype) {
    case GDN_F32:
      NormKernel<float><<<grid, kThreads, 0, stream>>>(args);
      break;
    case GDN_BF16:
      if (vectors) return LaunchVectorNorm<Bf16>(args, stream);
      NormKernel<Bf16><<<grid, kThreads, 0, stream>>>(args);
      break;
    case GDN_F16:
      if (vectors) return LaunchVectorNorm<F16>(args, stream);
      NormKernel<F16><<<grid, kThreads, 0, stream>>>(args);
      break;
  }
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
  gdn_delta_rule_args prefill = kernels::PrefillArgs(args);
  prefill.state = states;
  prefill.read_index = prefill.write_index = index;
  return DeltaRulePrefill(exec, prefill);
}

}  // namespace gdn::cuda
