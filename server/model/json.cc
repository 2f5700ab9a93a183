#include "server/model/json.h"

#include <algorithm>
#include <exception>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "server/model/quote.h"

namespace gdn::model {
namespace {

// Builds the tree from the parser's events; each returns false to stop, with error() set.
class TreeBuilder : public nlohmann::json_sax<nlohmann::json> {
 public:
  explicit TreeBuilder(const JsonLimits& limits) : limits_(limits) {}

  const std::string& error() const { return error_; }
  Json Take() { return std::move(*root_); }

  bool null() override { return Add(Json()); }
  bool boolean(bool value) override { return Add(Json(Json::Value(value))); }
  bool number_integer(int64_t value) override { return Add(Json(Json::Value(value))); }
  bool number_unsigned(uint64_t value) override {
    if (value > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
      return Add(Json(Json::Value(value)));
    }
    return Add(Json(Json::Value(static_cast<int64_t>(value))));
  }
  bool number_float(double value, const std::string&) override {
    return Add(Json(Json::Value(value)));
  }
  bool string(std::string& value) override { return Add(Json(Json::Value(std::move(value)))); }
  bool binary(nlohmann::json::binary_t&) override { return Fail("holds binary data"); }

  bool start_object(size_t) override { return Open(true); }
  bool start_array(size_t) override { return Open(false); }
  bool key(std::string& value) override {
    open_.back().key = std::move(value);
    return true;
  }
  bool end_object() override {
    Container closed = std::move(open_.back());
    open_.pop_back();
    std::sort(closed.members.begin(), closed.members.end(),
              [](const JsonMember& a, const JsonMember& b) { return a.key < b.key; });
    const auto duplicate =
        std::adjacent_find(closed.members.begin(), closed.members.end(),
                           [](const JsonMember& a, const JsonMember& b) { return a.key == b.key; });
    if (duplicate != closed.members.end()) {
      return Fail(absl::StrCat("has the key ", Quoted(duplicate->key), " twice in one object"));
    }
    return Place(Json(Json::Value(std::move(closed.members))));
  }
  bool end_array() override {
    Container closed = std::move(open_.back());
    open_.pop_back();
    return Place(Json(Json::Value(std::move(closed.items))));
  }
  bool parse_error(size_t position, const std::string& token,
                   const nlohmann::json::exception&) override {
    return Fail(absl::StrCat("is not valid JSON at byte ", position, ", near ", Quoted(token)));
  }

 private:
  struct Container {
    bool is_object = false;
    std::string key;  // Of the member being read.
    Json::Object members;
    Json::Array items;
  };

  bool Fail(std::string error) {
    error_ = std::move(error);
    return false;
  }
  bool Count() {
    if (++num_values_ <= limits_.max_values) return true;
    return Fail(absl::StrCat("has more than ", limits_.max_values, " values"));
  }
  bool Open(bool is_object) {
    if (open_.size() >= static_cast<size_t>(limits_.max_depth)) {
      return Fail(absl::StrCat("is nested more than ", limits_.max_depth, " levels deep"));
    }
    open_.emplace_back().is_object = is_object;
    return Count();
  }
  bool Add(Json value) { return Count() && Place(std::move(value)); }
  bool Place(Json value) {
    if (open_.empty()) {
      root_ = std::move(value);
    } else if (open_.back().is_object) {
      open_.back().members.push_back({std::move(open_.back().key), std::move(value)});
    } else {
      open_.back().items.push_back(std::move(value));
    }
    return true;
  }

  const JsonLimits& limits_;
  std::vector<Container> open_;
  std::optional<Json> root_;
  size_t num_values_ = 0;
  std::string error_;
};

}  // namespace

Json::Json() = default;
Json::Json(Value value) : value_(std::move(value)) {}
Json::Json(Json&&) noexcept = default;
Json& Json::operator=(Json&&) noexcept = default;
Json::~Json() = default;

const Json* Json::Find(std::string_view key) const {
  const Object* object = As<Object>();
  if (object == nullptr) return nullptr;
  const auto at =
      std::lower_bound(object->begin(), object->end(), key,
                       [](const JsonMember& m, std::string_view k) { return m.key < k; });
  return at != object->end() && at->key == key ? &at->value : nullptr;
}

std::string Json::Describe() const {
  struct Visitor {
    std::string operator()(std::monostate) const { return "null"; }
    std::string operator()(bool value) const { return value ? "true" : "false"; }
    std::string operator()(int64_t value) const { return absl::StrCat(value); }
    std::string operator()(uint64_t value) const { return absl::StrCat(value); }
    std::string operator()(double value) const { return absl::StrCat(value); }
    std::string operator()(const std::string& value) const { return Quoted(value); }
    std::string operator()(const Array& value) const {
      return absl::StrCat("an array of ", value.size());
    }
    std::string operator()(const Object& value) const {
      return absl::StrCat("an object of ", value.size());
    }
  };
  return std::visit(Visitor{}, value_);
}

absl::StatusOr<Json> ParseJson(std::string_view text, const std::string& name,
                               const JsonLimits& limits) {
  if (text.size() > limits.max_bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat(name, ": ", text.size(), " bytes of JSON, the limit is ", limits.max_bytes));
  }
  TreeBuilder builder(limits);
  try {
    if (!nlohmann::json::sax_parse(text.begin(), text.end(), &builder)) {
      return absl::InvalidArgumentError(absl::StrCat(name, " ", builder.error()));
    }
  } catch (const std::exception& e) {  // Out of memory, at worst.
    return absl::InvalidArgumentError(absl::StrCat(name, " cannot be parsed: ", e.what()));
  }
  return builder.Take();
}

}  // namespace gdn::model
