#include "server/rpc/testing/fake_engine.h"

#include <algorithm>
#include <cstdio>
#include <iterator>
#include <utility>

#include "server/engine/status_payload.h"

namespace gdn::rpc {
namespace {

constexpr std::chrono::seconds kPatience(10);

class GenerateHandle final : public engine::GenerateCall {
 public:
  explicit GenerateHandle(std::shared_ptr<FakeCall> call) : call_(std::move(call)) {}
  ~GenerateHandle() override { call_->Release(); }
  void Cancel() override { call_->End(absl::CancelledError()); }
  std::optional<engine::GenerateChunk> Drain() override { return call_->Drain(); }
  uint64_t seed() const override { return call_->seed(); }

 private:
  const std::shared_ptr<FakeCall> call_;
};

class ForkHandle final : public engine::ForkCall {
 public:
  explicit ForkHandle(std::shared_ptr<FakeCall> call) : call_(std::move(call)) {}
  ~ForkHandle() override { call_->Release(); }
  std::optional<absl::StatusOr<std::vector<engine::SessionInfo>>> Take() override {
    return call_->TakeCopies();
  }

 private:
  const std::shared_ptr<FakeCall> call_;
};

engine::SessionInfo Session(int64_t number) {
  char id[32];
  std::snprintf(id, sizeof(id), "s%08lld", static_cast<long long>(number));
  engine::SessionInfo info;
  info.id = id;
  info.position = number;
  info.token_hash = ~uint64_t{0};
  info.create_time_ms = 1;
  info.last_use_time_ms = 2;
  info.ttl_ms = 3;
  info.state_bytes = 4;
  return info;
}

}  // namespace

class FakeBatchHandle final : public engine::BatchCall {
 public:
  FakeBatchHandle(FakeEngine* engine, std::shared_ptr<FakeCall> call)
      : engine_(engine), call_(std::move(call)) {}
  ~FakeBatchHandle() override {
    {
      std::lock_guard lock(engine_->mutex_);
      --engine_->live_batches_;
    }
    call_->Release();
  }
  void Cancel() override {}
  std::optional<engine::BatchResult> Take() override { return call_->Take(); }

 private:
  FakeEngine* const engine_;
  const std::shared_ptr<FakeCall> call_;
};

void FakeCall::Ready() {
  if (!released_) options_.on_ready();
}

void FakeCall::Push(std::vector<engine::ChosenToken> tokens) {
  std::lock_guard lock(mutex_);
  chunk_.position += static_cast<int64_t>(tokens.size());
  chunk_.output_tokens += static_cast<int64_t>(tokens.size());
  std::move(tokens.begin(), tokens.end(), std::back_inserter(chunk_.tokens));
  fresh_ = true;
  Ready();
}

void FakeCall::Finish(engine::FinishReason reason) {
  std::lock_guard lock(mutex_);
  chunk_.done = true;
  chunk_.finish_reason = reason;
  chunk_.input_tokens = 7;
  chunk_.time_to_first_token_ns = 11;
  fresh_ = true;
  Ready();
}

void FakeCall::End(absl::Status status) {
  std::lock_guard lock(mutex_);
  chunk_.done = true;
  chunk_.status = std::move(status);
  fresh_ = true;
  Ready();
}

void FakeCall::Complete(engine::BatchResult result) {
  std::lock_guard lock(mutex_);
  result_ = std::move(result);
  Ready();
}

void FakeCall::CompleteFork() {
  std::lock_guard lock(mutex_);
  copied_ = true;
  Ready();
}

int64_t FakeCall::pending_tokens() const {
  std::lock_guard lock(mutex_);
  return std::ssize(chunk_.tokens);
}

bool FakeCall::WaitForRelease() const {
  std::unique_lock lock(mutex_);
  return changed_.wait_for(lock, kPatience, [this] { return released_; });
}

bool FakeCall::WaitForDrain() const {
  std::unique_lock lock(mutex_);
  return changed_.wait_for(lock, kPatience, [this] { return !fresh_; });
}

std::optional<engine::BatchResult> FakeCall::Take() {
  std::lock_guard lock(mutex_);
  return std::exchange(result_, std::nullopt);
}

std::optional<std::vector<engine::SessionInfo>> FakeCall::TakeCopies() {
  std::lock_guard lock(mutex_);
  if (!std::exchange(copied_, false)) return std::nullopt;
  return copies_;
}

std::optional<engine::GenerateChunk> FakeCall::Drain() {
  std::lock_guard lock(mutex_);
  if (!fresh_ || delivered_) return std::nullopt;
  fresh_ = false;
  delivered_ = chunk_.done;
  engine::GenerateChunk chunk = chunk_;
  chunk_.tokens.clear();
  changed_.notify_all();
  return chunk;
}

void FakeCall::Release() {
  std::lock_guard lock(mutex_);
  released_ = true;
  changed_.notify_all();
}

void FakeEngine::set_answer(Answer answer) {
  std::lock_guard lock(mutex_);
  answer_ = std::move(answer);
}

void FakeEngine::set_refusal(absl::Status status) {
  std::lock_guard lock(mutex_);
  refusal_ = std::move(status);
}

std::shared_ptr<FakeCall> FakeEngine::WaitForCall(size_t n) {
  std::unique_lock lock(mutex_);
  const bool there = changed_.wait_for(lock, kPatience, [&] { return calls_.size() > n; });
  return there ? calls_[n] : nullptr;
}

std::shared_ptr<FakeCall> FakeEngine::WaitForSeed(uint64_t seed) {
  std::shared_ptr<FakeCall> found;
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, kPatience, [&] {
    for (const auto& call : calls_) {
      if (call->seed() == seed) found = call;
    }
    return found != nullptr;
  });
  return found;
}

std::vector<engine::BatchRequest> FakeEngine::batches() const {
  std::lock_guard lock(mutex_);
  return batches_;
}

std::vector<engine::GenerateRequest> FakeEngine::generates() const {
  std::lock_guard lock(mutex_);
  return generates_;
}

int64_t FakeEngine::max_live_batches() const {
  std::lock_guard lock(mutex_);
  return max_live_batches_;
}

size_t FakeEngine::num_calls() const {
  std::lock_guard lock(mutex_);
  return calls_.size();
}

void FakeEngine::BeginDrain() { set_refusal(absl::UnavailableError("draining")); }

std::shared_ptr<FakeCall> FakeEngine::Add(engine::CallOptions options, uint64_t seed) {
  auto call = std::make_shared<FakeCall>(std::move(options), seed);
  calls_.push_back(call);
  changed_.notify_all();
  return call;
}

absl::StatusOr<std::unique_ptr<engine::BatchCall>> FakeEngine::Submit(engine::BatchRequest request,
                                                                      engine::CallOptions options) {
  std::shared_ptr<FakeCall> call;
  Answer answer;
  {
    std::lock_guard lock(mutex_);
    if (!refusal_.ok()) return refusal_;
    call = Add(std::move(options), 0);
    batches_.push_back(request);
    max_live_batches_ = std::max(max_live_batches_, ++live_batches_);
    answer = answer_;
  }
  if (answer) call->Complete(answer(request));
  return std::make_unique<FakeBatchHandle>(this, std::move(call));
}

absl::StatusOr<std::unique_ptr<engine::GenerateCall>> FakeEngine::Generate(
    engine::GenerateRequest request, engine::CallOptions options) {
  std::lock_guard lock(mutex_);
  if (!refusal_.ok()) return refusal_;
  const uint64_t seed = request.sampling.seed.value_or(1234);
  generates_.push_back(std::move(request));
  return std::make_unique<GenerateHandle>(Add(std::move(options), seed));
}

absl::StatusOr<engine::SessionInfo> FakeEngine::CreateSession(std::optional<int64_t> ttl_ms) {
  std::lock_guard lock(mutex_);
  if (!refusal_.ok()) return refusal_;
  engine::SessionInfo info = Session(0);
  info.ttl_ms = ttl_ms.value_or(-1);
  return info;
}

absl::StatusOr<engine::SessionInfo> FakeEngine::GetSession(std::string_view id) {
  engine::SessionInfo info = Session(0);
  if (id != info.id) return absl::NotFoundError("no such session");
  return info;
}

std::vector<engine::SessionInfo> FakeEngine::ListSessions(std::string_view after, int64_t limit,
                                                          int64_t* total) {
  *total = num_sessions_;
  std::vector<engine::SessionInfo> sessions;
  for (int64_t i = 0; i < num_sessions_ && std::ssize(sessions) < limit; ++i) {
    if (Session(i).id > after) sessions.push_back(Session(i));
  }
  return sessions;
}

absl::StatusOr<int64_t> FakeEngine::DeleteSession(std::string_view id) {
  if (id != Session(0).id) return absl::NotFoundError("no such session");
  return 5;
}

absl::StatusOr<std::unique_ptr<engine::ForkCall>> FakeEngine::ForkSession(
    engine::ForkRequest request, engine::CallOptions options) {
  if (request.expected_position.value_or(0) != 0) {
    return engine::PositionMismatchError({request.session_id, *request.expected_position, 0});
  }
  std::vector<engine::SessionInfo> copies;
  for (int64_t i = 1; i <= request.count; ++i) {
    copies.push_back(Session(i));
    copies.back().parent_id = request.session_id;
    copies.back().ttl_ms = request.ttl_ms.value_or(-1);
  }
  auto call = std::make_shared<FakeCall>(std::move(options), std::move(copies));
  {
    std::lock_guard lock(mutex_);
    calls_.push_back(call);
    changed_.notify_all();
  }
  if (!hold_forks_) call->CompleteFork();
  return std::make_unique<ForkHandle>(std::move(call));
}

engine::ChosenToken MakeToken(int32_t id, size_t num_logits) {
  engine::ChosenToken token;
  token.id = id;
  token.logprob = -0.5f;
  token.logits.assign(num_logits, static_cast<float>(id));
  return token;
}

}  // namespace gdn::rpc
