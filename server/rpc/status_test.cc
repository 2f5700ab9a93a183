#include "server/rpc/status.h"

#include <gtest/gtest.h>

#include <string>

#include "gdn/v1/types.pb.h"
#include "google/rpc/error_details.pb.h"
#include "server/engine/status_payload.h"
#include "server/rpc/observer.h"

namespace gdn::rpc {
namespace {

TEST(StatusTest, EveryCodeKeepsItsMeaning) {
  for (int code = 1; code <= 16; ++code) {
    const absl::Status status(static_cast<absl::StatusCode>(code), "why");
    const grpc::Status wire = ToGrpcStatus(status);
    EXPECT_EQ(wire.error_code(), code);
    EXPECT_EQ(wire.error_message(), "why");
    EXPECT_EQ(wire.error_details(), "");
    // The names that metrics use are those of the codes.
    EXPECT_EQ(std::string(kCodeNames[static_cast<size_t>(code)]),
              absl::StatusCodeToString(status.code()));
  }
  EXPECT_TRUE(ToGrpcStatus(absl::OkStatus()).ok());
  EXPECT_EQ(grpc::StatusCode::DATA_LOSS, static_cast<int>(absl::StatusCode::kDataLoss));
  EXPECT_EQ(grpc::StatusCode::ABORTED, static_cast<int>(absl::StatusCode::kAborted));
}

TEST(StatusTest, MismatchCarriesBothPositions) {
  const grpc::Status wire = ToGrpcStatus(engine::PositionMismatchError({"s1", 10, 12}));
  EXPECT_EQ(wire.error_code(), grpc::StatusCode::FAILED_PRECONDITION);
  google::rpc::Status proto;
  ASSERT_TRUE(proto.ParseFromString(wire.error_details()));
  EXPECT_EQ(proto.code(), wire.error_code());
  EXPECT_EQ(proto.message(), wire.error_message());
  v1::PositionMismatch mismatch;
  ASSERT_EQ(proto.details_size(), 1);
  EXPECT_EQ(proto.details(0).type_url(), "type.googleapis.com/gdn.v1.PositionMismatch");
  ASSERT_TRUE(proto.details(0).UnpackTo(&mismatch));
  EXPECT_EQ(mismatch.session_id(), "s1");
  EXPECT_EQ(mismatch.expected_position(), 10);
  EXPECT_EQ(mismatch.actual_position(), 12);
}

// Trailers above 8 KiB are refused by clients, which would then see another error altogether.
TEST(StatusTest, LongMessagesAreCutBetweenCharacters) {
  std::string message = "x";
  for (int i = 0; i < 5000; ++i)
    message += "\xC3\xA9";  // Two bytes each; the cut falls inside one.
  const grpc::Status wire = ToGrpcStatus(engine::ExhaustedError(message, 100));
  EXPECT_LE(wire.error_message().size(), 1024u);
  EXPECT_GE(wire.error_message().size(), 1020u);
  EXPECT_EQ(wire.error_message().size() % 2, 1u);
  EXPECT_LE(wire.error_details().size(), 1200u);
}

}  // namespace
}  // namespace gdn::rpc
