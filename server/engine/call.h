// File: call.h
//
// The state of one running call. A Prefill or Step call has one CallSequence per session; a
// Generate call has one, and a Stream.
//
// Who may touch what: everything is under the engine's lock, except that while the call has steps
// in flight the engine thread alone owns the sequences' inputs, results and staged outputs, so that
// it can copy outputs without the lock. Whoever wants the call to end meanwhile leaves a status in
// `ending`: nothing more is launched for it, and it ends with the last of its steps.
#ifndef SERVER_ENGINE_CALL_H_
#define SERVER_ENGINE_CALL_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "server/engine/engine.h"
#include "server/engine/scheduler.h"
#include "server/engine/session_table.h"
#include "server/engine/token_history.h"
#include "server/engine/types.h"
#include "server/engine/waiter.h"

namespace gdn::engine {

struct CallSequence {
  Session* session = nullptr;  // nullptr once the call has given it back.
  Input input;
  int64_t length = 0;    // Of the input.
  int64_t launched = 0;  // Of the input: what the steps launched so far take.
  int64_t consumed = 0;  // Of the input: what the completed ones have taken.
  OutputSelection output;
  pipeline::SampleSpec sample;
  TokenHistory history;
  SequenceResult result;         // Of a batch call.
  int64_t rows_in_flight = 0;    // In steps that have been launched and not completed.
  int64_t tokens_in_flight = 0;  // Of these rows: how far the slot is ahead of the session.
  bool lost = false;  // A row failed, for the reason in result.status; so do those in flight.
  bool done = false;

  // What the step being completed has yielded, until it is applied under the lock.
  uint64_t staged_hash = 0;
  absl::Status staged_status;
  bool staged_non_finite = false;  // Why, if staged_status is not OK.
  std::optional<ChosenToken> staged_token;
};

// The part of a Generate call that comes after its input.
struct Stream {
  std::unique_ptr<Session> throw_away;  // Absent for a named session.
  uint64_t seed = 0;
  std::vector<int32_t> stop_ids;  // Sorted.
  bool return_logits = false;
  int64_t buffer_limit = 0;

  // With two steps in flight a stop token is found when the step after it has been launched. For a
  // named session that step is the one that feeds it the last token; for a throw-away one it is
  // waste. Either way what it chose is discarded.
  int64_t total_tokens = 0;   // To be streamed: max_new_tokens, fewer from a stop token on.
  int64_t output_tokens = 0;  // Chosen, as far as completed steps tell.
  int64_t fed_tokens = 0;     // Of those chosen: rows launched to feed them back.
  int32_t last_token = -1;    // Number output_tokens - 1.
  int64_t chosen_row = -1;    // Of the newest step with a row that chooses: which row.
  FinishReason finish_reason = FinishReason::kLength;
  int64_t position = 0;  // Of the session; kept here because the session may be gone.

  std::vector<ChosenToken> buffer;  // Not drained yet.
  bool paused = false;
  int64_t paused_since_ns = 0;
  int64_t first_token_ns = 0;
  int64_t last_token_ns = 0;

  bool complete() const { return output_tokens == total_tokens; }
  // A named session is fed the last token too, so that it holds all that was streamed.
  int64_t tokens_to_feed() const { return total_tokens - (throw_away != nullptr ? 1 : 0); }
};

enum class CallType { kPrefill, kStep, kGenerate };

struct Call : Waiter, std::enable_shared_from_this<Call> {
  CallType type = CallType::kPrefill;
  std::vector<CallSequence> sequences;  // Not resized after admission: steps point into it.
  std::unique_ptr<Stream> stream;       // Of a Generate call.
  Work work;

  bool started = false;  // A step has worked for it.
  bool done = false;
  int64_t steps_in_flight = 0;         // Launched with rows of this call, and not completed.
  uint64_t newest_step = 0;            // The number of the last of them.
  bool delivered = false;              // The result or last chunk has been handed out.
  std::optional<absl::Status> ending;  // Why to end after the steps in flight.
  absl::Status status;                 // Once done.
  int64_t unfinished = 0;              // Sequences.
  int64_t waiting_tokens = 0;          // Of the inputs, not run yet.
  int64_t admitted_ns = 0;
  Timings timings;
};

}  // namespace gdn::engine

#endif  // SERVER_ENGINE_CALL_H_
