#include "client/cpp/gdnctl/json.h"

#include <vector>

#include "absl/strings/str_cat.h"
#include "gdn/client/input.h"

namespace gdn::gdnctl {
namespace {

Json ToJson(const v1::Limits& limits) {
  return {{"max_sessions", limits.max_sessions()},
          {"max_batch_sequences", limits.max_batch_sequences()},
          {"max_input_tokens", limits.max_input_tokens()},
          {"max_step_tokens", limits.max_step_tokens()},
          {"max_new_tokens", limits.max_new_tokens()},
          {"max_output_bytes", limits.max_output_bytes()},
          {"max_message_bytes", limits.max_message_bytes()},
          {"top_logprobs", limits.top_logprobs()}};
}

}  // namespace

Json ToJson(const v1::ModelInfo& model) {
  Json json = {{"name", model.name()},
               {"architecture", model.architecture()},
               {"fingerprint", model.fingerprint()},
               {"device", model.device()},
               {"precision", model.precision()},
               {"state_type", model.state_type()},
               {"batch_invariant", model.batch_invariant()},
               {"vocab_size", model.vocab_size()},
               {"hidden_size", model.hidden_size()},
               {"num_layers", model.num_layers()},
               {"first_layer", model.first_layer()},
               {"last_layer", model.last_layer()},
               {"has_embedding", model.has_embedding()},
               {"has_head", model.has_head()},
               {"key_heads", model.key_heads()},
               {"value_heads", model.value_heads()},
               {"key_dim", model.key_dim()},
               {"value_dim", model.value_dim()},
               {"state_bytes_per_session", model.state_bytes_per_session()},
               {"num_parameters", model.num_parameters()},
               {"eos_token_ids",
                std::vector<int32_t>(model.eos_token_ids().begin(), model.eos_token_ids().end())}};
  if (model.has_bos_token_id()) json["bos_token_id"] = model.bos_token_id();
  json["byte_vocabulary"] = model.byte_vocabulary();
  json["limits"] = ToJson(model.limits());
  json["server_version"] = model.server_version();
  return json;
}

Json ToJson(const v1::Session& session) {
  return {{"session_id", session.session_id()},
          {"position", session.position()},
          {"token_hash", absl::StrCat(absl::Hex(session.token_hash(), absl::kZeroPad16))},
          {"create_time_ms", session.create_time_ms()},
          {"last_use_time_ms", session.last_use_time_ms()},
          {"ttl_ms", session.ttl_ms()},
          {"in_use", session.in_use()},
          {"state_bytes", session.state_bytes()},
          {"parent_session_id", session.parent_session_id()}};
}

Json ToJson(const v1::Token& token) {
  Json json = {{"id", token.id()}, {"logprob", token.logprob()}};
  if (!token.top_logprobs().empty()) {
    Json top = Json::array();
    for (const v1::TokenLogprob& entry : token.top_logprobs()) {
      top.push_back({{"id", entry.id()}, {"logprob", entry.logprob()}});
    }
    json["top_logprobs"] = std::move(top);
  }
  if (token.has_logits()) json["logits"] = ToJson(token.logits());
  return json;
}

Json ToJson(const v1::Tensor& tensor) {
  Json json = {{"shape", std::vector<int64_t>(tensor.shape().begin(), tensor.shape().end())}};
  const auto values = client::ToFloats(tensor);
  json["data"] = values.ok() ? Json(*values) : Json(nullptr);
  return json;
}

Json ToJson(const v1::Usage& usage) {
  return {{"input_tokens", usage.input_tokens()},
          {"output_tokens", usage.output_tokens()},
          {"time_to_first_token_ns", usage.time_to_first_token_ns()}};
}

Json ToJson(const v1::Timings& timings) {
  return {{"queue_ns", timings.queue_ns()},
          {"compute_ns", timings.compute_ns()},
          {"total_ns", timings.total_ns()}};
}

std::string Line(const Json& json) {
  return json.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n";
}

}  // namespace gdn::gdnctl
