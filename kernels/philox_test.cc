#include "kernels/common/philox.h"

#include "gtest/gtest.h"

namespace gdn::kernels {
namespace {

// Known answers published with the Random123 library (kat_vectors, philox4x32 10).
TEST(PhiloxTest, KnownAnswers) {
  EXPECT_EQ(Philox4x32({0, 0, 0, 0}, {0, 0}),
            (PhiloxCounter{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(Philox4x32({0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}, {0xffffffff, 0xffffffff}),
            (PhiloxCounter{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(Philox4x32({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
            (PhiloxCounter{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(PhiloxTest, SamplingWordUsesAllOfSeedPositionAndId) {
  const uint32_t word = SamplingWord(1, 2, 3);
  EXPECT_EQ(word, Philox4x32({3, 0, 2, 0}, {1, 0})[0]);
  EXPECT_NE(word, SamplingWord(1 + (uint64_t{1} << 32), 2, 3));
  EXPECT_NE(word, SamplingWord(1, 2 + (int64_t{1} << 32), 3));
  EXPECT_NE(word, SamplingWord(1, 2, 4));
}

}  // namespace
}  // namespace gdn::kernels
