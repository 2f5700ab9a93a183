#include "server/engine/status_payload.h"

#include <gtest/gtest.h>

namespace gdn::engine {
namespace {

TEST(StatusPayload, CarriesTheTruePosition) {
  for (const std::string& id : {std::string("abc"), std::string(), std::string("with a space")}) {
    const absl::Status status = PositionMismatchError({id, -7, 1'000'000'000'000});
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_NE(status.message().find("1000000000000"), absl::string_view::npos);
    const auto mismatch = GetPositionMismatch(status);
    ASSERT_TRUE(mismatch.has_value());
    EXPECT_EQ(mismatch->session_id, id);
    EXPECT_EQ(mismatch->expected_position, -7);
    EXPECT_EQ(mismatch->actual_position, 1'000'000'000'000);
    EXPECT_FALSE(GetRetryDelayMs(status).has_value());
  }
}

TEST(StatusPayload, CarriesTheRetryDelay) {
  const absl::Status status = ExhaustedError("full", 250);
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(status.message(), "full");
  EXPECT_EQ(GetRetryDelayMs(status), 250);
  EXPECT_FALSE(GetPositionMismatch(status).has_value());
}

TEST(StatusPayload, IsAbsentElsewhere) {
  for (const absl::Status& status : {absl::OkStatus(), absl::ResourceExhaustedError("x")}) {
    EXPECT_FALSE(GetRetryDelayMs(status).has_value());
    EXPECT_FALSE(GetPositionMismatch(status).has_value());
  }
}

}  // namespace
}  // namespace gdn::engine
