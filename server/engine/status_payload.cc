#include "server/engine/status_payload.h"

#include <charconv>
#include <string_view>

#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"

namespace gdn::engine {
namespace {

constexpr char kPositionMismatchUrl[] = "gdn.engine/position_mismatch";
constexpr char kRetryDelayUrl[] = "gdn.engine/retry_delay_ms";

// Takes a number and the separator after it off the front.
std::optional<int64_t> TakeNumber(std::string_view* text) {
  int64_t value = 0;
  const char* end = text->data() + text->size();
  const auto [next, error] = std::from_chars(text->data(), end, value);
  if (error != std::errc() || (next != end && *next != ' ')) return std::nullopt;
  text->remove_prefix(static_cast<size_t>(next - text->data()) + (next != end ? 1 : 0));
  return value;
}

}  // namespace

absl::Status PositionMismatchError(const PositionMismatch& mismatch) {
  absl::Status status = absl::FailedPreconditionError(
      absl::StrCat("session ", mismatch.session_id, " is at position ", mismatch.actual_position,
                   ", expected_position is ", mismatch.expected_position,
                   "; continue from the true position, or start a new session"));
  status.SetPayload(kPositionMismatchUrl,
                    absl::Cord(absl::StrCat(mismatch.expected_position, " ",
                                            mismatch.actual_position, " ", mismatch.session_id)));
  return status;
}

std::optional<PositionMismatch> GetPositionMismatch(const absl::Status& status) {
  const absl::optional<absl::Cord> payload = status.GetPayload(kPositionMismatchUrl);
  if (!payload.has_value()) return std::nullopt;
  const std::string bytes(*payload);
  std::string_view text = bytes;
  const std::optional<int64_t> expected = TakeNumber(&text);
  if (!expected.has_value()) return std::nullopt;
  const std::optional<int64_t> actual = TakeNumber(&text);
  if (!actual.has_value()) return std::nullopt;
  return PositionMismatch{std::string(text), *expected, *actual};
}

absl::Status ExhaustedError(const std::string& message, int64_t retry_delay_ms) {
  absl::Status status = absl::ResourceExhaustedError(message);
  status.SetPayload(kRetryDelayUrl, absl::Cord(absl::StrCat(retry_delay_ms)));
  return status;
}

std::optional<int64_t> GetRetryDelayMs(const absl::Status& status) {
  const absl::optional<absl::Cord> payload = status.GetPayload(kRetryDelayUrl);
  if (!payload.has_value()) return std::nullopt;
  const std::string bytes(*payload);
  std::string_view text = bytes;
  return TakeNumber(&text);
}

}  // namespace gdn::engine
