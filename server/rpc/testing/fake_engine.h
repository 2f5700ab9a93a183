// File: fake_engine.h
//
// An engine without a model, for tests and benchmarks of the transport: calls are recorded, and
// answered when and as the test says.
//
// Thread-safety: all methods may be called from any thread.
#ifndef SERVER_RPC_TESTING_FAKE_ENGINE_H_
#define SERVER_RPC_TESTING_FAKE_ENGINE_H_

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "server/engine/engine.h"

namespace gdn::rpc {

// One call, kept alive by the test and by the transport's handle.
class FakeCall {
 public:
  FakeCall(engine::CallOptions options, uint64_t seed)
      : options_(std::move(options)), seed_(seed) {}
  // A fork.
  FakeCall(engine::CallOptions options, std::vector<engine::SessionInfo> copies)
      : options_(std::move(options)), seed_(0), copies_(std::move(copies)) {}

  // For the test.
  void Push(std::vector<engine::ChosenToken> tokens);  // Of Generate.
  void Finish(engine::FinishReason reason);            // Of Generate.
  void End(absl::Status status);                       // Of Generate, early.
  void Complete(engine::BatchResult result);           // Of a batch.
  int64_t pending_tokens() const;                      // Pushed and not drained.
  const engine::CallOptions& options() const { return options_; }
  // Waits until the transport has let go of the call; false after ten seconds.
  bool WaitForRelease() const;
  bool WaitForDrain() const;

  void CompleteFork();  // With the copies asked for.

  // For the handles.
  std::optional<engine::BatchResult> Take();
  std::optional<std::vector<engine::SessionInfo>> TakeCopies();
  std::optional<engine::GenerateChunk> Drain();
  void Release();
  uint64_t seed() const { return seed_; }

 private:
  void Ready();  // Under the lock, so that nobody is woken after Release().

  const engine::CallOptions options_;
  const uint64_t seed_;
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  engine::GenerateChunk chunk_;
  bool fresh_ = false;
  bool delivered_ = false;
  std::optional<engine::BatchResult> result_;
  std::vector<engine::SessionInfo> copies_;  // Of a fork.
  bool copied_ = false;
  bool released_ = false;
};

class FakeEngine final : public engine::Engine {
 public:
  // Batches are answered by this as they come in; null: they are held for the test.
  using Answer = std::function<engine::BatchResult(const engine::BatchRequest&)>;
  void set_answer(Answer answer);
  // Forks are held for the test, as calls.
  void set_hold_forks(bool hold) { hold_forks_ = hold; }
  // Calls from now on are refused with this, if it is not OK.
  void set_refusal(absl::Status status);
  // Waits for the n-th call (from 0); null after ten seconds.
  std::shared_ptr<FakeCall> WaitForCall(size_t n);
  std::shared_ptr<FakeCall> WaitForSeed(uint64_t seed);
  std::vector<engine::BatchRequest> batches() const;
  std::vector<engine::GenerateRequest> generates() const;
  int64_t max_live_batches() const;
  size_t num_calls() const;
  engine::EngineOptions& mutable_options() { return engine_options_; }
  // Every session is at this position; those listed are 0..n-1.
  void set_num_sessions(int64_t n) { num_sessions_ = n; }

  void Start() override {}
  absl::Status WarmUp() override { return absl::OkStatus(); }
  bool StepOnce() override { return false; }
  void BeginDrain() override;
  int64_t FinishDrain(int64_t) override { return 0; }
  void Stop() override {}
  absl::StatusOr<std::unique_ptr<engine::BatchCall>> Submit(engine::BatchRequest request,
                                                            engine::CallOptions options) override;
  absl::StatusOr<std::unique_ptr<engine::GenerateCall>> Generate(
      engine::GenerateRequest request, engine::CallOptions options) override;
  absl::StatusOr<engine::SessionInfo> CreateSession(std::optional<int64_t> ttl_ms) override;
  absl::StatusOr<engine::SessionInfo> GetSession(std::string_view id) override;
  std::vector<engine::SessionInfo> ListSessions(std::string_view after, int64_t limit,
                                                int64_t* total) override;
  absl::StatusOr<int64_t> DeleteSession(std::string_view id) override;
  absl::StatusOr<std::unique_ptr<engine::ForkCall>> ForkSession(
      engine::ForkRequest request, engine::CallOptions options) override;
  engine::Levels levels() const override { return {}; }
  const engine::EngineOptions& options() const override { return engine_options_; }

 private:
  std::shared_ptr<FakeCall> Add(engine::CallOptions options, uint64_t seed);

  engine::EngineOptions engine_options_;
  int64_t num_sessions_ = 0;
  std::atomic<bool> hold_forks_ = false;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  Answer answer_;
  absl::Status refusal_;
  std::vector<std::shared_ptr<FakeCall>> calls_;
  std::vector<engine::BatchRequest> batches_;
  std::vector<engine::GenerateRequest> generates_;
  int64_t live_batches_ = 0;
  int64_t max_live_batches_ = 0;

  friend class FakeBatchHandle;
};

engine::ChosenToken MakeToken(int32_t id, size_t num_logits = 0);

}  // namespace gdn::rpc

#endif  // SERVER_RPC_TESTING_FAKE_ENGINE_H_
