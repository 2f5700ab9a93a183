#include "server/engine/validate.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <unordered_map>

#include "absl/strings/str_cat.h"

namespace gdn::engine {
namespace {

using pipeline::PipelineInfo;

int64_t SaturatingMul(int64_t a, int64_t b) {
  int64_t product = 0;
  return __builtin_mul_overflow(a, b, &product) ? std::numeric_limits<int64_t>::max() : product;
}

int64_t SaturatingAdd(int64_t a, int64_t b) {
  int64_t sum = 0;
  return __builtin_add_overflow(a, b, &sum) ? std::numeric_limits<int64_t>::max() : sum;
}

int64_t Rows(Positions positions, int64_t length) {
  switch (positions) {
    case Positions::kNone:
      return 0;
    case Positions::kLast:
      return std::min<int64_t>(length, 1);
    case Positions::kAll:
      return length;
  }
  return 0;
}

absl::Status CheckTokens(const std::vector<int32_t>& tokens, const std::string& field,
                         const PipelineInfo& info) {
  for (size_t i = 0; i < tokens.size(); ++i) {
    if (tokens[i] < 0 || tokens[i] >= info.vocab_size) {
      return absl::InvalidArgumentError(absl::StrCat(field, "[", i, "] is ", tokens[i],
                                                     ", expected a token id in [0, ",
                                                     info.vocab_size, ")"));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckHidden(const std::vector<float>& hidden, const std::string& field,
                         const PipelineInfo& info) {
  const auto width = static_cast<size_t>(info.hidden_size);
  if (hidden.size() % width != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat(field, " holds ", hidden.size(), " values, expected whole rows of ", width));
  }
  for (size_t i = 0; i < hidden.size(); ++i) {
    if (!std::isfinite(hidden[i])) {
      return absl::InvalidArgumentError(absl::StrCat(field, "[", i / width, ", ", i % width,
                                                     "] is ", hidden[i],
                                                     ", expected a finite number"));
    }
  }
  return absl::OkStatus();
}

// `prefix` is "" or "sequences[i].".
absl::Status CheckInput(const Input& input, const std::string& prefix, int64_t max_tokens,
                        const char* limit, const PipelineInfo& info) {
  const std::string field =
      absl::StrCat(prefix, "input.", input.is_hidden ? "hidden_states" : "token_ids");
  if (input.is_hidden ? !input.tokens.empty() : !input.hidden.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat(prefix, "input holds token ids and hidden states; give exactly one of them"));
  }
  const int64_t length = InputLength(input, info);
  if (length > max_tokens) {
    return absl::OutOfRangeError(absl::StrCat(field, " has length ", length, ", over the limit of ",
                                              max_tokens, " (", limit,
                                              "); split it over several calls"));
  }
  if (input.is_hidden) return CheckHidden(input.hidden, field, info);
  if (length > 0 && !info.has_embedding) {
    return absl::FailedPreconditionError(
        absl::StrCat(field,
                     " needs the embedding, which this server does not hold; send "
                     "hidden_states, or ask the server of the first layers"));
  }
  return CheckTokens(input.tokens, field, info);
}

absl::Status CheckSampling(const Sampling& sampling, const std::string& prefix) {
  const auto wrong = [&](const char* name, auto value, const char* range) {
    return absl::InvalidArgumentError(
        absl::StrCat(prefix, "sampling.", name, " is ", value, ", expected ", range));
  };
  // Each comparison is false for NaN.
  if (!(sampling.temperature >= 0.0f) || std::isinf(sampling.temperature)) {
    return wrong("temperature", sampling.temperature, "a finite number >= 0 (0 is greedy)");
  }
  if (sampling.top_k < 0) return wrong("top_k", sampling.top_k, ">= 0 (0 is off)");
  if (!(sampling.top_p > 0.0f && sampling.top_p <= 1.0f)) {
    return wrong("top_p", sampling.top_p, "a number in (0, 1] (1 is off)");
  }
  if (!(sampling.min_p >= 0.0f && sampling.min_p < 1.0f)) {
    return wrong("min_p", sampling.min_p, "a number in [0, 1) (0 is off)");
  }
  if (!(sampling.repetition_penalty > 0.0f) || std::isinf(sampling.repetition_penalty)) {
    return wrong("repetition_penalty", sampling.repetition_penalty,
                 "a finite number > 0 (1 is off)");
  }
  return absl::OkStatus();
}

absl::Status CheckTopLogprobs(int32_t top_logprobs, const std::string& prefix,
                              const EngineOptions& options, const PipelineInfo& info) {
  if (top_logprobs < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat(prefix, "top_logprobs is ", top_logprobs, ", expected >= 0 (0 is off)"));
  }
  const int64_t limit = std::min(options.max_top_logprobs, info.vocab_size);
  if (top_logprobs > limit) {
    return absl::OutOfRangeError(absl::StrCat(prefix, "top_logprobs is ", top_logprobs,
                                              ", over the limit of ", limit,
                                              " (limits.top_logprobs)"));
  }
  return absl::OkStatus();
}

absl::Status NeedsHead(const std::string& field) {
  return absl::FailedPreconditionError(
      absl::StrCat(field,
                   " needs the head, which this server does not hold; ask for "
                   "output.hidden_states, or ask the server of the last layers"));
}

absl::Status CheckOutputBytes(int64_t bytes, const EngineOptions& options) {
  if (bytes <= options.max_output_bytes) return absl::OkStatus();
  return absl::OutOfRangeError(
      absl::StrCat("the logits and hidden states asked for take ", bytes,
                   " bytes, over the limit of ", options.max_output_bytes,
                   " (limits.max_output_bytes); ask for POSITIONS_LAST, or split the "
                   "call"));
}

absl::Status CheckSequence(const SequenceRequest& sequence, CallKind kind,
                           const std::string& prefix, const EngineOptions& options,
                           const PipelineInfo& info) {
  const bool step = kind == CallKind::kStep;
  absl::Status status =
      CheckInput(sequence.input, prefix, step ? options.max_step_tokens : options.max_input_tokens,
                 step ? "limits.max_step_tokens" : "limits.max_input_tokens", info);
  if (!status.ok()) return status;
  const OutputSelection& output = sequence.output;
  const bool empty = InputLength(sequence.input, info) == 0;
  if (empty && step) {
    return absl::InvalidArgumentError(
        absl::StrCat(prefix, "input is empty, expected 1..", options.max_step_tokens,
                     " tokens or rows (only Prefill takes an empty input)"));
  }
  if (empty && output.next_token) {
    return absl::InvalidArgumentError(
        absl::StrCat(prefix, "output.next_token needs a non-empty input, and input is empty"));
  }
  if (output.top_logprobs != 0 && !output.next_token) {
    return absl::InvalidArgumentError(
        absl::StrCat(prefix, "output.top_logprobs is ", output.top_logprobs,
                     " without output.next_token; set next_token, or leave top_logprobs at 0"));
  }
  status = CheckSampling(output.sampling, absl::StrCat(prefix, "output."));
  if (!status.ok()) return status;
  status = CheckTopLogprobs(output.top_logprobs, absl::StrCat(prefix, "output."), options, info);
  if (!status.ok()) return status;
  if (!info.has_head && output.next_token) {
    return NeedsHead(absl::StrCat(prefix, "output.next_token"));
  }
  if (!info.has_head && output.logits != Positions::kNone) {
    return NeedsHead(absl::StrCat(prefix, "output.logits"));
  }
  return absl::OkStatus();
}

}  // namespace

int64_t InputLength(const Input& input, const PipelineInfo& info) {
  return input.is_hidden ? static_cast<int64_t>(input.hidden.size()) / info.hidden_size
                         : static_cast<int64_t>(input.tokens.size());
}

int64_t StreamBufferLimit(const GenerateRequest& request, const EngineOptions& options,
                          const PipelineInfo& info) {
  if (!request.return_logits) return options.stream_buffer_tokens;
  const int64_t token_bytes = SaturatingMul(info.vocab_size, sizeof(float));
  return std::clamp<int64_t>(options.max_output_bytes / token_bytes, 1,
                             options.stream_buffer_tokens);
}

absl::Status ValidateOptions(const EngineOptions& options, const PipelineInfo& info) {
  struct Bound {
    const char* name;
    int64_t value;
    int64_t least;
  };
  const Bound bounds[] = {
      {"max_batch_sequences", options.max_batch_sequences, 1},
      {"max_batch_rows", options.max_batch_rows, 1},
      {"max_input_tokens", options.max_input_tokens, 1},
      {"max_step_tokens", options.max_step_tokens, 1},
      {"max_new_tokens", options.max_new_tokens, 1},
      {"max_output_bytes", options.max_output_bytes, 1},
      {"max_top_logprobs", options.max_top_logprobs, 0},
      {"max_queued_calls", options.max_queued_calls, 1},
      {"prefill_chunk_tokens", options.prefill_chunk_tokens, 1},
      {"prefill_token_budget", options.prefill_token_budget, 1},
      {"stream_buffer_tokens", options.stream_buffer_tokens, 1},
      {"default_ttl_ms", options.default_ttl_ms, 0},
      {"retry_delay_ms", options.retry_delay_ms, 0},
  };
  for (const Bound& bound : bounds) {
    if (bound.value < bound.least) {
      return absl::InvalidArgumentError(
          absl::StrCat(bound.name, " is ", bound.value, ", expected >= ", bound.least));
    }
  }
  if (options.prefill_chunk_tokens > options.prefill_token_budget) {
    return absl::InvalidArgumentError(absl::StrCat(
        "prefill_chunk_tokens (", options.prefill_chunk_tokens, ") is over prefill_token_budget (",
        options.prefill_token_budget, "); a step must have room for one chunk"));
  }
  if (options.max_step_tokens > options.max_input_tokens) {
    return absl::InvalidArgumentError(absl::StrCat("max_step_tokens (", options.max_step_tokens,
                                                   ") is over max_input_tokens (",
                                                   options.max_input_tokens, ")"));
  }
  if (info.num_slots < 2) {
    return absl::InvalidArgumentError(
        absl::StrCat("the pipeline has ", info.num_slots,
                     " state slots, expected >= 2: one is reserved for warm-up"));
  }
  if (info.hidden_size < 1 || ((info.has_embedding || info.has_head) && info.vocab_size < 1)) {
    return absl::InvalidArgumentError(absl::StrCat("the pipeline has hidden_size ",
                                                   info.hidden_size, " and vocab_size ",
                                                   info.vocab_size, ", expected >= 1"));
  }
  return absl::OkStatus();
}

absl::Status ValidateBatch(const BatchRequest& request, const EngineOptions& options,
                           const PipelineInfo& info) {
  const auto count = static_cast<int64_t>(request.sequences.size());
  if (count == 0) {
    return absl::InvalidArgumentError(absl::StrCat("sequences is empty, expected 1..",
                                                   options.max_batch_sequences, " sequences"));
  }
  if (count > options.max_batch_sequences) {
    return absl::OutOfRangeError(
        absl::StrCat("sequences has ", count, " entries, over the limit of ",
                     options.max_batch_sequences, " (limits.max_batch_sequences); split the call"));
  }
  std::unordered_map<std::string, size_t> first;
  first.reserve(request.sequences.size());
  int64_t bytes = 0;
  for (size_t i = 0; i < request.sequences.size(); ++i) {
    const SequenceRequest& sequence = request.sequences[i];
    const auto [it, added] = first.emplace(sequence.session_id, i);
    if (!added) {
      return absl::InvalidArgumentError(absl::StrCat(
          "sequences[", i, "].session_id is ", sequence.session_id.substr(0, 64),
          ", as is sequences[", it->second, "]'s; a session may appear once in a batch"));
    }
    const std::string prefix = absl::StrCat("sequences[", i, "].");
    absl::Status status = CheckSequence(sequence, request.kind, prefix, options, info);
    if (!status.ok()) return status;
    const int64_t length = InputLength(sequence.input, info);
    const int64_t values =
        SaturatingAdd(SaturatingMul(Rows(sequence.output.logits, length), info.vocab_size),
                      SaturatingMul(Rows(sequence.output.hidden, length), info.hidden_size));
    bytes = SaturatingAdd(bytes, SaturatingMul(values, sizeof(float)));
  }
  return CheckOutputBytes(bytes, options);
}

absl::Status ValidateGenerate(const GenerateRequest& request, const EngineOptions& options,
                              const PipelineInfo& info) {
  if (!info.has_embedding || !info.has_head) {
    return absl::FailedPreconditionError(
        absl::StrCat("Generate needs the embedding and the head; this server lacks ",
                     info.has_embedding ? "the head" : "the embedding",
                     "; use Prefill and Step with hidden_states, or ask a server of all layers"));
  }
  absl::Status status =
      CheckInput(request.input, "", options.max_input_tokens, "limits.max_input_tokens", info);
  if (!status.ok()) return status;
  if (InputLength(request.input, info) == 0) {
    return absl::InvalidArgumentError("input is empty, expected at least one token or row");
  }
  status = CheckSampling(request.sampling, "");
  if (!status.ok()) return status;
  status = CheckTopLogprobs(request.top_logprobs, "", options, info);
  if (!status.ok()) return status;
  if (request.max_new_tokens < 1) {
    return absl::InvalidArgumentError(absl::StrCat("max_new_tokens is ", request.max_new_tokens,
                                                   ", expected 1..", options.max_new_tokens));
  }
  if (request.max_new_tokens > options.max_new_tokens) {
    return absl::OutOfRangeError(absl::StrCat("max_new_tokens is ", request.max_new_tokens,
                                              ", over the limit of ", options.max_new_tokens,
                                              " (limits.max_new_tokens)"));
  }
  status = CheckTokens(request.stop_token_ids, "stop_token_ids", info);
  if (!status.ok()) return status;
  // One message holds at least one token's logits.
  return CheckOutputBytes(request.return_logits ? SaturatingMul(info.vocab_size, sizeof(float)) : 0,
                          options);
}

absl::Status ValidateFork(const ForkRequest& request, int64_t max_sessions) {
  if (absl::Status status = ValidateTtl(request.ttl_ms); !status.ok()) return status;
  if (request.count < 1) {
    return absl::InvalidArgumentError(absl::StrCat("count is ", request.count, ", expected >= 1"));
  }
  if (request.count > max_sessions) {
    return absl::OutOfRangeError(absl::StrCat("count is ", request.count, ", over the limit of ",
                                              max_sessions, " (limits.max_sessions)"));
  }
  return absl::OkStatus();
}

absl::Status ValidateTtl(std::optional<int64_t> ttl_ms) {
  if (!ttl_ms.has_value() || *ttl_ms >= 0) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("ttl_ms is ", *ttl_ms, ", expected >= 0 (0: never evicted)"));
}

}  // namespace gdn::engine
