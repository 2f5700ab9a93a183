#include "server/rpc/bench/echo_engine.h"

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <optional>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

namespace gdn::rpc {
namespace {

class EchoBatch final : public engine::BatchCall {
 public:
  explicit EchoBatch(engine::BatchResult result) : result_(std::move(result)) {}
  void Cancel() override {}
  std::optional<engine::BatchResult> Take() override {
    return std::exchange(result_, std::nullopt);
  }

 private:
  std::optional<engine::BatchResult> result_;
};

// What the thread and a handle share.
struct OneToken {
  std::mutex mutex;
  std::function<void()> on_ready;
  bool ready = false;
};

class OneTokenCall final : public engine::GenerateCall {
 public:
  explicit OneTokenCall(std::shared_ptr<OneToken> state) : state_(std::move(state)) {}
  ~OneTokenCall() override {
    std::lock_guard lock(state_->mutex);
    state_->on_ready = nullptr;
  }
  void Cancel() override {}
  std::optional<engine::GenerateChunk> Drain() override {
    std::lock_guard lock(state_->mutex);
    if (!std::exchange(state_->ready, false)) return std::nullopt;
    engine::GenerateChunk chunk;
    chunk.tokens.resize(1);
    chunk.done = true;
    return chunk;
  }
  uint64_t seed() const override { return 0; }

 private:
  const std::shared_ptr<OneToken> state_;
};

class EchoEngine final : public engine::Engine {
 public:
  EchoEngine() : thread_([this] { Loop(); }) {}
  ~EchoEngine() override { Stop(); }

  absl::StatusOr<std::unique_ptr<engine::BatchCall>> Submit(engine::BatchRequest request,
                                                            engine::CallOptions) override {
    engine::BatchResult result;
    for (engine::SequenceRequest& sequence : request.sequences) {
      result.sequences.emplace_back().session_id = std::move(sequence.session_id);
    }
    return std::make_unique<EchoBatch>(std::move(result));
  }
  absl::StatusOr<std::unique_ptr<engine::GenerateCall>> Generate(
      engine::GenerateRequest, engine::CallOptions options) override {
    auto state = std::make_shared<OneToken>();
    state->on_ready = std::move(options.on_ready);
    std::lock_guard lock(mutex_);
    queue_.push_back(state);
    changed_.notify_all();
    return std::make_unique<OneTokenCall>(std::move(state));
  }

  void Start() override {}
  absl::Status WarmUp() override { return absl::OkStatus(); }
  bool StepOnce() override { return false; }
  void BeginDrain() override {}
  int64_t FinishDrain(int64_t) override { return 0; }
  void Stop() override {
    {
      std::lock_guard lock(mutex_);
      stopping_ = true;
      changed_.notify_all();
    }
    if (thread_.joinable()) thread_.join();
  }
  absl::StatusOr<engine::SessionInfo> CreateSession(std::optional<int64_t>) override {
    return engine::SessionInfo{};
  }
  absl::StatusOr<engine::SessionInfo> GetSession(std::string_view) override {
    return engine::SessionInfo{};
  }
  std::vector<engine::SessionInfo> ListSessions(std::string_view, int64_t,
                                                int64_t* total) override {
    *total = 0;
    return {};
  }
  absl::StatusOr<int64_t> DeleteSession(std::string_view) override { return 0; }
  absl::StatusOr<std::unique_ptr<engine::ForkCall>> ForkSession(engine::ForkRequest,
                                                                engine::CallOptions) override {
    return absl::UnimplementedError("an echo has no sessions to fork");
  }
  engine::Levels levels() const override { return {}; }
  const engine::EngineOptions& options() const override { return options_; }

 private:
  void Loop() {
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
      if (stopping_) return;
      const std::shared_ptr<OneToken> state = std::move(queue_.front());
      queue_.pop_front();
      lock.unlock();
      {
        std::lock_guard state_lock(state->mutex);
        state->ready = true;
        if (state->on_ready) state->on_ready();
      }
      lock.lock();
    }
  }

  const engine::EngineOptions options_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::shared_ptr<OneToken>> queue_;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace

std::unique_ptr<engine::Engine> MakeEchoEngine() { return std::make_unique<EchoEngine>(); }

}  // namespace gdn::rpc
