// An engine over the fakes, driven step by step, and short forms of its requests. TearDown checks
// the engine's invariants and the pipeline's view of its caller.
//
// TEST_F tests run with one batch in flight, TEST_P tests with the number that is their parameter.
#ifndef SERVER_ENGINE_TESTING_ENGINE_FIXTURE_H_
#define SERVER_ENGINE_TESTING_ENGINE_FIXTURE_H_

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "server/engine/engine_impl.h"
#include "server/engine/testing/fake_clock.h"
#include "server/engine/testing/fake_pipeline.h"
#include "server/engine/testing/recording_observer.h"

namespace gdn::engine {

class EngineFixture : public ::testing::Test, public ::testing::WithParamInterface<int> {
 protected:
  EngineFixture() {
    const bool has_parameter =
        ::testing::UnitTest::GetInstance()->current_test_info()->value_param() != nullptr;
    if (has_parameter) depth_ = GetParam();
  }

  void Make(int64_t usable_slots, EngineOptions options = {}) {
    Make(FakePipeline::DefaultInfo(usable_slots + 1), options);
  }
  void Make(pipeline::PipelineInfo info, EngineOptions options = {}) {
    engine_.reset();
    info.max_in_flight = depth_;
    pipeline_ = std::make_unique<FakePipeline>(std::move(info));
    absl::StatusOr<std::unique_ptr<Engine>> engine =
        Engine::Create(options, pipeline_.get(), &clock_, &observer_);
    ASSERT_TRUE(engine.ok()) << engine.status();
    engine_ = std::move(*engine);
  }

  void TearDown() override {
    if (engine_ == nullptr) return;
    CheckClean();
    engine_.reset();
  }
  void CheckClean() {
    const absl::Status status = static_cast<EngineImpl*>(engine_.get())->CheckInvariants();
    EXPECT_TRUE(status.ok()) << status;
    for (const std::string& violation : pipeline_->violations()) ADD_FAILURE() << violation;
  }

  // Steps until nothing is left to do; a bound keeps a spinning engine from hanging the test.
  int64_t RunAll(int64_t bound = 100'000) {
    int64_t turns = 0;
    while (engine_->StepOnce()) {
      if (++turns > bound) {
        ADD_FAILURE() << "the engine is still busy after " << bound << " turns";
        break;
      }
      if (turns % 64 == 0) CheckClean();
    }
    return turns;
  }

  std::string NewSession(std::optional<int64_t> ttl_ms = 0) {
    absl::StatusOr<SessionInfo> session = engine_->CreateSession(ttl_ms);
    EXPECT_TRUE(session.ok()) << session.status();
    return session.ok() ? session->id : "";
  }
  int64_t PositionOf(const std::string& id) {
    absl::StatusOr<SessionInfo> session = engine_->GetSession(id);
    return session.ok() ? session->position : -1;
  }

  static std::vector<int32_t> Tokens(int64_t count, int32_t first = 1) {
    std::vector<int32_t> tokens(static_cast<size_t>(count));
    for (size_t i = 0; i < tokens.size(); ++i) {
      tokens[i] = static_cast<int32_t>((static_cast<size_t>(first) + 7 * i) % 900);
    }
    return tokens;
  }
  static SequenceRequest Sequence(const std::string& id, std::vector<int32_t> tokens,
                                  bool next_token = false) {
    SequenceRequest request;
    request.session_id = id;
    request.input.tokens = std::move(tokens);
    request.output.next_token = next_token;
    request.output.sampling.seed = 5;
    return request;
  }
  static BatchRequest Batch(CallKind kind, std::vector<SequenceRequest> sequences) {
    return {kind, std::move(sequences)};
  }
  static GenerateRequest Gen(const std::string& id, std::vector<int32_t> tokens,
                             int64_t max_new_tokens, uint64_t seed = 5) {
    GenerateRequest request;
    request.session_id = id;
    request.input.tokens = std::move(tokens);
    request.max_new_tokens = max_new_tokens;
    request.sampling.seed = seed;
    return request;
  }

  std::unique_ptr<BatchCall> MustSubmit(BatchRequest request, CallOptions options = {}) {
    auto call = engine_->Submit(std::move(request), std::move(options));
    EXPECT_TRUE(call.ok()) << call.status();
    return call.ok() ? std::move(*call) : nullptr;
  }
  std::unique_ptr<GenerateCall> MustGenerate(GenerateRequest request, CallOptions options = {}) {
    auto call = engine_->Generate(std::move(request), std::move(options));
    EXPECT_TRUE(call.ok()) << call.status();
    return call.ok() ? std::move(*call) : nullptr;
  }
  // Forks, with turns of the engine until the copies are there.
  absl::StatusOr<std::vector<SessionInfo>> Fork(const std::string& id,
                                                std::optional<int64_t> expected_position,
                                                int64_t count, std::optional<int64_t> ttl_ms) {
    auto fork = engine_->ForkSession({id, expected_position, count, ttl_ms}, {});
    if (!fork.ok()) return fork.status();
    auto result = (*fork)->Take();
    while (!result.has_value() && engine_->StepOnce()) result = (*fork)->Take();
    return result.has_value() ? *std::move(result) : absl::InternalError("the fork never ended");
  }
  // Submits, runs everything, and takes the result.
  BatchResult MustRun(BatchRequest request) {
    auto call = MustSubmit(std::move(request));
    if (call == nullptr) return {};
    RunAll();
    std::optional<BatchResult> result = call->Take();
    EXPECT_TRUE(result.has_value());
    return result.value_or(BatchResult());
  }
  // Feeds tokens without outputs.
  void Feed(const std::string& id, std::vector<int32_t> tokens) {
    const BatchResult result = MustRun(Batch(CallKind::kPrefill, {Sequence(id, tokens)}));
    EXPECT_TRUE(result.status.ok()) << result.status;
  }
  // Runs a stream to its end, draining after every turn.
  GenerateChunk Finish(GenerateCall* call) {
    GenerateChunk all;
    for (int turn = 0; turn < 100'000; ++turn) {
      const bool worked = engine_->StepOnce();
      std::optional<GenerateChunk> chunk = call->Drain();
      if (!chunk.has_value()) {
        if (!worked) break;
        continue;
      }
      Append(std::move(*chunk), &all);
      if (all.done) break;
    }
    EXPECT_TRUE(all.done);
    return all;
  }
  static void Append(GenerateChunk chunk, GenerateChunk* all) {
    std::vector<ChosenToken> tokens = std::move(all->tokens);
    for (ChosenToken& token : chunk.tokens) tokens.push_back(std::move(token));
    *all = std::move(chunk);
    all->tokens = std::move(tokens);
  }
  static std::vector<int32_t> Ids(const std::vector<ChosenToken>& tokens) {
    std::vector<int32_t> ids;
    for (const ChosenToken& token : tokens) ids.push_back(token.id);
    return ids;
  }
  FakeSequence Alone() const { return FakeSequence(pipeline_->info()); }

  int32_t depth_ = 1;  // Batches in flight, of the next Make.
  // Declared before the engine, which borrows them.
  FakeClock clock_;
  RecordingObserver observer_;
  std::unique_ptr<FakePipeline> pipeline_;
  std::unique_ptr<Engine> engine_;
};

}  // namespace gdn::engine

#endif  // SERVER_ENGINE_TESTING_ENGINE_FIXTURE_H_
