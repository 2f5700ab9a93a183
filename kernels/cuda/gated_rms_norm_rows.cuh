// The arithmetic of the gated RMSNorm for training, on eight neighbouring elements of a row.
//
// Every sum over a row has one order, whichever kernel forms it: a thread adds its eight elements
// one after the other, then lanes are added in halves, then warps one after the other. So each
// layout of the inputs gives the bits of the dense one, and gdn_rms_norm those of this norm.
#ifndef KERNELS_CUDA_GATED_RMS_NORM_ROWS_CUH_
#define KERNELS_CUDA_GATED_RMS_NORM_ROWS_CUH_

#include <cstdint>
#include <type_traits>

#include "gdn/kernels/gated_rms_norm_training.h"
#include "kernels/cuda/math.cuh"
#include "kernels/cuda/narrow_pair.cuh"
#include "kernels/cuda/row_view.cuh"
#include "kernels/cuda/sigmoid.cuh"

namespace gdn::cuda {

using Floats8 = float[kVectorElements];

template <typename T>
__device__ inline Vector<T> NarrowAll(const Floats8& values) {
  Vector<T> vector;
#pragma unroll
  for (int e = 0; e < kVectorElements; e += 2) {
    NarrowPair<T>(values[e], values[e + 1], &vector.element[e]);
  }
  return vector;
}
template <typename T>
__device__ inline void WidenAll(const Vector<T>& vector, Floats8& to) {
#pragma unroll
  for (int e = 0; e < kVectorElements; ++e) to[e] = Widen(vector.element[e]);
}
// The same by one instruction an element of BF16. For the backward, which its instructions bound;
// the forward is no faster with it, and slower where rows are few.
template <typename T>
__device__ inline void WidenWords(const Vector<T>& vector, Floats8& to) {
  if constexpr (std::is_same_v<T, Bf16>) {
    uint32_t words[kVectorElements / 2];
    memcpy(words, &vector, sizeof(words));
#pragma unroll
    for (int i = 0; i < kVectorElements / 2; ++i) {
      const float2 pair = WidenPair<T>(words[i]);
      to[2 * i] = pair.x;
      to[2 * i + 1] = pair.y;
    }
  } else {
    WidenAll(vector, to);
  }
}
// Rounds to T and back.
template <typename T>
__device__ inline void RoundAll(Floats8& values) {
  WidenAll(NarrowAll<T>(values), values);
}

struct Gamma {
  const void* data;
  gdn_dtype dtype;
  bool zero_centered;
  bool vectors;  // Of 16 bytes.
};

// gamma, or 1 + gamma, of columns i to i + 7; zeros beyond the row's end.
__device__ inline void LoadWeight(const Gamma& gamma, int64_t i, int64_t dim, Floats8& weight) {
  if (gamma.dtype == GDN_F32) {
    LoadRow(static_cast<const float*>(gamma.data), 1, gamma.vectors, i, dim, weight);
  } else if (gamma.dtype == GDN_BF16) {
    LoadRow(static_cast<const Bf16*>(gamma.data), 1, gamma.vectors, i, dim, weight);
  } else {
    LoadRow(static_cast<const F16*>(gamma.data), 1, gamma.vectors, i, dim, weight);
  }
  if (gamma.zero_centered) {
#pragma unroll
    for (int e = 0; e < kVectorElements; ++e) weight[e] += 1.0f;
  }
}
__device__ inline void LoadWeight(const gdn_gated_rms_norm_input& in, bool vectors, int64_t i,
                                  Floats8& weight) {
  LoadWeight({in.gamma, in.gamma_dtype, in.zero_centered_gamma != 0, vectors}, i, in.dim, weight);
}

__device__ inline float GateAct(bool silu, float gate) {
  float e;
  const float sigmoid = FastSigmoid(gate, &e);
  return silu ? gate * sigmoid : sigmoid;
}

// The activation, and its derivative.
template <bool kSilu>
__device__ inline float GateAct(float gate, float* derivative) {
  float e;
  const float sigmoid = FastSigmoid(gate, &e);
  if constexpr (kSilu) {
    const float silu = gate * sigmoid;
    *derivative = fmaf(silu, 1.0f - sigmoid, sigmoid);
    return silu;
  } else {
    // 1 - sigmoid is e * sigmoid without cancellation, unless e is infinite.
    *derivative = sigmoid * (gate > 0.0f ? e * sigmoid : 1.0f - sigmoid);
    return sigmoid;
  }
}

__device__ inline float SumOfSquares(const Floats8& x, float sum) {
#pragma unroll
  for (int e = 0; e < kVectorElements; ++e) sum = fmaf(x[e], x[e], sum);
  return sum;
}

__device__ inline float InverseRms(float sum, int64_t dim, float eps) {
  const float square = sum / static_cast<float>(dim) + eps;
  return square == 0.0f ? 0.0f : rsqrtf(square);  // With eps 0 zeros stay zeros.
}

// y from x and gate, rounded to X; `values` holds x.
template <typename X>
__device__ inline Vector<X> GatedNorm(Floats8& values, const Floats8& gate, const Floats8& weight,
                                      float rstd, bool silu) {
#pragma unroll
  for (int e = 0; e < kVectorElements; ++e) values[e] = values[e] * rstd * weight[e];
  RoundAll<X>(values);
#pragma unroll
  for (int e = 0; e < kVectorElements; ++e) values[e] *= GateAct(silu, gate[e]);
  return NarrowAll<X>(values);
}

// What the backward derives from a vector of a row before the row's mean is known.
template <typename X, bool kSilu>
__device__ inline void GatedGradient(Floats8& x, const Floats8& gate, const Floats8& dy,
                                     const Floats8& weight, float rstd, bool counts,
                                     Floats8& weighted, Floats8& dgate, Floats8& dgamma,
                                     float* sum) {
  Floats8 n, dn;
#pragma unroll
  for (int e = 0; e < kVectorElements; ++e) {
    x[e] *= rstd;
    n[e] = x[e] * weight[e];
    float derivative;
    dn[e] = dy[e] * GateAct<kSilu>(gate[e], &derivative);
    dgate[e] = derivative;
  }
  WidenWords(NarrowAll<X>(n), n);  // Rounded.
  WidenWords(NarrowAll<X>(dn), dn);
#pragma unroll
  for (int e = 0; e < kVectorElements; ++e) {
    dgate[e] = dy[e] * n[e] * dgate[e];
    weighted[e] = dn[e] * weight[e];
    *sum = fmaf(weighted[e], x[e], *sum);
    if (counts) dgamma[e] = fmaf(dn[e], x[e], dgamma[e]);
  }
}

// dx from the row's mean c of dn * w * x-hat; x holds x-hat.
template <typename X>
__device__ inline Vector<X> InputGradient(const Floats8& x, Floats8& weighted, float rstd,
                                          float c) {
#pragma unroll
  for (int e = 0; e < kVectorElements; ++e) weighted[e] = rstd * fmaf(-x[e], c, weighted[e]);
  return NarrowAll<X>(weighted);
}

}  // namespace gdn::cuda

#endif  // KERNELS_CUDA_GATED_RMS_NORM_ROWS_CUH_
