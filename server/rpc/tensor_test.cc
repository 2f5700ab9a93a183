#include "server/rpc/tensor.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

namespace gdn::rpc {
namespace {

v1::Tensor Make(v1::ElementType type, std::vector<int64_t> shape, size_t bytes) {
  v1::Tensor tensor;
  tensor.set_element_type(type);
  tensor.mutable_shape()->Assign(shape.begin(), shape.end());
  tensor.mutable_data()->resize(bytes);
  return tensor;
}

// The value of an IEEE half, by the definition of the format.
double HalfValue(uint16_t bits) {
  const int exponent = (bits >> 10) & 31;
  const double mantissa = bits & 0x3FF;
  const double sign = (bits & 0x8000) != 0 ? -1.0 : 1.0;
  if (exponent == 31) return mantissa == 0 ? sign * INFINITY : NAN;
  return sign *
         (exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25));
}

TEST(TensorTest, DecodesEveryFloat16) {
  v1::Tensor tensor = Make(v1::ELEMENT_TYPE_FLOAT16, {65536, 1}, 2 * 65536);
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const auto half = static_cast<uint16_t>(bits);
    std::memcpy(tensor.mutable_data()->data() + 2 * bits, &half, 2);
  }
  std::vector<float> rows;
  ASSERT_TRUE(DecodeRows(tensor, 1, "t", &rows).ok());
  ASSERT_EQ(rows.size(), 65536u);
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const double expected = HalfValue(static_cast<uint16_t>(bits));
    if (std::isnan(expected)) {
      EXPECT_TRUE(std::isnan(rows[bits])) << bits;
    } else {
      EXPECT_EQ(rows[bits], expected) << bits;
      EXPECT_EQ(std::signbit(rows[bits]), (bits & 0x8000) != 0) << bits;
    }
  }
}

TEST(TensorTest, DecodesEveryBFloat16) {
  v1::Tensor tensor = Make(v1::ELEMENT_TYPE_BFLOAT16, {256, 256}, 2 * 65536);
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const auto half = static_cast<uint16_t>(bits);
    std::memcpy(tensor.mutable_data()->data() + 2 * bits, &half, 2);
  }
  std::vector<float> rows;
  ASSERT_TRUE(DecodeRows(tensor, 256, "t", &rows).ok());
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    EXPECT_EQ(std::bit_cast<uint32_t>(rows[bits]), bits << 16);
  }
}

TEST(TensorTest, Float32SurvivesBothWays) {
  const std::vector<float> values = {1.5f, -0.0f, INFINITY, 3e-42f, -7.0f, 8.0f};
  v1::Tensor tensor;
  EncodeTensor(values, {2, 3}, &tensor);
  EXPECT_EQ(tensor.element_type(), v1::ELEMENT_TYPE_FLOAT32);
  std::vector<float> rows;
  ASSERT_TRUE(DecodeRows(tensor, 3, "t", &rows).ok());
  ASSERT_EQ(rows.size(), values.size());
  EXPECT_EQ(std::memcmp(rows.data(), values.data(), values.size() * sizeof(float)), 0);
  // A reused message forgets what it held.
  EncodeTensor({}, {0, 3}, &tensor);
  EXPECT_EQ(tensor.shape_size(), 2);
  ASSERT_TRUE(DecodeRows(tensor, 3, "t", &rows).ok());
  EXPECT_TRUE(rows.empty());
}

TEST(TensorTest, RefusesAndNamesWhatIsWrong) {
  const struct {
    v1::Tensor tensor;
    const char* field;
  } cases[] = {
      {Make(v1::ELEMENT_TYPE_UNSPECIFIED, {1, 4}, 16), "t.element_type"},
      {Make(static_cast<v1::ElementType>(17), {1, 4}, 16), "t.element_type"},
      {Make(v1::ELEMENT_TYPE_FLOAT32, {}, 16), "t.shape"},
      {Make(v1::ELEMENT_TYPE_FLOAT32, {4}, 16), "t.shape"},
      {Make(v1::ELEMENT_TYPE_FLOAT32, {1, 1, 4}, 16), "t.shape"},
      {Make(v1::ELEMENT_TYPE_FLOAT32, {1, 5}, 20), "t.shape"},
      {Make(v1::ELEMENT_TYPE_FLOAT32, {-1, 4}, 16), "t.shape"},
      {Make(v1::ELEMENT_TYPE_FLOAT32, {2, 4}, 31), "t.data"},
      {Make(v1::ELEMENT_TYPE_FLOAT32, {2, 4}, 33), "t.data"},
      {Make(v1::ELEMENT_TYPE_FLOAT32, {2, 4}, 16), "t.data"},
      {Make(v1::ELEMENT_TYPE_FLOAT32, {0, 4}, 16), "t.data"},
      {Make(v1::ELEMENT_TYPE_BFLOAT16, {2, 4}, 32), "t.data"},
      // Products that overflow to something small.
      {Make(v1::ELEMENT_TYPE_FLOAT32, {int64_t{1} << 60, 4}, 0), "t.data"},
      {Make(v1::ELEMENT_TYPE_FLOAT32, {(int64_t{1} << 60) + 1, 4}, 16), "t.data"},
  };
  for (const auto& [tensor, field] : cases) {
    std::vector<float> rows;
    const absl::Status status = DecodeRows(tensor, 4, "t", &rows);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << tensor.ShortDebugString();
    EXPECT_TRUE(std::string(status.message()).starts_with(field)) << status;
  }
}

}  // namespace
}  // namespace gdn::rpc
