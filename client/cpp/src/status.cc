#include "gdn/client/status.h"

#include <string>

#include "absl/strings/cord.h"
#include "client/cpp/src/rpc_status.h"
#include "google/rpc/error_details.pb.h"

namespace gdn::client {
namespace {

constexpr char kTypeUrlPrefix[] = "type.googleapis.com/";

template <typename Message>
std::optional<Message> GetDetail(const absl::Status& status) {
  const absl::optional<absl::Cord> payload =
      status.GetPayload(kTypeUrlPrefix + Message::descriptor()->full_name());
  Message message;
  if (!payload.has_value() || !message.ParseFromString(std::string(*payload))) return std::nullopt;
  return message;
}

void AddDetails(const google::rpc::Status& from, absl::Status* to) {
  for (const google::protobuf::Any& detail : from.details()) {
    to->SetPayload(detail.type_url(), absl::Cord(detail.value()));
  }
}

}  // namespace

std::optional<v1::PositionMismatch> GetPositionMismatch(const absl::Status& status) {
  return GetDetail<v1::PositionMismatch>(status);
}

std::optional<std::chrono::milliseconds> GetRetryDelay(const absl::Status& status) {
  const auto info = GetDetail<google::rpc::RetryInfo>(status);
  if (!info.has_value()) return std::nullopt;
  return std::chrono::duration_cast<std::chrono::milliseconds>(
      std::chrono::seconds(info->retry_delay().seconds()) +
      std::chrono::nanoseconds(info->retry_delay().nanos()));
}

absl::Status FromGrpc(const grpc::Status& status) {
  if (status.ok()) return absl::OkStatus();
  // Both enumerations carry the canonical numbers.
  absl::Status result(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
  google::rpc::Status details;
  if (details.ParseFromString(status.error_details())) AddDetails(details, &result);
  return result;
}

absl::Status FromProto(const google::rpc::Status& status) {
  absl::Status result(static_cast<absl::StatusCode>(status.code()), status.message());
  AddDetails(status, &result);
  return result;
}

}  // namespace gdn::client
