// How names and values that came from a file are shown in messages.
#ifndef SERVER_MODEL_QUOTE_H_
#define SERVER_MODEL_QUOTE_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace gdn::model {

// 'text' with control characters escaped, cut after 120 bytes: a hostile file must not be able to
// flood or forge a log line.
std::string Quoted(std::string_view text);

// [2, 3]; at most eight dimensions are shown.
std::string ShapeString(const std::vector<int64_t>& shape);

// A bounded list of problems for one status message.
class ProblemList {
 public:
  void Add(std::string problem);
  bool empty() const { return count_ == 0; }
  int64_t count() const { return count_; }
  // "a; b; c; and 17 more"
  std::string Joined() const;

 private:
  static constexpr size_t kMaxShown = 24;
  std::vector<std::string> shown_;
  int64_t count_ = 0;
};

}  // namespace gdn::model

#endif  // SERVER_MODEL_QUOTE_H_
