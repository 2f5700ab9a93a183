// The last step of the recurrence's backward: vectors of each value head summed over the heads that
// share a key head (or a gate head), in their order, and taken through the norm of q and k.
#ifndef KERNELS_CUDA_RULE_BACKWARD_KEYS_CUH_
#define KERNELS_CUDA_RULE_BACKWARD_KEYS_CUH_

#include <cstdint>

#include "kernels/cuda/element.cuh"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/math.cuh"

namespace gdn::cuda {

struct KeyGradient {
  const float* partials;  // [T, HV, K]
  int64_t heads;          // Of the output.
  int64_t ratio;          // Value heads to each of them.
  int64_t dim;
  const void* x_hat;  // [T, heads, K], with rstd only.
  gdn_dtype x_dtype;
  int64_t x_token_stride;
  const float* rstd;  // [T, heads], or NULL: no norm.
  void* out;          // [T, heads, K]
  gdn_dtype out_dtype;
  int64_t out_token_stride;
};

constexpr int kKeyGradientThreads = 256;
constexpr int kKeyGradientMax = 4;
struct KeyGradients {
  KeyGradient of[kKeyGradientMax];
  int count;
  int64_t sequences;
  const int32_t* cu_seqlens;
};

// A warp for each token and head of one gradient, blockIdx.y of them.
static __global__ void __launch_bounds__(kKeyGradientThreads)
    KeyGradientKernel(const __grid_constant__ KeyGradients all) {
  const KeyGradient& a = all.of[blockIdx.y];
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t rows = all.cu_seqlens[all.sequences] * a.heads;
  constexpr int kBlockWarps = kKeyGradientThreads / 32;
  for (int64_t row = blockIdx.x * int64_t{kBlockWarps} + threadIdx.x / 32; row < rows;
       row += int64_t{gridDim.x} * kBlockWarps) {
    const int64_t t = row / a.heads;
    const int64_t head = row % a.heads;
    constexpr int kPerLane = 256 / 32;
    float sum[kPerLane];
    float hat[kPerLane];
    float dot = 0.0f;
#pragma unroll
    for (int c = 0; c < kPerLane; ++c) {
      const int64_t i = lane + 32 * c;
      sum[c] = hat[c] = 0.0f;
      if (i >= a.dim) continue;
      const float* const from = a.partials + row * a.ratio * a.dim + i;
      for (int64_t r = 0; r < a.ratio; ++r) sum[c] += from[r * a.dim];
      if (a.rstd == nullptr) continue;
      hat[c] = LoadAs(a.x_hat, a.x_dtype, t * a.x_token_stride + head * a.dim + i);
      dot = fmaf(sum[c], hat[c], dot);
    }
    dot = LaneSum(dot);
    const float factor = a.rstd != nullptr ? a.rstd[row] : 1.0f;
#pragma unroll
    for (int c = 0; c < kPerLane; ++c) {
      const int64_t i = lane + 32 * c;
      if (i >= a.dim) continue;
      StoreAs(a.out, a.out_dtype, t * a.out_token_stride + head * a.dim + i,
              factor * fmaf(-hat[c], dot, sum[c]));
    }
  }
}

// Of the q and k of an op's args from their two partials.
template <typename Args>
KeyGradients QueryAndKeyGradients(const Args& a, const float* partials) {
  KeyGradients all{};
  all.count = 2;
  all.sequences = a.sequences;
  all.cu_seqlens = a.cu_seqlens;
  const bool norm = a.use_qk_l2norm != 0;
  const int64_t ratio = a.value_heads / a.key_heads;
  const int64_t size = a.tokens * a.value_heads * a.key_dim;
  all.of[0] = {partials,
               a.key_heads,
               ratio,
               a.key_dim,
               a.q,
               a.qkv_dtype,
               a.q_token_stride,
               norm ? a.q_rstd : nullptr,
               a.d_q,
               a.d_qkv_dtype,
               a.d_q_token_stride};
  all.of[1] = {partials + size,
               a.key_heads,
               ratio,
               a.key_dim,
               a.k,
               a.qkv_dtype,
               a.k_token_stride,
               norm ? a.k_rstd : nullptr,
               a.d_k,
               a.d_qkv_dtype,
               a.d_k_token_stride};
  return all;
}

inline void LaunchKeyGradients(const KeyGradients& all, int64_t tokens, cudaStream_t stream) {
  int64_t heads = 0;
  for (int i = 0; i < all.count; ++i) heads = all.of[i].heads > heads ? all.of[i].heads : heads;
  const dim3 grid(GridFor(tokens * heads, kKeyGradientThreads / 32),
                  static_cast<unsigned>(all.count));
  KeyGradientKernel<<<grid, kKeyGradientThreads, 0, stream>>>(all);
}

}  // namespace gdn::cuda

#endif  // KERNELS_CUDA_RULE_BACKWARD_KEYS_CUH_
