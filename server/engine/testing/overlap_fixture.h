// An engine over a pipeline that takes two batches, and the checks that its tests share.
#ifndef SERVER_ENGINE_TESTING_OVERLAP_FIXTURE_H_
#define SERVER_ENGINE_TESTING_OVERLAP_FIXTURE_H_

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "server/engine/testing/engine_fixture.h"
#include "server/engine/token_hash.h"

namespace gdn::engine {

class OverlapFixture : public EngineFixture {
 protected:
  OverlapFixture() { depth_ = 2; }

  // What a session alone gives after this prompt.
  static std::vector<int32_t> Expected(const std::vector<int32_t>& prompt, int64_t count,
                                       uint64_t seed = 5) {
    FakeSequence alone(FakePipeline::DefaultInfo(2));
    alone.ConsumeAll(prompt);
    return alone.Generate(count, seed);
  }
  static std::vector<int32_t> First(const std::vector<int32_t>& tokens, int64_t count) {
    return {tokens.begin(), tokens.begin() + count};
  }
  static std::vector<int32_t> Joined(std::vector<int32_t> a, const std::vector<int32_t>& b) {
    a.insert(a.end(), b.begin(), b.end());
    return a;
  }

  // The idle session's position, hash and state are those of exactly these tokens' beginning.
  void ExpectHolds(const std::string& id, const std::vector<int32_t>& history, int64_t position) {
    const auto info = engine_->GetSession(id);
    ASSERT_TRUE(info.ok()) << info.status();
    EXPECT_FALSE(info->in_use);
    ASSERT_EQ(info->position, position);
    ASSERT_LE(position, static_cast<int64_t>(history.size()));
    const std::vector<int32_t> held = First(history, position);
    EXPECT_EQ(info->token_hash, HashTokens(kEmptyHash, held));
    // The next call goes on from there.
    GenerateRequest request = Gen(id, {3, 4}, 6, 77);
    request.expected_position = position;
    auto call = MustGenerate(request);
    EXPECT_EQ(Ids(Finish(call.get()).tokens), Expected(Joined(held, {3, 4}), 6, 77));
    EXPECT_EQ(PositionOf(id), position + 8);
  }
  void ExpectIdle(int64_t sessions) {
    EXPECT_FALSE(engine_->StepOnce());
    EXPECT_EQ(pipeline_->batches_in_flight(), 0);
    for (const Levels& levels : {engine_->levels(), observer_.record().levels}) {
      EXPECT_EQ(levels.queued_calls + levels.queued_tokens, 0);
      EXPECT_EQ(levels.running_streams + levels.blocked_streams, 0);
      EXPECT_EQ(levels.slots_in_flight, 0);
      EXPECT_EQ(levels.live_sessions, sessions);
    }
    CheckClean();
  }

  int64_t NumChained() const {
    int64_t chained = 0;
    for (const auto& run : pipeline_->runs()) {
      chained += std::count_if(run.begin(), run.end(), [](const auto& r) { return r.chained; });
    }
    return chained;
  }
  // Calls `f` at the start of the n-th Wait from now, from 1.
  template <typename F>
  void AtWait(int n, F f) {
    pipeline_->set_on_wait([n, f]() mutable { return --n == 0 ? f() : absl::OkStatus(); });
  }
  template <typename F>
  void AtLaunch(int n, F f) {
    pipeline_->set_on_run([n, f]() mutable { return --n == 0 ? f() : absl::OkStatus(); });
  }
};

}  // namespace gdn::engine

#endif  // SERVER_ENGINE_TESTING_OVERLAP_FIXTURE_H_
