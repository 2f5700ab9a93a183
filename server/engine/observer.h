// File: observer.h
//
// What the engine tells whoever measures it. Calls come from the engine thread unless marked, are
// short, and never block. The default does nothing.
#ifndef SERVER_ENGINE_OBSERVER_H_
#define SERVER_ENGINE_OBSERVER_H_

#include <cstdint>
#include <optional>

#include "server/pipeline/pipeline.h"

namespace gdn::engine {

enum class EvictionReason { kTtl };
enum class RejectionReason { kQueueFull, kNoSlot, kDraining };
enum class CancelPhase { kQueued, kPrefill, kDecode };
enum class FinishReason { kStop, kLength };
// What became of an admitted Generate call. The first two are those of FinishReason.
enum class StreamEnd { kStop, kLength, kCancelled, kFailed };

struct StepStats {
  pipeline::Phase phase = pipeline::Phase::kDecode;
  int64_t duration_ns = 0;
  int64_t prefill_tokens = 0;
  int64_t decode_tokens = 0;
  int64_t prefill_sequences = 0;
  int64_t decode_sequences = 0;
};

// A snapshot of levels, sent after every change that matters and at least once a step.
struct Levels {
  int64_t queued_calls = 0;     // Admitted, and no step has worked for them yet.
  int64_t queued_tokens = 0;    // Input tokens of admitted calls that have not run yet.
  int64_t running_streams = 0;  // Generate calls admitted and not finished.
  int64_t blocked_streams = 0;  // Of those, paused because their reader lags.
  int64_t live_sessions = 0;
  int64_t slots_free = 0;
  int64_t slots_live = 0;       // Idle sessions' slots.
  int64_t slots_in_flight = 0;  // Slots of sessions in a running call.
  int64_t slots_reserved = 0;   // The warm-up slot.
};

class Observer {
 public:
  virtual ~Observer() = default;
  virtual void OnStep(const StepStats&) {}
  virtual void OnLevels(const Levels&) {}  // Any thread.
  virtual void OnQueueTime(int64_t /*ns*/) {}
  virtual void OnFirstToken(int64_t /*ns*/) {}  // Of a Generate call, from admission.
  virtual void OnInterToken(int64_t /*ns*/) {}  // Between tokens of one Generate call.
  virtual void OnStreamStarted() {}             // A Generate call was admitted. Any thread.
  virtual void OnStreamEnded(StreamEnd) {}      // Once for each that was. Any thread.
  // Once for each admitted call as it ends, what its last reply says. `compute_ns` is absent if no
  // step has worked for it. Any thread.
  virtual void OnCallEnded(int64_t /*total_ns*/, std::optional<int64_t> /*compute_ns*/) {}
  // A call ended before its end: by its caller, its deadline, or the stop of the engine. Any
  // thread.
  virtual void OnCancelled(CancelPhase) {}
  virtual void OnRejected(RejectionReason) {}  // Any thread.
  virtual void OnEvicted(EvictionReason) {}    // Any thread.
  virtual void OnNonFinite() {}                // A session was quarantined for NaN or infinity.
  virtual void OnStepFailed() {}               // One was quarantined because its step failed.
  // A paused stream went on after this long. Any thread.
  virtual void OnStreamBlocked(int64_t /*ns*/) {}
};

}  // namespace gdn::engine

#endif  // SERVER_ENGINE_OBSERVER_H_
