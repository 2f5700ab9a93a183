#include "server/model/element_convert.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>

namespace gdn::model {
namespace {

// IEEE 754 half precision by its definition.
double HalfByDefinition(uint32_t bits) {
  const int exponent = static_cast<int>(bits >> 10 & 0x1f);
  const double mantissa = bits & 0x3ff;
  const double magnitude =
      exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25);
  return (bits & 0x8000) != 0 ? -magnitude : magnitude;
}

TEST(ElementConvertTest, EveryHalfIsWidenedExactly) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const float value = F16ToF32(static_cast<uint16_t>(bits));
    if ((bits & 0x7c00) == 0x7c00) {
      EXPECT_EQ((bits & 0x3ff) == 0, std::isinf(value)) << bits;
      EXPECT_EQ((bits & 0x3ff) != 0, std::isnan(value)) << bits;
    } else {
      EXPECT_EQ(value, HalfByDefinition(bits)) << bits;
    }
    EXPECT_EQ(std::signbit(value), (bits & 0x8000) != 0) << bits;
  }
}

TEST(ElementConvertTest, Bf16RoundsToNearestEven) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    if ((bits & 0x7f80) == 0x7f80) continue;
    const float value = Bf16ToF32(static_cast<uint16_t>(bits));
    EXPECT_EQ(F32ToBf16(value), bits);
  }
  const auto from = [](uint32_t bits) { return F32ToBf16(std::bit_cast<float>(bits)); };
  EXPECT_EQ(from(0x3f807fffu), 0x3f80);
  EXPECT_EQ(from(0x3f808000u), 0x3f80);  // A tie, to the even side.
  EXPECT_EQ(from(0x3f808001u), 0x3f81);
  EXPECT_EQ(from(0x3f818000u), 0x3f82);
}

}  // namespace
}  // namespace gdn::model
