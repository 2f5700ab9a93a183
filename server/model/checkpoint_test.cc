#include "server/model/checkpoint.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "server/model/test_checkpoint.h"

namespace gdn::model {
namespace {

using testing::ExpectError;
using testing::F32Tensor;
using testing::SafetensorsBytes;
using testing::TempFolder;
using testing::TestTensor;
constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
constexpr char kIndex[] = "model.safetensors.index.json";

bool All(const std::string&) { return true; }

std::string OneTensorFile(const std::string& name) {
  return SafetensorsBytes(std::vector<TestTensor>{F32Tensor(name, {2})});
}

TEST(ShardIndexTest, RefusesPathsAndWrongTypes) {
  for (const char* file : {"../x.safetensors", "/etc/passwd", "a/b.safetensors", "..", ".", "",
                           "a\\\\b", "x\\u0000y"}) {
    const std::string text = std::string(R"({"weight_map":{"w":")") + file + "\"}}";
    ExpectError(ParseShardIndex(text, "index.json").status(), kInvalid,
                {"index.json", "'w'", "a file in the same folder"});
  }
  ExpectError(ParseShardIndex(R"({"weight_map":{"w":1}})", "i").status(), kInvalid, {"'w'", "1"});
  ExpectError(ParseShardIndex(R"({"weight_map":{}})", "i").status(), kInvalid, {"weight_map"});
  ExpectError(ParseShardIndex(R"({"weight_map":[]})", "i").status(), kInvalid, {"weight_map"});
  ExpectError(ParseShardIndex("{}", "i").status(), kInvalid, {"weight_map", "nothing"});
  ExpectError(ParseShardIndex("[]", "i").status(), kInvalid, {"weight_map"});
  ExpectError(ParseShardIndex("{", "i").status(), kInvalid, {"JSON"});
}

TEST(CheckpointTest, IndexDecidesAndTheFolderIsNotSearched) {
  const TempFolder folder;
  folder.Write(kIndex, R"({"metadata":{"total_size":1},"weight_map":{"a":"1.st","b":"2.st"}})");
  folder.Write("1.st", OneTensorFile("a"));
  folder.Write("2.st", OneTensorFile("b"));
  folder.Write("model.safetensors", "damaged, but nobody named it");
  folder.Write("3.st", "likewise");
  auto checkpoint = Checkpoint::Open(folder.path());
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  EXPECT_EQ(checkpoint->TensorNames(), (std::vector<std::string>{"a", "b"}));
  ASSERT_TRUE(checkpoint->OpenShards(All).ok());
  EXPECT_EQ(checkpoint->Get("b").file->path(), folder.path() + "/2.st");
  EXPECT_EQ(checkpoint->Get("b").info->name, "b");
  EXPECT_EQ(checkpoint->Get("c").info, nullptr);
}

TEST(CheckpointTest, OpensOnlyTheShardsThatAreNeeded) {
  const TempFolder folder;
  folder.Write(kIndex, R"({"weight_map":{"a":"1.st","b":"absent.st"}})");
  folder.Write("1.st", OneTensorFile("a"));
  auto checkpoint = Checkpoint::Open(folder.path());
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  EXPECT_TRUE(checkpoint->OpenShards([](const std::string& name) { return name == "a"; }).ok());
  EXPECT_EQ(checkpoint->Get("b").info, nullptr);
  ExpectError(checkpoint->OpenShards(All), absl::StatusCode::kNotFound,
              {folder.path(), "1 shard ", "'absent.st'", "'b'"});
}

TEST(CheckpointTest, NamesEveryMissingShard) {
  const TempFolder folder;
  folder.Write(kIndex, R"({"weight_map":{"a":"1.st","b":"2.st"}})");
  auto checkpoint = Checkpoint::Open(folder.path());
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  ExpectError(checkpoint->OpenShards(All), absl::StatusCode::kNotFound,
              {"2 shards", "'1.st'", "'2.st'"});
}

TEST(CheckpointTest, NamesDisagreementsOfIndexAndShards) {
  const TempFolder folder;
  folder.Write(kIndex, R"({"weight_map":{"a":"1.st","b":"2.st","c":"2.st"}})");
  folder.Write("1.st", SafetensorsBytes(std::vector<TestTensor>{
                           F32Tensor("a", {1}), F32Tensor("b", {1}), F32Tensor("d", {1})}));
  folder.Write("2.st", OneTensorFile("b"));
  auto checkpoint = Checkpoint::Open(folder.path());
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  ExpectError(checkpoint->OpenShards(All), kInvalid,
              {"'c' is not in '2.st'", "'1.st' holds 'b', which the index has in '2.st'",
               "'1.st' holds 'd', which the index does not name"});
}

TEST(CheckpointTest, DamagedShardIsNamed) {
  const TempFolder folder;
  folder.Write(kIndex, R"({"weight_map":{"a":"1.st"}})");
  folder.Write("1.st", OneTensorFile("a").substr(0, 50));
  auto checkpoint = Checkpoint::Open(folder.path());
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  ExpectError(checkpoint->OpenShards(All), kInvalid, {"1.st", "truncated"});
}

TEST(CheckpointTest, EmptyFolderSaysWhatIsMissing) {
  const TempFolder folder;
  ExpectError(Checkpoint::Open(folder.path()).status(), absl::StatusCode::kNotFound,
              {folder.path(), "model.safetensors.index.json", "model.safetensors"});
}

}  // namespace
}  // namespace gdn::model
