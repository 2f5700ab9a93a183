#include "server/model/config.h"

#include <algorithm>
#include <cstdint>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/model/quote.h"
#include "server/model/status_macros.h"

namespace gdn::model {
namespace {

// Generous bounds: beyond them a file is damaged or hostile, and sizes below cannot overflow.
constexpr int64_t kMaxVocabulary = int64_t{1} << 22;
constexpr int64_t kMaxHidden = int64_t{1} << 16;
constexpr int64_t kMaxIntermediate = int64_t{1} << 20;
constexpr int64_t kMaxLayers = 1024;
constexpr int64_t kMaxHeads = 1024;
constexpr int64_t kMaxPositions = int64_t{1} << 40;
// What the kernels compute.
constexpr int64_t kMaxHeadRatio = 8;
constexpr int64_t kMaxKeyDim = 256;
constexpr int64_t kMaxValueDim = 512;
constexpr int64_t kMinConvWidth = 2;
constexpr int64_t kMaxConvWidth = 8;

absl::StatusOr<JsonObject> ParseObject(const Document& document, Json* storage) {
  GDN_ASSIGN_OR_RETURN(*storage, ParseJson(document.text, document.name));
  if (storage->As<Json::Object>() == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat(document.name, ": expected a JSON object, got ", storage->Describe()));
  }
  return JsonObject{storage, document.name};
}

absl::Status ParseGdnDims(const JsonObject& text, GdnDims* gdn) {
  GDN_ASSIGN_OR_RETURN(gdn->key_heads, GetIntOr(text, "linear_num_key_heads", 16, 1, kMaxHeads));
  GDN_ASSIGN_OR_RETURN(gdn->value_heads,
                       GetIntOr(text, "linear_num_value_heads", 32, 1, kMaxHeads));
  GDN_ASSIGN_OR_RETURN(gdn->key_dim, GetIntOr(text, "linear_key_head_dim", 128, 1, kMaxKeyDim));
  GDN_ASSIGN_OR_RETURN(gdn->value_dim,
                       GetIntOr(text, "linear_value_head_dim", 128, 1, kMaxValueDim));
  GDN_ASSIGN_OR_RETURN(const int64_t width,
                       GetIntOr(text, "linear_conv_kernel_dim", 4, kMinConvWidth, kMaxConvWidth));
  gdn->conv_width = static_cast<int32_t>(width);
  if (gdn->value_heads % gdn->key_heads != 0 || gdn->value_heads / gdn->key_heads > kMaxHeadRatio) {
    return absl::InvalidArgumentError(
        absl::StrCat(text.name, ": linear_num_value_heads: expected 1 to ", kMaxHeadRatio,
                     " times linear_num_key_heads = ", gdn->key_heads, ", got ", gdn->value_heads));
  }
  return absl::OkStatus();
}

// Adds the ids of eos_token_id, which is absent, one id or a list of them.
absl::Status MergeEos(const JsonObject& object, int64_t vocab_size, std::vector<int32_t>* ids) {
  const Json* member = object.Find("eos_token_id");
  if (member == nullptr) return absl::OkStatus();
  const auto add = [&](const Json& item) {
    const int64_t* id = item.As<int64_t>();
    if (id == nullptr || *id < 0 || *id >= vocab_size) {
      return FieldError(object, "eos_token_id",
                        absl::StrCat("token ids in 0..", vocab_size - 1, " (vocab_size - 1)"),
                        &item);
    }
    ids->push_back(static_cast<int32_t>(*id));
    return absl::OkStatus();
  };
  if (const Json::Array* items = member->As<Json::Array>()) {
    for (const Json& item : *items) GDN_RETURN_IF_ERROR(add(item));
    return absl::OkStatus();
  }
  return add(*member);
}

// Later objects count only where earlier ones are silent.
absl::Status ParseTokenIds(const std::vector<const JsonObject*>& objects, ModelSpec* spec) {
  for (const JsonObject* object : objects) {
    GDN_RETURN_IF_ERROR(MergeEos(*object, spec->vocab_size, &spec->eos_token_ids));
    if (!spec->bos_token_id.has_value() && object->Find("bos_token_id") != nullptr) {
      GDN_ASSIGN_OR_RETURN(const int64_t bos,
                           GetInt(*object, "bos_token_id", 0, spec->vocab_size - 1));
      spec->bos_token_id = static_cast<int32_t>(bos);
    }
  }
  std::vector<int32_t>& ids = spec->eos_token_ids;
  std::sort(ids.begin(), ids.end());
  ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
  return absl::OkStatus();
}

absl::Status ParseDims(const JsonObject& text, ModelSpec* spec) {
  GDN_ASSIGN_OR_RETURN(spec->vocab_size, GetInt(text, "vocab_size", 1, kMaxVocabulary));
  GDN_ASSIGN_OR_RETURN(spec->hidden_size, GetInt(text, "hidden_size", 1, kMaxHidden));
  GDN_ASSIGN_OR_RETURN(spec->intermediate_size,
                       GetInt(text, "intermediate_size", 1, kMaxIntermediate));
  GDN_ASSIGN_OR_RETURN(spec->num_layers, GetInt(text, "num_hidden_layers", 1, kMaxLayers));
  GDN_ASSIGN_OR_RETURN(spec->max_positions,
                       GetIntOr(text, "max_position_embeddings", 32768, 1, kMaxPositions));
  GDN_ASSIGN_OR_RETURN(const double eps, GetNumberOr(text, "rms_norm_eps", 1e-6, 0.0, 1.0));
  spec->rms_norm_eps = static_cast<float>(eps);
  if (spec->rms_norm_eps == 0.0f) {
    return FieldError(text, "rms_norm_eps", "a number above 0 in single precision",
                      text.Find("rms_norm_eps"));
  }
  return absl::OkStatus();
}

absl::StatusOr<GateActivation> ParseOutputGate(const JsonObject& text) {
  GDN_ASSIGN_OR_RETURN(const std::string gate, GetStringOr(text, "output_gate_type", "silu"));
  if (gate == "silu" || gate == "swish") return GateActivation::kSilu;
  if (gate == "sigmoid") return GateActivation::kSigmoid;
  return absl::UnimplementedError(
      absl::StrCat(text.name, ": output_gate_type: ", Quoted(gate),
                   " is not supported; supported: 'swish', 'silu', 'sigmoid'"));
}

}  // namespace

absl::StatusOr<ParsedConfig> ParseConfig(const Document& config,
                                         const std::optional<Document>& generation_config) {
  Json root_json;
  GDN_ASSIGN_OR_RETURN(const JsonObject root, ParseObject(config, &root_json));
  ParsedConfig parsed;
  ModelSpec& spec = parsed.spec;
  GDN_ASSIGN_OR_RETURN(const JsonObject text, SelectTextConfig(root, &spec));
  GDN_RETURN_IF_ERROR(CheckFeatures(root, text));
  GDN_RETURN_IF_ERROR(ParseDims(text, &spec));
  GDN_RETURN_IF_ERROR(ParseGdnDims(text, &spec.gdn));
  if (spec.model_type == kGdn2ModelType) {
    GDN_ASSIGN_OR_RETURN(spec.layer_types, ParseGdn2LayerTypes(text, spec.num_layers));
    GDN_RETURN_IF_ERROR(ParseGdn2Keys(text, &spec));
  } else {
    GDN_ASSIGN_OR_RETURN(spec.layer_types, ParseLayerTypes(text, spec.num_layers));
  }
  GDN_ASSIGN_OR_RETURN(spec.output_gate, ParseOutputGate(text));

  GDN_ASSIGN_OR_RETURN(std::optional<bool> tied, GetBool(root, "tie_word_embeddings"));
  if (!tied.has_value()) {
    GDN_ASSIGN_OR_RETURN(tied, GetBool(text, "tie_word_embeddings"));
  }
  spec.tied_embedding = tied.value_or(false);
  parsed.tying_is_explicit = tied.has_value();

  std::vector<const JsonObject*> token_sources = {&text};
  if (text.json != root.json) token_sources.push_back(&root);
  Json generation_json;
  JsonObject generation;
  if (generation_config.has_value()) {
    GDN_ASSIGN_OR_RETURN(generation, ParseObject(*generation_config, &generation_json));
    token_sources.push_back(&generation);
  }
  GDN_RETURN_IF_ERROR(ParseTokenIds(token_sources, &spec));
  parsed.unknown_keys = UnknownKeys(root, text, spec);
  return parsed;
}

}  // namespace gdn::model
