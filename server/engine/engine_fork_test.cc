// Forks as calls: when their copies exist, and what is left of those nobody takes.
#include <gtest/gtest.h>

#include "server/engine/testing/overlap_fixture.h"

namespace gdn::engine {
namespace {

using Code = absl::StatusCode;

class EngineForkTest : public OverlapFixture {
 protected:
  void SetUp() override {
    depth_ = GetParam();
    Make(4);
    parent_ = NewSession();
    Feed(parent_, Tokens(6));
  }
  std::unique_ptr<ForkCall> MustFork(int64_t count, CallOptions options = {}) {
    if (!options.on_ready) options.on_ready = [this] { ++wakes_; };
    auto fork = engine_->ForkSession({parent_, 6, count, 0}, std::move(options));
    EXPECT_TRUE(fork.ok()) << fork.status();
    return fork.ok() ? *std::move(fork) : nullptr;
  }
  void ExpectLevels(int64_t live_sessions, int64_t slots_in_flight) {
    EXPECT_EQ(engine_->levels().live_sessions, live_sessions);
    EXPECT_EQ(engine_->levels().slots_in_flight, slots_in_flight);
    EXPECT_EQ(observer_.record().levels.slots_in_flight, slots_in_flight);
    CheckClean();
  }

  std::string parent_;
  int wakes_ = 0;
};

TEST_P(EngineForkTest, TheCopiesExistOnceTheyAreTaken) {
  auto fork = MustFork(2);
  EXPECT_FALSE(fork->Take().has_value());
  EXPECT_TRUE(engine_->GetSession(parent_)->in_use);
  ExpectLevels(1, 3);
  EXPECT_TRUE(engine_->StepOnce());
  EXPECT_EQ(wakes_, 1);
  ExpectLevels(1, 2);
  // The parent is free already, and what becomes of it is nothing to the copies.
  Feed(parent_, Tokens(3, 70));
  ASSERT_TRUE(engine_->DeleteSession(parent_).ok());
  const auto copies = fork->Take();
  ASSERT_TRUE(copies.has_value());
  ASSERT_TRUE(copies->ok()) << copies->status();
  EXPECT_FALSE(fork->Take().has_value());
  ExpectLevels(2, 0);
  fork.reset();
  for (const SessionInfo& copy : **copies) {
    EXPECT_EQ(copy.parent_id, parent_);
    ExpectHolds(copy.id, Tokens(6), 6);
  }
  EXPECT_EQ(wakes_, 1);
}

TEST_P(EngineForkTest, GivenUpBeforeItsTurn) {
  auto fork = MustFork(2);
  fork.reset();
  EXPECT_EQ(wakes_, 0);
  ExpectLevels(1, 0);
  EXPECT_FALSE(engine_->StepOnce());
  ExpectHolds(parent_, Tokens(6), 6);
}

TEST_P(EngineForkTest, GivenUpWhileItIsCopied) {
  auto fork = MustFork(2);
  pipeline_->set_on_copy([&](int64_t) {
    fork.reset();
    EXPECT_TRUE(engine_->GetSession(parent_)->in_use);
    return absl::OkStatus();
  });
  EXPECT_TRUE(engine_->StepOnce());
  EXPECT_EQ(wakes_, 0);
  ExpectLevels(1, 0);
  ExpectHolds(parent_, Tokens(6), 6);
}

TEST_P(EngineForkTest, GivenUpOnceItIsDone) {
  auto fork = MustFork(3);
  EXPECT_TRUE(engine_->StepOnce());
  EXPECT_EQ(engine_->CreateSession(0).status().code(), Code::kResourceExhausted);
  fork.reset();
  ExpectLevels(1, 0);
  EXPECT_FALSE(MustFork(3)->Take().has_value());
  ExpectHolds(parent_, Tokens(6), 6);
}

TEST_P(EngineForkTest, AFailedCopyIsTold) {
  pipeline_->set_on_copy([](int64_t) { return absl::InternalError("injected"); });
  auto fork = MustFork(2);
  EXPECT_TRUE(engine_->StepOnce());
  EXPECT_EQ(wakes_, 1);
  ExpectLevels(1, 0);
  EXPECT_EQ(fork->Take()->status().code(), Code::kInternal);
  EXPECT_FALSE(fork->Take().has_value());
  ExpectHolds(parent_, Tokens(6), 6);
}

TEST_P(EngineForkTest, ADeadline) {
  CallOptions options;
  options.deadline_ns = clock_.NowNs();
  EXPECT_EQ(engine_->ForkSession({parent_, 6, 1, 0}, options).status().code(),
            Code::kDeadlineExceeded);
  ExpectLevels(1, 0);
  options.deadline_ns = clock_.NowNs() + 1;
  auto fork = MustFork(1, options);
  clock_.AdvanceNs(1);
  EXPECT_TRUE(engine_->StepOnce());
  EXPECT_EQ(fork->Take()->status().code(), Code::kDeadlineExceeded);
  ExpectLevels(1, 0);
  ExpectHolds(parent_, Tokens(6), 6);
}

TEST_P(EngineForkTest, AFreshSessionNeedsNoTurn) {
  CallOptions options;
  options.on_ready = [this] { ++wakes_; };
  auto fork = engine_->ForkSession({NewSession(), 0, 2, 0}, options);
  ASSERT_TRUE(fork.ok());
  EXPECT_EQ(wakes_, 1);
  EXPECT_EQ((*fork)->Take()->value().size(), 2u);
  EXPECT_FALSE(engine_->StepOnce());
  ExpectLevels(4, 0);
}

TEST_P(EngineForkTest, DrainWaitsForItAndStopEndsIt) {
  auto fork = MustFork(1);
  EXPECT_EQ(engine_->FinishDrain(clock_.NowNs() + 1'000'000'000), 0);
  EXPECT_TRUE(fork->Take()->ok());
  for (const bool stop : {false, true}) {
    fork.reset();  // Handles do not outlive their engine.
    SetUp();
    wakes_ = 0;
    fork = MustFork(1);
    if (!stop) {
      EXPECT_EQ(engine_->FinishDrain(clock_.NowNs()), 0);
    }
    engine_->Stop();
    EXPECT_EQ(wakes_, 1);
    EXPECT_EQ(fork->Take()->status().code(), Code::kUnavailable);
    ExpectLevels(1, 0);
  }
  fork.reset();
}

INSTANTIATE_TEST_SUITE_P(InFlight, EngineForkTest, ::testing::Values(1, 2));

}  // namespace
}  // namespace gdn::engine
