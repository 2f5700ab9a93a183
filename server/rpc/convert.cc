#include "server/rpc/convert.h"

#include <algorithm>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/rpc/status.h"
#include "server/rpc/tensor.h"

namespace gdn::rpc {
namespace {

constexpr int64_t kDefaultMaxNewTokens = 256;
// As documented with GenerateRequest.stop_token_ids.
constexpr int kMaxStopTokens = 1024;

absl::Status DecodeInput(const v1::Input& proto, int64_t hidden_size,
                         const engine::EngineOptions& limits, const std::string& field,
                         engine::Input* input) {
  switch (proto.kind_case()) {
    case v1::Input::kTokenIds:
      if (proto.token_ids().ids_size() > limits.max_input_tokens) {
        return absl::OutOfRangeError(absl::StrCat(
            field, ".token_ids: ", proto.token_ids().ids_size(), " tokens are over the limit of ",
            limits.max_input_tokens, " for one call; send the sequence in several calls"));
      }
      input->tokens.assign(proto.token_ids().ids().begin(), proto.token_ids().ids().end());
      return absl::OkStatus();
    case v1::Input::kHiddenStates:
      input->is_hidden = true;
      return DecodeRows(proto.hidden_states(), hidden_size, absl::StrCat(field, ".hidden_states"),
                        &input->hidden);
    case v1::Input::KIND_NOT_SET:
      break;
  }
  return absl::InvalidArgumentError(
      absl::StrCat(field, ": neither token_ids nor hidden_states is set; either may be empty"));
}

engine::Sampling DecodeSampling(const v1::Sampling& proto) {
  engine::Sampling sampling;
  if (proto.has_temperature()) sampling.temperature = proto.temperature();
  if (proto.has_top_k()) sampling.top_k = proto.top_k();
  if (proto.has_top_p()) sampling.top_p = proto.top_p();
  if (proto.has_min_p()) sampling.min_p = proto.min_p();
  if (proto.has_repetition_penalty()) sampling.repetition_penalty = proto.repetition_penalty();
  if (proto.has_seed()) sampling.seed = proto.seed();
  return sampling;
}

absl::Status DecodePositions(v1::Positions proto, const std::string& field,
                             engine::Positions* positions) {
  switch (proto) {
    case v1::POSITIONS_NONE:
      *positions = engine::Positions::kNone;
      return absl::OkStatus();
    case v1::POSITIONS_LAST:
      *positions = engine::Positions::kLast;
      return absl::OkStatus();
    case v1::POSITIONS_ALL:
      *positions = engine::Positions::kAll;
      return absl::OkStatus();
    default:
      return absl::InvalidArgumentError(absl::StrCat(field, ": ", static_cast<int>(proto),
                                                     " is not one of NONE (0), LAST (1), ALL (2)"));
  }
}

absl::Status DecodeOutput(const v1::OutputSelection& proto, const std::string& field,
                          engine::OutputSelection* output) {
  output->next_token = proto.next_token();
  output->sampling = DecodeSampling(proto.sampling());
  output->top_logprobs = proto.top_logprobs();
  absl::Status status =
      DecodePositions(proto.logits(), absl::StrCat(field, ".logits"), &output->logits);
  if (!status.ok()) return status;
  return DecodePositions(proto.hidden_states(), absl::StrCat(field, ".hidden_states"),
                         &output->hidden);
}

std::optional<int64_t> ExpectedPosition(const auto& proto) {
  if (!proto.has_expected_position()) return std::nullopt;
  return proto.expected_position();
}

}  // namespace

v1::ModelInfo EncodeModel(const ModelFacts& facts, const engine::EngineOptions& limits,
                          int64_t max_message_bytes) {
  v1::ModelInfo info;
  info.set_name(facts.name);
  info.set_architecture(facts.architecture);
  info.set_fingerprint(facts.fingerprint);
  info.set_device(facts.device);
  info.set_precision(facts.precision);
  info.set_state_type(facts.state_type);
  info.set_batch_invariant(facts.batch_invariant);
  info.set_vocab_size(facts.vocab_size);
  info.set_hidden_size(facts.hidden_size);
  info.set_num_layers(facts.num_layers);
  info.set_first_layer(facts.first_layer);
  info.set_last_layer(facts.last_layer);
  info.set_has_embedding(facts.has_embedding);
  info.set_has_head(facts.has_head);
  info.set_key_heads(facts.key_heads);
  info.set_value_heads(facts.value_heads);
  info.set_key_dim(facts.key_dim);
  info.set_value_dim(facts.value_dim);
  info.set_state_bytes_per_session(facts.state_bytes_per_session);
  info.set_num_parameters(facts.num_parameters);
  info.mutable_eos_token_ids()->Assign(facts.eos_token_ids.begin(), facts.eos_token_ids.end());
  if (facts.bos_token_id) info.set_bos_token_id(*facts.bos_token_id);
  info.set_byte_vocabulary(facts.byte_vocabulary);
  v1::Limits* proto = info.mutable_limits();
  proto->set_max_sessions(facts.max_sessions);
  proto->set_max_batch_sequences(limits.max_batch_sequences);
  proto->set_max_input_tokens(limits.max_input_tokens);
  proto->set_max_step_tokens(limits.max_step_tokens);
  proto->set_max_new_tokens(limits.max_new_tokens);
  proto->set_max_output_bytes(limits.max_output_bytes);
  proto->set_max_message_bytes(max_message_bytes);
  proto->set_top_logprobs(limits.max_top_logprobs);
  info.set_server_version(facts.server_version);
  return info;
}

absl::StatusOr<engine::BatchRequest> DecodeBatch(const SequenceRequests& sequences,
                                                 engine::CallKind kind, int64_t hidden_size,
                                                 const engine::EngineOptions& limits) {
  if (sequences.size() > limits.max_batch_sequences) {
    return absl::OutOfRangeError(absl::StrCat("sequences: ", sequences.size(),
                                              " sequences are over the limit of ",
                                              limits.max_batch_sequences, " for one call"));
  }
  engine::BatchRequest batch;
  batch.kind = kind;
  batch.sequences.resize(static_cast<size_t>(sequences.size()));
  for (int i = 0; i < sequences.size(); ++i) {
    const v1::SequenceRequest& proto = sequences[i];
    engine::SequenceRequest& sequence = batch.sequences[static_cast<size_t>(i)];
    const std::string field = absl::StrCat("sequences[", i, "]");
    sequence.session_id = proto.session_id();
    sequence.expected_position = ExpectedPosition(proto);
    absl::Status status = DecodeInput(proto.input(), hidden_size, limits,
                                      absl::StrCat(field, ".input"), &sequence.input);
    if (!status.ok()) return status;
    status = DecodeOutput(proto.output(), absl::StrCat(field, ".output"), &sequence.output);
    if (!status.ok()) return status;
  }
  return batch;
}

void EncodeTimings(const engine::Timings& timings, v1::Timings* proto) {
  proto->set_queue_ns(timings.queue_ns);
  proto->set_compute_ns(timings.compute_ns);
  proto->set_total_ns(timings.total_ns);
}

void EncodeToken(const engine::ChosenToken& token, v1::Token* proto) {
  proto->set_id(token.id);
  proto->set_logprob(token.logprob);
  for (const engine::TokenLogprob& entry : token.top) {
    v1::TokenLogprob* top = proto->add_top_logprobs();
    top->set_id(entry.id);
    top->set_logprob(entry.logprob);
  }
  if (!token.logits.empty()) {
    EncodeTensor(token.logits, {static_cast<int64_t>(token.logits.size())},
                 proto->mutable_logits());
  }
}

void EncodeBatch(const engine::BatchResult& result, const SequenceRequests& requests,
                 const ModelFacts& facts, SequenceResponses* responses, v1::Timings* timings) {
  const auto encode_rows = [](v1::Positions asked, const std::vector<float>& values,
                              int64_t columns, auto mutable_tensor) {
    if (asked == v1::POSITIONS_NONE) return;
    EncodeTensor(values, {static_cast<int64_t>(values.size()) / columns, columns},
                 mutable_tensor());
  };
  for (size_t i = 0; i < result.sequences.size(); ++i) {
    const engine::SequenceResult& sequence = result.sequences[i];
    v1::SequenceResponse* proto = responses->Add();
    proto->set_session_id(sequence.session_id);
    proto->set_position(sequence.position);
    if (!sequence.status.ok()) {
      *proto->mutable_status() = ToRpcStatus(sequence.status);
      continue;
    }
    if (sequence.next_token) EncodeToken(*sequence.next_token, proto->mutable_next_token());
    const v1::OutputSelection& asked = requests[static_cast<int>(i)].output();
    encode_rows(asked.logits(), sequence.logits, facts.vocab_size,
                [proto] { return proto->mutable_logits(); });
    encode_rows(asked.hidden_states(), sequence.hidden, facts.hidden_size,
                [proto] { return proto->mutable_hidden_states(); });
  }
  EncodeTimings(result.timings, timings);
}

absl::StatusOr<engine::GenerateRequest> DecodeGenerate(const v1::GenerateRequest& request,
                                                       int64_t hidden_size,
                                                       const engine::EngineOptions& limits) {
  if (request.stop_token_ids_size() > kMaxStopTokens) {
    return absl::OutOfRangeError(absl::StrCat("stop_token_ids: ", request.stop_token_ids_size(),
                                              " ids are over the limit of ", kMaxStopTokens));
  }
  engine::GenerateRequest generate;
  generate.session_id = request.session_id();
  generate.expected_position = ExpectedPosition(request);
  absl::Status status = DecodeInput(request.input(), hidden_size, limits, "input", &generate.input);
  if (!status.ok()) return status;
  generate.sampling = DecodeSampling(request.sampling());
  generate.max_new_tokens = request.has_max_new_tokens()
                                ? request.max_new_tokens()
                                : std::min(kDefaultMaxNewTokens, limits.max_new_tokens);
  generate.stop_token_ids.assign(request.stop_token_ids().begin(), request.stop_token_ids().end());
  generate.ignore_eos = request.ignore_eos();
  generate.top_logprobs = request.top_logprobs();
  generate.return_logits = request.return_logits();
  return generate;
}

void EncodeSession(const engine::SessionInfo& info, v1::Session* proto) {
  proto->set_session_id(info.id);
  proto->set_position(info.position);
  proto->set_token_hash(info.token_hash);
  proto->set_create_time_ms(info.create_time_ms);
  proto->set_last_use_time_ms(info.last_use_time_ms);
  proto->set_ttl_ms(info.ttl_ms);
  proto->set_in_use(info.in_use);
  proto->set_state_bytes(info.state_bytes);
  proto->set_parent_session_id(info.parent_id);
}

}  // namespace gdn::rpc
