// File: gdn/client/status.h
//
// Every call of the library answers with an absl::Status. What a gdn server adds to an error beyond
// its code and message is decoded by the functions here.
#ifndef GDN_CLIENT_STATUS_H_
#define GDN_CLIENT_STATUS_H_

#include <chrono>
#include <optional>

#include "absl/status/status.h"
#include "gdn/v1/types.pb.h"

namespace gdn::client {

// With FAILED_PRECONDITION: the session is not where the request expected it to be.
std::optional<v1::PositionMismatch> GetPositionMismatch(const absl::Status& status);

// With RESOURCE_EXHAUSTED: the delay after which the server advises to try again. Absent where a
// retry cannot help, e.g. for a message that is too large.
std::optional<std::chrono::milliseconds> GetRetryDelay(const absl::Status& status);

}  // namespace gdn::client

#endif  // GDN_CLIENT_STATUS_H_
