// Models with gdn2 layers on the CPU: against the FP64 stack, and, with gates tied as a Gated
// DeltaNet has them, against the goldens of an independent implementation.
#include <gtest/gtest.h>

#include <cstring>

#include "tests/golden/gdn2_testing.h"
#include "tests/golden/testing.h"

namespace gdn::golden {
namespace {

using pipeline::Precision;

constexpr uint64_t kSeed = 5;

std::unique_ptr<pipeline::Pipeline> Create(model::Model model, Precision precision,
                                           int64_t num_slots = 4) {
  auto created = pipeline::CreateCpuPipeline(
      std::move(model), {.threads = 2, .precision = precision, .num_slots = num_slots});
  EXPECT_TRUE(created.ok()) << created.status();
  if (!created.ok()) std::abort();
  return *std::move(created);
}

model::Model LoadFiles(const Checkpoint& checkpoint) {
  auto model = model::LoadModel({.path = checkpoint.model_dir});
  EXPECT_TRUE(model.ok()) << model.status();
  if (!model.ok()) std::abort();
  return *std::move(model);
}

std::string Name(const testing::TestParamInfo<Checkpoint>& info) { return info.param.name; }

// What the reference is worth: on linear_attention layers it gives the goldens of others.
TEST(ReferenceStackTest, GivesTheGoldens) {
  const Checkpoint checkpoint = Checkpoints()[1];
  const Goldens goldens(checkpoint.golden_path);
  const ReferenceRun run = RunReference(LoadFiles(checkpoint), goldens.Ints("1.prompt"));
  EXPECT_LE(RelativeL2(run.logits, goldens.Floats("1.logits")), 1e-5);
}

class Gdn2Test : public testing::TestWithParam<Checkpoint> {};

TEST_P(Gdn2Test, IsTheReferenceInFloat32) {
  const model::Model model = LoadRandom(GetParam().model_dir, kSeed);
  const auto stack = Create(LoadRandom(GetParam().model_dir, kSeed), Precision::kFloat32);
  ExpectReference(stack.get(), model, 1e-4);
}

TEST_P(Gdn2Test, IsNearTheReferenceInBfloat16) {
  const model::Model model = LoadRandom(GetParam().model_dir, kSeed);
  const auto stack = Create(LoadRandom(GetParam().model_dir, kSeed), Precision::kBFloat16);
  ExpectReference(stack.get(), model, 3e-2);
}

TEST_P(Gdn2Test, ASequencesBitsDoNotDependOnItsBatch) {
  const auto stack = Create(LoadRandom(GetParam().model_dir, kSeed), Precision::kFloat32, 140);
  CompareRaggedPrefill(
      stack.get(), [](std::span<const float> together, std::span<const float> alone) {
        ASSERT_EQ(together.size(), alone.size());
        if (alone.empty()) return;
        EXPECT_EQ(std::memcmp(together.data(), alone.data(), alone.size_bytes()), 0);
      });
}

INSTANTIATE_TEST_SUITE_P(Models, Gdn2Test, testing::ValuesIn(Gdn2Models()), Name);

class TiedGatesTest : public testing::TestWithParam<Checkpoint> {};

TEST_P(TiedGatesTest, GiveTheGoldensOfGatedDeltaNet) {
  const Goldens goldens(GetParam().golden_path);
  const auto stack = Create(AsGdn2(LoadFiles(GetParam())), Precision::kFloat32);
  const GoldenBounds bounds = {.logits = 1e-4, .min_gap = 0.0, .states = 1e-4};
  ExpectPrefillGoldens(stack.get(), goldens, bounds);
  ExpectDecodeGoldens(stack.get(), goldens, GetParam(), bounds);
}

INSTANTIATE_TEST_SUITE_P(Checkpoints, TiedGatesTest, testing::ValuesIn(Checkpoints()), Name);

TEST(MixedStackTest, GivesTheGoldensOfGatedDeltaNet) {
  const Checkpoint checkpoint = Checkpoints()[1];  // As many key heads as value heads.
  const Goldens goldens(checkpoint.golden_path);
  for (const std::vector<bool>& convert : {std::vector<bool>{true, false}, {false, true}}) {
    const auto stack = Create(AsGdn2(LoadFiles(checkpoint), convert), Precision::kFloat32);
    ExpectPrefillGoldens(stack.get(), goldens, {.logits = 1e-4, .min_gap = 0.0, .states = 1e-4});
  }
}

}  // namespace
}  // namespace gdn::golden
