#include "server/pipeline/batch_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace gdn::pipeline {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

const PipelineInfo kInfo = {
    .vocab_size = 10, .hidden_size = 4, .num_slots = 8, .has_embedding = true, .has_head = true};
const std::vector<int32_t> kTokens = {1, 2, 3, 4, 5, 6, 7, 8, 9};

SequenceInput Tokens(int64_t slot, size_t count, Positions logits = Positions::kNone) {
  return {.read_slot = slot,
          .write_slot = slot,
          .tokens = std::span(kTokens).first(count),
          .want_logits = logits};
}

TEST(BatchPlan, PutsSingleTokensFirstAndPacksTheRest) {
  const std::vector<SequenceInput> inputs = {Tokens(1, 3), Tokens(2, 1), Tokens(3, 0), Tokens(4, 2),
                                             Tokens(5, 1)};
  BatchPlan plan;
  ASSERT_TRUE(plan.Build(inputs, kInfo).ok());
  EXPECT_EQ(plan.num_tokens, 7);
  EXPECT_EQ(plan.phase, Phase::kMixed);
  EXPECT_THAT(plan.steps.write_slot, ElementsAre(2, 5));
  EXPECT_THAT(plan.prefills.write_slot, ElementsAre(1, 3, 4));
  EXPECT_THAT(plan.prefills.cu_seqlens, ElementsAre(0, 3, 3, 5));
  EXPECT_EQ(plan.places[0].first_token, 2);
  EXPECT_EQ(plan.places[1].first_token, 0);
  EXPECT_EQ(plan.places[4].first_token, 1);
  EXPECT_EQ(plan.places[3].first_token, 5);
  EXPECT_TRUE(plan.logits_tokens.empty());
}

TEST(BatchPlan, SampledRowsComeFirstAndAreShared) {
  const SampleSpec sample;
  std::vector<SequenceInput> inputs = {Tokens(1, 3, Positions::kAll),
                                       Tokens(2, 1, Positions::kLast), Tokens(3, 2)};
  inputs[1].sample = &sample;
  inputs[2].sample = &sample;
  BatchPlan plan;
  ASSERT_TRUE(plan.Build(inputs, kInfo).ok());
  EXPECT_EQ(plan.num_sampled, 2);
  // Rows: last of sequence 1, last of sequence 2, then all of sequence 0.
  EXPECT_THAT(plan.logits_tokens, ElementsAre(0, 5, 1, 2, 3));
  EXPECT_EQ(plan.places[1].logits_row, 0);
  EXPECT_EQ(plan.places[1].sample_row, 0);
  EXPECT_EQ(plan.places[2].sample_row, 1);
  EXPECT_EQ(plan.places[2].logits_rows, 0);
  EXPECT_EQ(plan.places[0].logits_row, 2);
  EXPECT_EQ(plan.places[0].logits_rows, 3);
}

TEST(BatchPlan, PhaseFollowsTheSequences) {
  BatchPlan plan;
  const std::vector<SequenceInput> decode = {Tokens(1, 1), Tokens(2, 1)};
  ASSERT_TRUE(plan.Build(decode, kInfo).ok());
  EXPECT_EQ(plan.phase, Phase::kDecode);
  const std::vector<SequenceInput> prefill = {Tokens(1, 4)};
  ASSERT_TRUE(plan.Build(prefill, kInfo).ok());
  EXPECT_EQ(plan.phase, Phase::kPrefill);
}

TEST(BatchPlan, RefusesWhatCannotRun) {
  const std::vector<float> hidden(6);
  const std::vector<int32_t> bad_token = {1, 10};
  const SampleSpec sample;
  PipelineInfo headless = kInfo;
  headless.has_head = false;
  PipelineInfo middle = headless;
  middle.has_embedding = false;
  PipelineInfo overlapped = kInfo;
  overlapped.max_in_flight = 2;
  struct Bad {
    SequenceInput input;
    PipelineInfo info;
    std::string message;
  };
  const std::vector<Bad> cases = {
      {Tokens(8, 1), kInfo, "write slot 8"},
      {Tokens(-1, 1), kInfo, "write slot -1"},
      {{.read_slot = 9, .write_slot = 1, .tokens = kTokens}, kInfo, "read slot 9"},
      {{.read_slot = 1, .write_slot = 1, .tokens = bad_token}, kInfo, "token 10"},
      {{.read_slot = 1, .write_slot = 1, .hidden = hidden}, kInfo, "multiple of 4"},
      {{.read_slot = 1, .write_slot = 1, .tokens = kTokens, .hidden = hidden},
       kInfo,
       "more than one"},
      {{.read_slot = 1, .write_slot = 1, .chained = 0}, kInfo, "one batch in flight"},
      {{.read_slot = 1, .write_slot = 1, .tokens = kTokens, .chained = 0},
       overlapped,
       "more than one"},
      {Tokens(1, 1, Positions::kLast), headless, "head"},
      {Tokens(1, 1), middle, "embedding"},
      {{.read_slot = 1, .write_slot = 1, .sample = &sample}, kInfo, "empty input"},
  };
  for (const Bad& bad : cases) {
    const std::vector<SequenceInput> inputs = {Tokens(2, 0), bad.input};
    BatchPlan plan;
    const absl::Status status = plan.Build(inputs, bad.info);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << bad.message;
    EXPECT_THAT(std::string(status.message()), HasSubstr(bad.message));
    EXPECT_THAT(std::string(status.message()), HasSubstr("sequence 1"));
  }
}

// A chained sequence is one token long, and may choose another.
TEST(BatchPlan, ChainedInputsAreOneToken) {
  PipelineInfo info = kInfo;
  info.max_in_flight = 2;
  const SampleSpec sample;
  const std::vector<SequenceInput> inputs = {
      Tokens(1, 3), {.read_slot = 2, .write_slot = 2, .chained = 5, .sample = &sample}};
  BatchPlan plan;
  ASSERT_TRUE(plan.Build(inputs, info).ok());
  EXPECT_EQ(plan.steps.size(), 1);
  EXPECT_EQ(plan.places[1].num_tokens, 1);
  EXPECT_EQ(plan.places[1].first_token, 0);
  EXPECT_EQ(plan.places[1].sample_row, 0);
  EXPECT_EQ(plan.num_tokens, 4);
}

}  // namespace
}  // namespace gdn::pipeline
