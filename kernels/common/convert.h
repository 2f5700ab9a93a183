// Scalar conversions between FP32 and the 16-bit element types.
#ifndef KERNELS_COMMON_CONVERT_H_
#define KERNELS_COMMON_CONVERT_H_

#include <bit>
#include <cstdint>

#include "gdn/kernels/types.h"

namespace gdn::kernels {

inline float Bf16ToF32(uint16_t bits) { return std::bit_cast<float>(uint32_t{bits} << 16); }

// Round to nearest even; a NaN stays a (quiet) NaN.
inline uint16_t F32ToBf16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

inline float F16ToF32(uint16_t bits) { return static_cast<float>(std::bit_cast<_Float16>(bits)); }
inline uint16_t F32ToF16(float value) {
  return std::bit_cast<uint16_t>(static_cast<_Float16>(value));
}

inline constexpr int64_t SizeOf(gdn_dtype dtype) { return dtype == GDN_F32 ? 4 : 2; }
inline constexpr bool IsDtype(gdn_dtype dtype) {
  return dtype == GDN_F32 || dtype == GDN_BF16 || dtype == GDN_F16;
}

// Element `index` of a buffer of the given type, widened.
inline float Load(const void* data, gdn_dtype dtype, int64_t index) {
  switch (dtype) {
    case GDN_F32: return static_cast<const float*>(data)[index];
    case GDN_BF16: return Bf16ToF32(static_cast<const uint16_t*>(data)[index]);
    case GDN_F16: return F16ToF32(static_cast<const uint16_t*>(data)[index]);
  }
  return 0.0f;
}

// Stores `value` as element `index`, rounded once.
inline void Store(void* data, gdn_dtype dtype, int64_t index, float value) {
  switch (dtype) {
    case GDN_F32: static_cast<float*>(data)[index] = value; return;
    case GDN_BF16: static_cast<uint16_t*>(data)[index] = F32ToBf16(value); return;
    case GDN_F16: static_cast<uint16_t*>(data)[index] = F32ToF16(value); return;
  }
}

}  // namespace gdn::kernels

#endif  // KERNELS_COMMON_CONVERT_H_
