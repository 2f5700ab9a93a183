#include "gdn/client/input.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace gdn::client {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(InputTest, BytesAreUnsigned) {
  const v1::Input input = BytesInput(std::string_view("A\0\xFF", 3));
  EXPECT_THAT(input.token_ids().ids(), ElementsAre(65, 0, 255));
}

TEST(InputTest, EmptyInputIsStillTokens) {
  EXPECT_TRUE(BytesInput("").has_token_ids());
  EXPECT_TRUE(TokensInput({}).has_token_ids());
}

TEST(InputTest, HiddenStatesKeepTheirBits) {
  const std::vector<float> values = {1.5f, -0.0f, 3e38f, 1e-45f, 5.0f, 6.0f};
  const v1::Input input = HiddenInput(values, 3);
  EXPECT_THAT(input.hidden_states().shape(), ElementsAre(2, 3));
  const auto back = ToFloats(input.hidden_states());
  ASSERT_TRUE(back.ok()) << back.status();
  ASSERT_EQ(back->size(), values.size());
  EXPECT_EQ(std::memcmp(back->data(), values.data(), values.size() * sizeof(float)), 0);
}

TEST(InputTest, ToFloatsRefusesWhatDoesNotFit) {
  v1::Tensor tensor = Float32Tensor(std::vector<float>{1, 2}, std::vector<int64_t>{1, 3});
  EXPECT_THAT(std::string(ToFloats(tensor).status().message()), HasSubstr("[1, 3]"));
  tensor.mutable_shape()->Set(1, 2);
  EXPECT_TRUE(ToFloats(tensor).ok());
  tensor.mutable_data()->push_back('x');
  EXPECT_FALSE(ToFloats(tensor).ok());
  tensor.mutable_data()->pop_back();
  tensor.mutable_shape()->Set(0, -1);
  EXPECT_FALSE(ToFloats(tensor).ok());
  tensor.mutable_shape()->Set(0, int64_t{1} << 62);
  tensor.mutable_shape()->Set(1, 8);  // 2^65 elements.
  EXPECT_FALSE(ToFloats(tensor).ok());
  tensor.mutable_shape()->Set(0, 1);
  tensor.mutable_shape()->Set(1, 2);
  tensor.set_element_type(v1::ELEMENT_TYPE_BFLOAT16);
  EXPECT_THAT(std::string(ToFloats(tensor).status().message()), HasSubstr("BFLOAT16"));
}

}  // namespace
}  // namespace gdn::client
