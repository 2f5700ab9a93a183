// What callers hold of their calls.
#ifndef SERVER_ENGINE_CALL_HANDLES_H_
#define SERVER_ENGINE_CALL_HANDLES_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "server/engine/call.h"
#include "server/engine/engine.h"
#include "server/engine/engine_impl.h"

namespace gdn::engine {

class BatchHandle final : public BatchCall {
 public:
  BatchHandle(EngineImpl* engine, std::shared_ptr<Call> call)
      : engine_(engine), call_(std::move(call)) {}
  BatchHandle(const BatchHandle&) = delete;
  BatchHandle& operator=(const BatchHandle&) = delete;
  ~BatchHandle() override {
    call_->Detach();
    engine_->Cancel(call_.get());
  }

  void Cancel() override { engine_->Cancel(call_.get()); }
  std::optional<BatchResult> Take() override { return engine_->Take(call_.get()); }

 private:
  EngineImpl* const engine_;
  const std::shared_ptr<Call> call_;
};

class GenerateHandle final : public GenerateCall {
 public:
  GenerateHandle(EngineImpl* engine, std::shared_ptr<Call> call)
      : engine_(engine), call_(std::move(call)) {}
  GenerateHandle(const GenerateHandle&) = delete;
  GenerateHandle& operator=(const GenerateHandle&) = delete;
  ~GenerateHandle() override {
    call_->Detach();
    engine_->Cancel(call_.get());
  }

  void Cancel() override { engine_->Cancel(call_.get()); }
  std::optional<GenerateChunk> Drain() override { return engine_->Drain(call_.get()); }
  uint64_t seed() const override { return call_->stream->seed; }

 private:
  EngineImpl* const engine_;
  const std::shared_ptr<Call> call_;
};

class ForkHandle final : public ForkCall {
 public:
  ForkHandle(EngineImpl* engine, std::shared_ptr<Fork> fork)
      : engine_(engine), fork_(std::move(fork)) {}
  ForkHandle(const ForkHandle&) = delete;
  ForkHandle& operator=(const ForkHandle&) = delete;
  ~ForkHandle() override {
    fork_->Detach();
    engine_->Abandon(fork_.get());
  }

  std::optional<absl::StatusOr<std::vector<SessionInfo>>> Take() override {
    return engine_->Take(fork_.get());
  }

 private:
  EngineImpl* const engine_;
  const std::shared_ptr<Fork> fork_;
};

}  // namespace gdn::engine

#endif  // SERVER_ENGINE_CALL_HANDLES_H_
