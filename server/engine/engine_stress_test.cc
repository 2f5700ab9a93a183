// Many threads at once, everything at random, every answer checked against one session alone.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <random>
#include <thread>

#include "server/engine/testing/engine_fixture.h"
#include "server/engine/testing/event.h"

namespace gdn::engine {
namespace {

using Code = absl::StatusCode;

class EngineStressTest : public EngineFixture {
 protected:
  static constexpr int kThreads = 6;
  static constexpr int kRounds = 150;
  static constexpr int64_t kSlots = 12;

  void SetUp() override {
    EngineOptions options;
    options.prefill_chunk_tokens = 8;
    options.prefill_token_budget = 20;
    options.max_batch_rows = 5;
    options.stream_buffer_tokens = 3;
    options.max_queued_calls = 10;
    Make(kSlots, options);
    pipeline_->set_record_runs(false);
  }

  static CallOptions Waking(Event* event) {
    CallOptions options;
    options.on_ready = [event] { event->Set(); };
    return options;
  }
  static bool IsBusy(const absl::Status& status) {
    return status.code() == Code::kResourceExhausted;
  }

  // Makes the token expected at `at` a stop token.
  static void Stop(size_t at, GenerateRequest* request, std::vector<int32_t>* expected) {
    const int32_t stop = (*expected)[at];
    request->stop_token_ids = {stop};
    expected->erase(std::find(expected->begin(), expected->end(), stop) + 1, expected->end());
  }

  // A throw-away stream, read to its end or given up at a random moment.
  void RunStream(std::mt19937* rng) {
    const auto length = static_cast<int64_t>(1 + (*rng)() % 30);
    const auto count = static_cast<int64_t>(1 + (*rng)() % 12);
    const auto first = static_cast<int32_t>((*rng)() % 800);
    const uint64_t seed = (*rng)();
    FakeSequence alone = Alone();
    alone.ConsumeAll(Tokens(length, first));
    std::vector<int32_t> expected = alone.Generate(count, seed);
    GenerateRequest request = Gen("", Tokens(length, first), count, seed);
    if ((*rng)() % 2 == 0)
      Stop(static_cast<size_t>((*rng)() % expected.size()), &request, &expected);
    Event ready;
    auto call = engine_->Generate(request, Waking(&ready));
    if (!call.ok()) {
      EXPECT_TRUE(IsBusy(call.status())) << call.status();
      return;
    }
    ++started_;
    const auto give_up = (*rng)() % 4;  // 0: destroy, 1: cancel, else read on.
    auto patience = (*rng)() % 6;
    GenerateChunk all;
    while (!all.done) {
      if (auto chunk = (*call)->Drain()) {
        Append(std::move(*chunk), &all);
        continue;
      }
      if (give_up < 2 && patience-- == 0) {
        if (give_up == 0) return;
        (*call)->Cancel();
      }
      ASSERT_TRUE(ready.Wait());
    }
    if (all.status.ok()) {
      EXPECT_EQ(Ids(all.tokens), expected);
    } else {
      EXPECT_EQ(all.status.code(), Code::kCancelled);
      ASSERT_LE(all.tokens.size(), expected.size());
      expected.resize(all.tokens.size());
      EXPECT_EQ(Ids(all.tokens), expected);
    }
  }

  // A session of this thread, fed, cancelled, forked and deleted at random. After a cancellation
  // the position says how much of the input counts.
  void RunSession(std::mt19937* rng) {
    auto created = engine_->CreateSession(0);
    if (!created.ok()) {
      EXPECT_TRUE(IsBusy(created.status()));
      return;
    }
    const std::string id = created->id;
    FakeSequence alone = Alone();
    std::vector<int32_t> history;
    for (unsigned i = 0; i < 4; ++i) {
      const auto tokens =
          Tokens(static_cast<int64_t>(1 + (*rng)() % 25), static_cast<int32_t>((*rng)() % 800));
      SequenceRequest request = Sequence(id, tokens);
      request.expected_position = static_cast<int64_t>(history.size());
      request.output.logits = Positions::kLast;
      Event ready;
      auto call = engine_->Submit(Batch(CallKind::kPrefill, {request}), Waking(&ready));
      if (!call.ok()) {
        EXPECT_TRUE(IsBusy(call.status())) << call.status();
        continue;
      }
      const bool cancel = (*rng)() % 3 == 0;
      if (cancel && (*rng)() % 2 == 0) std::this_thread::yield();
      if (cancel) (*call)->Cancel();
      std::optional<BatchResult> result;
      while (!(result = (*call)->Take()).has_value()) ASSERT_TRUE(ready.Wait());
      const auto info = engine_->GetSession(id);
      ASSERT_TRUE(info.ok()) << info.status();
      EXPECT_FALSE(info->in_use);
      const auto consumed = static_cast<size_t>(info->position) - history.size();
      ASSERT_LE(consumed, tokens.size());
      if (result->status.ok()) {
        EXPECT_EQ(consumed, tokens.size());
      } else {
        EXPECT_EQ(result->status.code(), Code::kCancelled);
      }
      alone.ConsumeAll(std::span(tokens).first(consumed));
      history.insert(history.end(), tokens.begin(),
                     tokens.begin() + static_cast<std::ptrdiff_t>(consumed));
      if (result->status.ok()) {
        EXPECT_EQ(result->sequences[0].logits, alone.Logits());
      }
      EXPECT_EQ(info->token_hash, HashTokens(kEmptyHash, history));
      if ((*rng)() % 2 == 0) Continue(id, &alone, &history, rng);
      if (HasFatalFailure()) return;
      if ((*rng)() % 3 == 0) Fork(id, alone, static_cast<int64_t>(history.size()), rng);
    }
    const auto deleted = engine_->DeleteSession(id);
    ASSERT_TRUE(deleted.ok()) << deleted.status();
    EXPECT_EQ(*deleted, static_cast<int64_t>(history.size()));
  }

  // Generates on the session; whatever ends it, the position says what the session has been fed.
  void Continue(const std::string& id, FakeSequence* alone, std::vector<int32_t>* history,
                std::mt19937* rng) {
    const auto position = static_cast<int64_t>(history->size());
    const auto count = static_cast<int64_t>(1 + (*rng)() % 9);
    FakeSequence own = *alone;
    own.set_position(position);
    own.Consume(11);
    std::vector<int32_t> expected = own.Generate(count, 5);
    GenerateRequest request = Gen(id, {11}, count);
    request.expected_position = position;
    if ((*rng)() % 2 == 0)
      Stop(static_cast<size_t>((*rng)() % expected.size()), &request, &expected);
    Event ready;
    auto call = engine_->Generate(request, Waking(&ready));
    if (!call.ok()) {
      EXPECT_TRUE(IsBusy(call.status())) << call.status();
      return;
    }
    ++started_;
    auto patience = (*rng)() % 12;
    GenerateChunk all;
    while (!all.done) {
      if (auto chunk = (*call)->Drain()) {
        Append(std::move(*chunk), &all);
        continue;
      }
      if (patience-- == 0) (*call)->Cancel();
      ASSERT_TRUE(ready.Wait());
    }
    const auto info = engine_->GetSession(id);
    ASSERT_TRUE(info.ok()) << info.status();
    EXPECT_EQ(info->position, all.position);
    ASSERT_LE(all.tokens.size(), expected.size());
    if (all.status.ok()) {
      EXPECT_EQ(Ids(all.tokens), expected);
      EXPECT_EQ(all.position, position + 1 + std::ssize(expected));
    } else {
      EXPECT_EQ(all.status.code(), Code::kCancelled);
      expected.resize(all.tokens.size());
      EXPECT_EQ(Ids(all.tokens), expected);
      ASSERT_LE(all.position, position + 1 + std::ssize(expected));
    }
    expected.insert(expected.begin(), 11);
    expected.resize(static_cast<size_t>(all.position - position));
    alone->ConsumeAll(expected);
    history->insert(history->end(), expected.begin(), expected.end());
    EXPECT_EQ(info->token_hash, HashTokens(kEmptyHash, *history));
  }

  void Fork(const std::string& id, FakeSequence alone, int64_t position, std::mt19937* rng) {
    Event forked;
    auto call = engine_->ForkSession(
        {id, position, static_cast<int64_t>(1 + (*rng)() % 2), std::nullopt}, Waking(&forked));
    if (!call.ok()) {
      EXPECT_TRUE(IsBusy(call.status())) << call.status();
      return;
    }
    if ((*rng)() % 3 == 0) {  // Given up at any moment of its life.
      if ((*rng)() % 2 == 0) std::this_thread::yield();
      call->reset();
      // The session is ours again once a copy that was being made is.
      while (engine_->GetSession(id)->in_use) std::this_thread::yield();
      return;
    }
    std::optional<absl::StatusOr<std::vector<SessionInfo>>> forks;
    while (!(forks = (*call)->Take()).has_value()) ASSERT_TRUE(forked.Wait());
    ASSERT_TRUE(forks->ok()) << forks->status();
    for (const SessionInfo& fork : **forks) {
      EXPECT_EQ(fork.position, position);
      Event ready;
      auto stream = engine_->Generate(Gen(fork.id, {7}, 3), Waking(&ready));
      if (stream.ok()) {
        ++started_;
        GenerateChunk all;
        while (!all.done) {
          if (auto chunk = (*stream)->Drain()) {
            Append(std::move(*chunk), &all);
          } else {
            ASSERT_TRUE(ready.Wait());
          }
        }
        FakeSequence own = alone;
        own.set_position(position);
        own.Consume(7);
        EXPECT_EQ(Ids(all.tokens), own.Generate(3, 5));
      } else {
        EXPECT_TRUE(IsBusy(stream.status())) << stream.status();
      }
      EXPECT_TRUE(engine_->DeleteSession(fork.id).ok());
    }
  }

  std::atomic<int> started_{0};
};

TEST_P(EngineStressTest, EveryAnswerIsRightAndNothingLeaks) {
  engine_->Start();
  std::atomic<bool> stop{false};
  std::thread watcher([&] {
    while (!stop) {
      const Levels levels = engine_->levels();
      EXPECT_EQ(levels.slots_free + levels.slots_live + levels.slots_in_flight, kSlots);
      EXPECT_LE(levels.blocked_streams, levels.running_streams);
      EXPECT_GE(levels.queued_tokens, 0);
      const absl::Status status = static_cast<EngineImpl*>(engine_.get())->CheckInvariants();
      EXPECT_TRUE(status.ok()) << status;
      int64_t total = 0;
      engine_->ListSessions("", 100, &total);
      std::this_thread::yield();
    }
  });
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([this, t] {
      std::mt19937 rng(static_cast<unsigned>(t));
      for (int round = 0; round < kRounds && !HasFatalFailure(); ++round) {
        if (rng() % 2 == 0) {
          RunStream(&rng);
        } else {
          RunSession(&rng);
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  stop = true;
  watcher.join();
  engine_->FinishDrain(clock_.NowNs() + int64_t{30} * 1'000'000'000);
  engine_->Stop();
  for (const Levels& levels : {engine_->levels(), observer_.record().levels}) {
    EXPECT_EQ(levels.slots_free, kSlots);
    EXPECT_EQ(levels.queued_calls + levels.queued_tokens + levels.running_streams, 0);
    EXPECT_EQ(levels.live_sessions, 0);
  }
  const auto record = observer_.record();
  EXPECT_GT(record.finished(), 0);
  EXPECT_GT(record.cancelled(), 0);
  EXPECT_GE(record.finished() + record.cancelled(), started_);
  EXPECT_EQ(record.streams_ended(), record.streams_started);
  EXPECT_GE(record.total_times.size(), static_cast<size_t>(record.streams_started));
  EXPECT_LE(record.compute_times.size(), record.total_times.size());
}

// Cancel, destroy, finish, expire and delete fall on the same session at once: one release.
TEST_P(EngineStressTest, CancelReapAndFinishRace) {
  engine_->Start();
  for (int round = 0; round < 400; ++round) {
    auto session = engine_->CreateSession(1);
    ASSERT_TRUE(session.ok()) << session.status();
    const std::string id = session->id;
    auto call = engine_->Generate(Gen(id, Tokens(3), 1 + round % 4), {});
    ASSERT_TRUE(call.ok()) << call.status();
    std::thread canceller([&] { (*call)->Cancel(); });
    std::thread reaper([&] {
      clock_.AdvanceMs(2);
      engine_->GetSession(id).status().IgnoreError();
      engine_->DeleteSession(id).status().IgnoreError();
    });
    if (round % 2 == 0) (*call)->Drain();
    canceller.join();
    call->reset();
    reaper.join();
    clock_.AdvanceMs(2);
  }
  engine_->FinishDrain(clock_.NowNs() + int64_t{30} * 1'000'000'000);
  clock_.AdvanceMs(2);
  int64_t total = -1;
  engine_->ListSessions("", 1, &total);
  EXPECT_EQ(total, 0);
  EXPECT_EQ(engine_->levels().slots_free, kSlots);
}

TEST_P(EngineStressTest, StopUnderLoad) {
  for (int round = 0; round < 20; ++round) {
    SetUp();
    engine_->Start();
    std::atomic<int> ended{0};
    std::atomic<int> admitted{0};
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; ++t) {
      threads.emplace_back([&, t] {
        for (int i = 0; i < 100; ++i) {
          Event ready;
          auto call = engine_->Generate(Gen("", Tokens(9, t), 1000), Waking(&ready));
          if (!call.ok()) {
            EXPECT_EQ(call.status().code(), Code::kUnavailable);
            return;
          }
          ++admitted;
          GenerateChunk all;
          while (!all.done) {
            if (auto chunk = (*call)->Drain()) {
              Append(std::move(*chunk), &all);
            } else {
              ASSERT_TRUE(ready.Wait());
            }
          }
          ++ended;
        }
      });
    }
    while (admitted < 4) std::this_thread::yield();
    if (round % 2 == 0) engine_->FinishDrain(clock_.NowNs());
    engine_->Stop();
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(ended, admitted);
    EXPECT_EQ(engine_->levels().slots_free, kSlots);
    CheckClean();
  }
}

INSTANTIATE_TEST_SUITE_P(InFlight, EngineStressTest, ::testing::Values(1, 2));

}  // namespace
}  // namespace gdn::engine
