#include "server/model/json_fields.h"

#include <cmath>

#include "absl/strings/str_cat.h"
#include "server/model/status_macros.h"

namespace gdn::model {

const Json* JsonObject::Find(const char* key) const {
  const Json* member = json == nullptr ? nullptr : json->Find(key);
  return member == nullptr || member->is_null() ? nullptr : member;
}

absl::Status FieldError(const JsonObject& object, const char* key, const std::string& expected,
                        const Json* got) {
  return absl::InvalidArgumentError(absl::StrCat(object.name, ": ", key, ": expected ", expected,
                                                 ", got ",
                                                 got == nullptr ? "nothing" : got->Describe()));
}

absl::StatusOr<int64_t> GetInt(const JsonObject& object, const char* key, int64_t min,
                               int64_t max) {
  const Json* member = object.Find(key);
  const int64_t* value = member == nullptr ? nullptr : member->As<int64_t>();
  if (value == nullptr || *value < min || *value > max) {
    const bool real = member != nullptr && member->As<double>() != nullptr;
    return FieldError(object, key,
                      absl::StrCat("an integer in ", min, "..", max,
                                   real ? ", written without a fraction or an exponent" : ""),
                      member);
  }
  return *value;
}

absl::StatusOr<int64_t> GetIntOr(const JsonObject& object, const char* key, int64_t absent,
                                 int64_t min, int64_t max) {
  if (object.Find(key) == nullptr) return absent;
  return GetInt(object, key, min, max);
}

absl::StatusOr<double> GetNumberOr(const JsonObject& object, const char* key, double absent,
                                   double min, double max) {
  const Json* member = object.Find(key);
  if (member == nullptr) return absent;
  double value = NAN;
  if (const double* real = member->As<double>()) value = *real;
  if (const int64_t* integer = member->As<int64_t>()) value = static_cast<double>(*integer);
  if (!(value > min && value < max)) {  // False for NaN as well.
    return FieldError(object, key, absl::StrCat("a number between ", min, " and ", max), member);
  }
  return value;
}

absl::StatusOr<std::optional<bool>> GetBool(const JsonObject& object, const char* key) {
  const Json* member = object.Find(key);
  if (member == nullptr) return std::optional<bool>();
  const bool* value = member->As<bool>();
  if (value == nullptr) return FieldError(object, key, "true or false", member);
  return std::optional<bool>(*value);
}

absl::StatusOr<std::string> GetStringOr(const JsonObject& object, const char* key,
                                        const std::string& absent) {
  const Json* member = object.Find(key);
  if (member == nullptr) return absent;
  const std::string* value = member->As<std::string>();
  if (value == nullptr) return FieldError(object, key, "a string", member);
  return *value;
}

absl::StatusOr<JsonObject> GetObject(const JsonObject& object, const char* key) {
  JsonObject inner{object.Find(key), absl::StrCat(object.name, ", ", key)};
  if (inner.json != nullptr && inner.json->As<Json::Object>() == nullptr) {
    return FieldError(object, key, "an object", inner.json);
  }
  return inner;
}

}  // namespace gdn::model
