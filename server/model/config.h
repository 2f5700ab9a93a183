// config.json (and generation_config.json) to a ModelSpec.
//
// Reads Qwen3.5's format, flat (qwen3_5_text) or inside the vision-language wrapper (qwen3_5), with
// linear_attention layers only. Everything else that would change the function is refused by name;
// keys that are not known are reported, for the log.
#ifndef SERVER_MODEL_CONFIG_H_
#define SERVER_MODEL_CONFIG_H_

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/model/json_fields.h"
#include "server/model/model_spec.h"

namespace gdn::model {

struct Document {
  std::string name;  // Its path, in messages.
  std::string_view text;
};

struct ParsedConfig {
  ModelSpec spec;  // tied_embedding as the file says; false if it says nothing.
  // Whether the file says something about it: if not, the checkpoint's tensors decide.
  bool tying_is_explicit = false;
  std::vector<std::string> unknown_keys;  // "key" or "text_config.key", sorted.
};

absl::StatusOr<ParsedConfig> ParseConfig(const Document& config,
                                         const std::optional<Document>& generation_config);

// What can be loaded, for messages.
std::string SupportedModels();

// config_family.cc: refuses what is not Qwen3.5, and yields the object with the text model's keys.
absl::StatusOr<JsonObject> SelectTextConfig(const JsonObject& root, ModelSpec* spec);
// config_features.cc: refuses every switch in a Qwen3.5 configuration that is not implemented.
absl::Status CheckFeatures(const JsonObject& root, const JsonObject& text);
// config_layers.cc: one entry a layer; full attention is refused by index.
absl::StatusOr<std::vector<LayerType>> ParseLayerTypes(const JsonObject& text, int64_t num_layers);
// config_keys.cc
std::vector<std::string> UnknownKeys(const JsonObject& root, const JsonObject& text);

}  // namespace gdn::model

#endif  // SERVER_MODEL_CONFIG_H_
