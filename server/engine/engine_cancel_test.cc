// Ends before the end: cancellation and deadlines in every phase.
#include <gtest/gtest.h>

#include "server/engine/testing/engine_fixture.h"

namespace gdn::engine {
namespace {

using Code = absl::StatusCode;

class EngineCancelTest : public EngineFixture {
 protected:
  void SetUp() override {
    EngineOptions options;
    options.prefill_chunk_tokens = 4;
    options.prefill_token_budget = 4;
    options.stream_buffer_tokens = 3;
    Make(4, options);
  }

  // Cancels as the test asks: 0 by Cancel, 1 by destruction, 2 by the deadline.
  static constexpr int kWays = 3;
  static constexpr int64_t kDeadlineMs = 1000;
  CallOptions Options(int way) {
    CallOptions options;
    options.on_ready = [this] { ++wakes_; };
    if (way == 2) options.deadline_ns = clock_.NowNs() + kDeadlineMs * 1'000'000;
    return options;
  }
  template <typename C>
  void End(int way, std::unique_ptr<C>* call) {
    wakes_ = 0;
    if (way == 0) (*call)->Cancel();
    if (way == 1) call->reset();
    if (way == 2) {
      clock_.AdvanceMs(kDeadlineMs);
      EXPECT_TRUE(engine_->StepOnce());
    }
    EXPECT_EQ(wakes_, way == 1 ? 0 : 1);
  }
  static Code CodeOf(int way) { return way == 2 ? Code::kDeadlineExceeded : Code::kCancelled; }

  // The end of a stream, and nothing after it.
  void ExpectEnd(int way, GenerateCall* call, int64_t output_tokens) {
    if (way == 1) return;
    auto chunk = call->Drain();
    ASSERT_TRUE(chunk.has_value());
    EXPECT_TRUE(chunk->done);
    EXPECT_EQ(chunk->status.code(), CodeOf(way));
    EXPECT_EQ(chunk->output_tokens, output_tokens);
    EXPECT_FALSE(call->Drain().has_value());
  }
  void ExpectIdle(int64_t sessions) {
    EXPECT_FALSE(engine_->StepOnce());
    for (const Levels& levels : {engine_->levels(), observer_.record().levels}) {
      EXPECT_EQ(levels.queued_calls, 0);
      EXPECT_EQ(levels.queued_tokens, 0);
      EXPECT_EQ(levels.running_streams, 0);
      EXPECT_EQ(levels.blocked_streams, 0);
      EXPECT_EQ(levels.slots_in_flight, 0);
      EXPECT_EQ(levels.live_sessions, sessions);
      EXPECT_EQ(levels.slots_free, 4 - sessions);
    }
    CheckClean();
  }
  // The session is usable, and holds exactly the tokens its position says.
  void ExpectExact(const std::string& id, const std::vector<int32_t>& history) {
    const auto info = engine_->GetSession(id);
    ASSERT_TRUE(info.ok());
    EXPECT_FALSE(info->in_use);
    ASSERT_LE(info->position, static_cast<int64_t>(history.size()));
    FakeSequence alone = Alone();
    alone.ConsumeAll(std::span(history).first(static_cast<size_t>(info->position)));
    alone.Consume(3);
    SequenceRequest request = Sequence(id, {3});
    request.output.logits = Positions::kLast;
    const BatchResult result = MustRun(Batch(CallKind::kStep, {request}));
    ASSERT_TRUE(result.status.ok()) << result.status;
    EXPECT_EQ(result.sequences[0].logits, alone.Logits());
  }

  int wakes_ = 0;
};

TEST_P(EngineCancelTest, Queued) {
  for (int way = 0; way < kWays; ++way) {
    auto call = MustGenerate(Gen("", Tokens(3), 5), Options(way));
    End(way, &call);
    ExpectEnd(way, call.get(), 0);
    ExpectIdle(0);
  }
  EXPECT_TRUE(pipeline_->runs().empty());
  const auto record = observer_.record();
  EXPECT_EQ(record.cancelled_queued, 3);
  EXPECT_EQ(record.cancelled(), 3);
  EXPECT_TRUE(record.queue_times.empty());  // No figure for a stage that was not reached.
  EXPECT_TRUE(record.first_tokens.empty());
}

TEST_F(EngineCancelTest, MidPrefill) {
  for (int way = 0; way < kWays; ++way) {
    const std::string id = NewSession();
    auto call = MustGenerate(Gen(id, Tokens(10), 5), Options(way));
    engine_->StepOnce();
    EXPECT_EQ(PositionOf(id), 4);
    End(way, &call);
    ExpectEnd(way, call.get(), 0);
    EXPECT_EQ(PositionOf(id), 4);
    ExpectIdle(1);
    ExpectExact(id, Tokens(10));
    ASSERT_TRUE(engine_->DeleteSession(id).ok());
  }
  EXPECT_EQ(observer_.record().cancelled_prefill, 3);
  EXPECT_TRUE(observer_.record().first_tokens.empty());
}

TEST_F(EngineCancelTest, MidDecode) {
  for (int way = 0; way < kWays; ++way) {
    for (const bool named : {true, false}) {
      const std::string id = named ? NewSession() : "";
      auto call = MustGenerate(Gen(id, Tokens(4), 50), Options(way));
      engine_->StepOnce();
      engine_->StepOnce();
      End(way, &call);
      ExpectEnd(way, call.get(), 2);
      ExpectIdle(named ? 1 : 0);
      if (!named) continue;
      EXPECT_EQ(PositionOf(id), 5);
      std::vector<int32_t> history = Tokens(4);
      FakeSequence alone = Alone();
      alone.ConsumeAll(history);
      for (const int32_t token : alone.Generate(2, 5)) history.push_back(token);
      ExpectExact(id, history);
      ASSERT_TRUE(engine_->DeleteSession(id).ok());
    }
  }
  EXPECT_EQ(observer_.record().cancelled_decode, 6);
  EXPECT_EQ(observer_.record().finished(), 0);
}

TEST_F(EngineCancelTest, Paused) {
  for (int way = 0; way < kWays; ++way) {
    auto call = MustGenerate(Gen("", Tokens(4), 50), Options(way));
    RunAll();
    EXPECT_EQ(engine_->levels().blocked_streams, 1);
    End(way, &call);
    ExpectEnd(way, call.get(), 3);
    ExpectIdle(0);
  }
  EXPECT_EQ(observer_.record().cancelled_decode, 3);
}

TEST_F(EngineCancelTest, WhileTheLastTokenIsBeingConsumed) {
  for (int way = 0; way < kWays; ++way) {
    const std::string id = NewSession();
    auto call = MustGenerate(Gen(id, Tokens(4), 1), Options(way));
    engine_->StepOnce();
    End(way, &call);
    ExpectEnd(way, call.get(), 1);
    EXPECT_EQ(PositionOf(id), 4);
    ExpectIdle(1);
    ASSERT_TRUE(engine_->DeleteSession(id).ok());
  }
}

TEST_F(EngineCancelTest, BatchMidway) {
  for (int way = 0; way < kWays; ++way) {
    const std::string a = NewSession();
    const std::string b = NewSession();
    auto call =
        MustSubmit(Batch(CallKind::kPrefill, {Sequence(a, Tokens(10)), Sequence(b, Tokens(9, 50))}),
                   Options(way));
    engine_->StepOnce();
    engine_->StepOnce();
    engine_->StepOnce();
    EXPECT_EQ(PositionOf(a), 8);
    EXPECT_EQ(PositionOf(b), 4);
    End(way, &call);
    if (way != 1) {
      const auto result = call->Take();
      ASSERT_TRUE(result.has_value());
      EXPECT_EQ(result->status.code(), CodeOf(way));
      EXPECT_EQ(result->sequences[0].status.code(), CodeOf(way));
      EXPECT_EQ(result->sequences[0].position, 8);
      EXPECT_FALSE(call->Take().has_value());
    }
    ExpectIdle(2);
    ExpectExact(a, Tokens(10));
    ExpectExact(b, Tokens(9, 50));
    ASSERT_TRUE(engine_->DeleteSession(a).ok());
    ASSERT_TRUE(engine_->DeleteSession(b).ok());
  }
}

// The caller gives up while its step is running: the step's tokens count, nothing after it does.
TEST_P(EngineCancelTest, InsideAStep) {
  for (const bool destroy : {false, true}) {
    const std::string id = NewSession();
    auto call = MustGenerate(Gen(id, Tokens(10), 50));
    int runs = 0;
    pipeline_->set_on_run([&] {
      if (++runs == 2) {
        if (destroy) {
          call.reset();
        } else {
          call->Cancel();
        }
        EXPECT_TRUE(engine_->GetSession(id)->in_use);
      }
      return absl::OkStatus();
    });
    RunAll();
    EXPECT_EQ(runs, 2);
    EXPECT_EQ(PositionOf(id), 8);
    ExpectIdle(1);
    pipeline_->set_on_run(nullptr);
    ExpectExact(id, Tokens(10));
    ASSERT_TRUE(engine_->DeleteSession(id).ok());
  }
}

// A call that completes in the very step in which it is cancelled has completed: one end, not two.
TEST_P(EngineCancelTest, AsItCompletes) {
  auto stream = MustGenerate(Gen("", Tokens(3), 1));
  const std::string id = NewSession();
  auto batch = MustSubmit(Batch(CallKind::kStep, {Sequence(id, Tokens(2))}));
  pipeline_->set_on_run([&] {
    stream->Cancel();
    batch->Cancel();
    return absl::OkStatus();
  });
  EXPECT_TRUE(engine_->StepOnce());
  auto chunk = stream->Drain();
  ASSERT_TRUE(chunk.has_value());
  EXPECT_TRUE(chunk->done);
  EXPECT_TRUE(chunk->status.ok());
  EXPECT_TRUE(batch->Take()->status.ok());
  stream->Cancel();
  batch->Cancel();
  EXPECT_EQ(observer_.record().cancelled(), 0);
  EXPECT_EQ(observer_.record().finished(), 1);
  ExpectIdle(1);
}

TEST_P(EngineCancelTest, ADeadlineThatHasPassedIsRefused) {
  CallOptions options;
  options.deadline_ns = clock_.NowNs();
  EXPECT_EQ(engine_->Generate(Gen("", {1}, 1), options).status().code(), Code::kDeadlineExceeded);
  const std::string id = NewSession();
  EXPECT_EQ(engine_->Submit(Batch(CallKind::kStep, {Sequence(id, {1})}), options).status().code(),
            Code::kDeadlineExceeded);
  ExpectIdle(1);
}

TEST_P(EngineCancelTest, CancelTwiceAndAfterTheEnd) {
  auto call = MustGenerate(Gen("", Tokens(3), 5));
  call->Cancel();
  call->Cancel();
  auto tail = call->Drain();
  call->Cancel();
  call.reset();
  EXPECT_EQ(observer_.record().cancelled(), 1);
  ExpectIdle(0);
}

TEST_P(EngineCancelTest, ACallWithNothingToRun) {
  for (int way = 0; way < kWays; ++way) {
    const std::string id = NewSession();
    auto call = MustSubmit(Batch(CallKind::kPrefill, {Sequence(id, {})}), Options(way));
    End(way, &call);
    if (way != 1) {
      EXPECT_EQ(call->Take()->status.code(), CodeOf(way));
    }
    ExpectIdle(1);
    ASSERT_TRUE(engine_->DeleteSession(id).ok());
  }
  EXPECT_EQ(observer_.record().cancelled_queued, 3);
}

TEST_P(EngineCancelTest, OthersGoOn) {
  std::vector<std::unique_ptr<GenerateCall>> calls;
  for (int32_t i = 0; i < 4; ++i) calls.push_back(MustGenerate(Gen("", Tokens(6, i), 9, 1)));
  for (int i = 0; i < 9; ++i) engine_->StepOnce();
  calls[0]->Cancel();
  calls[2].reset();
  for (const size_t i : {size_t{1}, size_t{3}}) {
    FakeSequence alone = Alone();
    alone.ConsumeAll(Tokens(6, static_cast<int32_t>(i)));
    EXPECT_EQ(Ids(Finish(calls[i].get()).tokens), alone.Generate(9, 1));
  }
  ExpectIdle(0);
}

TEST_P(EngineCancelTest, OnReadyMayDestroyItsHandle) {
  std::unique_ptr<GenerateCall> call;
  int wakes = 0;
  CallOptions options;
  options.on_ready = [&] {
    ++wakes;
    call.reset();
  };
  call = MustGenerate(Gen("", Tokens(3), 50), options);
  RunAll();
  EXPECT_EQ(wakes, 1);
  ExpectIdle(0);
}

INSTANTIATE_TEST_SUITE_P(InFlight, EngineCancelTest, ::testing::Values(1, 2));

}  // namespace
}  // namespace gdn::engine
