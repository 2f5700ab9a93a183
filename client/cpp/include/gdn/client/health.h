// Asks a server for its health, as a probe does: once, with a deadline, before anything else.
#ifndef GDN_CLIENT_HEALTH_H_
#define GDN_CLIENT_HEALTH_H_

#include <chrono>
#include <string>

#include "absl/status/statusor.h"

namespace gdn::client {

// Whether `service` ("": the server as a whole) is SERVING at "host:port". UNAVAILABLE or
// DEADLINE_EXCEEDED: no answer; NOT_FOUND: the server has no such service.
absl::StatusOr<bool> IsServing(const std::string& target, const std::string& service,
                               std::chrono::milliseconds timeout);

}  // namespace gdn::client

#endif  // GDN_CLIENT_HEALTH_H_
