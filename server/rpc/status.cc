#include "server/rpc/status.h"

#include <algorithm>
#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

#include "gdn/v1/types.pb.h"
#include "google/rpc/error_details.pb.h"
#include "server/engine/status_payload.h"
#include "server/rpc/utf8.h"

namespace gdn::rpc {
namespace {

// Clients accept 8 KiB of trailing metadata by default, and a message goes out twice: percent
// encoded, and within the details.
constexpr size_t kMaxMessageBytes = 1024;

// Cut between characters, and repaired: a message may show part of what a client sent.
std::string CutMessage(absl::string_view message) {
  size_t size = std::min(message.size(), kMaxMessageBytes);
  if (size < message.size()) {
    while (size > 0 && (static_cast<unsigned char>(message[size]) & 0xC0) == 0x80) --size;
  }
  return RepairedUtf8({message.data(), size});
}

}  // namespace

google::rpc::Status ToRpcStatus(const absl::Status& status) {
  google::rpc::Status proto;
  proto.set_code(static_cast<int>(status.code()));
  proto.set_message(CutMessage(status.message()));
  if (const auto mismatch = engine::GetPositionMismatch(status)) {
    v1::PositionMismatch detail;
    detail.set_session_id(mismatch->session_id);
    detail.set_expected_position(mismatch->expected_position);
    detail.set_actual_position(mismatch->actual_position);
    proto.add_details()->PackFrom(detail);
  }
  if (const auto delay_ms = engine::GetRetryDelayMs(status)) {
    google::rpc::RetryInfo detail;
    detail.mutable_retry_delay()->set_seconds(*delay_ms / 1000);
    detail.mutable_retry_delay()->set_nanos(static_cast<int32_t>(*delay_ms % 1000) * 1'000'000);
    proto.add_details()->PackFrom(detail);
  }
  return proto;
}

grpc::Status ToGrpcStatus(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  const google::rpc::Status proto = ToRpcStatus(status);
  // The numbers of the codes are the same by definition of both.
  return grpc::Status(static_cast<grpc::StatusCode>(proto.code()), proto.message(),
                      proto.details_size() > 0 ? proto.SerializeAsString() : std::string());
}

}  // namespace gdn::rpc
