// Element types on the device: loads widen to FP32, stores round once.
#ifndef KERNELS_CUDA_ELEMENT_CUH_
#define KERNELS_CUDA_ELEMENT_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "gdn/kernels/types.h"

namespace gdn::cuda {

using Bf16 = __nv_bfloat16;
using F16 = __half;

__device__ inline float Widen(float value) { return value; }
__device__ inline float Widen(Bf16 value) { return __bfloat162float(value); }
__device__ inline float Widen(F16 value) { return __half2float(value); }

template <typename T>
__device__ inline T Narrow(float value);
template <>
__device__ inline float Narrow<float>(float value) {
  return value;
}
template <>
__device__ inline Bf16 Narrow<Bf16>(float value) {
  return __float2bfloat16_rn(value);
}
template <>
__device__ inline F16 Narrow<F16>(float value) {
  return __float2half_rn(value);
}

// Rounds to T and back.
template <typename T>
__device__ inline float RoundTo(float value) {
  return Widen(Narrow<T>(value));
}

// Two neighbouring elements, loaded and stored at once.
template <typename T>
struct Pair;
template <>
struct Pair<Bf16> {
  using Raw = __nv_bfloat162;
  static __device__ float2 Widen(Raw raw) { return __bfloat1622float2(raw); }
  static __device__ Raw Zero() { return __floats2bfloat162_rn(0.0f, 0.0f); }
};
template <>
struct Pair<F16> {
  using Raw = __half2;
  static __device__ float2 Widen(Raw raw) { return __half22float2(raw); }
  static __device__ Raw Zero() { return __floats2half2_rn(0.0f, 0.0f); }
};

// Two neighbouring elements in a word.
template <typename T>
__device__ inline uint32_t PackPair(float low, float high);
template <>
__device__ inline uint32_t PackPair<Bf16>(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}
template <>
__device__ inline uint32_t PackPair<F16>(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}
template <typename T>
__device__ inline float2 UnpackPair(uint32_t word) {
  return Pair<T>::Widen(*reinterpret_cast<const typename Pair<T>::Raw*>(&word));
}

// The same by one instruction an element of BF16 too.
template <typename T>
__device__ inline float2 WidenPair(uint32_t word) {
  if constexpr (std::is_same_v<T, Bf16>) {
    return make_float2(__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u));
  } else {
    return UnpackPair<T>(word);
  }
}

// Run-time typed access, for the ops where instances would cost more than they gain.
__device__ inline float LoadAs(const void* data, gdn_dtype dtype, int64_t index) {
  if (dtype == GDN_F32) return static_cast<const float*>(data)[index];
  if (dtype == GDN_BF16) return Widen(static_cast<const Bf16*>(data)[index]);
  return Widen(static_cast<const F16*>(data)[index]);
}
__device__ inline void StoreAs(void* data, gdn_dtype dtype, int64_t index, float value) {
  if (dtype == GDN_F32) {
    static_cast<float*>(data)[index] = value;
  } else if (dtype == GDN_BF16) {
    static_cast<Bf16*>(data)[index] = Narrow<Bf16>(value);
  } else {
    static_cast<F16*>(data)[index] = Narrow<F16>(value);
  }
}
__device__ inline float RoundAs(gdn_dtype dtype, float value) {
  if (dtype == GDN_F32) return value;
  return dtype == GDN_BF16 ? RoundTo<Bf16>(value) : RoundTo<F16>(value);
}

}  // namespace gdn::cuda

#endif  // KERNELS_CUDA_ELEMENT_CUH_
