#include <algorithm>
#include <iterator>

#include "absl/strings/str_cat.h"
#include "server/model/config.h"
#include "server/model/quote.h"
#include "server/model/status_macros.h"

namespace gdn::model {
namespace {

constexpr const char* kTextModelType = "qwen3_5_text";
constexpr const char* kWrapperModelType = "qwen3_5";
constexpr const char* kTextArchitecture = "Qwen3_5ForCausalLM";
constexpr const char* kWrapperArchitecture = "Qwen3_5ForConditionalGeneration";
constexpr const char* kGdn2Architecture = "Gdn2ForCausalLM";

// Families that hold delta-rule layers but not in this format. Known by name so that the message
// can say so; any other name is refused just the same.
constexpr const char* kOtherDeltaFamilies[] = {
    "qwen3_next",     "qwen3_5_moe",        "qwen3_5_moe_text", "qwen4_exp",
    "qwen4_exp_text", "olmo_hybrid",        "gated_deltanet",   "gated_deltanet2",
    "delta_net",      "gated_deltaproduct", "kimi_linear",      "glm5_next",
};

absl::Status UnsupportedModelType(const JsonObject& object, const std::string& type) {
  const bool other_family =
      std::find(std::begin(kOtherDeltaFamilies), std::end(kOtherDeltaFamilies), type) !=
      std::end(kOtherDeltaFamilies);
  return absl::UnimplementedError(
      absl::StrCat(object.name, ": model_type ", Quoted(type), " is not supported",
                   other_family ? " (a delta-rule model, but of another format)" : "",
                   "; supported: ", SupportedModels()));
}

// `own` is what a file of this model_type names itself where it says nothing.
absl::Status CheckArchitecture(const JsonObject& root, const std::string& own, ModelSpec* spec) {
  const Json* member = root.Find("architectures");
  if (member == nullptr) {
    spec->architecture = own;
    return absl::OkStatus();
  }
  const Json::Array* items = member->As<Json::Array>();
  if (items == nullptr || items->empty() || items->front().As<std::string>() == nullptr) {
    return FieldError(root, "architectures", "a list with the name of a class", member);
  }
  spec->architecture = *items->front().As<std::string>();
  const bool either =
      spec->architecture == kTextArchitecture || spec->architecture == kWrapperArchitecture;
  if (own == kGdn2Architecture ? spec->architecture == own : either) return absl::OkStatus();
  return absl::UnimplementedError(
      absl::StrCat(root.name, ": architecture ", Quoted(spec->architecture),
                   " is not supported; supported: ", SupportedModels()));
}

}  // namespace

std::string SupportedModels() {
  return absl::StrCat("model_type ", kTextModelType, " (", kTextArchitecture, "), or ",
                      kWrapperModelType, " (", kWrapperArchitecture, ") with a text_config of ",
                      kTextModelType, ", linear_attention layers only; or ", kGdn2ModelType, " (",
                      kGdn2Architecture,
                      "), gdn2 and linear_attention layers; unquantised F32, BF16 or F16");
}

absl::StatusOr<JsonObject> SelectTextConfig(const JsonObject& root, ModelSpec* spec) {
  GDN_ASSIGN_OR_RETURN(const std::string type, GetStringOr(root, "model_type", ""));
  if (type.empty()) {
    return absl::InvalidArgumentError(absl::StrCat(
        root.name, ": model_type: expected a string, got nothing; supported: ", SupportedModels()));
  }
  const bool wrapper = type == kWrapperModelType;
  const bool gdn2 = type == kGdn2ModelType;
  if (!wrapper && !gdn2 && type != kTextModelType) return UnsupportedModelType(root, type);
  GDN_RETURN_IF_ERROR(CheckArchitecture(root,
                                        wrapper ? kWrapperArchitecture
                                        : gdn2  ? kGdn2Architecture
                                                : kTextArchitecture,
                                        spec));
  spec->model_type = gdn2 ? kGdn2ModelType : kTextModelType;

  GDN_ASSIGN_OR_RETURN(const JsonObject text, GetObject(root, "text_config"));
  if (!wrapper) {
    if (text.json == nullptr) return root;
    return absl::InvalidArgumentError(absl::StrCat(root.name,
                                                   ": text_config: expected nothing in "
                                                   "a flat file of model_type ",
                                                   type, ", got an object; is this ",
                                                   kWrapperModelType, "?"));
  }
  if (text.json == nullptr) {
    return FieldError(root, "text_config",
                      absl::StrCat("an object, as model_type is ", kWrapperModelType), nullptr);
  }
  GDN_ASSIGN_OR_RETURN(const std::string text_type,
                       GetStringOr(text, "model_type", kTextModelType));
  if (text_type != kTextModelType) {
    return UnsupportedModelType(text, text_type);
  }
  return text;
}

}  // namespace gdn::model
