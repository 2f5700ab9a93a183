// File: engine.h
//
// The engine owns the sessions, their state slots, and the thread that steps the pipeline: admit,
// pick decode rows and a budget of prefill tokens, run them as one batch, hand the results out.
//
// Thread-safety: all public methods may be called from any thread, except where they say otherwise.
// Ownership: the pipeline, clock and observer are borrowed and must outlive the engine, and the
// engine must outlive the handles of its calls. Errors carry machine-readable payloads (see
// status_payload.h): the true position of a mismatch, the delay after which a retry makes sense.
#ifndef SERVER_ENGINE_ENGINE_H_
#define SERVER_ENGINE_ENGINE_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/engine/clock.h"
#include "server/engine/observer.h"
#include "server/engine/types.h"
#include "server/pipeline/pipeline.h"

namespace gdn::engine {

struct EngineOptions {
  int64_t max_batch_sequences = 256;   // Sequences in one Prefill or Step call.
  int64_t max_batch_rows = 256;        // Sequences the engine runs in one step.
  int64_t max_input_tokens = 1 << 20;  // Of one sequence in one call.
  int64_t max_step_tokens = 8;         // Of one sequence in one Step call.
  int64_t max_new_tokens = 1 << 20;
  int64_t max_output_bytes = 48 << 20;  // Logits and hidden states of one call.
  int64_t max_top_logprobs = 20;
  int64_t max_queued_calls = 1024;  // Admitted and unfinished, beyond which calls are refused.
  // An input is cut at multiples of this many tokens from its own start, and a step takes at most
  // one such chunk of a sequence: where a prompt is cut, and so its bits, never depends on who else
  // is being served.
  int64_t prefill_chunk_tokens = 256;
  // Prefill tokens in one step: as many whole chunks as fit, and at least one.
  int64_t prefill_token_budget = 512;
  int64_t stream_buffer_tokens = 64;  // Undelivered tokens at which a stream pauses.
  int64_t default_ttl_ms = 600'000;
  int64_t retry_delay_ms = 100;  // Advised with RESOURCE_EXHAUSTED.
};

// Per call: when to give up, and whom to wake. on_ready is called from the engine thread (or from
// the thread that cancels) whenever Drain or Take would yield something new; it must only wake
// somebody up, once per step at most. It may be called before Submit or Generate has returned. It
// is not called any more once the handle has been destroyed: the destructor waits for an on_ready
// that is running, so do not destroy a handle while holding a lock that on_ready takes.
struct CallOptions {
  std::optional<int64_t> deadline_ns;  // On the engine's clock.
  std::function<void()> on_ready;
};

// A running Prefill or Step. Destroying it cancels the call.
class BatchCall {
 public:
  virtual ~BatchCall() = default;
  virtual void Cancel() = 0;
  // The result, once; nullopt while it is not there yet.
  virtual std::optional<BatchResult> Take() = 0;
};

// A running Generate. Destroying it cancels the call and frees a throw-away session.
class GenerateCall {
 public:
  virtual ~GenerateCall() = default;
  virtual void Cancel() = 0;
  // Everything generated since the last call; nullopt if nothing is new. Resumes a paused stream.
  // After a chunk with done set it yields nullopt for ever.
  virtual std::optional<GenerateChunk> Drain() = 0;
  // The seed in use, given or drawn.
  virtual uint64_t seed() const = 0;
};

// A running ForkSession: the engine copies the state between two steps. Destroying it before the
// result is taken cancels the fork.
class ForkCall {
 public:
  virtual ~ForkCall() = default;
  // The copies, which exist from now on, or why there are none; once. nullopt while it is not
  // known.
  virtual std::optional<absl::StatusOr<std::vector<SessionInfo>>> Take() = 0;
};

class Engine {
 public:
  // INVALID_ARGUMENT names the option that is out of range or the two that conflict.
  static absl::StatusOr<std::unique_ptr<Engine>> Create(EngineOptions options,
                                                        pipeline::Pipeline* pipeline, Clock* clock,
                                                        Observer* observer);
  virtual ~Engine() = default;

  // Starts the engine thread. Without it a test drives StepOnce() itself.
  virtual void Start() = 0;
  // Runs a small batch on the reserved slot, so that the first request finds everything ready.
  // Before Start().
  virtual absl::Status WarmUp() = 0;
  // One turn of the loop, on the calling thread; false if there was nothing to do. Not with
  // Start().
  virtual bool StepOnce() = 0;
  // From now on calls are refused with UNAVAILABLE; running ones go on.
  virtual void BeginDrain() = 0;
  // Waits until all calls are done or the deadline passes, then ends the rest with UNAVAILABLE.
  // Returns the number of calls that were ended.
  virtual int64_t FinishDrain(int64_t deadline_ns) = 0;
  // Stops and joins the engine thread; calls that still run end with UNAVAILABLE. Idempotent.
  virtual void Stop() = 0;

  virtual absl::StatusOr<std::unique_ptr<BatchCall>> Submit(BatchRequest request,
                                                            CallOptions options) = 0;
  virtual absl::StatusOr<std::unique_ptr<GenerateCall>> Generate(GenerateRequest request,
                                                                 CallOptions options) = 0;

  virtual absl::StatusOr<SessionInfo> CreateSession(std::optional<int64_t> ttl_ms) = 0;
  virtual absl::StatusOr<SessionInfo> GetSession(std::string_view id) = 0;
  // Sessions with id > `after`, at most `limit`, in order; `total` is the number alive.
  virtual std::vector<SessionInfo> ListSessions(std::string_view after, int64_t limit,
                                                int64_t* total) = 0;
  virtual absl::StatusOr<int64_t> DeleteSession(std::string_view id) = 0;  // Its position.
  virtual absl::StatusOr<std::unique_ptr<ForkCall>> ForkSession(ForkRequest request,
                                                                CallOptions options) = 0;

  virtual Levels levels() const = 0;
  virtual const EngineOptions& options() const = 0;
};

}  // namespace gdn::engine

#endif  // SERVER_ENGINE_ENGINE_H_
