#include "absl/strings/str_cat.h"
#include "server/model/config.h"
#include "server/model/quote.h"
#include "server/model/status_macros.h"

namespace gdn::model {
namespace {

constexpr const char* kLinearAttention = "linear_attention";
constexpr const char* kFullAttention = "full_attention";
constexpr const char* kGdn2 = "gdn2";

absl::Status Unsupported(const JsonObject& text, int64_t layer, const std::string& type,
                         const std::string& reason, const std::string& supported) {
  return absl::UnimplementedError(absl::StrCat(text.name, ": layer_types[", layer, "] ",
                                               Quoted(type), reason,
                                               " is not supported; supported: ", supported));
}

std::string LinearAttentionOnly() {
  return absl::StrCat("'", kLinearAttention, "' in every layer");
}

// The names in `list`, the value of layer_types.
absl::StatusOr<std::vector<std::string>> ParseNames(const JsonObject& text, const Json* list,
                                                    int64_t num_layers) {
  const Json::Array* items = list->As<Json::Array>();
  if (items == nullptr || static_cast<int64_t>(items->size()) != num_layers) {
    return FieldError(text, "layer_types",
                      absl::StrCat("a list of num_hidden_layers = ", num_layers, " names"), list);
  }
  std::vector<std::string> names;
  for (const Json& item : *items) {
    const std::string* name = item.As<std::string>();
    if (name == nullptr) return FieldError(text, "layer_types", "names of layer types", &item);
    names.push_back(*name);
  }
  return names;
}

}  // namespace

absl::StatusOr<std::vector<LayerType>> ParseLayerTypes(const JsonObject& text, int64_t num_layers) {
  const Json* member = text.Find("layer_types");
  if (member == nullptr) {
    // The format's own default, a mixture of three to one.
    GDN_ASSIGN_OR_RETURN(const int64_t interval,
                         GetIntOr(text, "full_attention_interval", 4, 1, int64_t{1} << 31));
    if (interval <= num_layers) {
      return Unsupported(
          text, interval - 1, kFullAttention,
          absl::StrCat(" (layer_types is absent and full_attention_interval is ", interval, ")"),
          LinearAttentionOnly());
    }
    return std::vector<LayerType>(static_cast<size_t>(num_layers), LayerType::kLinearAttention);
  }
  GDN_ASSIGN_OR_RETURN(const std::vector<std::string> names, ParseNames(text, member, num_layers));
  std::vector<LayerType> types;
  for (const std::string& name : names) {
    if (name != kLinearAttention) {
      return Unsupported(text, static_cast<int64_t>(types.size()), name, "", LinearAttentionOnly());
    }
    types.push_back(LayerType::kLinearAttention);
  }
  return types;
}

absl::StatusOr<std::vector<LayerType>> ParseGdn2LayerTypes(const JsonObject& text,
                                                           int64_t num_layers) {
  std::vector<LayerType> types;
  const Json* member = text.Find("layer_types");
  if (member == nullptr) {
    types.assign(static_cast<size_t>(num_layers), LayerType::kGdn2);
    return types;
  }
  GDN_ASSIGN_OR_RETURN(const std::vector<std::string> names, ParseNames(text, member, num_layers));
  for (const std::string& name : names) {
    if (name != kGdn2 && name != kLinearAttention) {
      return Unsupported(text, static_cast<int64_t>(types.size()), name, "",
                         absl::StrCat("'", kGdn2, "', '", kLinearAttention, "'"));
    }
    types.push_back(name == kGdn2 ? LayerType::kGdn2 : LayerType::kLinearAttention);
  }
  return types;
}

}  // namespace gdn::model
