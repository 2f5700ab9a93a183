// Prefill and Step: ragged batches, outputs, positions, refusals.
#include <gtest/gtest.h>

#include "server/engine/status_payload.h"
#include "server/engine/testing/engine_fixture.h"

namespace gdn::engine {
namespace {

using EngineBatchTest = EngineFixture;

TEST_P(EngineBatchTest, RaggedBatchEqualsEachAlone) {
  Make(8);
  const std::vector<int64_t> lengths = {0, 1, 3, 64, 65, 500};
  std::vector<SequenceRequest> sequences;
  for (size_t i = 0; i < lengths.size(); ++i) {
    SequenceRequest request =
        Sequence(NewSession(), Tokens(lengths[i], static_cast<int32_t>(i)), lengths[i] > 0);
    request.output.logits = i % 2 == 0 ? Positions::kAll : Positions::kLast;
    request.output.hidden = i % 3 == 0 ? Positions::kAll : Positions::kLast;
    sequences.push_back(request);
  }
  const BatchResult result = MustRun(Batch(CallKind::kPrefill, sequences));
  EXPECT_TRUE(result.status.ok()) << result.status;
  ASSERT_EQ(result.sequences.size(), lengths.size());
  for (size_t i = 0; i < lengths.size(); ++i) {
    const SequenceResult& got = result.sequences[i];
    EXPECT_TRUE(got.status.ok()) << got.status;
    EXPECT_EQ(got.session_id, sequences[i].session_id);
    EXPECT_EQ(got.position, lengths[i]);
    EXPECT_EQ(PositionOf(got.session_id), lengths[i]);
    FakeSequence alone = Alone();
    std::vector<float> logits;
    std::vector<float> hidden;
    for (const int32_t token : sequences[i].input.tokens) {
      if (sequences[i].output.logits == Positions::kLast) logits.clear();
      if (sequences[i].output.hidden == Positions::kLast) hidden.clear();
      alone.Consume(token);
      for (const float x : alone.Logits()) logits.push_back(x);
      for (const float x : alone.Hidden()) hidden.push_back(x);
    }
    EXPECT_EQ(got.logits, logits);
    EXPECT_EQ(got.hidden, hidden);
    ASSERT_EQ(got.next_token.has_value(), lengths[i] > 0);
    if (lengths[i] > 0) {
      EXPECT_EQ(got.next_token->id, alone.Generate(1, 5)[0]);
    }
  }
  // The whole call shares its steps: 1+3+64+65+256 tokens, then 244.
  ASSERT_EQ(pipeline_->runs().size(), 2u);
  EXPECT_EQ(pipeline_->runs()[0].size(), 5u);
  EXPECT_EQ(pipeline_->runs()[1].size(), 1u);
}

TEST_P(EngineBatchTest, EverySplitOfAPromptIsTheSame) {
  Make(2);
  FakeSequence alone = Alone();
  alone.ConsumeAll(Tokens(130));
  for (const size_t split : {1, 2, 3, 63, 64, 65, 129}) {
    const std::string id = NewSession();
    const std::vector<int32_t> tokens = Tokens(130);
    const auto at = tokens.begin() + static_cast<std::ptrdiff_t>(split);
    Feed(id, {tokens.begin(), at});
    SequenceRequest rest = Sequence(id, {at, tokens.end()}, true);
    rest.output.logits = Positions::kLast;
    rest.expected_position = split;
    const BatchResult result = MustRun(Batch(CallKind::kPrefill, {rest}));
    EXPECT_EQ(result.sequences[0].logits, alone.Logits());
    EXPECT_EQ(result.sequences[0].position, 130);
    EXPECT_EQ(engine_->GetSession(id)->token_hash, HashTokens(kEmptyHash, tokens));
    ASSERT_TRUE(engine_->DeleteSession(id).ok());
  }
}

TEST_P(EngineBatchTest, StepAdvancesManySessions) {
  Make(16);
  std::vector<std::string> ids;
  std::vector<FakeSequence> alone;
  for (int i = 0; i < 16; ++i) {
    ids.push_back(NewSession());
    alone.push_back(Alone());
  }
  for (int32_t step = 0; step < 10; ++step) {
    std::vector<SequenceRequest> sequences;
    for (size_t i = 0; i < ids.size(); ++i) {
      const auto tokens =
          Tokens(1 + (static_cast<int64_t>(i) + step) % 8, step + static_cast<int32_t>(i));
      alone[i].ConsumeAll(tokens);
      sequences.push_back(Sequence(ids[i], tokens, true));
    }
    pipeline_->clear_runs();
    const BatchResult result = MustRun(Batch(CallKind::kStep, sequences));
    EXPECT_EQ(pipeline_->runs().size(), 1u);
    for (size_t i = 0; i < ids.size(); ++i) {
      FakeSequence next = alone[i];
      EXPECT_EQ(result.sequences[i].next_token->id, next.Generate(1, 5)[0]);
      EXPECT_EQ(result.sequences[i].position, alone[i].position());
    }
  }
}

TEST_P(EngineBatchTest, HiddenRowsGoInAndOut) {
  pipeline::PipelineInfo info = FakePipeline::DefaultInfo(3);
  info.has_embedding = false;
  info.has_head = false;
  info.vocab_size = 0;
  EngineOptions options;
  options.prefill_chunk_tokens = 2;
  Make(info, options);
  const std::string id = NewSession();
  SequenceRequest request;
  request.session_id = id;
  request.input.is_hidden = true;
  for (int i = 0; i < 15; ++i) request.input.hidden.push_back(static_cast<float>(i) * 0.5f);
  request.output.hidden = Positions::kAll;
  const BatchResult result = MustRun(Batch(CallKind::kPrefill, {request}));
  FakeSequence alone = Alone();
  std::vector<float> expected;
  for (size_t t = 0; t < 5; ++t) {
    alone.ConsumeHidden(std::span(request.input.hidden).subspan(3 * t, 3));
    for (const float x : alone.Hidden()) expected.push_back(x);
  }
  EXPECT_EQ(result.sequences[0].hidden, expected);
  EXPECT_EQ(result.sequences[0].position, 5);
  EXPECT_EQ(pipeline_->runs().size(), 3u);
  EXPECT_EQ(engine_->GetSession(id)->token_hash, HashHidden(kEmptyHash, request.input.hidden, 3));
  request.output.next_token = true;
  EXPECT_EQ(engine_->Submit(Batch(CallKind::kPrefill, {request}), {}).status().code(),
            absl::StatusCode::kFailedPrecondition);
}

TEST_P(EngineBatchTest, ACallOfEmptyInputsEndsWithoutAStep) {
  Make(4);
  const std::string fresh = NewSession();
  const std::string used = NewSession();
  Feed(used, Tokens(5));
  pipeline_->clear_runs();
  int wakes = 0;
  CallOptions options;
  options.on_ready = [&] { ++wakes; };
  SequenceRequest request = Sequence(fresh, {});
  request.output.logits = Positions::kLast;
  request.output.hidden = Positions::kAll;
  auto call = MustSubmit(Batch(CallKind::kPrefill, {request, Sequence(used, {})}), options);
  EXPECT_FALSE(call->Take().has_value());
  EXPECT_EQ(engine_->levels().queued_calls, 1);
  EXPECT_TRUE(engine_->StepOnce());
  EXPECT_EQ(wakes, 1);
  const auto result = call->Take();
  ASSERT_TRUE(result.has_value());
  EXPECT_TRUE(result->status.ok());
  EXPECT_EQ(result->sequences[0].position, 0);
  EXPECT_TRUE(result->sequences[0].logits.empty());
  EXPECT_EQ(result->sequences[1].position, 5);
  EXPECT_TRUE(pipeline_->runs().empty());
  EXPECT_FALSE(engine_->StepOnce());
  // The fresh session is still fresh: its slot must not be read.
  Feed(fresh, Tokens(2));
  EXPECT_TRUE(pipeline_->runs()[0][0].fresh);
}

TEST_P(EngineBatchTest, TheResultIsTakenOnce) {
  Make(4);
  const std::string id = NewSession();
  auto call = MustSubmit(Batch(CallKind::kPrefill, {Sequence(id, Tokens(3))}));
  EXPECT_FALSE(call->Take().has_value());
  RunAll();
  EXPECT_TRUE(call->Take().has_value());
  EXPECT_FALSE(call->Take().has_value());
}

TEST_P(EngineBatchTest, NothingRunsIfOneSequenceIsRefused) {
  Make(4);
  const std::string good = NewSession();
  const std::string busy = NewSession();
  auto running = MustSubmit(Batch(CallKind::kPrefill, {Sequence(busy, Tokens(3))}));

  const auto refuse = [&](SequenceRequest bad) {
    const Levels before = engine_->levels();
    auto call = engine_->Submit(Batch(CallKind::kPrefill, {Sequence(good, Tokens(3)), bad}), {});
    EXPECT_FALSE(call.ok());
    EXPECT_EQ(engine_->levels().queued_calls, before.queued_calls);
    EXPECT_EQ(engine_->levels().slots_in_flight, before.slots_in_flight);
    EXPECT_FALSE(engine_->GetSession(good)->in_use);
    return call.status();
  };
  const absl::Status unknown = refuse(Sequence("0123", Tokens(1)));
  EXPECT_EQ(unknown.code(), absl::StatusCode::kNotFound);
  EXPECT_NE(unknown.message().find("sequences[1].session_id"), absl::string_view::npos);
  EXPECT_EQ(refuse(Sequence(busy, Tokens(1))).code(), absl::StatusCode::kAborted);
  EXPECT_EQ(refuse(Sequence(good, Tokens(1))).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(refuse(Sequence("x", {1000})).code(), absl::StatusCode::kInvalidArgument);
  RunAll();
  SequenceRequest mismatch = Sequence(busy, Tokens(1));
  mismatch.expected_position = 2;
  const absl::Status wrong = refuse(mismatch);
  EXPECT_EQ(wrong.code(), absl::StatusCode::kFailedPrecondition);
  ASSERT_TRUE(GetPositionMismatch(wrong).has_value());
  EXPECT_EQ(GetPositionMismatch(wrong)->session_id, busy);
  EXPECT_EQ(GetPositionMismatch(wrong)->expected_position, 2);
  EXPECT_EQ(GetPositionMismatch(wrong)->actual_position, 3);
  EXPECT_EQ(PositionOf(good), 0);
  RunAll();
  EXPECT_EQ(pipeline_->runs().size(), 1u);
}

TEST_P(EngineBatchTest, OneCallPerSessionAtATime) {
  Make(4);
  const std::string id = NewSession();
  auto stream = MustGenerate(Gen(id, Tokens(3), 10));
  for (int i = 0; i < 5; ++i) {
    EXPECT_EQ(engine_->Submit(Batch(CallKind::kStep, {Sequence(id, {1})}), {}).status().code(),
              absl::StatusCode::kAborted);
    EXPECT_EQ(engine_->Generate(Gen(id, {1}, 1), {}).status().code(), absl::StatusCode::kAborted);
    EXPECT_EQ(engine_->DeleteSession(id).status().code(), absl::StatusCode::kAborted);
    EXPECT_EQ(Fork(id, std::nullopt, 1, std::nullopt).status().code(), absl::StatusCode::kAborted);
    engine_->StepOnce();
  }
  Finish(stream.get());
  EXPECT_EQ(PositionOf(id), 13);
  Feed(id, {1});
}

TEST_P(EngineBatchTest, TheQueueHasAnEnd) {
  EngineOptions options;
  options.max_queued_calls = 2;
  options.retry_delay_ms = 77;
  Make(8, options);
  auto a = MustGenerate(Gen("", Tokens(3), 5));
  auto b = MustGenerate(Gen("", Tokens(3), 5));
  const std::string id = NewSession();
  const absl::Status full =
      engine_->Submit(Batch(CallKind::kPrefill, {Sequence(id, Tokens(1))}), {}).status();
  EXPECT_EQ(full.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(GetRetryDelayMs(full), 77);
  EXPECT_EQ(engine_->Generate(Gen("", Tokens(3), 5), {}).status().code(),
            absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(observer_.record().rejected_queue, 2);
  EXPECT_EQ(engine_->levels().slots_free, 5);  // The refused Generate holds none.
  EXPECT_FALSE(engine_->GetSession(id)->in_use);
  Finish(a.get());
  Feed(id, Tokens(1));
}

TEST_F(EngineBatchTest, TellsTimes) {
  EngineOptions options;
  options.prefill_chunk_tokens = 4;
  options.prefill_token_budget = 4;
  Make(4, options);
  pipeline_->set_on_run([this] {
    clock_.AdvanceMs(10);
    return absl::OkStatus();
  });
  const std::string id = NewSession();
  const std::string other = NewSession();
  auto call = MustSubmit(Batch(CallKind::kPrefill, {Sequence(id, Tokens(8))}));
  auto late = MustSubmit(Batch(CallKind::kPrefill, {Sequence(other, Tokens(4))}));
  EXPECT_EQ(engine_->levels().queued_tokens, 12);
  clock_.AdvanceMs(1);
  engine_->StepOnce();
  EXPECT_EQ(engine_->levels().queued_tokens, 8);
  EXPECT_EQ(engine_->levels().queued_calls, 1);
  EXPECT_EQ(observer_.record().levels.queued_tokens, 8);
  RunAll();
  const BatchResult first = *call->Take();
  const BatchResult second = *late->Take();
  EXPECT_EQ(first.timings.queue_ns, 1'000'000);
  EXPECT_EQ(first.timings.compute_ns, 20'000'000);
  EXPECT_EQ(first.timings.total_ns, 31'000'000);
  EXPECT_EQ(second.timings.queue_ns, 11'000'000);
  EXPECT_EQ(second.timings.compute_ns, 10'000'000);
  EXPECT_EQ(second.timings.total_ns, 21'000'000);
  EXPECT_EQ(engine_->levels().queued_tokens, 0);
}

TEST_F(EngineBatchTest, DecodeRowsStepsAndPromptsShareAStep) {
  Make(8);
  auto stream = MustGenerate(Gen("", Tokens(3), 5));
  engine_->StepOnce();
  const std::string a = NewSession();
  const std::string b = NewSession();
  auto prefill = MustSubmit(Batch(CallKind::kPrefill, {Sequence(a, Tokens(20))}));
  auto step = MustSubmit(Batch(CallKind::kStep, {Sequence(b, Tokens(2))}));
  pipeline_->clear_runs();
  engine_->StepOnce();
  ASSERT_EQ(pipeline_->runs().size(), 1u);
  const auto& run = pipeline_->runs()[0];
  ASSERT_EQ(run.size(), 3u);
  EXPECT_EQ(run[0].tokens, 1);
  EXPECT_EQ(run[1].tokens, 2);
  EXPECT_EQ(run[2].tokens, 20);
  const StepStats stats = observer_.record().steps.back();
  EXPECT_EQ(stats.phase, pipeline::Phase::kMixed);
  EXPECT_EQ(stats.decode_tokens, 3);
  EXPECT_EQ(stats.decode_sequences, 2);
  EXPECT_EQ(stats.prefill_tokens, 20);
  EXPECT_TRUE(prefill->Take().has_value());
  EXPECT_TRUE(step->Take().has_value());
}

TEST_P(EngineBatchTest, ThePenaltyOfABatchSeesItsInput) {
  Make(4);
  SequenceRequest request = Sequence(NewSession(), {9, 9, 4}, true);
  request.output.sampling.repetition_penalty = 2.0f;
  const BatchResult result = MustRun(Batch(CallKind::kPrefill, {request}));
  FakeSequence alone = Alone();
  alone.ConsumeAll(std::vector<int32_t>{9, 9, 4});
  pipeline::SampleSpec spec;
  const std::vector<int32_t> history = {9, 4};
  spec.seed = 5;
  spec.position = 3;
  spec.history = history;
  EXPECT_EQ(result.sequences[0].next_token->id, alone.Sample(spec).id);
}

INSTANTIATE_TEST_SUITE_P(InFlight, EngineBatchTest, ::testing::Values(1, 2));

}  // namespace
}  // namespace gdn::engine
