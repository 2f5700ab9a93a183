// A strict JSON reader: bounded size, depth and number of values; duplicate keys refused; integers
// kept apart from other numbers. Nothing outside json.cc sees the parser library.
#ifndef SERVER_MODEL_JSON_H_
#define SERVER_MODEL_JSON_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "absl/status/statusor.h"

namespace gdn::model {

struct JsonLimits {
  size_t max_bytes = size_t{4} << 20;
  int max_depth = 32;
  size_t max_values = 4'000'000;  // Bounds memory: "[[],[],..." is small as text, large as a tree.
};

struct JsonMember;

class Json {
 public:
  using Array = std::vector<Json>;
  using Object = std::vector<JsonMember>;  // Sorted by key, keys distinct.
  // An integer that fits int64_t is an int64_t; above that, up to 2^64 - 1, a uint64_t; anything
  // written with a fraction or an exponent a double, whatever its value.
  using Value =
      std::variant<std::monostate, bool, int64_t, uint64_t, double, std::string, Array, Object>;

  Json();
  explicit Json(Value value);
  Json(Json&&) noexcept;
  Json& operator=(Json&&) noexcept;
  Json(const Json&) = delete;
  Json& operator=(const Json&) = delete;
  ~Json();

  bool is_null() const { return std::holds_alternative<std::monostate>(value_); }
  // The value if it is of that type, else null.
  template <typename T>
  const T* As() const {
    return std::get_if<T>(&value_);
  }
  // The member of that key; null if there is none or this is not an object.
  const Json* Find(std::string_view key) const;
  // For messages: the value itself if it is small, else its kind.
  std::string Describe() const;

 private:
  Value value_;
};

struct JsonMember {
  std::string key;
  Json value;
};

// `name` is the document's name in messages: its path. INVALID_ARGUMENT for whatever is wrong.
absl::StatusOr<Json> ParseJson(std::string_view text, const std::string& name,
                               const JsonLimits& limits = {});

}  // namespace gdn::model

#endif  // SERVER_MODEL_JSON_H_
