// Two batches in flight: early ends and faults between a launch and its wait.
#include <gtest/gtest.h>

#include "server/engine/testing/overlap_fixture.h"

namespace gdn::engine {
namespace {

using Code = absl::StatusCode;

class EngineOverlapEndTest : public OverlapFixture {
 protected:
  static constexpr int32_t kPoison = 950;  // Not among Tokens().
  static EngineOptions SmallChunks() {
    EngineOptions options;
    options.prefill_chunk_tokens = 4;
    options.prefill_token_budget = 4;
    return options;
  }
  static absl::Status Injected() { return absl::InternalError("injected"); }
};

// Given up by Cancel, by destruction or by a deadline, in every phase of two steps.
TEST_F(EngineOverlapEndTest, CancelledBetweenLaunchAndWait) {
  const auto history = Joined(Tokens(10), Expected(Tokens(10), 40));
  for (int way = 0; way < 3; ++way) {
    for (int n = 1; n <= 8; ++n) {
      for (const bool at_launch : {false, true}) {
        for (const bool named : {false, true}) {
          Make(4, SmallChunks());
          const std::string id = named ? NewSession() : "";
          CallOptions options;
          if (way == 2) options.deadline_ns = clock_.NowNs() + 1'000'000;
          auto call = MustGenerate(Gen(id, Tokens(10), 40), options);
          const auto give_up = [&] {
            if (way == 0) call->Cancel();
            if (way == 1) call.reset();
            if (way == 2) clock_.AdvanceMs(1);
            return absl::OkStatus();
          };
          if (at_launch) {
            AtLaunch(n, give_up);
          } else {
            AtWait(n, give_up);
          }
          RunAll();
          pipeline_->set_on_run(nullptr);
          pipeline_->set_on_wait(nullptr);
          // A launch may follow where the deadline is seen, at the next turn, but not two.
          EXPECT_LE(std::ssize(pipeline_->runs()), n + 2);
          const auto ran = std::ssize(pipeline_->runs());
          const int64_t position = ran <= 3 ? std::min<int64_t>(4 * ran, 10) : 10 + ran - 3;
          if (call != nullptr) {
            const auto chunk = call->Drain();
            ASSERT_TRUE(chunk.has_value());
            EXPECT_TRUE(chunk->done);
            EXPECT_EQ(chunk->status.code(), way == 2 ? Code::kDeadlineExceeded : Code::kCancelled);
            EXPECT_EQ(chunk->position, position);
            // Every step that ran has its token delivered, the last one not yet fed back.
            EXPECT_EQ(Joined(Tokens(10), Ids(chunk->tokens)),
                      First(history, 10 + std::max<int64_t>(ran - 2, 0)));
          }
          if (named) ExpectHolds(id, history, position);
          ExpectIdle(named ? 1 : 0);
        }
      }
    }
  }
}

TEST_F(EngineOverlapEndTest, ABatchCancelledBetweenLaunchAndWait) {
  for (int n = 1; n <= 3; ++n) {
    Make(4, SmallChunks());
    const std::string a = NewSession();
    const std::string b = NewSession();
    auto call = MustSubmit(
        Batch(CallKind::kPrefill, {Sequence(a, Tokens(10)), Sequence(b, Tokens(9, 50))}));
    AtWait(n, [&] {
      call->Cancel();
      EXPECT_FALSE(call->Take().has_value());
      EXPECT_TRUE(engine_->GetSession(a)->in_use);
      return absl::OkStatus();
    });
    RunAll();
    // One chunk a step, by turns; at the n-th Wait n + 1 are launched.
    const int64_t chunks = n + 1;
    const int64_t of_a = std::min<int64_t>(4 * ((chunks + 1) / 2), 10);
    const int64_t of_b = std::min<int64_t>(4 * (chunks / 2), 9);
    const auto result = call->Take();
    ASSERT_TRUE(result.has_value());
    EXPECT_EQ(result->status.code(), Code::kCancelled);
    EXPECT_EQ(result->sequences[0].position, of_a);
    EXPECT_EQ(result->sequences[1].position, of_b);
    pipeline_->set_on_wait(nullptr);
    ExpectHolds(a, Tokens(10), of_a);
    ExpectHolds(b, Tokens(9, 50), of_b);
    ExpectIdle(2);
  }
}

// A deadline that passes while both steps run is seen, and does not keep the engine from working.
TEST_F(EngineOverlapEndTest, ADeadlineBetweenTurns) {
  Make(4);
  CallOptions options;
  int wakes = 0;
  options.on_ready = [&] { ++wakes; };
  options.deadline_ns = clock_.NowNs() + 1'000'000;
  auto call = MustGenerate(Gen("", Tokens(3), 50), options);
  auto other = MustGenerate(Gen("", Tokens(3), 6, 1));
  ASSERT_TRUE(engine_->StepOnce());
  EXPECT_EQ(pipeline_->batches_in_flight(), 1);
  clock_.AdvanceMs(1);
  wakes = 0;
  ASSERT_TRUE(engine_->StepOnce());
  EXPECT_EQ(wakes, 1);
  auto chunk = call->Drain();
  ASSERT_TRUE(chunk.has_value());
  EXPECT_EQ(chunk->status.code(), Code::kDeadlineExceeded);
  EXPECT_EQ(Ids(chunk->tokens), Expected(Tokens(3), 2));
  EXPECT_EQ(observer_.record().cancelled_decode, 1);
  EXPECT_EQ(Ids(Finish(other.get()).tokens), Expected(Tokens(3), 6, 1));
  ExpectIdle(0);
}

// Its stop token is on the way when the caller gives up: it has ended by itself, once.
TEST_F(EngineOverlapEndTest, CancelledWhenItsEndIsInFlight) {
  const auto expected = Expected(Tokens(3), 2);
  for (const bool named : {false, true}) {
    Make(4);
    const std::string id = named ? NewSession() : "";
    GenerateRequest request = Gen(id, Tokens(3), 50);
    request.stop_token_ids = {expected[1]};
    auto call = MustGenerate(request);
    AtWait(2, [&] {
      call->Cancel();
      return absl::OkStatus();
    });
    RunAll();
    pipeline_->set_on_wait(nullptr);
    auto chunk = call->Drain();
    ASSERT_TRUE(chunk.has_value());
    EXPECT_TRUE(chunk->done);
    EXPECT_TRUE(chunk->status.ok()) << chunk->status;
    EXPECT_EQ(Ids(chunk->tokens), expected);
    if (named) ExpectHolds(id, Joined(Tokens(3), expected), 5);
    ExpectIdle(named ? 1 : 0);
  }
  EXPECT_EQ(observer_.record().finished_stop, 2);
  EXPECT_EQ(observer_.record().cancelled(), 0);
}

// One of two batches in flight fails: what needs it is lost, what does not goes on.
TEST_F(EngineOverlapEndTest, AFailedWaitTakesTheNextStepsRowsOfTheSameSessions) {
  for (int n = 1; n <= 5; ++n) {
    Make(6);
    const std::string idle = NewSession();
    Feed(idle, Tokens(5, 300));
    const std::string id = NewSession();
    auto a = MustGenerate(Gen("", Tokens(3), 30));
    auto b = MustGenerate(Gen(id, Tokens(3, 9), 30));
    const std::string c = NewSession();
    std::unique_ptr<BatchCall> batch;
    AtWait(n, [&] {  // The step after the one that fails is in flight; this comes in the third.
      EXPECT_EQ(pipeline_->batches_in_flight(), 2);
      batch = MustSubmit(Batch(CallKind::kPrefill, {Sequence(c, Tokens(6, 70), true)}));
      return Injected();
    });
    RunAll();
    pipeline_->set_on_wait(nullptr);
    for (GenerateCall* call : {a.get(), b.get()}) {
      const auto chunk = call->Drain();
      ASSERT_TRUE(chunk.has_value());
      EXPECT_TRUE(chunk->done);
      EXPECT_EQ(chunk->status.code(), Code::kInternal);
      EXPECT_NE(chunk->status.message().find("injected"), absl::string_view::npos);
      EXPECT_EQ(Ids(chunk->tokens), First(Expected(Tokens(3, call == a.get() ? 1 : 9), 30), n - 1));
    }
    EXPECT_EQ(engine_->GetSession(id).status().code(), Code::kNotFound);
    EXPECT_EQ(batch->Take()->sequences[0].next_token->id, Expected(Tokens(6, 70), 1)[0]);
    ExpectHolds(c, Tokens(6, 70), 6);
    ExpectHolds(idle, Tokens(5, 300), 5);
    ExpectIdle(2);
    EXPECT_EQ(observer_.record().step_failed, 2 * n);
  }
}

TEST_F(EngineOverlapEndTest, AFailedWaitSparesTheNextStepsOtherRows) {
  EngineOptions options;
  options.max_batch_rows = 2;
  Make(8, options);
  std::vector<std::string> ids;
  std::vector<SequenceRequest> sequences;
  for (int32_t i = 0; i < 4; ++i) {
    ids.push_back(NewSession());
    sequences.push_back(Sequence(ids.back(), Tokens(5, i), true));
  }
  AtWait(1, [&] { return Injected(); });
  const BatchResult result = MustRun(Batch(CallKind::kPrefill, sequences));
  pipeline_->set_on_wait(nullptr);
  EXPECT_TRUE(result.status.ok());
  for (int32_t i = 0; i < 4; ++i) {
    const SequenceResult& got = result.sequences[static_cast<size_t>(i)];
    if (i < 2) {
      EXPECT_EQ(got.status.code(), Code::kInternal);
      EXPECT_EQ(PositionOf(ids[static_cast<size_t>(i)]), -1);
    } else {
      ASSERT_TRUE(got.status.ok());
      EXPECT_EQ(got.next_token->id, Expected(Tokens(5, i), 1)[0]);
      ExpectHolds(ids[static_cast<size_t>(i)], Tokens(5, i), 5);
    }
  }
  ExpectIdle(2);
}

TEST_F(EngineOverlapEndTest, TheRestOfAFailedPromptIsForgotten) {
  Make(4, SmallChunks());
  const std::string id = NewSession();
  auto call = MustSubmit(Batch(CallKind::kPrefill, {Sequence(id, Tokens(15), true)}));
  int waits = 0;
  pipeline_->set_on_wait([&] {
    // Two parts are launched when the first of them fails; no more are.
    EXPECT_EQ(engine_->levels().queued_tokens, ++waits == 1 ? 7 : 0);
    return waits == 1 ? Injected() : absl::OkStatus();
  });
  RunAll();
  EXPECT_EQ(waits, 2);
  const auto result = call->Take();
  ASSERT_TRUE(result.has_value());
  EXPECT_EQ(result->sequences[0].status.code(), Code::kInternal);
  EXPECT_EQ(observer_.record().step_failed, 1);
  ExpectIdle(0);
}

// The step before a failed launch still counts, and its tokens are delivered.
TEST_F(EngineOverlapEndTest, AFailedLaunchLeavesTheStepBeforeIt) {
  for (int n = 1; n <= 5; ++n) {
    Make(6);
    const std::string id = NewSession();
    auto a = MustGenerate(Gen("", Tokens(3), 30));
    auto b = MustGenerate(Gen(id, Tokens(3, 9), 30));
    AtLaunch(n, [] { return Injected(); });
    RunAll();
    pipeline_->set_on_run(nullptr);
    EXPECT_EQ(std::ssize(pipeline_->runs()), n - 1);
    for (GenerateCall* call : {a.get(), b.get()}) {
      const auto chunk = call->Drain();
      ASSERT_TRUE(chunk.has_value());
      EXPECT_EQ(chunk->status.code(), Code::kInternal);
      EXPECT_EQ(Ids(chunk->tokens), First(Expected(Tokens(3, call == a.get() ? 1 : 9), 30), n - 1));
    }
    EXPECT_EQ(engine_->GetSession(id).status().code(), Code::kNotFound);
    ExpectIdle(0);
    auto c = MustGenerate(Gen("", Tokens(3), 10));
    EXPECT_EQ(Ids(Finish(c.get()).tokens), Expected(Tokens(3), 10));
  }
}

// A stream had ended, though nobody knew, when the step after its end failed.
TEST_F(EngineOverlapEndTest, AFailureAfterTheEnd) {
  const auto expected = Expected(Tokens(3), 4);
  for (const bool at_launch : {false, true}) {
    for (const bool named : {false, true}) {
      Make(4);
      const std::string id = named ? NewSession() : "";
      GenerateRequest request = Gen(id, Tokens(3), 50);
      request.stop_token_ids = {expected[3]};
      auto call = MustGenerate(request);
      if (at_launch) {
        AtLaunch(5, [] { return Injected(); });
      } else {
        AtWait(5, [] { return Injected(); });
      }
      const GenerateChunk all = Finish(call.get());
      EXPECT_EQ(Ids(all.tokens), expected);
      EXPECT_EQ(all.position, 6);
      // A throw-away session has no further use; a named one lacks its last token.
      EXPECT_EQ(all.status.code(), named ? Code::kInternal : Code::kOk) << all.status;
      if (named) {
        EXPECT_EQ(engine_->GetSession(id).status().code(), Code::kNotFound);
      }
      ExpectIdle(0);
    }
  }
  EXPECT_EQ(observer_.record().finished_stop, 2);
  EXPECT_EQ(observer_.record().step_failed, 2);
}

TEST_F(EngineOverlapEndTest, NonFiniteWithTheNextStepInFlight) {
  const auto expected = Expected(Tokens(3), 10);
  for (const bool named : {false, true}) {
    Make(4);
    const std::string id = named ? NewSession() : "";
    pipeline_->set_poison_token(expected[4]);
    auto other = MustGenerate(Gen("", Tokens(7, 40), 12, 2));
    auto call = MustGenerate(Gen(id, Tokens(3), 10));
    const GenerateChunk all = Finish(call.get());
    EXPECT_EQ(all.status.code(), Code::kDataLoss);
    EXPECT_EQ(Ids(all.tokens), First(expected, 5));
    EXPECT_EQ(Ids(Finish(other.get()).tokens), Expected(Tokens(7, 40), 12, 2));
    ExpectIdle(0);

    // The stop token itself: a throw-away session never needed to be fed it.
    GenerateRequest request = Gen(named ? NewSession() : "", Tokens(3), 10);
    request.stop_token_ids = {expected[4]};
    auto stopped = MustGenerate(request);
    EXPECT_EQ(Finish(stopped.get()).status.code(), named ? Code::kDataLoss : Code::kOk);
    ExpectIdle(0);
  }
  EXPECT_EQ(observer_.record().non_finite, 3);
}

// The row chained to a choice that was none is lost with it; a choice nobody wants is not looked
// at.
TEST_F(EngineOverlapEndTest, ASamplerWithoutAChoice) {
  Make(4);
  pipeline_->set_sampled_token(-1);
  const std::string id = NewSession();
  auto call = MustGenerate(Gen(id, Tokens(3), 10));
  const GenerateChunk all = Finish(call.get());
  EXPECT_EQ(all.status.code(), Code::kDataLoss);
  EXPECT_TRUE(all.tokens.empty());
  EXPECT_EQ(observer_.record().non_finite, 1);
  ExpectIdle(0);

  const auto expected = Expected(Tokens(3), 1);
  const std::string good = NewSession();
  GenerateRequest request = Gen(good, Tokens(3), 10);
  request.stop_token_ids = {expected[0]};
  pipeline_->set_sampled_token(expected[0]);
  auto stopped = MustGenerate(request);
  AtLaunch(2, [&] {
    pipeline_->set_sampled_token(-1);
    return absl::OkStatus();
  });
  EXPECT_TRUE(Finish(stopped.get()).status.ok());
  EXPECT_EQ(PositionOf(good), 4);
  ExpectIdle(1);
}

TEST_F(EngineOverlapEndTest, DrainAndStopWithStepsInFlight) {
  for (const bool stop : {false, true}) {
    Make(4);
    const std::string id = NewSession();
    auto stream = MustGenerate(Gen(id, Tokens(3), 30));
    auto last = MustGenerate(Gen("", Tokens(3), 2, 1));
    ASSERT_TRUE(engine_->StepOnce());
    EXPECT_EQ(pipeline_->batches_in_flight(), 1);
    if (stop) {
      engine_->Stop();
    } else {
      EXPECT_EQ(engine_->FinishDrain(clock_.NowNs()), 1);
    }
    EXPECT_EQ(pipeline_->batches_in_flight(), 0);
    EXPECT_EQ(pipeline_->events(), "LLWW");  // Nothing new.
    const auto chunk = stream->Drain();
    ASSERT_TRUE(chunk.has_value());
    EXPECT_EQ(chunk->status.code(), Code::kUnavailable);
    EXPECT_EQ(Ids(chunk->tokens), Expected(Tokens(3), 2));
    EXPECT_EQ(PositionOf(id), 4);
    EXPECT_FALSE(engine_->GetSession(id)->in_use);
    const auto ended = last->Drain();  // By itself.
    ASSERT_TRUE(ended.has_value());
    EXPECT_TRUE(ended->status.ok());
    EXPECT_EQ(Ids(ended->tokens), Expected(Tokens(3), 2, 1));
    ExpectIdle(1);
  }
}

TEST_F(EngineOverlapEndTest, AnEngineMayGoWithStepsInFlight) {
  Make(4);
  auto stream = MustGenerate(Gen("", Tokens(3), 30));
  ASSERT_TRUE(engine_->StepOnce());
  EXPECT_EQ(pipeline_->batches_in_flight(), 1);
  stream.reset();
  engine_.reset();
  EXPECT_EQ(pipeline_->batches_in_flight(), 0);
  EXPECT_TRUE(pipeline_->violations().empty());
  EXPECT_EQ(observer_.record().levels.slots_free, 4);
}

}  // namespace
}  // namespace gdn::engine
