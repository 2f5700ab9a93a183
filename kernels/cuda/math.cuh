// The scalar functions of a GDN step, shared by the fused kernel and the separate ops so that both
// give the same bits. These files are compiled with -fmad=false: a product and a sum contract only
// where fmaf says so, whatever surrounds the inlined code.
#ifndef KERNELS_CUDA_MATH_CUH_
#define KERNELS_CUDA_MATH_CUH_

#include "gdn/kernels/gated_rms_norm.h"

namespace gdn::cuda {

constexpr unsigned kFullMask = 0xffffffffu;
constexpr float kQkNormEps = 1e-6f;

// 1 / (1 + e^-x); both approximations are within a few units of the last place, and the limits
// hold: e^-x = inf gives 0, 0 gives 1.
__device__ inline float Sigmoid(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }
__device__ inline float Silu(float x) { return __fdividef(x, 1.0f + __expf(-x)); }

// 2^x within a few units of the last place; results below 2^-126 are 0.
__device__ inline float Exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ inline float Activate(gdn_gate_activation activation, float x) {
  const float sigmoid = Sigmoid(x);
  return activation == GDN_GATE_SILU ? x * sigmoid : sigmoid;
}

__device__ inline float LogDecay(float a, float dt_bias, float a_log) {
  const float x = a + dt_bias;
  return -expf(a_log) * (x > 20.0f ? x : log1pf(expf(x)));
}

__device__ inline float WriteStrength(float b, float beta_scale) {
  return beta_scale * __fdividef(1.0f, 1.0f + expf(-b));
}

// Sum over the lanes of a warp whose indices differ in the bits of kMask; every lane gets it.
template <int kMask = 31>
__device__ inline float LaneSum(float value) {
#pragma unroll
  for (int bit = 16; bit > 0; bit >>= 1) {
    if ((kMask & bit) != 0) value += __shfl_xor_sync(kFullMask, value, bit);
  }
  return value;
}

}  // namespace gdn::cuda

#endif  // KERNELS_CUDA_MATH_CUH_
