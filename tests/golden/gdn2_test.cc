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
  ExpectReference(stack.get(), model, {.position = 1e-4, .prompt = 1e-4, .states = 1e-4});
}

TEST_P(Gdn2Test, IsNearTheReferenceInBfloat16) {
  const model::Model model = LoadRandom(GetParam().model_dir, kSeed);
  const auto stack = Create(LoadRandom(GetParam().model_dir, kSeed), Precision::kBFloat16);
  ExpectReference(stack.get(), model, kBfloat16Bounds);
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

// Slices chained through hidden states give the whole stack's bits: a slice that begins with either
// type of layer knows which it holds.
TEST_P(Gdn2Test, SlicesOfTheStack) {
  const std::vector<int32_t> prompt = TextTokens(1, 70);
  const auto load = [](std::optional<model::LayerRange> layers) {
    return LoadStack(GetParam().model_dir,
                     {.cpu = {.precision = Precision::kFloat32, .num_slots = 4},
                      .layers = layers,
                      .random_weights = kSeed});
  };
  const auto whole = load(std::nullopt);
  Session session(whole.get(), 1);
  const std::vector<float> expected = session.Feed(prompt, pipeline::Positions::kAll);
  const int64_t num_layers = LoadRandom(GetParam().model_dir, kSeed).spec.num_layers;
  for (int64_t cut = 1; cut < num_layers; ++cut) {
    SCOPED_TRACE(cut);
    const auto front = load(model::LayerRange{0, cut});
    const auto back = load(model::LayerRange{cut, num_layers});
    pipeline::SequenceInput input{
        .write_slot = 1, .fresh = true, .tokens = prompt, .want_hidden = pipeline::Positions::kAll};
    std::vector<pipeline::SequenceOutput> outputs;
    ASSERT_TRUE(front->Run({&input, 1}, &outputs).ok());
    const std::vector<float> middle(outputs[0].hidden.begin(), outputs[0].hidden.end());
    pipeline::SequenceInput rest{
        .write_slot = 1, .fresh = true, .hidden = middle, .want_logits = pipeline::Positions::kAll};
    ASSERT_TRUE(back->Run({&rest, 1}, &outputs).ok());
    ASSERT_EQ(outputs[0].logits.size(), expected.size());
    EXPECT_EQ(std::memcmp(outputs[0].logits.data(), expected.data(), expected.size() * 4), 0);
  }
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
