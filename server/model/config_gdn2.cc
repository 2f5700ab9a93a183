#include <cmath>

#include "absl/strings/str_cat.h"
#include "server/model/config.h"
#include "server/model/quote.h"
#include "server/model/status_macros.h"

namespace gdn::model {
namespace {

constexpr const char* kDecayGate = "gdn2_decay_gate";
constexpr const char* kLowerBound = "gdn2_decay_lower_bound";
constexpr double kLeastBound = -5.0;  // That the kernels take.

absl::Status ParseDecayGate(const JsonObject& text, ModelSpec* spec) {
  GDN_ASSIGN_OR_RETURN(const std::string gate, GetStringOr(text, kDecayGate, "softplus"));
  if (gate == "softplus") {
    spec->decay_gate = DecayGate::kSoftplus;
    const Json* bound = text.Find(kLowerBound);
    if (bound == nullptr) return absl::OkStatus();
    return FieldError(text, kLowerBound, absl::StrCat("nothing, as ", kDecayGate, " is 'softplus'"),
                      bound);
  }
  if (gate != "bounded") {
    return absl::UnimplementedError(
        absl::StrCat(text.name, ": ", kDecayGate, ": ", Quoted(gate),
                     " is not supported; supported: 'softplus', 'bounded'"));
  }
  spec->decay_gate = DecayGate::kBounded;
  // -5 itself is allowed.
  GDN_ASSIGN_OR_RETURN(const double bound, GetNumberOr(text, kLowerBound, kLeastBound,
                                                       std::nextafter(kLeastBound, -6.0), 0.0));
  spec->decay_lower_bound = static_cast<float>(bound);
  if (spec->decay_lower_bound < 0.0f) return absl::OkStatus();
  return FieldError(text, kLowerBound, "a number below 0 in single precision",
                    text.Find(kLowerBound));
}

}  // namespace

absl::Status ParseGdn2Keys(const JsonObject& text, ModelSpec* spec) {
  GDN_RETURN_IF_ERROR(ParseDecayGate(text, spec));
  GDN_ASSIGN_OR_RETURN(const std::optional<bool> negative, GetBool(text, "allow_neg_eigval"));
  if (negative.value_or(false)) spec->beta_scale = 2.0f;
  GDN_ASSIGN_OR_RETURN(const std::optional<bool> normed, GetBool(text, "use_qk_l2norm"));
  if (normed.value_or(true)) return absl::OkStatus();
  return absl::UnimplementedError(
      absl::StrCat(text.name, ": use_qk_l2norm: false is not supported; supported: true"));
}

}  // namespace gdn::model
