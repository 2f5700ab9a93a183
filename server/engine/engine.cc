#include "server/engine/engine.h"

#include <algorithm>
#include <chrono>

#include "absl/strings/str_cat.h"
#include "server/engine/engine_impl.h"
#include "server/engine/validate.h"

namespace gdn::engine {
namespace {

// Bounds a wait, so that a clock near its end cannot overflow the condition variable's.
constexpr int64_t kMaxWaitNs = int64_t{3600} * 1'000'000'000;

std::chrono::nanoseconds WaitTime(int64_t due_ns, int64_t now_ns) {
  return std::chrono::nanoseconds(due_ns - now_ns < kMaxWaitNs ? due_ns - now_ns : kMaxWaitNs);
}

}  // namespace

absl::StatusOr<std::unique_ptr<Engine>> Engine::Create(EngineOptions options,
                                                       pipeline::Pipeline* pipeline, Clock* clock,
                                                       Observer* observer) {
  if (absl::Status status = ValidateOptions(options, pipeline->info()); !status.ok()) return status;
  return std::unique_ptr<Engine>(std::make_unique<EngineImpl>(options, pipeline, clock, observer));
}

EngineImpl::EngineImpl(EngineOptions options, pipeline::Pipeline* pipeline, Clock* clock,
                       Observer* observer)
    : options_(options),
      pipeline_(pipeline),
      clock_(clock),
      observer_(observer),
      pool_(pipeline->info().num_slots),
      scheduler_(
          {options.max_batch_rows, options.prefill_chunk_tokens, options.prefill_token_budget}),
      steps_(pipeline->info().max_in_flight) {
  Outbox outbox;
  Publish(&outbox);
}

EngineImpl::~EngineImpl() { Stop(); }

void EngineImpl::Start() {
  const Lock lock(mu_);
  if (thread_running_ || stopping_) return;
  thread_running_ = true;
  thread_ = std::thread([this] { Loop(); });
}

void EngineImpl::Loop() {
  Lock lock(mu_);
  while (!stopping_) {
    if (!Turn(lock)) WaitForWork(lock);
  }
}

bool EngineImpl::StepOnce() {
  Lock lock(mu_);
  return !stopping_ && Turn(lock);
}

bool EngineImpl::Turn(Lock& lock) {
  bool worked = RunForks(lock);
  worked |= EndOverdue(clock_->NowNs());
  worked |= EvictExpired(&outbox_);
  for (Call* call : nothing_to_run_) EndCall(call, absl::OkStatus(), &outbox_);
  worked |= !nothing_to_run_.empty();
  nothing_to_run_.clear();
  if (!outbox_.empty()) {  // Nobody waits for a step that is not theirs.
    lock.unlock();
    Publish(&outbox_);
    lock.lock();
  }
  if (RunStep(lock)) {
    worked = true;
    lock.unlock();
    Publish(&outbox_);
    lock.lock();
  }
  return worked;
}

void EngineImpl::Wake() {
  wake_ = true;
  wake_cv_.notify_one();
}

void EngineImpl::WaitForWork(Lock& lock) {
  int64_t due = sessions_.next_expiry_ns();
  if (!deadlines_.empty()) due = std::min(due, deadlines_.begin()->first);
  const int64_t now = clock_->NowNs();
  if (due <= now) return;
  sleeping_until_ns_ = due;
  const auto woken = [this] { return wake_ || stopping_; };
  if (due == kNever) {
    wake_cv_.wait(lock, woken);
  } else {
    wake_cv_.wait_for(lock, WaitTime(due, now), woken);
  }
  sleeping_until_ns_ = kNever;
  wake_ = false;
}

bool EngineImpl::EndOverdue(int64_t now_ns) {
  bool worked = false;
  while (!deadlines_.empty() && deadlines_.begin()->first <= now_ns) {
    Call* call = deadlines_.begin()->second;
    EndEarly(call,
             absl::DeadlineExceededError(
                 call->started ? "the deadline passed while the call was running; its sessions are "
                                 "at the positions GetSession reports"
                               : "the deadline passed while the call was queued; allow more time, "
                                 "or retry when the server is less busy"),
             &outbox_);
    worked = true;
  }
  return worked;
}

bool EngineImpl::EvictExpired(Outbox* outbox) {
  if (sessions_.next_expiry_ns() == kNever) return false;
  const int64_t now = clock_->NowNs();
  bool evicted = false;
  while (Session* session = sessions_.Expired(now)) {
    Expect(pool_.Release(session->slot, SlotOwner::kLive));
    sessions_.Remove(session);
    outbox->AddEnum(Outbox::Event::kEvicted, EvictionReason::kTtl);
    evicted = true;
  }
  return evicted;
}

void EngineImpl::AcquirePipeline(Lock& lock) {
  done_cv_.wait(lock, [this] { return !pipeline_busy_; });
  pipeline_busy_ = true;
}

void EngineImpl::ReleasePipeline() {
  pipeline_busy_ = false;
  done_cv_.notify_all();
}

void EngineImpl::BeginDrain() {
  const Lock lock(mu_);
  draining_ = true;
}

int64_t EngineImpl::FinishDrain(int64_t deadline_ns) {
  Lock lock(mu_);
  draining_ = true;
  while (!(active_.empty() && forks_.empty()) && !stopping_) {
    const int64_t now = clock_->NowNs();
    if (now >= deadline_ns) break;
    if (!thread_running_ && Turn(lock)) continue;
    done_cv_.wait_for(lock, WaitTime(deadline_ns, now));
  }
  if (!thread_running_ && !stopping_) Settle(lock);
  Outbox outbox;
  const int64_t ended = EndAll(
      absl::UnavailableError("the server is shutting down; retry on another server"), &outbox);
  lock.unlock();
  Publish(&outbox);
  return ended;
}

void EngineImpl::Stop() {
  const std::lock_guard<std::mutex> stop_lock(stop_mu_);
  {
    const Lock lock(mu_);
    draining_ = true;
    stopping_ = true;
    wake_cv_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
  Outbox outbox;
  {
    Lock lock(mu_);
    thread_running_ = false;
    Settle(lock);
    nothing_to_run_.clear();
    EndAll(absl::UnavailableError("the server has stopped; retry on another server"), &outbox);
    for (; !forks_.empty(); forks_.pop_front()) {
      EndFork(forks_.front(),
              absl::UnavailableError("the server has stopped; retry on another server"), &outbox);
    }
    done_cv_.notify_all();
  }
  Publish(&outbox);
}

Levels EngineImpl::SnapshotLevels() const {
  Levels levels;
  levels.queued_calls = queued_calls_;
  levels.queued_tokens = queued_tokens_;
  levels.running_streams = running_streams_;
  levels.blocked_streams = blocked_streams_;
  levels.live_sessions = sessions_.size();
  levels.slots_free = pool_.count(SlotOwner::kFree);
  levels.slots_live = pool_.count(SlotOwner::kLive);
  levels.slots_in_flight = pool_.count(SlotOwner::kInFlight);
  levels.slots_reserved = pool_.count(SlotOwner::kWarmUp);
  return levels;
}

Levels EngineImpl::levels() const {
  const Lock lock(mu_);
  return SnapshotLevels();
}

void EngineImpl::Publish(Outbox* outbox) {
  outbox->Send(observer_);
  const std::lock_guard<std::mutex> order(levels_mu_);
  observer_->OnLevels(levels());
}

}  // namespace gdn::engine
