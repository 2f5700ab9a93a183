#include "gdn/client/client.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "client/cpp/testing/fake_server.h"
#include "gdn/client/input.h"
#include "gdn/client/status.h"

namespace gdn::client {
namespace {

using std::chrono::milliseconds;
using ::testing::ElementsAre;
using testing::FakeServer;
using ::testing::HasSubstr;
using testing::kPatience;

class ClientTest : public ::testing::Test {
 protected:
  ClientTest() {
    auto client = Client::Connect(server_.address(), {.connect_timeout = kPatience});
    EXPECT_TRUE(client.ok()) << client.status();
    if (client.ok()) client_ = *std::move(client);
  }
  void SetUp() override { ASSERT_NE(client_, nullptr); }

  testing::Control& control() { return server_.control(); }
  // Everything that has been configured must be in place before a call, so no lock is needed here.
  static v1::GenerateRequest Prompt() {
    v1::GenerateRequest request;
    *request.mutable_input() = BytesInput("And");
    return request;
  }
  static v1::StepRequest StepOf(const std::string& session, int32_t id) {
    v1::StepRequest request;
    v1::SequenceRequest* sequence = request.add_sequences();
    sequence->set_session_id(session);
    *sequence->mutable_input() = TokensInput(std::vector<int32_t>{id});
    sequence->mutable_output()->set_next_token(true);
    return request;
  }

  FakeServer server_;
  std::unique_ptr<Client> client_;
};

TEST_F(ClientTest, ConnectKeepsTheModel) {
  EXPECT_EQ(client_->model().name(), "fake");
  const auto model = client_->GetModel();
  ASSERT_TRUE(model.ok()) << model.status();
  EXPECT_EQ(model->vocab_size(), 260);
}

TEST_F(ClientTest, ConnectWaitsForAServerThatIsNotReady) {
  control().model_calls = 0;
  control().model_failures.assign(3, {grpc::StatusCode::UNAVAILABLE, "loading"});
  const auto client = Client::Connect(server_.address(), {.connect_timeout = kPatience});
  EXPECT_TRUE(client.ok()) << client.status();
  EXPECT_EQ(control().model_calls, 4);
}

TEST_F(ClientTest, ConnectGivesUpInTimeAndSaysWhy) {
  control().model_failures.assign(10'000, {grpc::StatusCode::UNAVAILABLE, "loading the model"});
  const auto client = Client::Connect(server_.address(), {.connect_timeout = milliseconds(500)});
  EXPECT_EQ(client.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(client.status().message()),
              ::testing::AllOf(HasSubstr(server_.address()), HasSubstr("500 ms"),
                               HasSubstr("loading the model")));
}

TEST_F(ClientTest, ConnectDoesNotRetryOtherErrors) {
  control().model_calls = 0;
  control().model_failures.assign(1, {grpc::StatusCode::UNIMPLEMENTED, "no such method"});
  const auto client = Client::Connect(server_.address(), {.connect_timeout = kPatience});
  EXPECT_EQ(client.status().code(), absl::StatusCode::kUnimplemented);
  EXPECT_EQ(control().model_calls, 1);
}

TEST(ClientConnectTest, NobodyListens) {
  std::string address;
  {
    FakeServer gone;
    address = gone.address();
  }
  const auto client = Client::Connect(address, {.connect_timeout = milliseconds(200)});
  EXPECT_EQ(client.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(client.status().message()), HasSubstr(address));
}

TEST_F(ClientTest, CallsAreNotRetried) {
  control().failures.assign(1, {grpc::StatusCode::UNAVAILABLE, "draining"});
  const auto response = client_->Step(StepOf("a", 1));
  EXPECT_EQ(response.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(control().step_requests.size(), 1u);
}

TEST_F(ClientTest, DeadlineOfOneCall) {
  control().hold_steps = true;
  const auto response = client_->Step(StepOf("a", 1), {.timeout = milliseconds(50)});
  EXPECT_EQ(response.status().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_TRUE(control().WaitForCancelled(1));
}

TEST_F(ClientTest, DefaultDeadlineHoldsForStreams) {
  control().hold_after = 2;
  const auto client = Client::Connect(
      server_.address(), {.connect_timeout = kPatience, .call_timeout = milliseconds(500)});
  ASSERT_TRUE(client.ok()) << client.status();
  const auto stream = (*client)->Generate(Prompt());
  v1::GenerateResponse response;
  while (stream->Next(&response)) {
  }
  EXPECT_EQ(stream->Finish().code(), absl::StatusCode::kDeadlineExceeded);
}

TEST_F(ClientTest, DecodesPositionMismatch) {
  control().failures.assign(1, testing::PositionMismatchStatus("a", 3, 5));
  const auto response = client_->Prefill(v1::PrefillRequest());
  EXPECT_EQ(response.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(response.status().message(), "expected_position: wrong");
  const auto mismatch = GetPositionMismatch(response.status());
  ASSERT_TRUE(mismatch.has_value());
  EXPECT_EQ(mismatch->session_id(), "a");
  EXPECT_EQ(mismatch->expected_position(), 3);
  EXPECT_EQ(mismatch->actual_position(), 5);
  EXPECT_FALSE(GetRetryDelay(response.status()).has_value());
}

TEST_F(ClientTest, DecodesRetryInfo) {
  control().failures.assign(1, testing::ExhaustedStatus("no free slot", 1'250));
  const auto session = client_->CreateSession();
  EXPECT_EQ(session.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(GetRetryDelay(session.status()), milliseconds(1'250));
  EXPECT_FALSE(GetPositionMismatch(session.status()).has_value());
}

TEST_F(ClientTest, FaultOfOneSequence) {
  control().sequence_fault = testing::PositionMismatchStatus("a", 1, 2);
  const auto response = client_->Step(StepOf("a", 1));
  ASSERT_TRUE(response.ok()) << response.status();
  const absl::Status fault = SequenceStatus(response->sequences(0));
  EXPECT_EQ(fault.code(), absl::StatusCode::kFailedPrecondition);
  ASSERT_TRUE(GetPositionMismatch(fault).has_value());
  EXPECT_EQ(GetPositionMismatch(fault)->actual_position(), 2);
  EXPECT_TRUE(SequenceStatus(v1::SequenceResponse()).ok());
}

TEST_F(ClientTest, SessionsFromCreationToDeletion) {
  std::vector<std::string> ids;
  for (int i = 0; i < 5; ++i) {
    const auto session = client_->CreateSession(i == 0 ? std::optional<int64_t>(0) : std::nullopt);
    ASSERT_TRUE(session.ok()) << session.status();
    ids.push_back(session->session_id());
  }
  EXPECT_TRUE(control().create_requests[0].has_ttl_ms());
  EXPECT_FALSE(control().create_requests[1].has_ttl_ms());
  const auto all = client_->ListAllSessions();  // The fake has two on a page.
  ASSERT_TRUE(all.ok()) << all.status();
  std::vector<std::string> listed;
  for (const v1::Session& session : *all) listed.push_back(session.session_id());
  EXPECT_EQ(listed, ids);

  ASSERT_TRUE(client_->Step(StepOf(ids[0], 7)).ok());
  v1::ForkSessionRequest fork;
  fork.set_session_id(ids[0]);
  fork.set_count(2);
  const auto copies = client_->ForkSession(fork);
  ASSERT_TRUE(copies.ok()) << copies.status();
  ASSERT_EQ(copies->size(), 2u);
  EXPECT_EQ((*copies)[1].position(), 1);
  EXPECT_EQ((*copies)[1].parent_session_id(), ids[0]);

  const auto position = client_->DeleteSession(ids[0]);
  ASSERT_TRUE(position.ok()) << position.status();
  EXPECT_EQ(*position, 1);
  EXPECT_EQ(client_->GetSession(ids[0]).status().code(), absl::StatusCode::kNotFound);
}

TEST_F(ClientTest, GenerateToTheEnd) {
  control().tokens_per_message = 5;
  const auto stream = client_->Generate(Prompt());
  std::string text;
  v1::GenerateResponse response;
  while (stream->Next(&response)) {
    for (const v1::Token& token : response.tokens()) text += static_cast<char>(token.id());
  }
  EXPECT_EQ(text, "Go in peace.");
  EXPECT_EQ(response.finish_reason(), v1::FINISH_REASON_STOP);
  EXPECT_EQ(response.usage().input_tokens(), 3);
  EXPECT_TRUE(stream->Finish().ok());
  EXPECT_TRUE(stream->Finish().ok());
  EXPECT_FALSE(stream->Next(&response));
}

TEST_F(ClientTest, StreamWithoutFinishReasonIsNoSuccess) {
  control().omit_finish_reason = true;
  const auto stream = client_->Generate(Prompt());
  v1::GenerateResponse response;
  while (stream->Next(&response)) {
  }
  const absl::Status status = stream->Finish();
  EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
  EXPECT_THAT(std::string(status.message()), HasSubstr("finish_reason"));
}

TEST_F(ClientTest, RefusedGenerate) {
  control().failures.assign(1, {grpc::StatusCode::OUT_OF_RANGE, "max_new_tokens: 9 > 8"});
  const auto stream = client_->Generate(Prompt());
  v1::GenerateResponse response;
  EXPECT_FALSE(stream->Next(&response));
  EXPECT_EQ(stream->Finish(), absl::OutOfRangeError("max_new_tokens: 9 > 8"));
}

TEST_F(ClientTest, CancelReachesTheServer) {
  control().hold_after = 3;
  const auto stream = client_->Generate(Prompt());
  v1::GenerateResponse response;
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(stream->Next(&response));
  stream->Cancel();
  EXPECT_FALSE(stream->Next(&response));
  EXPECT_EQ(stream->Finish().code(), absl::StatusCode::kCancelled);
  EXPECT_TRUE(control().WaitForCancelled(1));
}

TEST_F(ClientTest, FinishBeforeTheEndCancels) {
  control().hold_after = 1;
  const auto stream = client_->Generate(Prompt());
  EXPECT_EQ(stream->Finish().code(), absl::StatusCode::kCancelled);
}

TEST_F(ClientTest, DestructionCancels) {
  control().hold_after = 1;
  {
    const auto stream = client_->Generate(Prompt());
    v1::GenerateResponse response;
    ASSERT_TRUE(stream->Next(&response));
  }
  EXPECT_TRUE(control().WaitForCancelled(1));
  {
    const auto stream = client_->OpenStepStream();
    ASSERT_TRUE(stream->Step(StepOf("a", 1)).ok());
  }
  EXPECT_TRUE(control().WaitForCancelled(2));
}

TEST_F(ClientTest, StepStreamAnswersInOrder) {
  const auto stream = client_->OpenStepStream();
  const auto first = stream->Step(StepOf("a", 10));
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_EQ(first->sequences(0).next_token().id(), 11);
  for (const int32_t id : {20, 30, 40}) ASSERT_TRUE(stream->Send(StepOf("a", id)));
  stream->CloseSend();
  EXPECT_FALSE(stream->Send(StepOf("a", 50)));
  std::vector<int32_t> ids;
  std::vector<int64_t> positions;
  v1::StepResponse response;
  while (stream->Receive(&response)) {
    ids.push_back(response.sequences(0).next_token().id());
    positions.push_back(response.sequences(0).position());
  }
  EXPECT_THAT(ids, ElementsAre(21, 31, 41));
  EXPECT_THAT(positions, ElementsAre(2, 3, 4));
  EXPECT_TRUE(stream->Finish().ok());
}

TEST_F(ClientTest, RefusedStepEndsTheStreamWithItsStatus) {
  const auto stream = client_->OpenStepStream();
  ASSERT_TRUE(stream->Step(StepOf("a", 1)).ok());
  {
    const std::lock_guard lock(control().mutex);
    control().failures.assign(1, testing::PositionMismatchStatus("a", 9, 1));
  }
  const auto response = stream->Step(StepOf("a", 2));
  ASSERT_EQ(response.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(GetPositionMismatch(response.status())->actual_position(), 1);
  EXPECT_EQ(stream->Finish(), response.status());
  EXPECT_EQ(stream->Step(StepOf("a", 3)).status(), response.status());
}

}  // namespace
}  // namespace gdn::client
