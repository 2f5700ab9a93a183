// Generate: tokens, positions, the ends of streams, sampling, slow readers.
#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "server/engine/testing/engine_fixture.h"

namespace gdn::engine {
namespace {

using EngineGenerateTest = EngineFixture;

TEST_P(EngineGenerateTest, StreamsWhatOneSessionAloneGives) {
  Make(4);
  auto call = MustGenerate(Gen("", Tokens(10), 20));
  const GenerateChunk all = Finish(call.get());
  FakeSequence alone = Alone();
  alone.ConsumeAll(Tokens(10));
  EXPECT_EQ(Ids(all.tokens), alone.Generate(20, 5));
  EXPECT_TRUE(all.status.ok());
  EXPECT_EQ(all.finish_reason, FinishReason::kLength);
  EXPECT_EQ(all.input_tokens, 10);
  EXPECT_EQ(all.output_tokens, 20);
  EXPECT_EQ(all.position, 29);  // Without the newest token.
  EXPECT_FALSE(call->Drain().has_value());
  EXPECT_EQ(engine_->levels().slots_free, 4);
}

TEST_P(EngineGenerateTest, PromptsLongerThanAStepAreCutAtFixedPlaces) {
  EngineOptions options;
  options.prefill_chunk_tokens = 16;
  options.prefill_token_budget = 32;
  for (const int64_t length : {1, 15, 16, 17, 32, 100}) {
    Make(4, options);
    auto call = MustGenerate(Gen("", Tokens(length), 3));
    const GenerateChunk all = Finish(call.get());
    FakeSequence alone = Alone();
    alone.ConsumeAll(Tokens(length));
    EXPECT_EQ(Ids(all.tokens), alone.Generate(3, 5)) << length;
    const auto& runs = pipeline_->runs();
    ASSERT_EQ(static_cast<int64_t>(runs.size()), (length + 15) / 16 + 2);
    for (size_t i = 0; i < runs.size(); ++i) {
      ASSERT_EQ(runs[i].size(), 1u);
      EXPECT_EQ(runs[i][0].fresh, i == 0);
      EXPECT_EQ(runs[i][0].sampled, i + 3 >= runs.size());
    }
  }
}

TEST_P(EngineGenerateTest, ANamedSessionConsumesEveryStreamedToken) {
  Make(4);
  const std::string id = NewSession();
  Feed(id, Tokens(7, 100));
  auto call = MustGenerate(Gen(id, Tokens(10), 5));
  EXPECT_TRUE(engine_->GetSession(id)->in_use);
  GenerateChunk all = Finish(call.get());
  FakeSequence alone = Alone();
  alone.ConsumeAll(Tokens(7, 100));
  alone.ConsumeAll(Tokens(10));
  EXPECT_EQ(Ids(all.tokens), alone.Generate(5, 5));
  EXPECT_EQ(all.position, 22);
  EXPECT_EQ(all.output_tokens, 5);
  EXPECT_EQ(PositionOf(id), 22);
  EXPECT_FALSE(engine_->GetSession(id)->in_use);

  // The next call goes on after the last token.
  call = MustGenerate(Gen(id, Tokens(1), 4));
  all = Finish(call.get());
  alone.ConsumeAll(Tokens(1));
  EXPECT_EQ(Ids(all.tokens), alone.Generate(4, 5));
  EXPECT_EQ(PositionOf(id), 27);
  // Its hash is that of the same tokens prefilled.
  std::vector<int32_t> history = Tokens(7, 100);
  FakeSequence again = Alone();
  again.ConsumeAll(Tokens(7, 100));
  const auto append = [&](const std::vector<int32_t>& tokens) {
    history.insert(history.end(), tokens.begin(), tokens.end());
  };
  append(Tokens(10));
  again.ConsumeAll(Tokens(10));
  append(again.Generate(5, 5));
  append(Tokens(1));
  again.ConsumeAll(Tokens(1));
  append(again.Generate(4, 5));
  EXPECT_EQ(engine_->GetSession(id)->token_hash, HashTokens(kEmptyHash, history));
}

TEST_P(EngineGenerateTest, TheLastTokenIsStreamedBeforeItIsConsumed) {
  Make(4);
  const std::string id = NewSession();
  auto call = MustGenerate(Gen(id, Tokens(3), 1));
  ASSERT_TRUE(engine_->StepOnce());
  auto chunk = call->Drain();
  ASSERT_TRUE(chunk.has_value());
  EXPECT_EQ(chunk->tokens.size(), 1u);
  EXPECT_EQ(chunk->position, 3);
  EXPECT_FALSE(chunk->done);
  EXPECT_FALSE(call->Drain().has_value());
  ASSERT_TRUE(engine_->StepOnce());
  chunk = call->Drain();
  ASSERT_TRUE(chunk.has_value());
  EXPECT_TRUE(chunk->tokens.empty());
  EXPECT_TRUE(chunk->done);
  EXPECT_EQ(chunk->position, 4);
  ASSERT_EQ(pipeline_->runs().size(), 2u);
  EXPECT_FALSE(pipeline_->runs()[1][0].sampled);
  EXPECT_FALSE(engine_->StepOnce());
}

TEST_P(EngineGenerateTest, StopsAfterAStopToken) {
  FakeSequence alone(FakePipeline::DefaultInfo(5));
  alone.ConsumeAll(Tokens(10));
  const std::vector<int32_t> expected = alone.Generate(50, 5);
  const std::vector<int32_t> cut(expected.begin(),
                                 std::find(expected.begin(), expected.end(), expected[6]) + 1);
  for (const bool eos : {false, true}) {
    for (const bool named : {false, true}) {
      pipeline::PipelineInfo info = FakePipeline::DefaultInfo(5);
      if (eos) info.eos_token_ids = {expected[6]};
      Make(info);
      const std::string id = named ? NewSession() : "";
      GenerateRequest request = Gen(id, Tokens(10), 50);
      if (!eos) request.stop_token_ids = {999, expected[6], 0};
      auto call = MustGenerate(request);
      const GenerateChunk all = Finish(call.get());
      EXPECT_EQ(Ids(all.tokens), cut);
      EXPECT_EQ(all.finish_reason, FinishReason::kStop);
      EXPECT_EQ(all.position, 10 + static_cast<int64_t>(cut.size()) - (named ? 0 : 1));
      if (eos) {
        request.session_id = "";
        request.ignore_eos = true;
        call = MustGenerate(request);
        EXPECT_EQ(Ids(Finish(call.get()).tokens), expected);
      }
    }
  }
  EXPECT_EQ(observer_.record().finished_stop, 4);
  EXPECT_EQ(observer_.record().finished_length, 2);
}

TEST_P(EngineGenerateTest, DrawsAndReportsASeed) {
  Make(4);
  std::set<uint64_t> seeds;
  for (int i = 0; i < 20; ++i) {
    GenerateRequest request = Gen("", Tokens(4), 6);
    request.sampling.seed.reset();
    auto call = MustGenerate(request);
    EXPECT_TRUE(seeds.insert(call->seed()).second);
    const GenerateChunk all = Finish(call.get());
    FakeSequence alone = Alone();
    alone.ConsumeAll(Tokens(4));
    EXPECT_EQ(Ids(all.tokens), alone.Generate(6, call->seed()));
  }
  EXPECT_EQ(MustGenerate(Gen("", Tokens(4), 6, 1234))->seed(), 1234u);
}

TEST_P(EngineGenerateTest, ThePenaltySeesTheDistinctTokensOfThisCall) {
  Make(4);
  const std::string id = NewSession();
  Feed(id, {500, 501});  // Not of this call.
  GenerateRequest request = Gen(id, {7, 8, 7, 9}, 5);
  request.sampling.repetition_penalty = 1.5f;
  auto call = MustGenerate(request);
  const GenerateChunk all = Finish(call.get());
  FakeSequence alone = Alone();
  alone.ConsumeAll(std::vector<int32_t>{500, 501, 7, 8, 7, 9});
  std::vector<int32_t> history = {7, 8, 9};
  std::vector<int32_t> expected;
  for (int i = 0; i < 5; ++i) {
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
  EXPECT_EQ(Ids(all.tokens), expected);
}

TEST_P(EngineGenerateTest, ReturnsLogitsAndAlternatives) {
  Make(4);
  GenerateRequest request = Gen("", Tokens(4), 3);
  request.return_logits = true;
  request.top_logprobs = 4;
  auto call = MustGenerate(request);
  const GenerateChunk all = Finish(call.get());
  FakeSequence alone = Alone();
  alone.ConsumeAll(Tokens(4));
  ASSERT_EQ(all.tokens.size(), 3u);
  for (const ChosenToken& token : all.tokens) {
    EXPECT_EQ(token.logits, alone.Logits());
    ASSERT_EQ(token.top.size(), 4u);
    for (size_t i = 0; i < 4; ++i) {
      EXPECT_EQ(token.top[i].id, alone.Top(4)[i].id);
      EXPECT_EQ(token.top[i].logprob, alone.Top(4)[i].logprob);
    }
    pipeline::SampleSpec spec;
    spec.seed = 5;
    spec.position = alone.position();
    EXPECT_EQ(token.logprob, alone.Sample(spec).logprob);
    alone.Consume(token.id);
  }
}

TEST_P(EngineGenerateTest, HiddenRowsAreAnInputToo) {
  Make(4);
  GenerateRequest request = Gen("", {}, 4);
  request.input.is_hidden = true;
  request.input.hidden = {1, 2, 3, 4, 5, 6};
  request.sampling.repetition_penalty = 1.0f;
  auto call = MustGenerate(request);
  FakeSequence alone = Alone();
  alone.ConsumeHidden(std::span(request.input.hidden).first(3));
  alone.ConsumeHidden(std::span(request.input.hidden).subspan(3));
  const GenerateChunk all = Finish(call.get());
  EXPECT_EQ(Ids(all.tokens), alone.Generate(4, 5));
  EXPECT_EQ(all.input_tokens, 2);
}

TEST_P(EngineGenerateTest, EveryStreamGetsWhatItGetsAlone) {
  EngineOptions options;
  options.max_batch_rows = 9;
  options.prefill_chunk_tokens = 8;
  options.prefill_token_budget = 20;
  options.stream_buffer_tokens = 3;
  Make(64, options);
  std::vector<std::unique_ptr<GenerateCall>> calls;
  std::vector<GenerateChunk> got(64);
  for (int64_t i = 0; i < 64; ++i) {
    calls.push_back(MustGenerate(Gen("", Tokens(1 + i * 3 % 40, static_cast<int32_t>(i)), 5 + i % 7,
                                     static_cast<uint64_t>(i))));
  }
  for (int turn = 0; turn < 5000 && engine_->levels().running_streams > 0; ++turn) {
    engine_->StepOnce();
    for (size_t i = 0; i < calls.size(); ++i) {
      if ((turn + static_cast<int>(i)) % 3 != 0) continue;  // Readers of different speeds.
      if (auto chunk = calls[i]->Drain()) Append(std::move(*chunk), &got[i]);
    }
  }
  for (int64_t i = 0; i < 64; ++i) {
    GenerateChunk& all = got[static_cast<size_t>(i)];
    while (auto chunk = calls[static_cast<size_t>(i)]->Drain()) Append(std::move(*chunk), &all);
    ASSERT_TRUE(all.done);
    FakeSequence alone = Alone();
    alone.ConsumeAll(Tokens(1 + i * 3 % 40, static_cast<int32_t>(i)));
    EXPECT_EQ(Ids(all.tokens), alone.Generate(5 + i % 7, static_cast<uint64_t>(i))) << i;
  }
  EXPECT_EQ(engine_->levels().slots_free, 64);
}

TEST_P(EngineGenerateTest, ReadyStreamsShareOneRun) {
  Make(32);
  std::vector<std::unique_ptr<GenerateCall>> calls;
  for (int32_t i = 0; i < 32; ++i) calls.push_back(MustGenerate(Gen("", Tokens(4, i), 6)));
  RunAll();
  ASSERT_EQ(pipeline_->runs().size(), 6u);
  for (const auto& run : pipeline_->runs()) EXPECT_EQ(run.size(), 32u);
}

TEST_F(EngineGenerateTest, ASlowReaderPausesItsOwnStreamAlone) {
  EngineOptions options;
  options.stream_buffer_tokens = 4;
  Make(4, options);
  auto slow = MustGenerate(Gen("", Tokens(3), 12, 1));
  auto fast = MustGenerate(Gen("", Tokens(3), 12, 2));
  const GenerateChunk all_fast = Finish(fast.get());
  EXPECT_EQ(all_fast.output_tokens, 12);
  EXPECT_FALSE(engine_->StepOnce());  // Paused means asleep.
  EXPECT_EQ(engine_->levels().blocked_streams, 1);
  EXPECT_EQ(engine_->levels().running_streams, 1);
  EXPECT_EQ(engine_->levels().slots_in_flight, 1);
  EXPECT_EQ(observer_.record().levels.blocked_streams, 1);

  clock_.AdvanceMs(30);
  GenerateChunk all_slow;
  for (int i = 0; i < 3; ++i) {
    auto chunk = slow->Drain();
    ASSERT_TRUE(chunk.has_value());
    EXPECT_EQ(chunk->tokens.size(), 4u);
    Append(std::move(*chunk), &all_slow);
    RunAll();
  }
  FakeSequence alone = Alone();
  alone.ConsumeAll(Tokens(3));
  EXPECT_EQ(Ids(all_slow.tokens), alone.Generate(12, 1));
  EXPECT_TRUE(all_slow.done);
  EXPECT_EQ(engine_->levels().blocked_streams, 0);
  const auto record = observer_.record();
  ASSERT_EQ(record.blocked.size(), 2u);
  EXPECT_EQ(record.blocked[0], 30'000'000);
}

TEST_P(EngineGenerateTest, ANamedStreamEndsThoughItsBufferIsFull) {
  EngineOptions options;
  options.stream_buffer_tokens = 4;
  Make(4, options);
  const std::string id = NewSession();
  auto call = MustGenerate(Gen(id, Tokens(3), 4));
  RunAll();
  EXPECT_EQ(PositionOf(id), 7);
  const auto chunk = call->Drain();
  ASSERT_TRUE(chunk.has_value());
  EXPECT_TRUE(chunk->done);
  EXPECT_EQ(chunk->tokens.size(), 4u);
}

TEST_F(EngineGenerateTest, TellsTimes) {
  Make(4);
  pipeline_->set_on_run([this] {
    clock_.AdvanceMs(10);
    return absl::OkStatus();
  });
  auto call = MustGenerate(Gen("", Tokens(3), 3));
  clock_.AdvanceMs(5);
  const GenerateChunk all = Finish(call.get());
  EXPECT_EQ(all.timings.queue_ns, 5'000'000);
  EXPECT_EQ(all.timings.compute_ns, 30'000'000);
  EXPECT_EQ(all.timings.total_ns, 35'000'000);
  EXPECT_EQ(all.time_to_first_token_ns, 15'000'000);
  const auto record = observer_.record();
  EXPECT_EQ(record.queue_times, (std::vector<int64_t>{5'000'000}));
  EXPECT_EQ(record.first_tokens, (std::vector<int64_t>{15'000'000}));
  EXPECT_EQ(record.inter_tokens, (std::vector<int64_t>{10'000'000, 10'000'000}));
  ASSERT_EQ(record.steps.size(), 3u);
  EXPECT_EQ(record.steps[0].phase, pipeline::Phase::kPrefill);
  EXPECT_EQ(record.steps[0].prefill_tokens, 3);
  EXPECT_EQ(record.steps[0].duration_ns, 10'000'000);
  EXPECT_EQ(record.steps[2].phase, pipeline::Phase::kDecode);
  EXPECT_EQ(record.steps[2].decode_sequences, 1);
}

TEST_P(EngineGenerateTest, WakesTheReaderOnceAStep) {
  Make(4);
  int wakes = 0;
  CallOptions options;
  options.on_ready = [&] { ++wakes; };
  auto call = MustGenerate(Gen("", Tokens(3), 4), std::move(options));
  for (int step = 1; step <= 4; ++step) {
    ASSERT_TRUE(engine_->StepOnce());
    EXPECT_EQ(wakes, step);
  }
  EXPECT_FALSE(engine_->StepOnce());
  EXPECT_EQ(wakes, 4);
}

TEST_P(EngineGenerateTest, RepeatedCallsGiveTheSame) {
  Make(2);
  std::vector<int32_t> first;
  for (int i = 0; i < 20; ++i) {
    auto call = MustGenerate(Gen("", Tokens(9), 9));
    const auto ids = Ids(Finish(call.get()).tokens);
    if (i == 0) first = ids;
    EXPECT_EQ(ids, first);
  }
}

INSTANTIATE_TEST_SUITE_P(InFlight, EngineGenerateTest, ::testing::Values(1, 2));

}  // namespace
}  // namespace gdn::engine
