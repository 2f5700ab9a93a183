// Faults below the engine, and what they may touch.
#include <gtest/gtest.h>

#include "server/engine/testing/engine_fixture.h"

namespace gdn::engine {
namespace {

using Code = absl::StatusCode;
using EngineFaultTest = EngineFixture;

constexpr int32_t kPoison = 950;  // Not among Tokens().

TEST_P(EngineFaultTest, ANonFiniteSequenceIsLostAlone) {
  EngineOptions options;
  options.prefill_chunk_tokens = 8;
  Make(4, options);
  pipeline_->set_poison_token(kPoison);
  const std::string good = NewSession();
  const std::string bad = NewSession();
  Feed(good, Tokens(4));
  Feed(bad, Tokens(4));
  auto stream = MustGenerate(Gen("", Tokens(3), 12));
  std::vector<int32_t> poisoned = Tokens(20, 30);
  poisoned[3] = kPoison;
  const BatchResult result = MustRun(Batch(
      CallKind::kPrefill, {Sequence(good, Tokens(20, 30), true), Sequence(bad, poisoned, true)}));
  EXPECT_TRUE(result.status.ok());
  EXPECT_TRUE(result.sequences[0].status.ok());
  EXPECT_EQ(result.sequences[1].status.code(), Code::kDataLoss);
  EXPECT_NE(result.sequences[1].status.message().find(bad), absl::string_view::npos);
  EXPECT_FALSE(result.sequences[1].next_token.has_value());
  FakeSequence alone = Alone();
  alone.ConsumeAll(Tokens(4));
  alone.ConsumeAll(Tokens(20, 30));
  EXPECT_EQ(result.sequences[0].next_token->id, alone.Generate(1, 5)[0]);
  EXPECT_EQ(result.sequences[0].position, 24);

  EXPECT_EQ(engine_->GetSession(bad).status().code(), Code::kNotFound);
  EXPECT_EQ(engine_->levels().live_sessions, 1);
  EXPECT_EQ(engine_->levels().queued_tokens, 0);
  EXPECT_EQ(observer_.record().non_finite, 1);
  EXPECT_EQ(observer_.record().step_failed, 0);
  FakeSequence streamed = Alone();
  streamed.ConsumeAll(Tokens(3));
  EXPECT_EQ(Ids(Finish(stream.get()).tokens), streamed.Generate(12, 5));

  // The slot's next tenants start clean; nobody inherits the fault.
  for (int i = 0; i < 3; ++i) {
    const std::string id = NewSession();
    const BatchResult next = MustRun(Batch(CallKind::kStep, {Sequence(id, Tokens(2), true)}));
    FakeSequence fresh = Alone();
    fresh.ConsumeAll(Tokens(2));
    EXPECT_EQ(next.sequences[0].next_token->id, fresh.Generate(1, 5)[0]);
  }
  EXPECT_EQ(engine_->levels().slots_free, 0);
}

TEST_P(EngineFaultTest, ANonFiniteStreamEndsWithDataLoss) {
  Make(2);
  for (const bool named : {false, true}) {
    const std::string id = named ? NewSession() : "";
    FakeSequence alone = Alone();
    alone.ConsumeAll(Tokens(3));
    const auto expected = alone.Generate(10, 5);
    pipeline_->set_poison_token(expected[4]);
    auto call = MustGenerate(Gen(id, Tokens(3), 10));
    const GenerateChunk all = Finish(call.get());
    EXPECT_EQ(all.status.code(), Code::kDataLoss);
    EXPECT_EQ(Ids(all.tokens), std::vector<int32_t>(expected.begin(), expected.begin() + 5));
    EXPECT_EQ(engine_->levels().slots_free, 2);
    if (named) {
      EXPECT_EQ(engine_->GetSession(id).status().code(), Code::kNotFound);
    }
    pipeline_->set_poison_token(-1);
  }
  const auto record = observer_.record();
  EXPECT_EQ(record.non_finite, 2);
  EXPECT_EQ(record.finished() + record.cancelled(), 0);
  EXPECT_EQ(record.levels.running_streams, 0);
}

// The sampler reports logits without a choice by an id outside the vocabulary.
TEST_P(EngineFaultTest, ASamplerWithoutAChoiceLosesTheSession) {
  Make(2);
  pipeline_->set_sampled_token(-1);
  const std::string id = NewSession();
  const BatchResult result = MustRun(Batch(CallKind::kStep, {Sequence(id, Tokens(2), true)}));
  EXPECT_EQ(result.sequences[0].status.code(), Code::kDataLoss);
  EXPECT_EQ(engine_->GetSession(id).status().code(), Code::kNotFound);
  auto call = MustGenerate(Gen("", Tokens(3), 10));
  EXPECT_EQ(Finish(call.get()).status.code(), Code::kDataLoss);
  EXPECT_EQ(observer_.record().non_finite, 2);
  EXPECT_EQ(engine_->levels().slots_free, 2);
}

TEST_P(EngineFaultTest, AFailedStepTakesItsSessionsAndNoOthers) {
  for (const bool data_loss : {false, true}) {
    EngineOptions options;
    options.max_batch_rows = 3;
    Make(8, options);
    const std::string idle = NewSession();
    Feed(idle, Tokens(5));
    std::vector<std::string> ids;
    std::vector<SequenceRequest> sequences;
    for (int32_t i = 0; i < 4; ++i) {
      ids.push_back(NewSession());
      sequences.push_back(Sequence(ids.back(), Tokens(3, i), true));
    }
    bool fail = true;
    pipeline_->set_on_run([&]() -> absl::Status {
      if (!std::exchange(fail, false)) return absl::OkStatus();
      return data_loss ? absl::DataLossError("injected") : absl::ResourceExhaustedError("injected");
    });
    // Three rows in the first step, which fails; the fourth in the second.
    const BatchResult result = MustRun(Batch(CallKind::kPrefill, sequences));
    EXPECT_TRUE(result.status.ok());
    for (size_t i = 0; i < 3; ++i) {
      EXPECT_EQ(result.sequences[i].status.code(), data_loss ? Code::kDataLoss : Code::kInternal);
      EXPECT_NE(result.sequences[i].status.message().find("injected"), absl::string_view::npos);
      EXPECT_EQ(engine_->GetSession(ids[i]).status().code(), Code::kNotFound);
    }
    EXPECT_TRUE(result.sequences[3].status.ok());
    EXPECT_EQ(PositionOf(ids[3]), 3);
    EXPECT_EQ(PositionOf(idle), 5);
    Feed(idle, Tokens(5));
    EXPECT_EQ(engine_->levels().slots_free, 6);
    CheckClean();
  }
  EXPECT_EQ(observer_.record().step_failed, 6);
  EXPECT_EQ(observer_.record().non_finite, 0);
}

TEST_P(EngineFaultTest, StreamsEndWithTheFailedStep) {
  Make(4);
  int runs = 0;
  pipeline_->set_on_run(
      [&] { return ++runs == 3 ? absl::InternalError("injected") : absl::OkStatus(); });
  auto a = MustGenerate(Gen("", Tokens(3), 10));
  const std::string id = NewSession();
  auto b = MustGenerate(Gen(id, Tokens(3), 10));
  const GenerateChunk all = Finish(a.get());
  EXPECT_EQ(all.status.code(), Code::kInternal);
  EXPECT_EQ(all.tokens.size(), 2u);
  EXPECT_EQ(Finish(b.get()).status.code(), Code::kInternal);
  EXPECT_EQ(engine_->GetSession(id).status().code(), Code::kNotFound);
  EXPECT_EQ(engine_->levels().slots_free, 4);
  auto c = MustGenerate(Gen("", Tokens(3), 10));
  EXPECT_TRUE(Finish(c.get()).status.ok());
}

TEST_P(EngineFaultTest, CancelledInTheStepThatFails) {
  Make(2);
  const std::string id = NewSession();
  auto call = MustSubmit(Batch(CallKind::kPrefill, {Sequence(id, Tokens(3))}));
  pipeline_->set_on_run([&] {
    call.reset();
    return absl::InternalError("injected");
  });
  RunAll();
  EXPECT_EQ(engine_->GetSession(id).status().code(), Code::kNotFound);
  EXPECT_EQ(engine_->levels().slots_free, 2);
}

// A session that fails in the middle of its prompt takes the rest of the prompt with it.
TEST_P(EngineFaultTest, TheRestOfAFailedPromptIsForgotten) {
  EngineOptions options;
  options.prefill_chunk_tokens = 4;
  options.prefill_token_budget = 4;
  Make(2, options);
  int runs = 0;
  pipeline_->set_on_run(
      [&] { return ++runs == 2 ? absl::InternalError("injected") : absl::OkStatus(); });
  auto call = MustGenerate(Gen("", Tokens(100), 10));
  EXPECT_EQ(Finish(call.get()).status.code(), Code::kInternal);
  EXPECT_EQ(runs, 2);
  EXPECT_FALSE(engine_->StepOnce());
  EXPECT_EQ(engine_->levels().queued_tokens, 0);
}

INSTANTIATE_TEST_SUITE_P(InFlight, EngineFaultTest, ::testing::Values(1, 2));

}  // namespace
}  // namespace gdn::engine
