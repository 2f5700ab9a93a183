#include "absl/strings/str_cat.h"
#include "server/model/config.h"
#include "server/model/quote.h"
#include "server/model/status_macros.h"

namespace gdn::model {
namespace {

constexpr const char* kLinearAttention = "linear_attention";
constexpr const char* kFullAttention = "full_attention";

absl::Status Unsupported(const JsonObject& text, int64_t layer, const std::string& type,
                         const std::string& reason) {
  return absl::UnimplementedError(
      absl::StrCat(text.name, ": layer_types[", layer, "] ", Quoted(type), reason,
                   " is not supported; supported: '", kLinearAttention, "' in every layer"));
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
          absl::StrCat(" (layer_types is absent and full_attention_interval is ", interval, ")"));
    }
    return std::vector<LayerType>(static_cast<size_t>(num_layers), LayerType::kLinearAttention);
  }
  const Json::Array* items = member->As<Json::Array>();
  if (items == nullptr || static_cast<int64_t>(items->size()) != num_layers) {
    return FieldError(text, "layer_types",
                      absl::StrCat("a list of num_hidden_layers = ", num_layers, " names"), member);
  }
  std::vector<LayerType> types;
  for (const Json& item : *items) {
    const std::string* type = item.As<std::string>();
    if (type == nullptr) return FieldError(text, "layer_types", "names of layer types", &item);
    if (*type != kLinearAttention) {
      return Unsupported(text, static_cast<int64_t>(types.size()), *type, "");
    }
    types.push_back(LayerType::kLinearAttention);
  }
  return types;
}

}  // namespace gdn::model
