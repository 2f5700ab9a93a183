#include "gdn/client/health.h"

#include <grpcpp/create_channel.h>
#include <grpcpp/security/credentials.h>

#include "client/cpp/src/rpc_status.h"
#include "grpc/health/v1/health.grpc.pb.h"

namespace gdn::client {

namespace health = ::grpc::health::v1;

absl::StatusOr<bool> IsServing(const std::string& target, const std::string& service,
                               std::chrono::milliseconds timeout) {
  const auto stub =
      health::Health::NewStub(::grpc::CreateChannel(target, ::grpc::InsecureChannelCredentials()));
  ::grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + timeout);
  health::HealthCheckRequest request;
  request.set_service(service);
  health::HealthCheckResponse response;
  if (absl::Status status = FromGrpc(stub->Check(&context, request, &response)); !status.ok()) {
    return status;
  }
  return response.status() == health::HealthCheckResponse::SERVING;
}

}  // namespace gdn::client
