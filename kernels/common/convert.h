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

// Exact. In integers, since not every compiler has a 16-bit float on every target.
inline float F16ToF32(uint16_t bits) {
  const uint32_t sign = uint32_t{bits & 0x8000u} << 16;
  const uint32_t exponent = (bits >> 10) & 0x1fu;
  const uint32_t mantissa = bits & 0x3ffu;
  if (exponent == 0) {  // Zero or subnormal: mantissa * 2^-24.
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
    return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(magnitude));
  }
  const uint32_t wide_exponent = exponent == 0x1f ? 0xffu : exponent + 112;
  return std::bit_cast<float>(sign | (wide_exponent << 23) | (mantissa << 13));
}

// Round to nearest even; overflow gives infinity; a NaN stays a (quiet) NaN.
inline uint16_t F32ToF16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const auto sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) {
    return static_cast<uint16_t>(sign | 0x7e00u | ((magnitude >> 13) & 0x3ffu));
  }
  if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // >= 65520
  if (magnitude < 0x38800000u) {  // Below 2^-14: adding 2^-1 aligns the result's last bit.
    const float aligned = std::bit_cast<float>(magnitude) + 0.5f;
    return static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(aligned) - 0x3f000000u));
  }
  const uint32_t rounded = magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u);
  return static_cast<uint16_t>(sign | (rounded >> 13));
}

inline constexpr int64_t SizeOf(gdn_dtype dtype) { return dtype == GDN_F32 ? 4 : 2; }
inline constexpr bool IsDtype(gdn_dtype dtype) {
  return dtype == GDN_F32 || dtype == GDN_BF16 || dtype == GDN_F16;
}

// Element `index` of a buffer of the given type, widened.
inline float Load(const void* data, gdn_dtype dtype, int64_t index) {
  switch (dtype) {
    case GDN_F32:
      return static_cast<const float*>(data)[index];
    case GDN_BF16:
      return Bf16ToF32(static_cast<const uint16_t*>(data)[index]);
    case GDN_F16:
      return F16ToF32(static_cast<const uint16_t*>(data)[index]);
  }
  return 0.0f;
}

// Stores `value` as element `index`, rounded once.
inline void Store(void* data, gdn_dtype dtype, int64_t index, float value) {
  switch (dtype) {
    case GDN_F32:
      static_cast<float*>(data)[index] = value;
      return;
    case GDN_BF16:
      static_cast<uint16_t*>(data)[index] = F32ToBf16(value);
      return;
    case GDN_F16:
      static_cast<uint16_t*>(data)[index] = F32ToF16(value);
      return;
  }
}

}  // namespace gdn::kernels

#endif  // KERNELS_COMMON_CONVERT_H_
