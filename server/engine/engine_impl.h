// File: engine_impl.h
//
// One lock, mu_, covers all state; it is not held while the pipeline runs, while outputs are
// copied, or while anybody is told anything. The pipeline is used by one thread at a time: the
// engine's, or without Start() whoever holds the pipeline_busy_ mark.
//
// A step is launched and completed; with a pipeline that takes two batches, the next one is
// launched in between, so that the device never waits for the host (see step.h).
//
// Lock order: stop_mu_, levels_mu_, mu_. A call's callback_mu is taken with none of them held.
#ifndef SERVER_ENGINE_ENGINE_IMPL_H_
#define SERVER_ENGINE_ENGINE_IMPL_H_

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "server/engine/call.h"
#include "server/engine/engine.h"
#include "server/engine/fork.h"
#include "server/engine/outbox.h"
#include "server/engine/scheduler.h"
#include "server/engine/session_table.h"
#include "server/engine/slot_pool.h"
#include "server/engine/step.h"

namespace gdn::engine {

class EngineImpl final : public Engine {
 public:
  EngineImpl(EngineOptions options, pipeline::Pipeline* pipeline, Clock* clock, Observer* observer);
  ~EngineImpl() override;

  void Start() override;
  absl::Status WarmUp() override;
  bool StepOnce() override;
  void BeginDrain() override;
  int64_t FinishDrain(int64_t deadline_ns) override;
  void Stop() override;

  absl::StatusOr<std::unique_ptr<BatchCall>> Submit(BatchRequest request,
                                                    CallOptions options) override;
  absl::StatusOr<std::unique_ptr<GenerateCall>> Generate(GenerateRequest request,
                                                         CallOptions options) override;

  absl::StatusOr<SessionInfo> CreateSession(std::optional<int64_t> ttl_ms) override;
  absl::StatusOr<SessionInfo> GetSession(std::string_view id) override;
  std::vector<SessionInfo> ListSessions(std::string_view after, int64_t limit,
                                        int64_t* total) override;
  absl::StatusOr<int64_t> DeleteSession(std::string_view id) override;
  absl::StatusOr<std::unique_ptr<ForkCall>> ForkSession(ForkRequest request,
                                                        CallOptions options) override;

  Levels levels() const override;
  const EngineOptions& options() const override { return options_; }

  // For the handles.
  void Cancel(Call* call);
  std::optional<BatchResult> Take(Call* call);
  std::optional<GenerateChunk> Drain(Call* call);
  std::optional<absl::StatusOr<std::vector<SessionInfo>>> Take(Fork* fork);
  void Abandon(Fork* fork);

  // INTERNAL names what does not add up: slots, sessions, counters. For tests, between steps.
  absl::Status CheckInvariants() const;

 private:
  using Lock = std::unique_lock<std::mutex>;

  // engine_admit.cc. All with mu_ held.
  absl::Status CheckAccepting(Outbox* outbox);
  absl::Status CheckDeadline(const CallOptions& options) const;
  absl::Status CheckRoomAndDeadline(const CallOptions& options, Outbox* outbox);
  absl::Status NoSlotError(int64_t needed, Outbox* outbox);
  static absl::Status UnknownSession(const std::string& field, std::string_view id);
  absl::StatusOr<Session*> FindIdle(std::string_view id, std::optional<int64_t> expected_position,
                                    const std::string& field);
  absl::Status AdmitBatch(const std::shared_ptr<Call>& call, const BatchRequest& request,
                          Outbox* outbox);
  absl::Status AdmitGenerate(const std::shared_ptr<Call>& call, const GenerateRequest& request,
                             Outbox* outbox);
  void Activate(const std::shared_ptr<Call>& call);

  // engine_fork.cc. With mu_ held, which is released while the pipeline copies.
  absl::Status AdmitFork(const std::shared_ptr<Fork>& fork, const ForkRequest& request,
                         Outbox* outbox);
  bool RunForks(Lock& lock);
  absl::Status Copy(Lock& lock, const Fork& fork);
  void EndFork(const std::shared_ptr<Fork>& fork, absl::Status status, Outbox* outbox);
  void FreeCopies(Fork* fork);

  // engine_sessions.cc
  Session* AddSession(SlotHandle slot, int64_t ttl_ms);  // With mu_ held.
  SessionInfo Describe(const Session& session) const;

  // engine_end.cc. All with mu_ held.
  void UseSession(Session* session);
  void ReturnSession(Session* session);
  void GiveBack(Call* call, CallSequence* sequence);
  void Quarantine(Call* call, CallSequence* sequence);
  // Ends a call that has no step in flight.
  void EndCall(Call* call, absl::Status status, Outbox* outbox);
  // The same before its time; a call with steps in flight ends after them.
  void EndEarly(Call* call, absl::Status status, Outbox* outbox);
  int64_t EndAll(const absl::Status& status, Outbox* outbox);
  // Records a broken invariant instead of dying of it; CheckInvariants reports it.
  void Expect(const absl::Status& status);

  // engine_launch.cc. With mu_ held, which is released while the pipeline works.
  bool RunStep(Lock& lock);
  bool LaunchStep(Lock& lock);
  void Prepare(const BatchItem& item, Step* step);
  bool Chains(const CallSequence& sequence) const;
  void QueueDecode(Call* call);

  // engine_complete.cc. With mu_ held, which is released while the pipeline works.
  bool CompleteStep(Lock& lock);
  // Completes what is in flight, and launches nothing.
  void Settle(Lock& lock);
  void Stage(const BatchItem& item, const pipeline::SequenceInput& input,
             const pipeline::SequenceOutput* output, const absl::Status& step_status);
  void Apply(const BatchItem& item, int64_t now_ns);
  void ApplyRow(Call* call, CallSequence* sequence, const BatchItem& item, int64_t now_ns);
  void ApplyFailure(Call* call, CallSequence* sequence, const BatchItem& item);
  void ApplyToken(Call* call, CallSequence* sequence, int64_t now_ns);
  void Resume(Stream* stream, int64_t now_ns, Outbox* outbox);
  void AfterStep(Call* call);

  // engine.cc
  void Loop();
  bool Turn(Lock& lock);
  void WaitForWork(Lock& lock);
  void Wake();
  bool EndOverdue(int64_t now_ns);
  // Also on any caller's thread.
  bool EvictExpired(Outbox* outbox);
  void AcquirePipeline(Lock& lock);
  void ReleasePipeline();
  Levels SnapshotLevels() const;
  // Sends what the outbox holds, and the levels. Without mu_.
  void Publish(Outbox* outbox);
  static Call* Owner(const BatchItem& item) { return static_cast<Call*>(item.work->owner); }
  static CallSequence& SequenceOf(const BatchItem& item) {
    return Owner(item)->sequences[static_cast<size_t>(item.sequence)];
  }

  const EngineOptions options_;
  pipeline::Pipeline* const pipeline_;
  Clock* const clock_;
  Observer* const observer_;

  std::mutex stop_mu_;    // Held by Stop.
  std::mutex levels_mu_;  // Makes levels arrive in the order they were taken.

  mutable std::mutex mu_;
  std::condition_variable wake_cv_;  // The engine thread sleeps here.
  std::condition_variable done_cv_;  // No call or fork is left, or the pipeline is free.
  bool wake_ = false;
  bool draining_ = false;
  bool stopping_ = false;
  bool thread_running_ = false;
  bool pipeline_busy_ = false;
  int64_t sleeping_until_ns_ = kNever;
  std::thread thread_;

  SlotPool pool_;
  SessionTable sessions_;
  Scheduler scheduler_;
  std::unordered_map<Call*, std::shared_ptr<Call>> active_;
  std::set<std::pair<int64_t, Call*>> deadlines_;
  std::vector<Call*>
      nothing_to_run_;  // Admitted with empty inputs only; they end in the next turn.
  std::deque<std::shared_ptr<Fork>> forks_;  // Waiting for the engine thread.
  int64_t queued_calls_ = 0;
  int64_t queued_tokens_ = 0;
  int64_t running_streams_ = 0;
  int64_t blocked_streams_ = 0;
  int64_t forking_slots_ = 0;  // In flight, of sessions that do not exist yet.
  absl::Status broken_;        // The first broken invariant.

  StepQueue steps_;  // In flight.

  // The engine thread's own.
  Outbox outbox_;
  int64_t last_step_end_ns_ = 0;
};

}  // namespace gdn::engine

#endif  // SERVER_ENGINE_ENGINE_IMPL_H_
