// Scalar functions of the fused prefill, in fewer instructions than those of math.cuh: subnormal
// results are zeros.
#ifndef KERNELS_CUDA_FUSED_PREFILL_MATH_CUH_
#define KERNELS_CUDA_FUSED_PREFILL_MATH_CUH_

#include <cstdint>

#include "kernels/cuda/element.cuh"
#include "kernels/cuda/sigmoid.cuh"

namespace gdn::cuda::chunk {

__device__ inline float FastSigmoid(float x) {
  float power;
  return cuda::FastSigmoid(x, &power);
}

// silu(x) of t = kSiluScale x = -x log2(e), within a few units in the last place of itself:
// x / (1 + e^-x) = t / (kSiluScale (1 + 2^t)).
constexpr float kSiluScale = -1.4426950408889634f;
__device__ inline float SiluOfScaled(float t) {
  float power;
  float inverse;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(t));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(fmaf(kSiluScale, power, kSiluScale)));
  return t * inverse;
}

// softplus(x) = ln(1 + e^x) within some 2e-5 of itself, e^x where that is small.
__device__ inline float FastSoftplus(float x) {
  constexpr float kLog2E = 1.4426950408889634f;
  constexpr float kLn2 = 0.6931471805599453f;
  float power;
  float log2;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x * kLog2E));
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(log2) : "f"(1.0f + power));
  // ln(1 + y) = y - y^2 / 2 + y^3 / 3 - ... without the loss of digits in 1 + y.
  const float series =
      power * fmaf(power, fmaf(power, fmaf(power, -0.25f, 1.0f / 3.0f), -0.5f), 1.0f);
  return x > 20.0f ? x : (power < 0.0625f ? series : kLn2 * log2);
}

// Rounds two neighbouring values to X and back.
template <typename X>
__device__ inline void RoundPair(float* values) {
  const float2 rounded = UnpackPair<X>(PackPair<X>(values[0], values[1]));
  values[0] = rounded.x;
  values[1] = rounded.y;
}

}  // namespace gdn::cuda::chunk

#endif  // KERNELS_CUDA_FUSED_PREFILL_MATH_CUH_
