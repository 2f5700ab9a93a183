#include "server/model/json.h"

#include <gtest/gtest.h>

#include <string>

#include "server/model/json_fields.h"
#include "server/model/test_checkpoint.h"

namespace gdn::model {
namespace {

using testing::ExpectError;
constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;

absl::Status ParseStatus(const std::string& text, const JsonLimits& limits = {}) {
  return ParseJson(text, "doc.json", limits).status();
}

TEST(JsonTest, KeepsKindsApart) {
  const auto json = ParseJson(
      R"({"i":-3,"z":0,"max":9223372036854775807,"u":9223372036854775808,"e":1e3,"f":1.0,)"
      R"("b":true,"n":null,"s":"é\u0000x","a":[1,[2]],"o":{"k":{}}})",
      "doc.json");
  ASSERT_TRUE(json.ok()) << json.status();
  EXPECT_EQ(*json->Find("i")->As<int64_t>(), -3);
  EXPECT_EQ(*json->Find("z")->As<int64_t>(), 0);
  EXPECT_EQ(*json->Find("max")->As<int64_t>(), INT64_MAX);
  EXPECT_EQ(json->Find("u")->As<int64_t>(), nullptr);
  EXPECT_EQ(*json->Find("u")->As<uint64_t>(), uint64_t{1} << 63);
  EXPECT_EQ(*json->Find("e")->As<double>(), 1000.0);
  EXPECT_EQ(json->Find("f")->As<int64_t>(), nullptr);
  EXPECT_TRUE(*json->Find("b")->As<bool>());
  EXPECT_TRUE(json->Find("n")->is_null());
  EXPECT_EQ(*json->Find("s")->As<std::string>(), std::string("é\0x", 4));
  EXPECT_EQ(json->Find("a")->As<Json::Array>()->size(), 2u);
  EXPECT_NE(json->Find("o")->Find("k"), nullptr);
  EXPECT_EQ(json->Find("absent"), nullptr);
  EXPECT_EQ(json->Find("a")->Find("k"), nullptr);
}

TEST(JsonTest, RefusesWhatIsNotJson) {
  for (const char* text :
       {"", " ", "{", "[1,]", "{\"a\":}", "{\"a\":NaN}", "{\"a\":Infinity}", "{} x", "{'a':1}",
        "{\"a\":01}", "{\"a\":+1}", "// c\n{}", "\"\xff\"", "\"\xed\xa0\x80\"", "{\"a\":1e999}"}) {
    ExpectError(ParseStatus(text), kInvalid, {"doc.json", "JSON"});
  }
}

TEST(JsonTest, RefusesDuplicateKeys) {
  ExpectError(ParseStatus(R"({"b":1,"a":2,"b":3})"), kInvalid, {"'b'", "twice"});
  ExpectError(ParseStatus(R"([{"x":{"a":1,"\u0061":1}}])"), kInvalid, {"'a'", "twice"});
}

TEST(JsonTest, BoundsDepthSizeAndValues) {
  const std::string open(32, '['), close(32, ']');
  EXPECT_TRUE(ParseStatus(open + close).ok());
  ExpectError(ParseStatus("[" + open + close + "]"), kInvalid, {"32 levels"});
  ExpectError(ParseStatus(std::string(1'000'000, '[')), kInvalid, {"levels deep"});
  std::string objects;
  for (int i = 0; i < 100'000; ++i) objects += "{\"a\":";
  ExpectError(ParseStatus(objects), kInvalid, {"levels deep"});
  ExpectError(ParseStatus("[1,2,3]", {.max_bytes = 6}), kInvalid, {"7 bytes", "limit is 6"});
  EXPECT_TRUE(ParseStatus("[1,2,3]", {.max_values = 4}).ok());
  ExpectError(ParseStatus("[1,2,3]", {.max_values = 3}), kInvalid, {"more than 3 values"});
}

TEST(JsonTest, EscapesHostileNamesInMessages) {
  const std::string key(500, 'k');
  const absl::Status status = ParseStatus("{\"a\\nb" + key + "\":1,\"a\\nb" + key + "\":2}");
  ExpectError(status, kInvalid, {"a\\nbkkk", "..."});
  EXPECT_LT(status.message().size(), 250u);
}

class JsonFieldsTest : public ::testing::Test {
 protected:
  JsonObject Object(const std::string& text) {
    auto json = ParseJson(text, "doc.json");
    EXPECT_TRUE(json.ok()) << json.status();
    json_ = *std::move(json);
    return {&json_, "doc.json"};
  }
  Json json_;
};

TEST_F(JsonFieldsTest, IntegersInRangeOnly) {
  const JsonObject object = Object(R"({"i":7,"neg":-1,"e":1e3,"f":7.0,"s":"7","b":true,"n":null,)"
                                   R"("big":18446744073709551615})");
  EXPECT_EQ(*GetInt(object, "i", 7, 7), 7);
  ExpectError(GetInt(object, "i", 8, 9).status(), kInvalid, {"doc.json: i", "8..9", "got 7"});
  ExpectError(GetInt(object, "i", 1, 6).status(), kInvalid, {"1..6"});
  ExpectError(GetInt(object, "neg", 0, 9).status(), kInvalid, {"neg", "got -1"});
  for (const char* key : {"e", "f", "s", "b", "n", "big", "absent"}) {
    ExpectError(GetInt(object, key, 0, INT64_MAX).status(), kInvalid, {key, "an integer in"});
  }
  EXPECT_EQ(*GetIntOr(object, "absent", 3, 4, 5), 3);
  EXPECT_EQ(*GetIntOr(object, "n", 3, 4, 5), 3);
  EXPECT_FALSE(GetIntOr(object, "i", 3, 4, 5).ok());
}

TEST_F(JsonFieldsTest, NumbersStringsAndFlags) {
  const JsonObject object = Object(R"({"x":0.5,"one":1,"s":"t","b":false,"o":{"k":1}})");
  EXPECT_EQ(*GetNumberOr(object, "x", 9, 0, 1), 0.5);
  EXPECT_EQ(*GetNumberOr(object, "one", 9, 0, 2), 1.0);
  EXPECT_EQ(*GetNumberOr(object, "absent", 9, 0, 1), 9.0);
  ExpectError(GetNumberOr(object, "one", 9, 0, 1).status(), kInvalid, {"one", "between 0 and 1"});
  ExpectError(GetNumberOr(object, "s", 9, 0, 1).status(), kInvalid, {"s", "'t'"});
  EXPECT_EQ(*GetStringOr(object, "s", ""), "t");
  ExpectError(GetStringOr(object, "x", "").status(), kInvalid, {"x", "a string"});
  EXPECT_EQ(*GetBool(object, "b"), std::optional<bool>(false));
  EXPECT_EQ(*GetBool(object, "absent"), std::nullopt);
  ExpectError(GetBool(object, "one").status(), kInvalid, {"true or false", "got 1"});
  EXPECT_EQ(*GetInt(*GetObject(object, "o"), "k", 0, 9), 1);
  EXPECT_EQ(GetObject(object, "absent")->json, nullptr);
  ExpectError(GetObject(object, "x").status(), kInvalid, {"an object"});
}

}  // namespace
}  // namespace gdn::model
