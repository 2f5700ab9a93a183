// config.json (and generation_config.json) to a ModelSpec.
//
// Reads Qwen3.5's format, flat (qwen3_5_text) or inside the vision-language wrapper (qwen3_5), with
// linear_attention layers only, and this project's own for stacks with gdn2 layers (gdn2), which
// adds keys to the flat one; docs/models.md describes it. Everything else that would change the
// function is refused by name; keys that are not known are reported, for the log.
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

inline constexpr char kGdn2ModelType[] = "gdn2";

// config_family.cc: refuses other families, and yields the object with the text model's keys.
absl::StatusOr<JsonObject> SelectTextConfig(const JsonObject& root, ModelSpec* spec);
// config_features.cc: refuses every switch in a configuration that is not implemented.
absl::Status CheckFeatures(const JsonObject& root, const JsonObject& text);
// config_layers.cc: one entry a layer; other types are refused by index.
absl::StatusOr<std::vector<LayerType>> ParseLayerTypes(const JsonObject& text, int64_t num_layers);
absl::StatusOr<std::vector<LayerType>> ParseGdn2LayerTypes(const JsonObject& text,
                                                           int64_t num_layers);
// config_gdn2.cc: the keys that model_type gdn2 adds.
absl::Status ParseGdn2Keys(const JsonObject& text, ModelSpec* spec);
// config_keys.cc
std::vector<std::string> UnknownKeys(const JsonObject& root, const JsonObject& text,
                                     const ModelSpec& spec);

}  // namespace gdn::model

#endif  // SERVER_MODEL_CONFIG_H_
