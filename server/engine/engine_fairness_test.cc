// Many clients: nobody starves, whatever the others do.
#include <gtest/gtest.h>

#include <map>

#include "server/engine/testing/engine_fixture.h"

namespace gdn::engine {
namespace {

using EngineFairnessTest = EngineFixture;

TEST_F(EngineFairnessTest, DecodeGoesOnUnderALongPrefill) {
  EngineOptions options;
  options.prefill_chunk_tokens = 16;
  options.prefill_token_budget = 16;
  Make(4, options);
  auto stream = MustGenerate(Gen("", Tokens(3), 1000));
  engine_->StepOnce();
  auto prompt = MustSubmit(Batch(CallKind::kPrefill, {Sequence(NewSession(), Tokens(16 * 50))}));
  for (int step = 0; step < 50; ++step) {
    stream->Drain();
    ASSERT_TRUE(engine_->StepOnce());
    ASSERT_EQ(pipeline_->runs().back().size(), 2u);  // One row of each, every step.
  }
  EXPECT_TRUE(prompt->Take().has_value());
}

TEST_F(EngineFairnessTest, APromptGetsInThoughDecodeFillsTheBatch) {
  EngineOptions options;
  options.max_batch_rows = 4;
  Make(16, options);
  std::vector<std::unique_ptr<GenerateCall>> streams;
  for (int i = 0; i < 8; ++i) streams.push_back(MustGenerate(Gen("", Tokens(2, i), 500)));
  for (int i = 0; i < 10; ++i) engine_->StepOnce();
  auto step = MustSubmit(Batch(CallKind::kStep, {Sequence(NewSession(), Tokens(2))}));
  auto prompt = MustSubmit(Batch(CallKind::kPrefill, {Sequence(NewSession(), Tokens(2))}));
  engine_->StepOnce();
  EXPECT_TRUE(step->Take().has_value());
  EXPECT_TRUE(prompt->Take().has_value());
}

TEST_P(EngineFairnessTest, StreamsBeyondTheRowsTakeTurns) {
  EngineOptions options;
  options.max_batch_rows = 4;
  options.stream_buffer_tokens = 1000;
  Make(16, options);
  std::vector<std::unique_ptr<GenerateCall>> streams;
  std::vector<size_t> tokens(10, 0);
  for (int i = 0; i < 10; ++i) streams.push_back(MustGenerate(Gen("", Tokens(2, i), 500)));
  for (int step = 0; step < 250; ++step) engine_->StepOnce();
  for (size_t i = 0; i < streams.size(); ++i) {
    const auto chunk = streams[i]->Drain();
    ASSERT_TRUE(chunk.has_value());
    EXPECT_NEAR(static_cast<double>(chunk->tokens.size()), 100.0, 4.0) << i;
  }
}

TEST_F(EngineFairnessTest, AShortPromptDoesNotWaitForLongOnes) {
  EngineOptions options;
  options.prefill_chunk_tokens = 16;
  options.prefill_token_budget = 32;
  Make(64, options);
  std::vector<SequenceRequest> sequences;
  for (int i = 0; i < 40; ++i) sequences.push_back(Sequence(NewSession(), Tokens(16 * 100)));
  auto huge = MustSubmit(Batch(CallKind::kPrefill, sequences));
  for (int i = 0; i < 5; ++i) engine_->StepOnce();
  auto quick = MustGenerate(Gen("", Tokens(5), 1));
  engine_->StepOnce();
  engine_->StepOnce();
  const auto chunk = quick->Drain();
  ASSERT_TRUE(chunk.has_value());
  EXPECT_TRUE(chunk->done);
}

// Sessions at twice the slots: everybody is served in the end, by waiting for slots, and no idle
// session keeps others out for longer than its TTL.
TEST_P(EngineFairnessTest, OversubscriptionMakesProgress) {
  Make(4);
  int served = 0;
  std::vector<std::string> idle;
  for (int i = 0; i < 4; ++i) idle.push_back(NewSession(100));
  int refused = 0;
  for (int round = 0; round < 1000 && served < 8; ++round) {
    auto call = engine_->Generate(Gen("", Tokens(3, round), 3), {});
    if (call.ok()) {
      EXPECT_TRUE(Finish(call->get()).status.ok());
      ++served;
    } else {
      EXPECT_EQ(call.status().code(), absl::StatusCode::kResourceExhausted);
      ++refused;
      clock_.AdvanceMs(10);
    }
  }
  EXPECT_EQ(served, 8);
  EXPECT_EQ(refused, 10);
}

TEST_P(EngineFairnessTest, EveryStepMakesProgress) {
  EngineOptions options;
  options.prefill_chunk_tokens = 7;
  options.prefill_token_budget = 9;
  options.max_batch_rows = 2;
  Make(8, options);
  std::vector<SequenceRequest> sequences;
  int64_t tokens = 0;
  for (int64_t i = 0; i < 8; ++i) {
    sequences.push_back(Sequence(NewSession(), Tokens(i * 5)));
    tokens += i * 5;
  }
  auto call = MustSubmit(Batch(CallKind::kPrefill, sequences));
  const int64_t turns = RunAll();
  EXPECT_LE(turns, tokens);
  int64_t ran = 0;
  for (const auto& run : pipeline_->runs()) {
    ASSERT_FALSE(run.empty());
    for (const FakeRunItem& item : run) {
      EXPECT_GT(item.tokens, 0);
      ran += item.tokens;
    }
  }
  EXPECT_EQ(ran, tokens);
  EXPECT_TRUE(call->Take()->status.ok());
}

INSTANTIATE_TEST_SUITE_P(InFlight, EngineFairnessTest, ::testing::Values(1, 2));

}  // namespace
}  // namespace gdn::engine
