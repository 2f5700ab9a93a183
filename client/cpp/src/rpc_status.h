// gRPC's statuses as Abseil's, details included. Internal to the library.
#ifndef CLIENT_CPP_SRC_RPC_STATUS_H_
#define CLIENT_CPP_SRC_RPC_STATUS_H_

#include <grpcpp/support/status.h>

#include "absl/status/status.h"
#include "google/rpc/status.pb.h"

namespace gdn::client {

// Each detail becomes a payload under its type URL.
absl::Status FromGrpc(const grpc::Status& status);
absl::Status FromProto(const google::rpc::Status& status);

}  // namespace gdn::client

#endif  // CLIENT_CPP_SRC_RPC_STATUS_H_
