// Scalar conversions between FP32 and the 16-bit types weights are stored in.
#ifndef SERVER_MODEL_ELEMENT_CONVERT_H_
#define SERVER_MODEL_ELEMENT_CONVERT_H_

#include <bit>
#include <cstdint>

namespace gdn::model {

inline float Bf16ToF32(uint16_t bits) { return std::bit_cast<float>(uint32_t{bits} << 16); }

// Of a finite value; rounds to nearest even.
inline uint16_t F32ToBf16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// Exact; in integers, as not every compiler has a 16-bit float on every target.
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

}  // namespace gdn::model

#endif  // SERVER_MODEL_ELEMENT_CONVERT_H_
