#include "kernels/common/fp8.h"

#include <cmath>
#include <cstdint>

#include "gtest/gtest.h"
#include "kernels/recurrence_test_util.h"

namespace gdn::kernels {
namespace {

// Against the nearest of the 256 values, ties to the even mantissa: nothing of the conversion's.
uint8_t NearestE4m3(float value) {
  uint8_t best = 0;
  double distance = INFINITY;
  for (int code = 0; code < 127; ++code) {
    const double magnitude = code < 8 ? code * 0x1p-9 : (8 + code % 8) * std::exp2(code / 8 - 10);
    const double error = std::abs(std::fabs(value) - magnitude);
    if (error < distance || (error == distance && code % 2 == 0)) {
      best = static_cast<uint8_t>(code);
      distance = error;
    }
  }
  return static_cast<uint8_t>(best | (std::signbit(value) ? 0x80 : 0));
}

TEST(Fp8Conversion, RoundsToTheNearestAndSaturates) {
  Random random(60);
  for (int i = 0; i < 20000; ++i) {
    const float value = random.Normal() * std::exp2(random.Uniform(-12.0f, 9.0f));
    ASSERT_EQ(F32ToE4m3(value), NearestE4m3(value)) << value;
  }
  for (int code = 0; code < 127; ++code) {
    const float exact = E4m3ToF32(static_cast<uint8_t>(code));
    EXPECT_EQ(F32ToE4m3(exact), code);
    EXPECT_EQ(F32ToE4m3(-exact), code | 0x80);
    if (code == 126) break;
    const float tie = (exact + E4m3ToF32(static_cast<uint8_t>(code + 1))) / 2.0f;
    EXPECT_EQ(F32ToE4m3(tie), code % 2 == 0 ? code : code + 1) << tie;
    EXPECT_EQ(F32ToE4m3(std::nextafter(tie, 1e9f)), code + 1);
  }
  EXPECT_EQ(F32ToE4m3(449.0f), 0x7e);
  EXPECT_EQ(F32ToE4m3(-INFINITY), 0xfe);
  EXPECT_EQ(F32ToE4m3(NAN) & 0x7f, 0x7f);
  EXPECT_EQ(F32ToE4m3(1e-30f), 0);
}

}  // namespace
}  // namespace gdn::kernels
