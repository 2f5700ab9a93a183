// The engine with its own thread: waking, sleeping, forks, blocked steps, handles that go away.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "server/engine/testing/engine_fixture.h"
#include "server/engine/testing/event.h"

namespace gdn::engine {
namespace {

using Code = absl::StatusCode;

class EngineThreadTest : public EngineFixture {
 protected:
  // Blocks each step until the test lets it go.
  struct Gate {
    Event entered;
    Event leave;
  };
  void Block(Gate* gate) {
    pipeline_->set_on_run([gate] {
      gate->entered.Set();
      return gate->leave.Wait() ? absl::OkStatus() : absl::InternalError("never let go");
    });
  }
  static CallOptions Waking(Event* event) {
    CallOptions options;
    options.on_ready = [event] { event->Set(); };
    return options;
  }
  // Reads a stream to its end.
  GenerateChunk Read(GenerateCall* call, Event* ready) {
    GenerateChunk all;
    while (!all.done) {
      if (auto chunk = call->Drain()) {
        Append(std::move(*chunk), &all);
      } else if (!ready->Wait()) {
        ADD_FAILURE() << "nothing came";
        break;
      }
    }
    return all;
  }
};

TEST_P(EngineThreadTest, StreamsAndSleepsAndStreams) {
  Make(4);
  engine_->Start();
  engine_->Start();  // Once is enough.
  FakeSequence alone = Alone();
  alone.ConsumeAll(Tokens(5));
  const auto expected = alone.Generate(200, 5);
  for (int i = 0; i < 20; ++i) {
    Event ready;
    auto call = MustGenerate(Gen("", Tokens(5), 200), Waking(&ready));
    EXPECT_EQ(Ids(Read(call.get(), &ready).tokens), expected);
  }
}

TEST_P(EngineThreadTest, CancelInsideABlockedStep) {
  Make(4);
  Gate gate;
  Block(&gate);
  const std::string id = NewSession();
  engine_->Start();
  Event ready;
  auto call = MustGenerate(Gen(id, Tokens(5), 200), Waking(&ready));
  ASSERT_TRUE(gate.entered.Wait());
  call->Cancel();  // Returns at once; the step is still running.
  EXPECT_FALSE(call->Drain().has_value());
  EXPECT_TRUE(engine_->GetSession(id)->in_use);
  EXPECT_TRUE(engine_->CreateSession(0).ok());  // Nor does anything else wait for the step.
  gate.leave.Set();
  ASSERT_TRUE(ready.Wait());
  auto chunk = call->Drain();
  ASSERT_TRUE(chunk.has_value());
  EXPECT_TRUE(chunk->done);
  EXPECT_EQ(chunk->status.code(), Code::kCancelled);
  EXPECT_EQ(chunk->position, 5);
  EXPECT_EQ(PositionOf(id), 5);
  EXPECT_FALSE(engine_->GetSession(id)->in_use);
}

TEST_P(EngineThreadTest, AForkWaitsForTheStepAndNobodyForTheFork) {
  Make(4);
  const std::string parent = NewSession();
  Feed(parent, Tokens(6));
  Gate gate;
  Block(&gate);
  engine_->Start();
  Event ready;
  auto call = MustGenerate(Gen("", Tokens(5), 1), Waking(&ready));
  ASSERT_TRUE(gate.entered.Wait());
  Event forked;
  auto fork = engine_->ForkSession({parent, 6, 2, std::nullopt}, Waking(&forked));
  ASSERT_TRUE(fork.ok()) << fork.status();
  EXPECT_FALSE((*fork)->Take().has_value());
  EXPECT_TRUE(engine_->GetSession(parent)->in_use);
  EXPECT_EQ(engine_->levels().live_sessions, 1);  // The copies do not exist yet.
  EXPECT_EQ(engine_->DeleteSession(parent).status().code(), Code::kAborted);
  gate.leave.Set();
  ASSERT_TRUE(forked.Wait());
  const auto copies = (*fork)->Take();
  ASSERT_TRUE(copies.has_value());
  ASSERT_TRUE(copies->ok()) << copies->status();
  EXPECT_EQ((*copies)->size(), 2u);
  EXPECT_EQ((**copies)[1].position, 6);
  EXPECT_FALSE((*fork)->Take().has_value());
  EXPECT_TRUE(Read(call.get(), &ready).status.ok());
}

TEST_P(EngineThreadTest, StopDoesNotLeaveAForkWaiting) {
  for (int i = 0; i < 50; ++i) {
    Make(4);
    const std::string parent = NewSession();
    Feed(parent, Tokens(6));
    engine_->Start();
    Event forked;
    auto fork = engine_->ForkSession({parent, 6, 2, std::nullopt}, Waking(&forked));
    ASSERT_TRUE(fork.ok()) << fork.status();
    engine_->Stop();
    ASSERT_TRUE(forked.Wait());
    const auto copies = (*fork)->Take();
    ASSERT_TRUE(copies.has_value());
    EXPECT_TRUE(copies->ok() || copies->status().code() == Code::kUnavailable) << copies->status();
    EXPECT_EQ(engine_->levels().live_sessions, copies->ok() ? 3 : 1);
    EXPECT_EQ(engine_->levels().slots_in_flight, 0);
    CheckClean();
  }
}

TEST_P(EngineThreadTest, AHandleWaitsForItsRunningCallback) {
  Make(4);
  engine_->Start();
  Event entered;
  Event leave;
  std::atomic<int> calls{0};
  std::atomic<bool> left{false};
  CallOptions options;
  options.on_ready = [&] {
    if (calls.fetch_add(1) > 0) return;
    entered.Set();
    EXPECT_TRUE(leave.Wait());
    left = true;
  };
  auto call = MustGenerate(Gen("", Tokens(5), 1'000'000), options);
  ASSERT_TRUE(entered.Wait());
  std::thread destroyer([&] {
    call.reset();
    EXPECT_TRUE(left);
  });
  leave.Set();
  destroyer.join();
  const int after = calls;
  Event ready;
  auto other = MustGenerate(Gen("", Tokens(5), 3), Waking(&ready));
  Read(other.get(), &ready);
  EXPECT_EQ(calls, after);
}

// Real time, but nothing is measured: the thread must wake by itself.
class EngineRealTimeTest : public ::testing::Test {
 protected:
  class EvictionEvent final : public Observer {
   public:
    void OnEvicted(EvictionReason) override { event.Set(); }
    Event event;
  };
  class CountingClock final : public Clock {
   public:
    int64_t NowNs() const override {
      ++looks;
      return clock.NowNs();
    }
    int64_t UnixTimeMs() const override { return clock.UnixTimeMs(); }
    SystemClock clock;
    mutable std::atomic<int64_t> looks{0};
  };
  void SetUp() override {
    EngineOptions options;
    options.stream_buffer_tokens = 2;
    engine_ = *Engine::Create(options, &pipeline_, &clock_, &observer_);
    engine_->Start();
  }

  FakePipeline pipeline_{5};
  CountingClock clock_;
  EvictionEvent observer_;
  std::unique_ptr<Engine> engine_;
};

TEST_F(EngineRealTimeTest, AnExpiryWakesTheThread) {
  ASSERT_TRUE(engine_->CreateSession(3'600'000).ok());
  ASSERT_TRUE(engine_->CreateSession(10).ok());
  EXPECT_TRUE(observer_.event.Wait());
  EXPECT_EQ(engine_->levels().live_sessions, 1);
}

TEST_F(EngineRealTimeTest, ADeadlineWakesTheThread) {
  GenerateRequest request;
  request.input.tokens = {1, 2};
  Event ready;
  CallOptions options;
  options.deadline_ns = clock_.NowNs() + 20'000'000;
  options.on_ready = [&] { ready.Set(); };
  auto call = *engine_->Generate(request, options);  // Pauses, since nobody reads.
  while (engine_->levels().running_streams > 0) ASSERT_TRUE(ready.Wait());
  auto chunk = call->Drain();
  ASSERT_TRUE(chunk.has_value());
  EXPECT_EQ(chunk->status.code(), Code::kDeadlineExceeded);
  EXPECT_EQ(engine_->levels().slots_free, 4);
}

TEST_F(EngineRealTimeTest, AnIdleEngineSleeps) {
  ASSERT_TRUE(engine_->CreateSession(3'600'000).ok());
  GenerateRequest request;
  request.input.tokens = {1, 2};
  CallOptions options;
  options.deadline_ns = clock_.NowNs() + int64_t{3600} * 1'000'000'000;
  auto call = *engine_->Generate(request, options);
  while (engine_->levels().blocked_streams == 0) std::this_thread::yield();
  // A spinning loop looks at the clock many thousand times in this while.
  const int64_t before = clock_.looks;
  const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(50);
  while (std::chrono::steady_clock::now() < end) std::this_thread::yield();
  EXPECT_LE(clock_.looks - before, 20);
}

TEST_F(EngineRealTimeTest, DrainWaitsForTheThread) {
  std::vector<std::unique_ptr<GenerateCall>> calls;
  for (int i = 0; i < 4; ++i) {
    GenerateRequest request;
    request.input.tokens = {1, 2};
    request.max_new_tokens = 2;
    calls.push_back(*engine_->Generate(request, {}));
  }
  EXPECT_EQ(engine_->FinishDrain(clock_.NowNs() + int64_t{30} * 1'000'000'000), 0);
  for (auto& call : calls) {
    auto chunk = call->Drain();
    ASSERT_TRUE(chunk.has_value());
    EXPECT_TRUE(chunk->done);
    EXPECT_TRUE(chunk->status.ok());
  }
  engine_->Stop();
}

INSTANTIATE_TEST_SUITE_P(InFlight, EngineThreadTest, ::testing::Values(1, 2));

}  // namespace
}  // namespace gdn::engine
