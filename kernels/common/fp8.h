// Scalar conversions between FP32 and FP8 E4M3 (OCP: no infinity, largest value 448).
#ifndef KERNELS_COMMON_FP8_H_
#define KERNELS_COMMON_FP8_H_

#include <bit>
#include <cstdint>

namespace gdn::kernels {

inline constexpr float kE4m3Max = 448.0f;

// Round to nearest even, saturating; a NaN becomes 0x7f or 0xff.
inline uint8_t F32ToE4m3(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const auto sign = static_cast<uint8_t>((bits >> 24) & 0x80u);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<uint8_t>(sign | 0x7fu);
  if (magnitude >= 0x43e00000u) return static_cast<uint8_t>(sign | 0x7eu);  // >= 448
  if (magnitude < 0x3c800000u) {  // Below 2^-6: adding 2^14 aligns the result's last bit, 2^-9.
    const float aligned = std::bit_cast<float>(magnitude) + 0x1p14f;
    return static_cast<uint8_t>(sign | (std::bit_cast<uint32_t>(aligned) - 0x46800000u));
  }
  const uint32_t rounded = magnitude - (120u << 23) + 0x7ffffu + ((magnitude >> 20) & 1u);
  return static_cast<uint8_t>(sign | (rounded >> 20));
}

// Exact.
inline float E4m3ToF32(uint8_t bits) {
  const uint32_t sign = uint32_t{bits & 0x80u} << 24;
  const uint32_t exponent = (bits >> 3) & 0xfu;
  const uint32_t mantissa = bits & 0x7u;
  if (exponent == 0xf && mantissa == 0x7) return std::bit_cast<float>(sign | 0x7fc00000u);
  if (exponent == 0) {
    const float magnitude = static_cast<float>(mantissa) * 0x1p-9f;
    return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(magnitude));
  }
  return std::bit_cast<float>(sign | ((exponent + 120u) << 23) | (mantissa << 20));
}

}  // namespace gdn::kernels

#endif  // KERNELS_COMMON_FP8_H_
