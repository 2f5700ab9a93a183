// Eight neighbouring elements at once: accesses of 16 bytes whatever the type.
#ifndef KERNELS_CUDA_VECTOR_CUH_
#define KERNELS_CUDA_VECTOR_CUH_

#include <cstdint>

#include "kernels/cuda/element.cuh"

namespace gdn::cuda {

constexpr int kVectorElements = 8;

inline bool IsAligned(const void* data, uintptr_t bytes) {
  return reinterpret_cast<uintptr_t>(data) % bytes == 0;
}
// Whether rows of a buffer can be accessed by vectors: every row starts on 16 bytes.
inline bool IsVectorAligned(const void* data, int64_t row_stride) {
  return reinterpret_cast<uintptr_t>(data) % 16 == 0 && row_stride % kVectorElements == 0;
}

template <typename T>
struct alignas(16) Vector {
  T element[kVectorElements];
};

// `data` is aligned to 16 bytes, not to the size of a vector of FP32.
template <typename T>
__device__ inline Vector<T> LoadVector(const T* data) {
  constexpr int kParts = sizeof(Vector<T>) / sizeof(uint4);
  uint4 parts[kParts];
#pragma unroll
  for (int i = 0; i < kParts; ++i) parts[i] = reinterpret_cast<const uint4*>(data)[i];
  Vector<T> vector;
  memcpy(&vector, parts, sizeof(vector));
  return vector;
}
template <typename T>
__device__ inline void StoreVector(T* data, const Vector<T>& vector) {
  constexpr int kParts = sizeof(Vector<T>) / sizeof(uint4);
  uint4 parts[kParts];
  memcpy(parts, &vector, sizeof(vector));
#pragma unroll
  for (int i = 0; i < kParts; ++i) reinterpret_cast<uint4*>(data)[i] = parts[i];
}

// Calls function.operator()<T>() with the type that `dtype` names.
template <typename Function>
void ForElementType(gdn_dtype dtype, const Function& function) {
  switch (dtype) {
    case GDN_F32:
      return function.template operator()<float>();
    case GDN_BF16:
      return function.template operator()<Bf16>();
    case GDN_F16:
      return function.template operator()<F16>();
  }
}

}  // namespace gdn::cuda

#endif  // KERNELS_CUDA_VECTOR_CUH_
