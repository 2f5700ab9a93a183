#include "server/rpc/step_stream.h"

#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "server/engine/status_payload.h"
#include "server/rpc/testing/captured_log.h"
#include "server/rpc/testing/rpc_fixture.h"

namespace gdn::rpc {
namespace {

class StepStreamTest : public RpcTest {
 protected:
  using Stream = std::unique_ptr<grpc::ClientReaderWriter<v1::StepRequest, v1::StepResponse>>;
};

TEST_F(StepStreamTest, AnswersInOrderAndEndsOkAfterHalfClose) {
  engine_.set_answer(Echo);
  Context context;
  const Stream stream = inference_->StepStream(&context);
  constexpr int kRequests = 100;
  for (int i = 0; i < kRequests; ++i) {  // A window of all of them.
    ASSERT_TRUE(stream->Write(Batch<v1::StepRequest>("s" + std::to_string(i))));
  }
  ASSERT_TRUE(stream->WritesDone());
  v1::StepResponse response;
  for (int i = 0; i < kRequests; ++i) {
    ASSERT_TRUE(stream->Read(&response));
    ASSERT_EQ(response.sequences_size(), 1);
    EXPECT_EQ(response.sequences(0).session_id(), "s" + std::to_string(i));
    EXPECT_FALSE(response.sequences(0).has_status());
    EXPECT_TRUE(response.has_timings());
  }
  EXPECT_FALSE(stream->Read(&response));
  EXPECT_TRUE(stream->Finish().ok());
  EXPECT_EQ(engine_.max_live_batches(), 1) << "requests of one stream must not overlap";
  for (const engine::BatchRequest& batch : engine_.batches()) {
    EXPECT_EQ(batch.kind, engine::CallKind::kStep);
  }
}

TEST_F(StepStreamTest, HalfCloseFinishesWhatIsOutstanding) {
  Context context;
  const Stream stream = inference_->StepStream(&context);
  ASSERT_TRUE(stream->Write(Batch<v1::StepRequest>("a")));
  ASSERT_TRUE(stream->WritesDone());
  const auto call = engine_.WaitForCall(0);
  ASSERT_NE(call, nullptr);
  call->Complete(Echo(engine_.batches().at(0)));
  v1::StepResponse response;
  ASSERT_TRUE(stream->Read(&response));
  EXPECT_EQ(response.sequences(0).session_id(), "a");
  EXPECT_FALSE(stream->Read(&response));
  EXPECT_TRUE(stream->Finish().ok());
  EXPECT_TRUE(call->WaitForRelease());
}

TEST_F(StepStreamTest, HalfCloseAtOnceIsOk) {
  Context context;
  const Stream stream = inference_->StepStream(&context);
  ASSERT_TRUE(stream->WritesDone());
  EXPECT_TRUE(stream->Finish().ok());
  EXPECT_EQ(engine_.num_calls(), 0u);
}

TEST_F(StepStreamTest, ARefusalEndsTheStreamAndLateWritesAreDropped) {
  engine_.set_answer(Echo);
  Context context;
  const Stream stream = inference_->StepStream(&context);
  v1::StepResponse response;
  ASSERT_TRUE(stream->Write(Batch<v1::StepRequest>("a")));
  ASSERT_TRUE(stream->Read(&response));
  engine_.set_refusal(engine::PositionMismatchError({"a", 7, 1}));
  ASSERT_TRUE(stream->Write(Batch<v1::StepRequest>("a")));
  EXPECT_FALSE(stream->Read(&response));
  while (stream->Write(Batch<v1::StepRequest>("late"))) {  // Until the client's side knows.
  }
  const grpc::Status status = stream->Finish();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::FAILED_PRECONDITION);
  google::rpc::Status details;
  v1::PositionMismatch mismatch;
  ASSERT_TRUE(details.ParseFromString(status.error_details()));
  ASSERT_EQ(details.details_size(), 1);
  ASSERT_TRUE(details.details(0).UnpackTo(&mismatch));
  EXPECT_EQ(mismatch.actual_position(), 1);
  EXPECT_EQ(engine_.num_calls(), 1u);
  ExpectServes();
}

TEST_F(StepStreamTest, AMalformedRequestEndsTheStream) {
  engine_.set_answer(Echo);
  Context context;
  const Stream stream = inference_->StepStream(&context);
  v1::StepRequest request;
  request.add_sequences()->set_session_id("a");
  ASSERT_TRUE(stream->Write(request));
  v1::StepResponse response;
  EXPECT_FALSE(stream->Read(&response));
  const grpc::Status status = stream->Finish();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_NE(status.error_message().find("sequences[0].input"), std::string::npos)
      << status.error_message();
}

class LoggedStepStreamTest : public StepStreamTest {
 protected:
  CapturedLog log_;  // From before the server's threads to after them.
};

TEST_F(LoggedStepStreamTest, AMessageThatDoesNotParseIsNotTheEndOfTheStream) {
  engine_.set_answer(Echo);
  Context context;
  const Stream stream = inference_->StepStream(&context);
  ASSERT_TRUE(stream->Write(Batch<v1::StepRequest>("a")));
  v1::StepResponse response;
  ASSERT_TRUE(stream->Read(&response));
  ASSERT_TRUE(stream->Write(Batch<v1::StepRequest>("\xff\xfe")));  // Not UTF-8.
  EXPECT_FALSE(stream->Read(&response));
  const grpc::Status status = stream->Finish();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_NE(status.error_message().find("StepRequest"), std::string::npos);
  EXPECT_TRUE(log_.WaitFor("invalid UTF-8 data when parsing")) << "what protobuf has to say";
  EXPECT_EQ(engine_.batches().size(), 1u);
}

TEST_F(StepStreamTest, AFailedBatchEndsTheStream) {
  engine_.set_answer([](const engine::BatchRequest&) {
    engine::BatchResult result;
    result.status = absl::InternalError("broken");
    return result;
  });
  Context context;
  const Stream stream = inference_->StepStream(&context);
  ASSERT_TRUE(stream->Write(Batch<v1::StepRequest>("a")));
  v1::StepResponse response;
  EXPECT_FALSE(stream->Read(&response));
  EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::INTERNAL);
}

TEST_F(StepStreamTest, CancellingReleasesTheRunningBatch) {
  Context context;
  const Stream stream = inference_->StepStream(&context);
  ASSERT_TRUE(stream->Write(Batch<v1::StepRequest>("a")));
  const auto call = engine_.WaitForCall(0);
  ASSERT_NE(call, nullptr);
  context.TryCancel();
  EXPECT_TRUE(call->WaitForRelease());
  EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::CANCELLED);
  ExpectServes();
}

TEST_F(StepStreamTest, CancellingAnIdleStreamEndsIt) {
  engine_.set_answer(Echo);
  Context context;
  const Stream stream = inference_->StepStream(&context);
  ASSERT_TRUE(stream->Write(Batch<v1::StepRequest>("a")));
  v1::StepResponse response;
  ASSERT_TRUE(stream->Read(&response));
  context.TryCancel();
  EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::CANCELLED);
  EXPECT_EQ(
      observer_.WaitForTotal(1),
      (std::map<std::pair<Rpc, int>, int>{{{Rpc::kStepStream, grpc::StatusCode::CANCELLED}, 1}}));
}

TEST_F(StepStreamTest, ADrainEndsIdleStreamsAndLetsBusyOnesAnswer) {
  Context idle_context;
  const Stream idle = inference_->StepStream(&idle_context);
  Context busy_context;
  const Stream busy = inference_->StepStream(&busy_context);
  ASSERT_TRUE(busy->Write(Batch<v1::StepRequest>("a")));
  const auto call = engine_.WaitForCall(0);
  ASSERT_NE(call, nullptr);
  server_->BeginDrain();
  v1::StepResponse response;
  EXPECT_FALSE(idle->Read(&response));
  EXPECT_EQ(idle->Finish().error_code(), grpc::StatusCode::UNAVAILABLE);
  call->Complete(Echo(engine_.batches().at(0)));
  ASSERT_TRUE(busy->Read(&response));
  EXPECT_EQ(response.sequences(0).session_id(), "a");
  EXPECT_FALSE(busy->Read(&response));
  EXPECT_EQ(busy->Finish().error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_TRUE(server_->WaitForCalls(10'000));
}

}  // namespace
}  // namespace gdn::rpc
