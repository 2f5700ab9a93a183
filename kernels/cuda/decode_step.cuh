// The arithmetic of one token on the rows that a warp holds, shared by the kernels for
// K = V = 128 so that all give the same bits. See fused_decode_split.cuh for the formulas.
#ifndef KERNELS_CUDA_DECODE_STEP_CUH_
#define KERNELS_CUDA_DECODE_STEP_CUH_

#include "kernels/cuda/element.cuh"
#include "kernels/cuda/fused_decode.cuh"
#include "kernels/cuda/math.cuh"
#include "kernels/cuda/state_tile.cuh"

namespace gdn::cuda::decode128 {

constexpr int kDim = 128;
constexpr int kTaps = 3;                     // W - 1.
constexpr int kPartials = kDim / kTileRows;  // Partial sums of o^2 of a head.

__device__ inline float Convolve(float h0, float h1, float h2, float x, const float4& w) {
  return Silu(fmaf(w.w, x, fmaf(w.z, h2, fmaf(w.y, h1, w.x * h0))));
}

// One token of two neighbouring channels; the taps shift on by x.
template <typename X>
__device__ inline float2 ConvolvePair(typename Pair<X>::Raw (&taps)[kTaps], typename Pair<X>::Raw x,
                                      const float4& w0, const float4& w1) {
  const float2 h0 = Pair<X>::Widen(taps[0]);
  const float2 h1 = Pair<X>::Widen(taps[1]);
  const float2 h2 = Pair<X>::Widen(taps[2]);
  const float2 now = Pair<X>::Widen(x);
  taps[0] = taps[1];
  taps[1] = taps[2];
  taps[2] = x;
  return make_float2(RoundTo<X>(Convolve(h0.x, h1.x, h2.x, now.x, w0)),
                     RoundTo<X>(Convolve(h0.y, h1.y, h2.y, now.y, w1)));
}

// What the norms of q and k make of products with the raw vectors.
struct KeyFactors {
  float q;
  float k;
  float kq;  // k.q of the normalised and scaled vectors.
};

__device__ inline KeyFactors MakeFactors(const DecodeParams& p, float qq, float kk, float kq) {
  const bool norm = p.use_qk_l2norm != 0;
  KeyFactors factors;
  factors.q = norm ? rsqrtf(qq + kQkNormEps) * p.scale : p.scale;
  factors.k = norm ? rsqrtf(kk + kQkNormEps) : 1.0f;
  factors.kq = kq * factors.k * factors.q;
  return factors;
}

// What a token makes of one row: from S k and S q of the old state to o, and u times the factor of
// k.
struct RowStep {
  float o;
  float uk;
};

__device__ inline RowStep StepRow(const KeyFactors& factors, float decay, float beta, float v,
                                  float sk, float sq) {
  const float u = beta * fmaf(-decay, sk * factors.k, v);
  return {fmaf(factors.kq, u, decay * (sq * factors.q)), u * factors.k};
}

// S <- decay S + u k^T.
__device__ inline float UpdateElement(float s, float k, float decay, float uk) {
  return fmaf(uk, k, decay * s);
}

// rsqrt(mean(o^2) + eps) from the partial sums in shared memory.
__device__ inline float InverseRms(const float* partials, float eps) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kPartials; i += 4) {
    const float4 part = *reinterpret_cast<const float4*>(partials + i);
    sum += part.x;
    sum += part.y;
    sum += part.z;
    sum += part.w;
  }
  return rsqrtf(sum * (1.0f / kDim) + eps);
}

template <typename X>
__device__ inline X NormaliseAndGate(const DecodeParams& p, float o, float rstd, float weight,
                                     float z) {
  float n = o * rstd * weight;
  if (p.round_before_gate != 0) n = RoundTo<X>(n);
  return Narrow<X>(n * Activate(p.sigmoid_gate != 0 ? GDN_GATE_SIGMOID : GDN_GATE_SILU, z));
}

__device__ inline float NormWeight(const DecodeParams& p, float stored) {
  return stored + (p.zero_centered != 0 ? 1.0f : 0.0f);
}

}  // namespace gdn::cuda::decode128

#endif  // KERNELS_CUDA_DECODE_STEP_CUH_
