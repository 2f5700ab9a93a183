#include "server/rpc/status.h"

#include <gtest/gtest.h>

#include <string>

#include "gdn/v1/types.pb.h"
#include "google/rpc/error_details.pb.h"
#include "server/engine/status_payload.h"
#include "server/rpc/observer.h"
#include "server/rpc/utf8.h"

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

// A session id in a message may have been cut anywhere.
TEST(StatusTest, MessagesAreWellFormed) {
  const grpc::Status wire =
      ToGrpcStatus(engine::ExhaustedError("session \"\xC3\xA9\xE2\x82\" is unknown", 100));
  const std::string expected = "session \"\xC3\xA9\xEF\xBF\xBD\" is unknown";
  EXPECT_EQ(wire.error_message(), expected);
  google::rpc::Status proto;
  ASSERT_TRUE(proto.ParseFromString(wire.error_details()));
  EXPECT_EQ(proto.message(), expected);
}

TEST(Utf8Test, KnowsWhatIsWellFormed) {
  for (const char* text : {"", "a", "\xC2\x80", "\xDF\xBF", "\xE0\xA0\x80", "\xED\x9F\xBF",
                           "\xEF\xBF\xBF", "\xF0\x90\x80\x80", "\xF4\x8F\xBF\xBF", "a\xC3\xA9z"}) {
    EXPECT_TRUE(IsUtf8(text)) << text;
    EXPECT_EQ(RepairedUtf8(text), text);
  }
  for (const char* text :
       {"\x80", "\xBF", "\xC0\x80", "\xC1\xBF", "\xC3", "\xC3z", "\xE0\x9F\xBF", "\xE2\x82",
        "\xE2\x82z", "\xED\xA0\x80", "\xF0\x8F\xBF\xBF", "\xF0\x9F\x98", "\xF4\x90\x80\x80",
        "\xF5\x80\x80\x80", "\xFF", "ab\xC3"}) {
    EXPECT_FALSE(IsUtf8(text)) << text;
    EXPECT_TRUE(IsUtf8(RepairedUtf8(text))) << text;
  }
  EXPECT_EQ(RepairedUtf8("a\xFF\xFE"
                         "b\xE2\x82"),
            "a\xEF\xBF\xBD"
            "b\xEF\xBF\xBD");
}

}  // namespace
}  // namespace gdn::rpc
