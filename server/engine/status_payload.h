// Machine-readable companions of an absl::Status, for the layer that puts it on a wire.
#ifndef SERVER_ENGINE_STATUS_PAYLOAD_H_
#define SERVER_ENGINE_STATUS_PAYLOAD_H_

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"

namespace gdn::engine {

struct PositionMismatch {
  std::string session_id;
  int64_t expected_position = 0;
  int64_t actual_position = 0;
};

absl::Status PositionMismatchError(const PositionMismatch& mismatch);
std::optional<PositionMismatch> GetPositionMismatch(const absl::Status& status);

// RESOURCE_EXHAUSTED with the delay after which a retry makes sense.
absl::Status ExhaustedError(const std::string& message, int64_t retry_delay_ms);
std::optional<int64_t> GetRetryDelayMs(const absl::Status& status);

}  // namespace gdn::engine

#endif  // SERVER_ENGINE_STATUS_PAYLOAD_H_
