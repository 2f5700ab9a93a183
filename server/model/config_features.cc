#include "absl/strings/str_cat.h"
#include "server/model/config.h"
#include "server/model/quote.h"
#include "server/model/status_macros.h"

namespace gdn::model {
namespace {

absl::Status Unsupported(const JsonObject& object, const std::string& what,
                         const std::string& supported) {
  return absl::UnimplementedError(
      absl::StrCat(object.name, ": ", what, " is not supported; supported: ", supported));
}

absl::Status CheckQuantization(const JsonObject& object) {
  if (object.Find("quantization_config") == nullptr) return absl::OkStatus();
  GDN_ASSIGN_OR_RETURN(const JsonObject quantization, GetObject(object, "quantization_config"));
  GDN_ASSIGN_OR_RETURN(const std::string method,
                       GetStringOr(quantization, "quant_method", "absent"));
  return Unsupported(object, absl::StrCat("quantization_config with quant_method ", Quoted(method)),
                     "unquantised F32, BF16 or F16 weights");
}

absl::Status CheckDtype(const JsonObject& object) {
  for (const char* key : {"dtype", "torch_dtype"}) {
    GDN_ASSIGN_OR_RETURN(const std::string dtype, GetStringOr(object, key, "bfloat16"));
    if (dtype == "bfloat16" || dtype == "float16" || dtype == "float32") continue;
    return Unsupported(object, absl::StrCat(key, " ", Quoted(dtype)),
                       "'bfloat16', 'float16', 'float32'");
  }
  return absl::OkStatus();
}

// Linear layers have no positional encoding, so the parameters do not matter; a scaling type does
// say that the model was made for something else than what is computed here.
absl::Status CheckRope(const JsonObject& text) {
  for (const char* key : {"rope_parameters", "rope_scaling"}) {
    GDN_ASSIGN_OR_RETURN(const JsonObject rope, GetObject(text, key));
    for (const char* type_key : {"rope_type", "type"}) {
      GDN_ASSIGN_OR_RETURN(const std::string type, GetStringOr(rope, type_key, "default"));
      if (type == "default") continue;
      return Unsupported(rope, absl::StrCat(type_key, " ", Quoted(type)), "'default'");
    }
  }
  return absl::OkStatus();
}

absl::Status CheckActivation(const JsonObject& text) {
  GDN_ASSIGN_OR_RETURN(const std::string act, GetStringOr(text, "hidden_act", "silu"));
  if (act == "silu") return absl::OkStatus();
  return Unsupported(text, absl::StrCat("hidden_act ", Quoted(act)), "'silu'");
}

}  // namespace

absl::Status CheckFeatures(const JsonObject& root, const JsonObject& text) {
  for (const JsonObject* object : {&root, &text}) {
    GDN_RETURN_IF_ERROR(CheckQuantization(*object));
    GDN_RETURN_IF_ERROR(CheckDtype(*object));
  }
  GDN_RETURN_IF_ERROR(CheckActivation(text));
  return CheckRope(text);
}

}  // namespace gdn::model
