// The one place where engine statuses become wire statuses, details included.
#ifndef SERVER_RPC_STATUS_H_
#define SERVER_RPC_STATUS_H_

#include <grpcpp/support/status.h>

#include "absl/status/status.h"
#include "google/rpc/status.pb.h"

namespace gdn::rpc {

// Code, message (cut to what fits a trailer), and PositionMismatch or RetryInfo if it carries one.
google::rpc::Status ToRpcStatus(const absl::Status& status);

// The same as a call's status; the details travel as grpc-status-details-bin.
grpc::Status ToGrpcStatus(const absl::Status& status);

}  // namespace gdn::rpc

#endif  // SERVER_RPC_STATUS_H_
