// The CPU pipeline against goldens of an independent implementation (float32 arithmetic on the
// stored weights), in both precisions.
#include <gtest/gtest.h>

#include "tests/golden/testing.h"

namespace gdn::golden {
namespace {

using pipeline::Positions;
using pipeline::Precision;

struct Case {
  Checkpoint checkpoint;
  Precision precision;
  GoldenBounds bounds;
};

std::vector<Case> Float32Cases() {
  std::vector<Case> cases;
  for (const Checkpoint& checkpoint : Checkpoints()) {
    cases.push_back(
        {checkpoint, Precision::kFloat32, {.logits = 1e-4, .min_gap = 0.0, .states = 1e-4}});
  }
  return cases;
}

std::vector<Case> AllCases() {
  std::vector<Case> cases = Float32Cases();
  for (const Checkpoint& checkpoint : Checkpoints()) {
    cases.push_back(
        {checkpoint, Precision::kBFloat16, {.logits = 3e-2, .min_gap = 0.25, .states = 3e-2}});
  }
  return cases;
}

std::string CaseName(const testing::TestParamInfo<Case>& info) {
  return info.param.checkpoint.name +
         (info.param.precision == Precision::kFloat32 ? "_float32" : "_bfloat16");
}

class GoldenTest : public testing::TestWithParam<Case> {
 protected:
  GoldenTest() : goldens_(GetParam().checkpoint.golden_path) {
    StackOptions options;
    options.cpu.precision = GetParam().precision;
    options.cpu.num_slots = 4;
    stack_ = LoadStack(GetParam().checkpoint.model_dir, options);
    vocab_ = static_cast<size_t>(stack_->info().vocab_size);
  }

  void ExpectRows(std::span<const float> ours, std::span<const float> golden) {
    ExpectGoldenRows(ours, golden, vocab_, GetParam().bounds.logits, GetParam().bounds.min_gap);
  }

  Goldens goldens_;
  std::unique_ptr<pipeline::Pipeline> stack_;
  size_t vocab_;
};

TEST_P(GoldenTest, PrefillLogitsAtEveryPosition) {
  ExpectPrefillGoldens(stack_.get(), goldens_, GetParam().bounds);
}

TEST_P(GoldenTest, DecodeLogitsOnTheGoldenPath) {
  ExpectDecodeGoldens(stack_.get(), goldens_, GetParam().checkpoint, GetParam().bounds);
}

// In float32 only: bfloat16 products may leave the golden path at a near-tie.
class GreedyTest : public GoldenTest {};

TEST_P(GreedyTest, OwnTokensAreTheGoldens) {
  for (int prompt = 0; goldens_.Has(Key(prompt, "prompt")); ++prompt) {
    SCOPED_TRACE(prompt);
    const std::vector<int32_t> golden = goldens_.Ints(Key(prompt, "greedy"));
    Session session(stack_.get(), 2);
    std::vector<float> row = session.Feed(goldens_.Ints(Key(prompt, "prompt")));
    std::vector<int32_t> tokens;
    while (tokens.size() < golden.size()) {
      tokens.push_back(static_cast<int32_t>(ArgMax(row)));
      row = session.Feed({&tokens.back(), 1});
    }
    EXPECT_EQ(tokens, golden);
  }
}

TEST_P(GoldenTest, StatesAfterThePrompt) {
  ExpectStateGoldens(stack_.get(), goldens_, GetParam().checkpoint, GetParam().bounds);
}

// Slices [0, i) of the stack give the hidden states between the layers; slices chained through
// hidden states give the whole stack's logits.
TEST_P(GoldenTest, SlicesOfTheStack) {
  model::LoadOptions load;
  load.path = GetParam().checkpoint.model_dir;
  const int64_t num_layers = model::LoadModel(load)->spec.num_layers;
  const auto hidden = static_cast<size_t>(stack_->info().hidden_size);
  const std::vector<int32_t> prompt = goldens_.Ints("1.prompt");
  const std::vector<float> golden = goldens_.Floats("1.hidden_last");
  ASSERT_EQ(golden.size(), static_cast<size_t>(num_layers + 1) * hidden);
  for (int64_t last = 1; last < num_layers; ++last) {
    SCOPED_TRACE(last);
    StackOptions options;
    options.cpu.precision = GetParam().precision;
    options.cpu.num_slots = 2;
    options.layers = model::LayerRange{0, last};
    const auto front = LoadStack(GetParam().checkpoint.model_dir, options);
    EXPECT_FALSE(front->info().has_head);
    pipeline::SequenceInput input{
        .write_slot = 1, .fresh = true, .tokens = prompt, .want_hidden = Positions::kAll};
    std::vector<pipeline::SequenceOutput> outputs;
    ASSERT_TRUE(front->Run({&input, 1}, &outputs).ok());
    ASSERT_EQ(outputs[0].hidden.size(), prompt.size() * hidden);
    EXPECT_LE(
        RelativeL2(outputs[0].hidden.last(hidden), std::span<const float>(golden).subspan(
                                                       static_cast<size_t>(last) * hidden, hidden)),
        GetParam().bounds.logits);

    options.layers = model::LayerRange{last, num_layers};
    const auto back = LoadStack(GetParam().checkpoint.model_dir, options);
    EXPECT_FALSE(back->info().has_embedding);
    const std::vector<float> middle(outputs[0].hidden.begin(), outputs[0].hidden.end());
    pipeline::SequenceInput rest{
        .write_slot = 1, .fresh = true, .hidden = middle, .want_logits = Positions::kAll};
    ASSERT_TRUE(back->Run({&rest, 1}, &outputs).ok());
    ExpectRows(outputs[0].logits, goldens_.Floats("1.logits"));
  }
}

INSTANTIATE_TEST_SUITE_P(Checkpoints, GoldenTest, testing::ValuesIn(AllCases()), CaseName);
INSTANTIATE_TEST_SUITE_P(Checkpoints, GreedyTest, testing::ValuesIn(Float32Cases()), CaseName);

class HeldOutTest : public testing::TestWithParam<Precision> {};

TEST_P(HeldOutTest, BitsPerByte) {
  StackOptions options;
  options.cpu.precision = GetParam();
  options.cpu.num_slots = 2;
  const auto stack = LoadStack(SourcePath("deploy/models/demo-gdn-7m"), options);
  const double bits = HeldOutBitsPerByte(stack.get());
  EXPECT_NEAR(bits, 1.1066, GetParam() == Precision::kFloat32 ? 0.0005 : 0.003);
  RecordProperty("bits_per_byte", std::to_string(bits));
}

INSTANTIATE_TEST_SUITE_P(Precisions, HeldOutTest,
                         testing::Values(Precision::kFloat32, Precision::kBFloat16),
                         [](const auto& param_info) {
                           return param_info.param == Precision::kFloat32 ? "float32" : "bfloat16";
                         });

}  // namespace
}  // namespace gdn::golden
