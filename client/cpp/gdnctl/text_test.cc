#include "client/cpp/gdnctl/text.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace gdn::gdnctl {
namespace {

const std::string kBad = "\xEF\xBF\xBD";

std::string Encode(uint32_t code_point) {
  std::string bytes;
  if (code_point < 0x80) {
    bytes += static_cast<char>(code_point);
  } else if (code_point < 0x800) {
    bytes += static_cast<char>(0xC0 | (code_point >> 6));
    bytes += static_cast<char>(0x80 | (code_point & 0x3F));
  } else if (code_point < 0x10000) {
    bytes += static_cast<char>(0xE0 | (code_point >> 12));
    bytes += static_cast<char>(0x80 | ((code_point >> 6) & 0x3F));
    bytes += static_cast<char>(0x80 | (code_point & 0x3F));
  } else {
    bytes += static_cast<char>(0xF0 | (code_point >> 18));
    bytes += static_cast<char>(0x80 | ((code_point >> 12) & 0x3F));
    bytes += static_cast<char>(0x80 | ((code_point >> 6) & 0x3F));
    bytes += static_cast<char>(0x80 | (code_point & 0x3F));
  }
  return bytes;
}

std::string Whole(const std::string& bytes) {
  Utf8Stream stream;
  std::string text = stream.Append(bytes);
  return text + stream.Finish();
}

TEST(Utf8StreamTest, EveryCodePointComesThroughByteByByte) {
  for (uint32_t code_point = 0; code_point < 0x110000; ++code_point) {
    if (code_point >= 0xD800 && code_point < 0xE000) continue;
    const std::string bytes = Encode(code_point);
    Utf8Stream stream;
    for (size_t i = 0; i + 1 < bytes.size(); ++i) ASSERT_EQ(stream.Append(bytes.substr(i, 1)), "");
    ASSERT_EQ(stream.Append(bytes.substr(bytes.size() - 1)), bytes) << std::hex << code_point;
    ASSERT_EQ(stream.Finish(), "");
  }
}

TEST(Utf8StreamTest, SurrogatesAndBeyondAreThreeAndFourFaults) {
  for (uint32_t code_point = 0xD800; code_point < 0xE000; ++code_point) {
    ASSERT_EQ(Whole(Encode(code_point)), kBad + kBad + kBad) << std::hex << code_point;
  }
  EXPECT_EQ(Whole(Encode(0x110000)), kBad + kBad + kBad + kBad);
}

// The examples of Unicode 3.9, tables 3-8 to 3-11.
TEST(Utf8StreamTest, MaximalParts) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"\xC0\xAF\xE0\x80\xBF\xF0\x81\x82\x41",
       kBad + kBad + kBad + kBad + kBad + kBad + kBad + kBad + "A"},
      {"\xED\xA0\x80\xED\xBF\xBF\xED\xAF\x41",
       kBad + kBad + kBad + kBad + kBad + kBad + kBad + kBad + "A"},
      {"\xF4\x91\x92\x93\xFF\x41\x80\xBF\x42",
       kBad + kBad + kBad + kBad + kBad + "A" + kBad + kBad + "B"},
      {"\xE1\x80\xE2\xF0\x91\x92\xF1\xBF\x41", kBad + kBad + kBad + kBad + "A"},
  };
  for (const auto& [bytes, expected] : cases) EXPECT_EQ(Whole(bytes), expected);
}

TEST(Utf8StreamTest, SplitDoesNotMatter) {
  const std::string bytes =
      "a\xE2\x82\xAC\xE2\x82z\xF0\x9F\x98\x80\xF0\x9F\x98\xFF\xC3\xA9\xE2\x82";
  const std::string expected = Whole(bytes);
  EXPECT_EQ(expected,
            "a\xE2\x82\xAC" + kBad + "z\xF0\x9F\x98\x80" + kBad + kBad + "\xC3\xA9" + kBad);
  for (size_t i = 0; i <= bytes.size(); ++i) {
    for (size_t j = i; j <= bytes.size(); ++j) {
      Utf8Stream stream;
      std::string text = stream.Append(bytes.substr(0, i));
      text += stream.Append(bytes.substr(i, j - i));
      text += stream.Append(bytes.substr(j));
      EXPECT_EQ(text + stream.Finish(), expected) << i << " " << j;
    }
  }
}

TEST(EscapeControlsTest, NothingCanSteerATerminal) {
  EXPECT_EQ(EscapeControls("a\n\tb"), "a\n\tb");
  EXPECT_EQ(EscapeControls("\x1b[2J\r\x07\x7f"), "\\x1b[2J\\x0d\\x07\\x7f");
  EXPECT_EQ(EscapeControls(std::string("\0", 1)), "\\x00");
  EXPECT_EQ(EscapeControls("\xC2\x9B"
                           "2J"),
            "\\x9b2J");  // CSI in one code point.
  EXPECT_EQ(EscapeControls("\xC2\xA0\xC3\x9B"), "\xC2\xA0\xC3\x9B");
}

TEST(QuoteByteTest, EveryByteIsPrintable) {
  for (int byte = 0; byte < 256; ++byte) {
    for (const char c : QuoteByte(static_cast<uint8_t>(byte))) {
      EXPECT_TRUE(c >= 0x20 && c < 0x7F) << byte;
    }
  }
  EXPECT_EQ(QuoteByte('G'), "'G'");
  EXPECT_EQ(QuoteByte('\n'), "'\\n'");
  EXPECT_EQ(QuoteByte('\''), "'\\''");
  EXPECT_EQ(QuoteByte(0xC3), "'\\xc3'");
}

}  // namespace
}  // namespace gdn::gdnctl
