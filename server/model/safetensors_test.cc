#include "server/model/safetensors.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <string>

#include "absl/strings/str_cat.h"
#include "server/model/test_checkpoint.h"

namespace gdn::model {
namespace {

using testing::ExpectError;
using testing::SafetensorsBytes;
constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;

absl::Status ParseStatus(const std::string& file) {
  return ParseSafetensors(std::as_bytes(std::span(file)), "bad.safetensors").status();
}

std::string Entry(const std::string& name, const std::string& dtype, const std::string& shape,
                  const std::string& offsets) {
  return absl::StrCat("\"", name, "\":{\"dtype\":", dtype, ",\"shape\":", shape,
                      ",\"data_offsets\":", offsets, "}");
}
std::string Header(const std::string& a, const std::string& b = "") {
  return b.empty() ? absl::StrCat("{", a, "}") : absl::StrCat("{", a, ",", b, "}");
}

// One U8 tensor "t" of the given fields over four bytes of data.
absl::Status OneTensor(const std::string& dtype, const std::string& shape,
                       const std::string& offsets) {
  return ParseStatus(SafetensorsBytes(Header(Entry("t", dtype, shape, offsets)), "1234"));
}

TEST(SafetensorsTest, ReadsTensorsInAnyOrderOfNamesAndOffsets) {
  const std::string file =
      SafetensorsBytes(Header(absl::StrCat(R"("__metadata__":{"format":"pt","k":""},)",
                                           Entry("b", "\"BF16\"", "[2,1]", "[0,4]")),
                              absl::StrCat(Entry("a", "\"F32\"", "[]", "[4,8]"), ",",
                                           Entry("empty", "\"I64\"", "[3,0]", "[8,8]"))),
                       "abcdWXYZ");
  const auto contents = ParseSafetensors(std::as_bytes(std::span(file)), "f");
  ASSERT_TRUE(contents.ok()) << contents.status();
  ASSERT_EQ(contents->tensors.size(), 3u);
  const TensorInfo& a = contents->tensors[0];
  EXPECT_EQ(a.name, "a");
  EXPECT_TRUE(a.shape.empty());
  EXPECT_EQ(std::string(reinterpret_cast<const char*>(a.data.data()), a.data.size()), "WXYZ");
  const TensorInfo& b = contents->tensors[1];
  EXPECT_STREQ(b.dtype->name, "BF16");
  EXPECT_EQ(b.shape, (std::vector<int64_t>{2, 1}));
  EXPECT_EQ(std::string(reinterpret_cast<const char*>(b.data.data()), b.data.size()), "abcd");
  EXPECT_EQ(contents->tensors[2].data.size(), 0u);
  EXPECT_EQ(contents->metadata.at("format"), "pt");
}

TEST(SafetensorsTest, ReadsEveryDtypeOfTheFormat) {
  for (const char* name : {"BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0"}) {
    EXPECT_TRUE(OneTensor(absl::StrCat("\"", name, "\""), "[4]", "[0,4]").ok()) << name;
  }
  for (const char* name : {"I16", "U16", "F16", "BF16"}) {
    EXPECT_TRUE(OneTensor(absl::StrCat("\"", name, "\""), "[2]", "[0,4]").ok()) << name;
  }
  for (const char* name : {"I32", "U32", "F32"}) {
    EXPECT_TRUE(OneTensor(absl::StrCat("\"", name, "\""), "[1]", "[0,4]").ok()) << name;
  }
  for (const char* name : {"I64", "U64", "F64", "C64"}) {
    ExpectError(OneTensor(absl::StrCat("\"", name, "\""), "[1]", "[0,4]"), kInvalid,
                {"'t'", "expected 8 bytes", "got 4", name});
  }
  EXPECT_TRUE(OneTensor("\"F4\"", "[8]", "[0,4]").ok());
  ExpectError(OneTensor("\"F4\"", "[7]", "[0,4]"), kInvalid,
              {"'t'", "F4", "whole number of bytes"});
}

TEST(SafetensorsTest, RefusesBrokenLengths) {
  ExpectError(ParseStatus(""), kInvalid, {"bad.safetensors", "at least 8 bytes", "0"});
  ExpectError(ParseStatus("1234567"), kInvalid, {"bad.safetensors", "7"});
  const std::string header = Header(Entry("t", "\"U8\"", "[4]", "[0,4]"));
  ExpectError(ParseStatus(SafetensorsBytes(100'000'001, header, "1234")), kInvalid,
              {"100000000", "100000001"});
  ExpectError(ParseStatus(SafetensorsBytes(UINT64_MAX, header, "1234")), kInvalid,
              {"18446744073709551615"});
  ExpectError(ParseStatus(SafetensorsBytes(header.size() + 5, header, "1234")), kInvalid,
              {"truncated", absl::StrCat(header.size() + 5)});
  ExpectError(ParseStatus(SafetensorsBytes(header, "123")), kInvalid,
              {"'t'", "ends at 4", "3 bytes", "truncated"});
  ExpectError(ParseStatus(SafetensorsBytes(header, "12345")), kInvalid, {"4 bytes", "5 bytes"});
}

TEST(SafetensorsTest, RefusesEveryTruncationOfAGoodFile) {
  const std::string file = SafetensorsBytes(std::vector<testing::TestTensor>{
      testing::F32Tensor("a", {3}), testing::Bf16Tensor("b", {2, 2})});
  ASSERT_TRUE(ParseStatus(file).ok());
  for (size_t size = 0; size < file.size(); ++size) {
    EXPECT_EQ(ParseStatus(file.substr(0, size)).code(), kInvalid) << size;
  }
}

TEST(SafetensorsTest, RefusesHeadersThatAreNotObjects) {
  for (const std::string header :
       {"", " {}", "[]", "null", "{", "{\"a\"}", "{}}", "\xef\xbb\xbf{}", "{\"\xff\":1}"}) {
    ExpectError(ParseStatus(SafetensorsBytes(header, "")), kInvalid, {"bad.safetensors", "header"});
  }
  ExpectError(ParseStatus(SafetensorsBytes("{\"t\":[]}", "")), kInvalid, {"'t'", "an array of 0"});
  ExpectError(ParseStatus(SafetensorsBytes("{\"t\":" + std::string(100'000, '['), "")), kInvalid,
              {"levels deep"});
  EXPECT_TRUE(ParseStatus(SafetensorsBytes("{}    ", "")).ok());
}

TEST(SafetensorsTest, RefusesBrokenEntries) {
  ExpectError(OneTensor("\"u8\"", "[4]", "[0,4]"), kInvalid, {"'t'", "dtype", "BF16", "'u8'"});
  ExpectError(OneTensor("8", "[4]", "[0,4]"), kInvalid, {"'t'", "dtype", "got 8"});
  ExpectError(OneTensor("null", "[4]", "[0,4]"), kInvalid, {"'t'", "dtype", "nothing"});
  ExpectError(OneTensor("\"U8\"", "[-4]", "[0,4]"), kInvalid, {"'t'", "shape", "got -4"});
  ExpectError(OneTensor("\"U8\"", "[4.0]", "[0,4]"), kInvalid, {"'t'", "shape", "got 4"});
  ExpectError(OneTensor("\"U8\"", "[true]", "[0,4]"), kInvalid, {"'t'", "shape", "got true"});
  ExpectError(OneTensor("\"U8\"", "4", "[0,4]"), kInvalid, {"'t'", "shape", "got 4"});
  ExpectError(OneTensor("\"U8\"", "[4]", "[0]"), kInvalid, {"'t'", "data_offsets", "array of 1"});
  ExpectError(OneTensor("\"U8\"", "[4]", "[0,4,4]"), kInvalid, {"'t'", "data_offsets"});
  ExpectError(OneTensor("\"U8\"", "[4]", "[-1,3]"), kInvalid, {"'t'", "data_offsets", "got -1"});
  ExpectError(OneTensor("\"U8\"", "[4]", "[4,0]"), kInvalid, {"'t'", "begin <= end", "[4, 0]"});
  ExpectError(OneTensor("\"U8\"", "[3]", "[0,4]"), kInvalid,
              {"'t'", "expected 3 bytes", "[3]", "U8", "got 4"});
  ExpectError(OneTensor("\"U8\"", "[4]", "[0,18446744073709551615]"), kInvalid,
              {"'t'", "data_offsets", "18446744073709551615"});
}

TEST(SafetensorsTest, RefusesOverflow) {
  const std::string huge = "4611686018427387904";  // 2^62
  ExpectError(OneTensor("\"U8\"", absl::StrCat("[", huge, ",4]"), "[0,0]"), kInvalid,
              {"'t'", huge, "overflows"});
  ExpectError(OneTensor("\"F64\"", absl::StrCat("[", huge, "]"), "[0,0]"), kInvalid,
              {"'t'", "F64", "overflows"});
  // Wraps to zero elements in 64 bits.
  ExpectError(OneTensor("\"U8\"", "[4294967296,4294967296]", "[0,0]"), kInvalid, {"overflows"});
}

TEST(SafetensorsTest, RefusesHolesAndOverlaps) {
  const auto two = [](const std::string& first, const std::string& second) {
    return ParseStatus(SafetensorsBytes(
        Header(Entry("first", "\"U8\"", "[2]", first), Entry("second", "\"U8\"", "[2]", second)),
        "123456"));
  };
  ExpectError(two("[0,2]", "[4,6]"), kInvalid, {"'second'", "'first'", "at 2", "got 4", "hole"});
  ExpectError(two("[0,2]", "[1,3]"), kInvalid, {"'second'", "'first'", "got 1", "overlap"});
  ExpectError(two("[0,2]", "[0,2]"), kInvalid, {"overlap"});
  ExpectError(two("[2,4]", "[4,6]"), kInvalid, {"'first'", "where the data begins", "hole"});
  ExpectError(two("[0,2]", "[2,4]"), kInvalid, {"4 bytes", "6 bytes"});
}

TEST(SafetensorsTest, RefusesDuplicatesAndBadMetadata) {
  const std::string entry = Entry("t", "\"U8\"", "[4]", "[0,4]");
  ExpectError(ParseStatus(SafetensorsBytes(Header(entry, entry), "1234")), kInvalid,
              {"'t'", "twice"});
  ExpectError(ParseStatus(SafetensorsBytes(R"({"__metadata__":{"k":1}})", "")), kInvalid,
              {"__metadata__", "'k'", "got 1"});
  ExpectError(ParseStatus(SafetensorsBytes(R"({"__metadata__":[]})", "")), kInvalid,
              {"__metadata__", "array"});
}

TEST(SafetensorsTest, FileErrorsNameThePath) {
  const testing::TempFolder folder;
  ExpectError(SafetensorsFile::Open(folder.path() + "/none.safetensors").status(),
              absl::StatusCode::kNotFound, {"none.safetensors"});
  ExpectError(SafetensorsFile::Open(folder.path()).status(), kInvalid,
              {folder.path(), "not a regular file"});
  const std::string fifo = folder.path() + "/fifo.safetensors";
  ASSERT_EQ(mkfifo(fifo.c_str(), 0600), 0);
  ExpectError(SafetensorsFile::Open(fifo).status(), kInvalid, {fifo, "not a regular file"});
  const std::string empty = folder.Write("empty.safetensors", "");
  ExpectError(SafetensorsFile::Open(empty).status(), kInvalid, {empty, "at least 8 bytes"});
}

TEST(SafetensorsTest, FindsByName) {
  const testing::TempFolder folder;
  const auto file = SafetensorsFile::Open(folder.Write(
      "m.safetensors", SafetensorsBytes(std::vector<testing::TestTensor>{
                           testing::F32Tensor("y", {3}), testing::F32Tensor("x", {1})})));
  ASSERT_TRUE(file.ok()) << file.status();
  ASSERT_NE((*file)->Find("y"), nullptr);
  EXPECT_EQ((*file)->Find("y")->shape, std::vector<int64_t>{3});
  EXPECT_EQ((*file)->Find("w"), nullptr);
  EXPECT_EQ((*file)->Find("z"), nullptr);
}

}  // namespace
}  // namespace gdn::model
