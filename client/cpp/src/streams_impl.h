// What the streams own. Internal to the library.
#ifndef CLIENT_CPP_SRC_STREAMS_IMPL_H_
#define CLIENT_CPP_SRC_STREAMS_IMPL_H_

#include <grpcpp/client_context.h>
#include <grpcpp/support/sync_stream.h>

#include <memory>
#include <optional>

#include "absl/status/status.h"
#include "gdn/client/streams.h"
#include "gdn/v1/inference.grpc.pb.h"

namespace gdn::client {

struct GenerateStream::Impl {
  grpc::ClientContext context;
  std::unique_ptr<grpc::ClientReader<v1::GenerateResponse>> reader;
  bool at_end = false;
  bool finish_reason_seen = false;
  std::optional<absl::Status> status;
};

struct StepStream::Impl {
  grpc::ClientContext context;
  std::unique_ptr<grpc::ClientReaderWriter<v1::StepRequest, v1::StepResponse>> stream;
  bool send_closed = false;
  std::optional<absl::Status> status;
};

}  // namespace gdn::client

#endif  // CLIENT_CPP_SRC_STREAMS_IMPL_H_
