// Two batches in flight: what is launched ahead of what is known, and that it shows nowhere.
#include <gtest/gtest.h>

#include <algorithm>

#include "server/engine/testing/overlap_fixture.h"

namespace gdn::engine {
namespace {

using EngineOverlapTest = OverlapFixture;

TEST_F(EngineOverlapTest, AStepIsLaunchedBeforeTheOneBeforeItIsAwaited) {
  for (const bool named : {false, true}) {
    Make(4);
    auto call = MustGenerate(Gen(named ? NewSession() : "", Tokens(3), 5));
    RunAll();
    EXPECT_EQ(Ids(call->Drain()->tokens), Expected(Tokens(3), 5));
    // As many steps as one at a time would take: the end by count is known ahead.
    EXPECT_EQ(pipeline_->events(), named ? "LLWLWLWLWLWW" : "LLWLWLWLWW");
    const auto& runs = pipeline_->runs();
    for (size_t i = 0; i < runs.size(); ++i) {
      ASSERT_EQ(runs[i].size(), 1u);
      EXPECT_EQ(runs[i][0].chained, i > 0);
      EXPECT_EQ(runs[i][0].sampled, i < 5);
    }
    ExpectIdle(named ? 1 : 0);
  }
}

TEST_F(EngineOverlapTest, NeverMoreThanTwo) {
  depth_ = 5;
  Make(4);
  auto call = MustGenerate(Gen("", Tokens(3), 5));
  RunAll();
  EXPECT_EQ(pipeline_->events(), "LLWLWLWLWW");
  EXPECT_EQ(Ids(call->Drain()->tokens), Expected(Tokens(3), 5));
}

TEST_F(EngineOverlapTest, ThePartsOfAPromptFollowEachOther) {
  EngineOptions options;
  options.prefill_chunk_tokens = 4;
  options.prefill_token_budget = 4;
  Make(4, options);
  const std::string id = NewSession();
  SequenceRequest request = Sequence(id, Tokens(15), true);
  request.output.logits = Positions::kAll;
  const BatchResult result = MustRun(Batch(CallKind::kPrefill, {request}));
  EXPECT_EQ(pipeline_->events(), "LLWLWLWW");
  FakeSequence alone = Alone();
  std::vector<float> logits;
  for (const int32_t token : Tokens(15)) {
    alone.Consume(token);
    for (const float x : alone.Logits()) logits.push_back(x);
  }
  EXPECT_EQ(result.sequences[0].logits, logits);
  EXPECT_EQ(result.sequences[0].next_token->id, Expected(Tokens(15), 1)[0]);
  EXPECT_TRUE(pipeline_->runs()[0][0].fresh);
  EXPECT_FALSE(pipeline_->runs()[1][0].fresh);
  ExpectHolds(id, Tokens(15), 15);
  ExpectIdle(1);
}

// The stop token may be the first, one in the middle, or the last that the caller wanted.
TEST_F(EngineOverlapTest, AStopTokenIsFoundAStepLate) {
  const std::vector<int32_t> expected = Expected(Tokens(6), 12);
  for (const int64_t length : {1, 2, 7, 11, 12}) {
    for (const bool named : {false, true}) {
      Make(4);
      const std::string id = named ? NewSession() : "";
      GenerateRequest request = Gen(id, Tokens(6), 12);
      request.stop_token_ids = {expected[static_cast<size_t>(length - 1)]};
      auto call = MustGenerate(request);
      const GenerateChunk all = Finish(call.get());
      EXPECT_TRUE(all.status.ok());
      EXPECT_EQ(all.finish_reason, FinishReason::kStop);
      EXPECT_EQ(Ids(all.tokens), First(expected, length));
      EXPECT_EQ(all.output_tokens, length);
      EXPECT_EQ(all.position, 6 + length - (named ? 0 : 1));
      // The step after the stop token feeds it; a throw-away session at its limit needs none.
      const bool at_limit = length == 12;
      EXPECT_EQ(std::ssize(pipeline_->runs()), length + (named || !at_limit ? 1 : 0));
      // It was launched when nobody knew, except at the limit.
      EXPECT_EQ(pipeline_->runs().back()[0].sampled, !(named && at_limit));
      if (named) ExpectHolds(id, Joined(Tokens(6), expected), 6 + length);
      ExpectIdle(named ? 1 : 0);
    }
  }
  EXPECT_EQ(observer_.record().finished_stop, 10);
}

// With fewer rows than streams the token is back before its stream's turn comes: then the step
// after a stop token is not launched for a throw-away session, and does not sample for a named one.
TEST_F(EngineOverlapTest, StreamsThatWaitForTheirTurnAreNotChained) {
  EngineOptions options;
  options.max_batch_rows = 2;
  Make(8, options);
  std::vector<std::string> ids;
  std::vector<std::unique_ptr<GenerateCall>> calls;
  for (int32_t i = 0; i < 6; ++i) {
    ids.push_back(i % 2 == 0 ? NewSession() : "");
    GenerateRequest request = Gen(ids.back(), Tokens(3, i), 9);
    request.stop_token_ids = {Expected(Tokens(3, i), 4)[3]};
    calls.push_back(MustGenerate(request));
  }
  RunAll();
  EXPECT_EQ(observer_.record().finished_stop, 6);
  int64_t rows = 0;
  int64_t samples = 0;
  for (const auto& run : pipeline_->runs()) {
    for (const FakeRunItem& item : run) {
      ++rows;
      samples += item.sampled ? 1 : 0;
    }
  }
  // No waste but at the very end, where the last streams have the rows for themselves.
  EXPECT_LE(rows, 6 * 4 + 3 + 2);
  EXPECT_LE(samples, 6 * 4 + 2);
  for (int32_t i = 0; i < 6; ++i) {
    const auto expected = Expected(Tokens(3, i), 4);
    EXPECT_EQ(Ids(calls[static_cast<size_t>(i)]->Drain()->tokens), expected) << i;
    const std::string& id = ids[static_cast<size_t>(i)];
    if (!id.empty()) ExpectHolds(id, Joined(Tokens(3, i), expected), 7);
  }
  ExpectIdle(3);
}

TEST_F(EngineOverlapTest, APenaltyWaitsForItsTokenAndOthersDoNot) {
  Make(4);
  auto plain = MustGenerate(Gen("", Tokens(5), 12, 1));
  GenerateRequest request = Gen(NewSession(), {7, 8, 7, 9}, 6);
  request.sampling.repetition_penalty = 1.5f;
  auto penalised = MustGenerate(request);
  FakeSequence alone = Alone();
  alone.ConsumeAll(request.input.tokens);
  std::vector<int32_t> history = {7, 8, 9};
  std::vector<int32_t> expected;
  for (int i = 0; i < 6; ++i) {
    pipeline::SampleSpec spec;
    spec.seed = 5;
    spec.position = alone.position();
    spec.history = history;
    expected.push_back(alone.Sample(spec).id);
    if (std::find(history.begin(), history.end(), expected.back()) == history.end()) {
      history.push_back(expected.back());
    }
    alone.Consume(expected.back());
  }
  RunAll();
  EXPECT_EQ(Ids(plain->Drain()->tokens), Expected(Tokens(5), 12, 1));
  EXPECT_EQ(Ids(penalised->Drain()->tokens), expected);
  EXPECT_EQ(PositionOf(request.session_id), 10);
  const auto& runs = pipeline_->runs();
  EXPECT_EQ(runs.size(), 13u);  // 7 rows of the penalised stream, in every other step.
  EXPECT_EQ(NumChained(), 11);
  for (size_t i = 0; i < runs.size(); ++i) {
    EXPECT_EQ(runs[i].size(), i % 2 == 0 && i < 12 ? 2u : 1u) << i;
  }
  ExpectIdle(1);
}

TEST_F(EngineOverlapTest, ASlowReaderGetsAtMostOneTokenMore) {
  EngineOptions options;
  options.stream_buffer_tokens = 4;
  Make(4, options);
  auto call = MustGenerate(Gen("", Tokens(3), 23));
  GenerateChunk all;
  while (!all.done) {
    RunAll();
    EXPECT_EQ(engine_->levels().blocked_streams, all.tokens.size() < 20 ? 1 : 0);
    EXPECT_FALSE(engine_->StepOnce());  // Paused means asleep.
    auto chunk = call->Drain();
    ASSERT_TRUE(chunk.has_value());
    ASSERT_LE(chunk->tokens.size(), 5u);
    Append(std::move(*chunk), &all);
  }
  EXPECT_EQ(Ids(all.tokens), Expected(Tokens(3), 23));
  EXPECT_EQ(observer_.record().blocked.size(), 4u);
  ExpectIdle(0);
}

// The reader comes back while the stream's last step is still in flight.
TEST_F(EngineOverlapTest, AStreamResumesInAnyPhaseOfAStep) {
  for (int n = 1; n <= 12; ++n) {
    for (const bool at_launch : {false, true}) {
      EngineOptions options;
      options.stream_buffer_tokens = 3;
      Make(4, options);
      auto other = MustGenerate(Gen("", Tokens(2), 3, 9));
      auto call = MustGenerate(Gen("", Tokens(3), 20));
      GenerateChunk all;
      const auto drain = [&] {
        if (auto chunk = call->Drain()) Append(std::move(*chunk), &all);
        return absl::OkStatus();
      };
      if (at_launch) {
        AtLaunch(n, drain);
      } else {
        AtWait(n, drain);
      }
      for (int i = 0; i < 30 && !all.done; ++i) {
        RunAll();
        drain().IgnoreError();
      }
      EXPECT_EQ(Ids(all.tokens), Expected(Tokens(3), 20)) << n;
      EXPECT_EQ(Ids(other->Drain()->tokens), Expected(Tokens(2), 3, 9));
      ExpectIdle(0);
    }
  }
}

// The token that was in flight when the stream paused is its last: nothing waits for the reader.
TEST_F(EngineOverlapTest, APausedStreamEndsWithTheTokenInFlight) {
  const auto expected = Expected(Tokens(3), 5);
  for (const bool named : {false, true}) {
    for (const bool stop : {false, true}) {
      EngineOptions options;
      options.stream_buffer_tokens = 4;
      Make(4, options);
      const std::string id = named ? NewSession() : "";
      GenerateRequest request = Gen(id, Tokens(3), stop ? 50 : 5);
      if (stop) request.stop_token_ids = {expected[4]};
      auto call = MustGenerate(request);
      RunAll();
      const auto chunk = call->Drain();
      ASSERT_TRUE(chunk.has_value());
      EXPECT_TRUE(chunk->done);
      EXPECT_EQ(Ids(chunk->tokens), expected);
      if (named) ExpectHolds(id, Joined(Tokens(3), expected), 8);
      ExpectIdle(named ? 1 : 0);
    }
  }
  EXPECT_EQ(observer_.record().blocked.size(), 4u);
}

TEST_F(EngineOverlapTest, ForksAndDeletesRightAfterTheEnd) {
  const auto expected = Expected(Tokens(6), 7);
  Make(6);
  auto busy = MustGenerate(Gen("", Tokens(4), 60, 1));
  const std::string id = NewSession();
  GenerateRequest request = Gen(id, Tokens(6), 50);
  request.stop_token_ids = {expected[6]};
  auto call = MustGenerate(request);
  GenerateChunk all;
  while (!all.done) {
    // Until the step that was launched ahead is over, the session is busy.
    EXPECT_EQ(engine_->DeleteSession(id).status().code(), absl::StatusCode::kAborted);
    EXPECT_EQ(Fork(id, std::nullopt, 1, std::nullopt).status().code(), absl::StatusCode::kAborted);
    ASSERT_TRUE(engine_->StepOnce());
    if (auto chunk = call->Drain()) Append(std::move(*chunk), &all);
  }
  EXPECT_EQ(pipeline_->batches_in_flight(), 1);  // Of the other stream.
  auto forks = Fork(id, 13, 2, 0);
  ASSERT_TRUE(forks.ok()) << forks.status();
  EXPECT_EQ(*engine_->DeleteSession(id), 13);
  const std::string tenant = NewSession();  // In the slot just freed.
  Feed(tenant, Tokens(3, 200));
  for (const SessionInfo& fork : *forks) {
    EXPECT_EQ(fork.position, 13);
    ExpectHolds(fork.id, Joined(Tokens(6), expected), 13);
  }
  ExpectHolds(tenant, Tokens(3, 200), 3);
  EXPECT_EQ(Ids(Finish(busy.get()).tokens), Expected(Tokens(4), 60, 1));
  ExpectIdle(3);
}

TEST_F(EngineOverlapTest, CountsTheTimeOfAStepOnce) {
  Make(4);
  pipeline_->set_on_run([this] {
    clock_.AdvanceMs(1);
    return absl::OkStatus();
  });
  pipeline_->set_on_wait([this] {
    clock_.AdvanceMs(10);
    return absl::OkStatus();
  });
  auto call = MustGenerate(Gen("", Tokens(3), 3));
  clock_.AdvanceMs(5);
  const GenerateChunk all = Finish(call.get());
  // Launched at 5 and 6; awaited till 17; launched at 17; awaited till 28 and 38.
  const auto record = observer_.record();
  std::vector<int64_t> durations;
  for (const StepStats& step : record.steps) durations.push_back(step.duration_ns / 1'000'000);
  EXPECT_EQ(durations, (std::vector<int64_t>{12, 11, 10}));
  EXPECT_EQ(all.timings.queue_ns, 5'000'000);
  EXPECT_EQ(all.timings.compute_ns, 33'000'000);
  EXPECT_EQ(all.timings.total_ns, 38'000'000);
  EXPECT_EQ(all.time_to_first_token_ns, 17'000'000);
  EXPECT_EQ(record.inter_tokens, (std::vector<int64_t>{11'000'000, 10'000'000}));
  // Not the time between two steps that did not overlap.
  clock_.AdvanceMs(1000);
  auto later = MustGenerate(Gen("", Tokens(3), 1));
  Finish(later.get());
  EXPECT_EQ(observer_.record().steps.back().duration_ns, 11'000'000);
}

}  // namespace
}  // namespace gdn::engine
