// Sessions by name: capacity, TTL, lists, forks.
#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "server/engine/status_payload.h"
#include "server/engine/testing/engine_fixture.h"

namespace gdn::engine {
namespace {

using EngineSessionTest = EngineFixture;

TEST_P(EngineSessionTest, DescribesASession) {
  Make(4);
  auto created = engine_->CreateSession(1234);
  ASSERT_TRUE(created.ok());
  EXPECT_EQ(created->id.size(), 32u);
  EXPECT_EQ(created->ttl_ms, 1234);
  EXPECT_EQ(created->position, 0);
  EXPECT_EQ(created->token_hash, kEmptyHash);
  EXPECT_EQ(created->create_time_ms, clock_.UnixTimeMs());
  EXPECT_EQ(created->state_bytes, 4096);
  EXPECT_FALSE(created->in_use);
  clock_.AdvanceMs(100);
  Feed(created->id, Tokens(3));
  const auto now = engine_->GetSession(created->id);
  ASSERT_TRUE(now.ok());
  EXPECT_EQ(now->position, 3);
  EXPECT_EQ(now->create_time_ms, created->create_time_ms);
  EXPECT_EQ(now->last_use_time_ms, created->create_time_ms + 100);
  EXPECT_EQ(engine_->CreateSession(std::nullopt)->ttl_ms, engine_->options().default_ttl_ms);
  EXPECT_EQ(engine_->CreateSession(-1).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(engine_->GetSession("nope").status().code(), absl::StatusCode::kNotFound);
}

TEST_P(EngineSessionTest, ExactCapacity) {
  for (const int64_t usable : {1, 2, 4}) {
    Make(usable);
    std::vector<std::string> ids;
    for (int64_t i = 0; i < usable; ++i) ids.push_back(NewSession());
    const absl::Status full = engine_->CreateSession(0).status();
    EXPECT_EQ(full.code(), absl::StatusCode::kResourceExhausted);
    EXPECT_EQ(GetRetryDelayMs(full), engine_->options().retry_delay_ms);
    EXPECT_EQ(engine_->Generate(Gen("", {1}, 1), {}).status().code(),
              absl::StatusCode::kResourceExhausted);
    // All of them run at once.
    std::vector<SequenceRequest> sequences;
    for (const std::string& id : ids) sequences.push_back(Sequence(id, Tokens(5), true));
    const BatchResult result = MustRun(Batch(CallKind::kPrefill, sequences));
    FakeSequence alone = Alone();
    alone.ConsumeAll(Tokens(5));
    const int32_t next = alone.Generate(1, 5)[0];
    for (const SequenceResult& r : result.sequences) EXPECT_EQ(r.next_token->id, next);
    // One freed is one gained, and the new tenant starts clean.
    EXPECT_EQ(*engine_->DeleteSession(ids[0]), 5);
    auto call = MustGenerate(Gen("", Tokens(5), 1));
    EXPECT_EQ(engine_->CreateSession(0).status().code(), absl::StatusCode::kResourceExhausted);
    EXPECT_EQ(Ids(Finish(call.get()).tokens), std::vector<int32_t>{next});
    EXPECT_EQ(engine_->levels().slots_free, 1);
    EXPECT_EQ(engine_->DeleteSession(ids[0]).status().code(), absl::StatusCode::kNotFound);
    CheckClean();
  }
  EXPECT_EQ(observer_.record().rejected_slot, 9);
}

TEST_P(EngineSessionTest, OpenAndCloseLeaksNothing) {
  Make(4);
  for (int i = 0; i < 1000; ++i) {
    const std::string id = NewSession();
    if (i % 2 == 0) Feed(id, Tokens(3, i));
    if (i % 5 == 0) {
      auto call = MustGenerate(Gen("", Tokens(2), 2));
      if (i % 10 == 0) Finish(call.get());
    }
    EXPECT_TRUE(engine_->DeleteSession(id).ok());
  }
  RunAll();
  const Levels levels = engine_->levels();
  EXPECT_EQ(levels.slots_free, 4);
  EXPECT_EQ(levels.slots_live + levels.slots_in_flight + levels.live_sessions, 0);
  EXPECT_EQ(levels.slots_reserved, 1);
}

TEST_P(EngineSessionTest, AnIdleSessionExpires) {
  Make(2);
  const std::string id = NewSession(100);
  const std::string never = NewSession(0);
  clock_.AdvanceNs(100'000'000 - 1);
  EXPECT_FALSE(engine_->StepOnce());
  EXPECT_TRUE(engine_->GetSession(id).ok());
  EXPECT_EQ(engine_->CreateSession(0).status().code(), absl::StatusCode::kResourceExhausted);
  clock_.AdvanceNs(1);
  EXPECT_TRUE(engine_->StepOnce());
  EXPECT_FALSE(engine_->StepOnce());
  EXPECT_EQ(engine_->GetSession(id).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(observer_.record().evicted, 1);
  EXPECT_EQ(observer_.record().levels.live_sessions, 1);
  clock_.AdvanceMs(1'000'000'000);
  EXPECT_FALSE(engine_->StepOnce());
  EXPECT_TRUE(engine_->GetSession(never).ok());
}

TEST_P(EngineSessionTest, ExpiryIsSeenOnAccessToo) {
  Make(1);
  const auto expire = [&] {
    const std::string id = NewSession(10);
    clock_.AdvanceMs(10);
    return id;
  };
  EXPECT_EQ(engine_->GetSession(expire()).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(engine_->DeleteSession(expire()).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(Fork(expire(), std::nullopt, 1, std::nullopt).status().code(),
            absl::StatusCode::kNotFound);
  EXPECT_EQ(engine_->Submit(Batch(CallKind::kStep, {Sequence(expire(), {1})}), {}).status().code(),
            absl::StatusCode::kNotFound);
  EXPECT_EQ(engine_->Generate(Gen(expire(), {1}, 1), {}).status().code(),
            absl::StatusCode::kNotFound);
  expire();
  int64_t total = -1;
  EXPECT_TRUE(engine_->ListSessions("", 10, &total).empty());
  EXPECT_EQ(total, 0);
  expire();
  EXPECT_TRUE(engine_->CreateSession(10).ok());  // Takes the expired one's slot.
  clock_.AdvanceMs(10);
  EXPECT_NE(MustGenerate(Gen("", {1}, 1)), nullptr);
  EXPECT_EQ(observer_.record().evicted, 8);
}

TEST_P(EngineSessionTest, UseIsNotIdleness) {
  Make(2);
  const std::string id = NewSession(100);
  clock_.AdvanceMs(90);
  auto call = MustGenerate(Gen(id, Tokens(3), 4));
  for (int i = 0; i < 3; ++i) {
    engine_->StepOnce();
    clock_.AdvanceMs(1000);
    EXPECT_TRUE(engine_->GetSession(id).ok());
  }
  Finish(call.get());
  clock_.AdvanceMs(99);
  EXPECT_TRUE(engine_->GetSession(id).ok());  // Looking is not using.
  clock_.AdvanceMs(1);
  EXPECT_EQ(engine_->GetSession(id).status().code(), absl::StatusCode::kNotFound);
}

// A clock that moves with every look must not evict what the same call has just found.
TEST_P(EngineSessionTest, NoSessionExpiresHalfwayThroughAdmission) {
  Make(2);
  const std::string a = NewSession(1000);
  const std::string b = NewSession(1000);
  clock_.set_tick_ns(50'000'000);
  int admitted = 0;
  for (int i = 0; i < 30; ++i) {
    auto call = engine_->Submit(Batch(CallKind::kPrefill, {Sequence(a, {}), Sequence(b, {})}), {});
    if (call.ok()) {
      ++admitted;
      RunAll();
      EXPECT_TRUE((*call)->Take().has_value());
      clock_.AdvanceMs(10 * i);
    } else {
      EXPECT_EQ(call.status().code(), absl::StatusCode::kNotFound);
    }
    CheckClean();
  }
  EXPECT_GT(admitted, 2);
}

TEST_P(EngineSessionTest, ListsInPages) {
  Make(10);
  std::vector<std::string> ids;
  for (int i = 0; i < 10; ++i) ids.push_back(NewSession());
  std::sort(ids.begin(), ids.end());
  std::vector<std::string> listed;
  std::string after;
  for (int page = 0; page < 20; ++page) {
    int64_t total = 0;
    const auto sessions = engine_->ListSessions(after, 3, &total);
    EXPECT_EQ(total, 10);
    if (sessions.empty()) break;
    EXPECT_LE(sessions.size(), 3u);
    for (const SessionInfo& session : sessions) listed.push_back(session.id);
    after = listed.back();
  }
  EXPECT_EQ(listed, ids);
  int64_t total = 0;
  EXPECT_TRUE(engine_->ListSessions("", 0, &total).empty());
  EXPECT_EQ(total, 10);
}

TEST_P(EngineSessionTest, ForksDiverge) {
  Make(4);
  const std::string parent = NewSession(500);
  Feed(parent, Tokens(10));
  auto forks = Fork(parent, 10, 2, std::nullopt);
  ASSERT_TRUE(forks.ok()) << forks.status();
  ASSERT_EQ(forks->size(), 2u);
  EXPECT_EQ((*forks)[0].ttl_ms, 500);
  EXPECT_EQ((*forks)[0].parent_id, parent);
  EXPECT_EQ((*forks)[0].position, 10);
  EXPECT_EQ((*forks)[0].token_hash, engine_->GetSession(parent)->token_hash);
  EXPECT_EQ((*forks)[1].parent_id, parent);
  EXPECT_FALSE(engine_->GetSession(parent)->in_use);

  const std::vector<std::string> ids = {parent, (*forks)[0].id, (*forks)[1].id};
  EXPECT_EQ(std::set<std::string>(ids.begin(), ids.end()).size(), 3u);
  std::vector<SequenceRequest> sequences;
  for (size_t i = 0; i < ids.size(); ++i) {
    SequenceRequest request = Sequence(ids[i], Tokens(3, 100 + static_cast<int32_t>(i)));
    request.output.logits = Positions::kLast;
    request.expected_position = 10;
    sequences.push_back(request);
  }
  const BatchResult result = MustRun(Batch(CallKind::kPrefill, sequences));
  for (size_t i = 0; i < ids.size(); ++i) {
    FakeSequence alone = Alone();
    alone.ConsumeAll(Tokens(10));
    alone.ConsumeAll(Tokens(3, 100 + static_cast<int32_t>(i)));
    EXPECT_EQ(result.sequences[i].logits, alone.Logits()) << i;
    EXPECT_EQ(result.sequences[i].position, 13);
  }
  // A fork outlives its parent.
  ASSERT_TRUE(engine_->DeleteSession(parent).ok());
  Feed(ids[1], Tokens(1));
}

TEST_P(EngineSessionTest, AForkOfAFreshSessionIsFresh) {
  Make(4);
  bool copied = false;
  pipeline_->set_on_copy([&](int64_t) {
    copied = true;
    return absl::OkStatus();
  });
  const std::string parent = NewSession();
  auto forks = Fork(parent, 0, 3, 0);
  ASSERT_TRUE(forks.ok());
  EXPECT_FALSE(copied);
  EXPECT_EQ((*forks)[2].ttl_ms, 0);
  const BatchResult result =
      MustRun(Batch(CallKind::kStep, {Sequence((*forks)[1].id, Tokens(2), true)}));
  FakeSequence alone = Alone();
  alone.ConsumeAll(Tokens(2));
  EXPECT_EQ(result.sequences[0].next_token->id, alone.Generate(1, 5)[0]);
}

TEST_P(EngineSessionTest, ForksAllOrNone) {
  Make(4);
  const std::string parent = NewSession();
  Feed(parent, Tokens(4));
  EXPECT_EQ(Fork(parent, std::nullopt, 4, std::nullopt).status().code(),
            absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(Fork(parent, std::nullopt, 5, std::nullopt).status().code(),
            absl::StatusCode::kOutOfRange);
  EXPECT_EQ(Fork(parent, std::nullopt, 0, std::nullopt).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(Fork(parent, std::nullopt, 1, -5).status().code(), absl::StatusCode::kInvalidArgument);
  const absl::Status wrong = Fork(parent, 3, 1, std::nullopt).status();
  ASSERT_TRUE(GetPositionMismatch(wrong).has_value());
  EXPECT_EQ(GetPositionMismatch(wrong)->actual_position, 4);
  EXPECT_EQ(engine_->levels().slots_free, 3);
  EXPECT_EQ(engine_->levels().live_sessions, 1);
  // The second copy fails: the first is taken back too.
  int copies = 0;
  pipeline_->set_on_copy(
      [&](int64_t) { return ++copies == 2 ? absl::InternalError("injected") : absl::OkStatus(); });
  const absl::Status failed = Fork(parent, 4, 3, std::nullopt).status();
  EXPECT_EQ(failed.code(), absl::StatusCode::kInternal);
  EXPECT_NE(failed.message().find("injected"), absl::string_view::npos);
  EXPECT_EQ(copies, 2);
  EXPECT_EQ(engine_->levels().slots_free, 3);
  EXPECT_EQ(engine_->levels().live_sessions, 1);
  CheckClean();
  Feed(parent, Tokens(1));
  EXPECT_EQ(Fork(parent, 5, 3, std::nullopt)->size(), 3u);
}

INSTANTIATE_TEST_SUITE_P(InFlight, EngineSessionTest, ::testing::Values(1, 2));

}  // namespace
}  // namespace gdn::engine
