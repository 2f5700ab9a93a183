// A sequence's result does not depend on who shares its batch: bit for bit in float32 and with
// batch_invariant, within 1e-2 by default.
#include <gtest/gtest.h>

#include <cstring>

#include "tests/golden/testing.h"

namespace gdn::golden {
namespace {

using pipeline::Positions;
using pipeline::Precision;
using pipeline::SequenceInput;
using pipeline::SequenceOutput;

struct Mode {
  std::string name;
  Precision precision;
  bool batch_invariant;
  double bound;  // 0: the bits.
};

class BatchTest : public testing::TestWithParam<Mode> {
 protected:
  BatchTest() {
    StackOptions options;
    options.cpu.precision = GetParam().precision;
    options.cpu.batch_invariant = GetParam().batch_invariant;
    options.cpu.num_slots = 140;
    stack_ = LoadStack(SourcePath("deploy/models/demo-gdn-7m"), options);
  }

  void ExpectSame(std::span<const float> together, std::span<const float> alone) {
    ASSERT_EQ(together.size(), alone.size());
    if (alone.empty()) return;
    if (GetParam().bound == 0) {
      EXPECT_EQ(std::memcmp(together.data(), alone.data(), alone.size_bytes()), 0);
    } else {
      EXPECT_LE(RelativeL2(together, alone), GetParam().bound);
    }
  }

  std::unique_ptr<pipeline::Pipeline> stack_;
};

TEST_P(BatchTest, RaggedPrefill) {
  CompareRaggedPrefill(stack_.get(),
                       [&](std::span<const float> together, std::span<const float> alone) {
                         ExpectSame(together, alone);
                       });
}

// Decode rows of 64 sequences beside each other, and beside somebody's prefill.
TEST_P(BatchTest, DecodeAmongOthers) {
  constexpr size_t kSequences = 64;
  constexpr size_t kSteps = 6;
  std::vector<std::vector<int32_t>> tokens;
  for (size_t i = 0; i < kSequences; ++i) tokens.push_back(TextTokens(i, 4 + i % 7 + kSteps));
  const std::vector<int32_t> intruder = TextTokens(999, 200);

  std::vector<std::vector<float>> together(kSequences);
  std::vector<SequenceOutput> outputs;
  for (size_t step = 0; step <= kSteps; ++step) {
    std::vector<SequenceInput> batch;
    for (size_t i = 0; i < kSequences; ++i) {
      const std::span<const int32_t> all(tokens[i]);
      const size_t prompt = tokens[i].size() - kSteps;
      batch.push_back({.read_slot = static_cast<int64_t>(1 + i),
                       .write_slot = static_cast<int64_t>(1 + i),
                       .fresh = step == 0,
                       .tokens = step == 0 ? all.first(prompt) : all.subspan(prompt + step - 1, 1),
                       .want_logits = Positions::kLast});
    }
    if (step % 2 == 1) batch.push_back({.write_slot = 120, .fresh = true, .tokens = intruder});
    ASSERT_TRUE(stack_->Run(batch, &outputs).ok());
    for (size_t i = 0; i < kSequences; ++i) {
      together[i].insert(together[i].end(), outputs[i].logits.begin(), outputs[i].logits.end());
    }
  }
  for (size_t i = 0; i < kSequences; ++i) {
    SCOPED_TRACE(i);
    Session alone(stack_.get(), 130);
    const std::span<const int32_t> all(tokens[i]);
    const size_t prompt = tokens[i].size() - kSteps;
    std::vector<float> rows = alone.Feed(all.first(prompt));
    for (size_t step = 0; step < kSteps; ++step) {
      const std::vector<float> row = alone.Feed(all.subspan(prompt + step, 1));
      rows.insert(rows.end(), row.begin(), row.end());
    }
    ExpectSame(together[i], rows);
  }
}

TEST_P(BatchTest, SampledTokensAmongOthers) {
  std::vector<std::vector<int32_t>> prompts;
  std::vector<pipeline::SampleSpec> specs;
  for (size_t i = 0; i < 32; ++i) {
    prompts.push_back(TextTokens(i, 3 + i));
    pipeline::SampleSpec spec;
    spec.temperature = i % 4 == 0 ? 0.0f : 1.0f;
    spec.top_k = i % 3 == 0 ? 20 : 0;
    spec.top_p = i % 5 == 0 ? 0.9f : 1.0f;
    spec.seed = i;
    spec.position = static_cast<int64_t>(prompts.back().size());
    spec.top_logprobs = static_cast<int32_t>(i % 3);
    specs.push_back(spec);
  }
  std::vector<SequenceInput> batch;
  for (size_t i = 0; i < prompts.size(); ++i) {
    batch.push_back({.write_slot = static_cast<int64_t>(1 + i),
                     .fresh = true,
                     .tokens = prompts[i],
                     .sample = &specs[i]});
  }
  std::vector<SequenceOutput> outputs;
  ASSERT_TRUE(stack_->Run(batch, &outputs).ok());
  std::vector<pipeline::TokenLogprob> together;
  for (size_t i = 0; i < outputs.size(); ++i) {
    together.push_back(outputs[i].token);
    EXPECT_EQ(outputs[i].top.size(), static_cast<size_t>(specs[i].top_logprobs));
  }
  for (size_t i = 0; i < prompts.size(); ++i) {
    SCOPED_TRACE(i);
    SequenceInput input = batch[i];
    input.write_slot = 131;
    ASSERT_TRUE(stack_->Run({&input, 1}, &outputs).ok());
    ASSERT_GE(together[i].id, 0);
    if (GetParam().bound == 0) {
      EXPECT_EQ(outputs[0].token.id, together[i].id);
      EXPECT_EQ(outputs[0].token.logprob, together[i].logprob);
    } else if (outputs[0].token.id == together[i].id) {
      EXPECT_NEAR(outputs[0].token.logprob, together[i].logprob, 0.1);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Modes, BatchTest,
                         testing::Values(Mode{"float32", Precision::kFloat32, false, 0},
                                         Mode{"invariant", Precision::kBFloat16, true, 0},
                                         Mode{"default", Precision::kBFloat16, false, 1e-2}),
                         [](const auto& param_info) { return param_info.param.name; });

}  // namespace
}  // namespace gdn::golden
