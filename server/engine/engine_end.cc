// How calls end and what becomes of their sessions.
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/engine/engine_impl.h"

namespace gdn::engine {
namespace {

CancelPhase PhaseOf(const Call& call) {
  if (!call.started) return CancelPhase::kQueued;
  if (call.stream != nullptr && call.stream->output_tokens > 0) return CancelPhase::kDecode;
  return CancelPhase::kPrefill;
}

}  // namespace

void EngineImpl::Expect(const absl::Status& status) {
  if (!status.ok() && broken_.ok()) broken_ = status;
}

void EngineImpl::UseSession(Session* session) {
  sessions_.BeginUse(session);
  Expect(pool_.Transfer(session->slot, SlotOwner::kLive, SlotOwner::kInFlight));
}

void EngineImpl::ReturnSession(Session* session) {
  Expect(pool_.Transfer(session->slot, SlotOwner::kInFlight, SlotOwner::kLive));
  sessions_.EndUse(session, clock_->NowNs(), clock_->UnixTimeMs());
  if (sessions_.next_expiry_ns() < sleeping_until_ns_) Wake();
}

void EngineImpl::GiveBack(Call* call, CallSequence* sequence) {
  Session* session = std::exchange(sequence->session, nullptr);
  if (session == nullptr) return;
  if (call->stream != nullptr && call->stream->throw_away != nullptr) {
    Expect(pool_.Release(session->slot, SlotOwner::kInFlight));
    call->stream->throw_away.reset();
    return;
  }
  ReturnSession(session);
}

void EngineImpl::Quarantine(Call* call, CallSequence* sequence) {
  Session* session = std::exchange(sequence->session, nullptr);
  // Its next user starts from zero, so the slot needs no cleaning.
  Expect(pool_.Release(session->slot, SlotOwner::kInFlight));
  if (call->stream != nullptr && call->stream->throw_away != nullptr) {
    call->stream->throw_away.reset();
  } else {
    sessions_.Remove(session);
  }
}

void EngineImpl::EndCall(Call* call, absl::Status status, Outbox* outbox) {
  scheduler_.Remove(&call->work);
  if (call->options.deadline_ns.has_value()) {
    deadlines_.erase({*call->options.deadline_ns, call});
  }
  for (CallSequence& sequence : call->sequences) GiveBack(call, &sequence);
  if (!call->started) --queued_calls_;
  queued_tokens_ -= std::exchange(call->waiting_tokens, 0);
  if (call->stream != nullptr) {
    --running_streams_;
    if (std::exchange(call->stream->paused, false)) --blocked_streams_;
  }
  call->status = std::move(status);
  call->timings.total_ns = clock_->NowNs() - call->admitted_ns;
  call->done = true;
  outbox->Add(Outbox::Event::kCallEnded, call->timings.total_ns,
              call->started ? std::optional(call->timings.compute_ns) : std::nullopt);
  const auto it = active_.find(call);
  outbox->Ready(std::move(it->second));
  active_.erase(it);
  if (active_.empty()) done_cv_.notify_all();
}

void EngineImpl::EndEarly(Call* call, absl::Status status, Outbox* outbox) {
  if (call->done) return;
  if (call->steps_in_flight > 0) {
    if (call->ending.has_value()) return;
    call->ending = std::move(status);
    scheduler_.Remove(&call->work);
    if (call->options.deadline_ns.has_value()) {
      deadlines_.erase({*call->options.deadline_ns, call});
    }
    return;
  }
  std::erase(nothing_to_run_, call);
  outbox->AddEnum(Outbox::Event::kCancelled, PhaseOf(*call));
  if (call->stream != nullptr) outbox->AddEnum(Outbox::Event::kStreamEnded, StreamEnd::kCancelled);
  EndCall(call, std::move(status), outbox);
}

int64_t EngineImpl::EndAll(const absl::Status& status, Outbox* outbox) {
  std::vector<Call*> calls;
  calls.reserve(active_.size());
  for (const auto& [call, owner] : active_) calls.push_back(call);
  // Each has a status of its own: ThreadSanitizer does not see the counts of shared ones.
  for (Call* call : calls) EndEarly(call, absl::Status(status.code(), status.message()), outbox);
  return static_cast<int64_t>(calls.size());
}

absl::Status EngineImpl::CheckInvariants() const {
  const Lock lock(mu_);
  if (!broken_.ok()) return broken_;
  if (absl::Status status = pool_.CheckInvariants(); !status.ok()) return status;
  if (!sessions_.CheckInvariants()) {
    return absl::InternalError("the session table and its expiry order disagree");
  }
  int64_t live = 0;
  int64_t in_flight = forking_slots_;
  sessions_.ForEach([&](const Session& session) { ++(session.in_use ? in_flight : live); });
  Levels levels;
  int64_t steps_in_flight = 0;  // Counted once for each call in them.
  for (int i = 0; i < steps_.size(); ++i) {
    steps_in_flight += static_cast<int64_t>(steps_[i].calls.size());
  }
  for (const auto& [call, owner] : active_) {
    steps_in_flight -= call->steps_in_flight;
    levels.queued_calls += call->started ? 0 : 1;
    levels.queued_tokens += call->waiting_tokens;
    if (call->stream == nullptr) continue;
    ++levels.running_streams;
    levels.blocked_streams += call->stream->paused ? 1 : 0;
    in_flight += call->stream->throw_away != nullptr ? 1 : 0;
  }
  if (live != pool_.count(SlotOwner::kLive) || in_flight != pool_.count(SlotOwner::kInFlight)) {
    return absl::InternalError(absl::StrCat(
        "sessions need ", live, " live slots and ", in_flight, " in flight, the pool has ",
        pool_.count(SlotOwner::kLive), " and ", pool_.count(SlotOwner::kInFlight)));
  }
  if (levels.queued_calls != queued_calls_ || levels.queued_tokens != queued_tokens_ ||
      levels.running_streams != running_streams_ || levels.blocked_streams != blocked_streams_) {
    return absl::InternalError("the levels do not match the calls");
  }
  if (steps_in_flight != 0) {
    return absl::InternalError("the steps in flight do not match the calls'");
  }
  if (active_.empty() && (!scheduler_.empty() || !deadlines_.empty())) {
    return absl::InternalError("work or a deadline is left of a call that has ended");
  }
  return absl::OkStatus();
}

}  // namespace gdn::engine
