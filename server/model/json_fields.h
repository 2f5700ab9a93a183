// Typed, range-checked access to the members of a JSON object. Every error names the document, the
// key, what was expected and what came. A member that is null counts as absent, as in configuration
// files written from Python.
#ifndef SERVER_MODEL_JSON_FIELDS_H_
#define SERVER_MODEL_JSON_FIELDS_H_

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/model/json.h"

namespace gdn::model {

// An object and its name in messages ("/m/config.json, text_config").
struct JsonObject {
  const Json* json = nullptr;
  std::string name;

  // The member, or null if it is absent or JSON's null.
  const Json* Find(const char* key) const;
};

// INVALID_ARGUMENT: "<name>: <key>: expected <expected>, got <value>".
absl::Status FieldError(const JsonObject& object, const char* key, const std::string& expected,
                        const Json* got);

absl::StatusOr<int64_t> GetInt(const JsonObject& object, const char* key, int64_t min, int64_t max);
absl::StatusOr<int64_t> GetIntOr(const JsonObject& object, const char* key, int64_t absent,
                                 int64_t min, int64_t max);
// Accepts integers too; finite, min < value < max.
absl::StatusOr<double> GetNumberOr(const JsonObject& object, const char* key, double absent,
                                   double min, double max);
absl::StatusOr<std::optional<bool>> GetBool(const JsonObject& object, const char* key);
absl::StatusOr<std::string> GetStringOr(const JsonObject& object, const char* key,
                                        const std::string& absent);
// An object-valued member; its JsonObject::json is null if it is absent.
absl::StatusOr<JsonObject> GetObject(const JsonObject& object, const char* key);

}  // namespace gdn::model

#endif  // SERVER_MODEL_JSON_FIELDS_H_
