// Start, warm-up, drain and stop.
#include <gtest/gtest.h>

#include "server/engine/testing/engine_fixture.h"

namespace gdn::engine {
namespace {

using Code = absl::StatusCode;
using EngineLifecycleTest = EngineFixture;

TEST_F(EngineLifecycleTest, RefusesBadOptions) {
  FakePipeline pipeline(4);
  EngineOptions options;
  options.prefill_chunk_tokens = 1000;
  EXPECT_EQ(Engine::Create(options, &pipeline, &clock_, &observer_).status().code(),
            Code::kInvalidArgument);
}

TEST_F(EngineLifecycleTest, LevelsAreKnownFromTheStart) {
  Make(5);
  EXPECT_EQ(observer_.record().levels.slots_free, 5);
  EXPECT_EQ(observer_.record().levels.slots_reserved, 1);
}

TEST_P(EngineLifecycleTest, WarmsUpOnTheReservedSlotAlone) {
  for (const bool embedding : {true, false}) {
    for (const bool head : {true, false}) {
      pipeline::PipelineInfo info = FakePipeline::DefaultInfo(3);
      info.has_embedding = embedding;
      info.has_head = head;
      Make(info);
      EXPECT_TRUE(engine_->WarmUp().ok());
      ASSERT_EQ(pipeline_->runs().size(), 2u);
      for (const auto& run : pipeline_->runs()) {
        ASSERT_EQ(run.size(), 1u);
        EXPECT_EQ(run[0].slot, 0);
        EXPECT_EQ(run[0].sampled, head);
      }
      EXPECT_EQ(pipeline_->runs()[0][0].tokens, 256);
      EXPECT_EQ(pipeline_->runs()[1][0].tokens, 1);
      EXPECT_EQ(engine_->levels().slots_free, 2);
      CheckClean();
    }
  }
}

TEST_P(EngineLifecycleTest, AFailedWarmUpSaysSo) {
  Make(2);
  pipeline_->set_on_run([] { return absl::InternalError("injected"); });
  EXPECT_EQ(engine_->WarmUp().code(), Code::kInternal);
  pipeline_->set_on_run(nullptr);
  pipeline_->set_poison_token(0);
  EXPECT_EQ(engine_->WarmUp().code(), Code::kDataLoss);
}

TEST_P(EngineLifecycleTest, DrainingRefusesNewWorkAndFinishesOld) {
  Make(4);
  const std::string id = NewSession();
  const std::string other = NewSession();
  auto stream = MustGenerate(Gen(id, Tokens(3), 5));
  engine_->StepOnce();
  engine_->BeginDrain();
  EXPECT_EQ(engine_->Generate(Gen("", {1}, 1), {}).status().code(), Code::kUnavailable);
  EXPECT_EQ(engine_->Submit(Batch(CallKind::kStep, {Sequence(other, {1})}), {}).status().code(),
            Code::kUnavailable);
  EXPECT_EQ(engine_->CreateSession(0).status().code(), Code::kUnavailable);
  EXPECT_EQ(Fork(other, std::nullopt, 1, std::nullopt).status().code(), Code::kUnavailable);
  EXPECT_EQ(observer_.record().rejected_draining, 4);
  EXPECT_TRUE(engine_->GetSession(id).ok());
  EXPECT_TRUE(engine_->DeleteSession(other).ok());
  EXPECT_EQ(engine_->FinishDrain(clock_.NowNs() + 1'000'000'000), 0);
  auto chunk = stream->Drain();
  ASSERT_TRUE(chunk.has_value());
  EXPECT_TRUE(chunk->done);
  EXPECT_TRUE(chunk->status.ok());
  EXPECT_EQ(PositionOf(id), 8);
}

TEST_F(EngineLifecycleTest, DrainEndsWhatIsLeftAtTheDeadline) {
  EngineOptions options;
  options.stream_buffer_tokens = 2;
  Make(4, options);
  auto a = MustGenerate(Gen("", Tokens(3), 500));
  auto b = MustGenerate(Gen("", Tokens(3), 500));
  RunAll();  // Both are paused: nothing would ever end them.
  EXPECT_EQ(engine_->FinishDrain(clock_.NowNs()), 2);
  for (GenerateCall* call : {a.get(), b.get()}) {
    auto chunk = call->Drain();
    ASSERT_TRUE(chunk.has_value());
    EXPECT_TRUE(chunk->done);
    EXPECT_EQ(chunk->status.code(), Code::kUnavailable);
    EXPECT_EQ(chunk->tokens.size(), 2u);
  }
  EXPECT_EQ(engine_->levels().slots_free, 4);
  EXPECT_EQ(observer_.record().levels.running_streams, 0);
  EXPECT_EQ(engine_->FinishDrain(clock_.NowNs()), 0);
}

TEST_P(EngineLifecycleTest, StopEndsEverythingOnce) {
  Make(4);
  int wakes = 0;
  CallOptions options;
  options.on_ready = [&] { ++wakes; };
  auto stream = MustGenerate(Gen("", Tokens(3), 500), options);
  auto empty = MustSubmit(Batch(CallKind::kPrefill, {Sequence(NewSession(), {})}), options);
  engine_->Stop();
  engine_->Stop();
  EXPECT_EQ(wakes, 2);
  EXPECT_EQ(stream->Drain()->status.code(), Code::kUnavailable);
  EXPECT_EQ(empty->Take()->status.code(), Code::kUnavailable);
  EXPECT_FALSE(engine_->StepOnce());
  EXPECT_EQ(engine_->CreateSession(0).status().code(), Code::kUnavailable);
  EXPECT_EQ(engine_->levels().slots_in_flight, 0);
}

TEST_F(EngineLifecycleTest, GaugesReturnToZeroAfterAMassCancel) {
  EngineOptions options;
  options.stream_buffer_tokens = 2;
  options.prefill_chunk_tokens = 8;
  options.prefill_token_budget = 16;
  Make(64, options);
  std::vector<std::unique_ptr<GenerateCall>> calls;
  for (int64_t i = 0; i < 64; ++i) calls.push_back(MustGenerate(Gen("", Tokens(1 + i), 50)));
  for (int i = 0; i < 30; ++i) engine_->StepOnce();
  const Levels busy = observer_.record().levels;
  EXPECT_GT(busy.queued_calls, 0);
  EXPECT_GT(busy.queued_tokens, 0);
  EXPECT_GT(busy.blocked_streams, 0);
  EXPECT_EQ(busy.running_streams, 64);
  calls.clear();
  const Levels idle = observer_.record().levels;
  EXPECT_EQ(idle.queued_calls, 0);
  EXPECT_EQ(idle.queued_tokens, 0);
  EXPECT_EQ(idle.blocked_streams, 0);
  EXPECT_EQ(idle.running_streams, 0);
  EXPECT_EQ(idle.slots_in_flight, 0);
  EXPECT_EQ(idle.slots_free, 64);
  EXPECT_EQ(observer_.record().cancelled(), 64);
}

// Each stream is counted once, by exactly one of its possible ends.
TEST_P(EngineLifecycleTest, EveryStreamIsCountedOnce) {
  Make(8);
  pipeline_->set_poison_token(950);
  int started = 0;
  for (int round = 0; round < 50; ++round) {
    std::vector<std::unique_ptr<GenerateCall>> calls;
    for (int i = 0; i < 6; ++i) {
      std::vector<int32_t> tokens = Tokens(1 + i);
      if (i == 2) tokens.back() = 950;
      CallOptions options;
      if (i == 4) options.deadline_ns = clock_.NowNs() + 1 + round;
      calls.push_back(MustGenerate(Gen("", tokens, 1 + (i + round) % 5), options));
      ++started;
    }
    for (int i = 0; i < round % 5; ++i) engine_->StepOnce();
    calls[round % 6]->Cancel();
    clock_.AdvanceNs(25);
    RunAll();
  }
  const auto record = observer_.record();
  EXPECT_EQ(record.finished() + record.cancelled() + record.non_finite, started);
  EXPECT_EQ(record.streams_started, started);
  EXPECT_EQ(record.streams_ended(), started);
  EXPECT_EQ(static_cast<int64_t>(record.total_times.size()), started);
  EXPECT_LE(record.first_tokens.size(), static_cast<size_t>(started));
  EXPECT_GE(static_cast<int64_t>(record.first_tokens.size()), record.finished());
}

INSTANTIATE_TEST_SUITE_P(InFlight, EngineLifecycleTest, ::testing::Values(1, 2));

}  // namespace
}  // namespace gdn::engine
