#include "server/model/quote.h"

#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"

namespace gdn::model {

std::string Quoted(std::string_view text) {
  constexpr size_t kMaxShown = 120;
  const bool cut = text.size() > kMaxShown;
  if (cut) {
    size_t size = kMaxShown;
    while (size > 0 && (static_cast<unsigned char>(text[size]) & 0xc0u) == 0x80u) --size;
    text = text.substr(0, size);
  }
  return absl::StrCat("'", absl::Utf8SafeCEscape(absl::string_view(text.data(), text.size())),
                      cut ? "...'" : "'");
}

std::string ShapeString(const std::vector<int64_t>& shape) {
  constexpr size_t kMaxShown = 8;
  if (shape.size() <= kMaxShown) return absl::StrCat("[", absl::StrJoin(shape, ", "), "]");
  return absl::StrCat("[", absl::StrJoin(shape.begin(), shape.begin() + kMaxShown, ", "),
                      ", ...] of ", shape.size(), " dimensions");
}

void ProblemList::Add(std::string problem) {
  ++count_;
  if (shown_.size() < kMaxShown) shown_.push_back(std::move(problem));
}

std::string ProblemList::Joined() const {
  std::string text = absl::StrJoin(shown_, "; ");
  const int64_t hidden = count_ - static_cast<int64_t>(shown_.size());
  if (hidden > 0) absl::StrAppend(&text, "; and ", hidden, " more");
  return text;
}

}  // namespace gdn::model
