// File: types.h
//
// Requests and results of the engine: plain data, no threads, no wire types.
#ifndef SERVER_ENGINE_TYPES_H_
#define SERVER_ENGINE_TYPES_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "server/engine/observer.h"
#include "server/pipeline/pipeline.h"

namespace gdn::engine {

using pipeline::Positions;
using pipeline::TokenLogprob;

// Tokens, or rows of hidden states; exactly one kind is used.
struct Input {
  std::vector<int32_t> tokens;
  std::vector<float> hidden;  // [T, hidden_size]
  bool is_hidden = false;
};

struct Sampling {
  float temperature = 0.0f;
  int32_t top_k = 0;
  float top_p = 1.0f;
  float min_p = 0.0f;
  float repetition_penalty = 1.0f;
  std::optional<uint64_t> seed;  // Absent: the engine draws one.
};

struct OutputSelection {
  bool next_token = false;
  Sampling sampling;
  int32_t top_logprobs = 0;
  Positions logits = Positions::kNone;
  Positions hidden = Positions::kNone;
};

struct SequenceRequest {
  std::string session_id;
  std::optional<int64_t> expected_position;
  Input input;
  OutputSelection output;
};

// Prefill and Step differ in their limit of tokens per sequence, and in their place in the queue.
enum class CallKind { kPrefill, kStep };

struct BatchRequest {
  CallKind kind = CallKind::kPrefill;
  std::vector<SequenceRequest> sequences;
};

struct ChosenToken {
  int32_t id = -1;
  float logprob = 0.0f;
  std::vector<TokenLogprob> top;
  std::vector<float> logits;  // [vocab_size] where asked for.
};

struct SequenceResult {
  std::string session_id;
  absl::Status status;  // Of this sequence alone.
  int64_t position = 0;
  std::optional<ChosenToken> next_token;
  std::vector<float> logits;  // [n, vocab_size]
  std::vector<float> hidden;  // [n, hidden_size]
};

struct Timings {
  int64_t queue_ns = 0;
  int64_t compute_ns = 0;
  int64_t total_ns = 0;
};

struct BatchResult {
  absl::Status status;  // Of the call: CANCELLED, DEADLINE_EXCEEDED, UNAVAILABLE, INTERNAL.
  std::vector<SequenceResult> sequences;
  Timings timings;
};

struct GenerateRequest {
  std::string session_id;  // Empty: a throw-away session.
  std::optional<int64_t> expected_position;
  Input input;
  Sampling sampling;
  int64_t max_new_tokens = 256;
  std::vector<int32_t> stop_token_ids;
  bool ignore_eos = false;
  int32_t top_logprobs = 0;
  bool return_logits = false;
};

// What a drained stream yields at once.
struct GenerateChunk {
  std::vector<ChosenToken> tokens;
  int64_t position = 0;
  bool done = false;    // No more chunks follow; the fields below are set.
  absl::Status status;  // OK, or why the stream ended early.
  FinishReason finish_reason = FinishReason::kStop;  // If status is OK.
  int64_t input_tokens = 0;
  int64_t output_tokens = 0;
  int64_t time_to_first_token_ns = 0;
  Timings timings;
};

struct ForkRequest {
  std::string session_id;
  std::optional<int64_t> expected_position;
  int64_t count = 1;
  std::optional<int64_t> ttl_ms;  // Absent: the parent's.
};

struct SessionInfo {
  std::string id;
  std::string parent_id;
  int64_t position = 0;
  uint64_t token_hash = 0;
  int64_t create_time_ms = 0;  // Unix time.
  int64_t last_use_time_ms = 0;
  int64_t ttl_ms = 0;  // 0: never evicted.
  bool in_use = false;
  int64_t state_bytes = 0;
};

}  // namespace gdn::engine

#endif  // SERVER_ENGINE_TYPES_H_
