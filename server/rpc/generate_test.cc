#include "server/rpc/generate.h"

#include <gtest/gtest.h>

#include <cstring>
#include <map>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "server/rpc/testing/rpc_fixture.h"

namespace gdn::rpc {
namespace {

class GenerateTest : public RpcTest {
 protected:
  using Reader = std::unique_ptr<grpc::ClientReader<v1::GenerateResponse>>;
};

TEST_F(GenerateTest, StreamsTokensAndOneFinalMessage) {
  Context context;
  v1::GenerateRequest request = GenerateTokens();
  request.mutable_sampling()->set_temperature(0.5f);
  request.mutable_sampling()->set_seed(77);
  request.add_stop_token_ids(4);
  const Reader reader = inference_->Generate(&context, request);
  const auto call = engine_.WaitForCall(0);
  ASSERT_NE(call, nullptr);

  v1::GenerateResponse response;
  call->Push({MakeToken(10)});
  ASSERT_TRUE(reader->Read(&response));
  ASSERT_EQ(response.tokens_size(), 1);
  EXPECT_EQ(response.tokens(0).id(), 10);
  EXPECT_FLOAT_EQ(response.tokens(0).logprob(), -0.5f);
  EXPECT_FALSE(response.tokens(0).has_logits());
  EXPECT_EQ(response.position(), 1);
  EXPECT_EQ(response.seed(), 77u);
  EXPECT_EQ(response.finish_reason(), v1::FINISH_REASON_UNSPECIFIED);
  EXPECT_FALSE(response.has_usage());

  call->Push({MakeToken(11), MakeToken(12)});
  ASSERT_TRUE(reader->Read(&response));
  EXPECT_EQ(response.tokens_size(), 2);
  EXPECT_FALSE(response.has_seed());

  call->Finish(engine::FinishReason::kStop);
  ASSERT_TRUE(reader->Read(&response));
  EXPECT_EQ(response.tokens_size(), 0);
  EXPECT_EQ(response.finish_reason(), v1::FINISH_REASON_STOP);
  EXPECT_EQ(response.usage().input_tokens(), 7);
  EXPECT_EQ(response.usage().output_tokens(), 3);
  EXPECT_EQ(response.usage().time_to_first_token_ns(), 11);
  EXPECT_FALSE(reader->Read(&response));
  EXPECT_TRUE(reader->Finish().ok());

  const engine::GenerateRequest seen = engine_.generates().at(0);
  EXPECT_EQ(seen.input.tokens, std::vector<int32_t>{1});
  EXPECT_FLOAT_EQ(seen.sampling.temperature, 0.5f);
  EXPECT_EQ(seen.max_new_tokens, 256);
  EXPECT_EQ(seen.stop_token_ids, std::vector<int32_t>{4});
  EXPECT_EQ(observer_.WaitForTotal(1),
            (std::map<std::pair<Rpc, int>, int>{{{Rpc::kGenerate, grpc::StatusCode::OK}, 1}}));
}

TEST_F(GenerateTest, LastTokensShareTheFinalMessage) {
  Context context;
  const Reader reader = inference_->Generate(&context, GenerateTokens());
  const auto call = engine_.WaitForCall(0);
  ASSERT_NE(call, nullptr);
  // The transport is held up by a message that does not fit the flow control window.
  call->Push({MakeToken(1, 4 << 20)});
  ASSERT_TRUE(call->WaitForDrain());
  for (int32_t i = 2; i < 12; ++i) call->Push({MakeToken(i)});
  call->Finish(engine::FinishReason::kLength);

  v1::GenerateResponse response;
  ASSERT_TRUE(reader->Read(&response));
  EXPECT_EQ(response.tokens_size(), 1);
  EXPECT_EQ(response.tokens(0).logits().data().size(), sizeof(float) * (4 << 20));
  EXPECT_EQ(response.finish_reason(), v1::FINISH_REASON_UNSPECIFIED);
  std::vector<int> ids;
  int messages = 0;
  int finals = 0;
  while (reader->Read(&response)) {
    ++messages;
    EXPECT_EQ(finals, 0) << "a message after the final one";
    if (response.finish_reason() != v1::FINISH_REASON_UNSPECIFIED) ++finals;
    for (const v1::Token& token : response.tokens()) ids.push_back(token.id());
  }
  EXPECT_TRUE(reader->Finish().ok());
  EXPECT_EQ(messages, 1);
  EXPECT_EQ(finals, 1);
  EXPECT_EQ(ids, (std::vector<int>{2, 3, 4, 5, 6, 7, 8, 9, 10, 11}));
}

TEST_F(GenerateTest, CutsABacklogOfLogitsIntoMessages) {
  Context context;
  const Reader reader = inference_->Generate(&context, GenerateTokens());
  const auto call = engine_.WaitForCall(0);
  ASSERT_NE(call, nullptr);
  std::vector<engine::ChosenToken> tokens;
  for (int32_t i = 0; i < 64; ++i) tokens.push_back(MakeToken(i, 100'000));
  call->Push(std::move(tokens));  // Adds up to 25 MB.
  call->Finish(engine::FinishReason::kLength);
  v1::GenerateResponse response;
  int next = 0;
  bool final = false;
  bool first = true;
  while (reader->Read(&response)) {
    EXPECT_FALSE(final);
    EXPECT_LT(response.ByteSizeLong(), 2u << 20);
    EXPECT_EQ(response.has_seed(), first);
    first = false;
    for (const v1::Token& token : response.tokens()) {
      EXPECT_EQ(token.id(), next);
      ASSERT_EQ(token.logits().data().size(), 400'000u);
      float value = 0;
      std::memcpy(&value, token.logits().data().data() + 399'996, 4);
      EXPECT_EQ(value, static_cast<float>(next));
      ++next;
    }
    EXPECT_EQ(response.position(), next);
    final = response.finish_reason() == v1::FINISH_REASON_LENGTH;
  }
  EXPECT_TRUE(final);
  EXPECT_EQ(next, 64);
  EXPECT_TRUE(reader->Finish().ok());
}

TEST_F(GenerateTest, AnEarlyEndDeliversItsTokensAndTheStatus) {
  Context context;
  const Reader reader = inference_->Generate(&context, GenerateTokens());
  const auto call = engine_.WaitForCall(0);
  ASSERT_NE(call, nullptr);
  call->Push({MakeToken(1)});
  call->End(absl::DataLossError("the state of this session is damaged"));
  v1::GenerateResponse response;
  int tokens = 0;
  while (reader->Read(&response)) {
    tokens += response.tokens_size();
    EXPECT_EQ(response.finish_reason(), v1::FINISH_REASON_UNSPECIFIED);
  }
  EXPECT_EQ(tokens, 1);
  const grpc::Status status = reader->Finish();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::DATA_LOSS);
  EXPECT_EQ(status.error_message(), "the state of this session is damaged");
}

TEST_F(GenerateTest, ARefusalIsTheStatus) {
  engine_.set_refusal(absl::NotFoundError("session_id: unknown"));
  Context context;
  const Reader reader = inference_->Generate(&context, GenerateTokens());
  v1::GenerateResponse response;
  EXPECT_FALSE(reader->Read(&response));
  EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::NOT_FOUND);

  Context no_input;
  EXPECT_EQ(inference_->Generate(&no_input, {})->Finish().error_code(),
            grpc::StatusCode::INVALID_ARGUMENT);
}

TEST_F(GenerateTest, CancellingAQueuedCallReleasesIt) {
  Context context;
  const Reader reader = inference_->Generate(&context, GenerateTokens());
  const auto call = engine_.WaitForCall(0);
  ASSERT_NE(call, nullptr);
  context.TryCancel();
  EXPECT_TRUE(call->WaitForRelease());
  EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::CANCELLED);
  EXPECT_EQ(
      observer_.WaitForTotal(1),
      (std::map<std::pair<Rpc, int>, int>{{{Rpc::kGenerate, grpc::StatusCode::CANCELLED}, 1}}));
  ExpectServes();
}

TEST_F(GenerateTest, CancellingAmidTokensReleasesIt) {
  Context context;
  const Reader reader = inference_->Generate(&context, GenerateTokens());
  const auto call = engine_.WaitForCall(0);
  ASSERT_NE(call, nullptr);
  call->Push({MakeToken(1)});
  v1::GenerateResponse response;
  ASSERT_TRUE(reader->Read(&response));
  context.TryCancel();
  EXPECT_TRUE(call->WaitForRelease());
  ExpectServes();
}

TEST_F(GenerateTest, ADroppedConnectionReleasesIt) {
  auto context = std::make_unique<Context>();
  Reader reader = inference_->Generate(context.get(), GenerateTokens());
  const auto call = engine_.WaitForCall(0);
  ASSERT_NE(call, nullptr);
  reader.reset();
  context.reset();
  EXPECT_TRUE(call->WaitForRelease());
}

TEST_F(GenerateTest, TheDeadlineReachesTheEngineAndEndsTheCall) {
  const int64_t before_ns = clock_.NowNs();
  Context context(std::chrono::milliseconds(300));
  const Reader reader = inference_->Generate(&context, GenerateTokens());
  const auto call = engine_.WaitForCall(0);
  ASSERT_NE(call, nullptr);
  ASSERT_TRUE(call->options().deadline_ns.has_value());
  EXPECT_GT(*call->options().deadline_ns, before_ns);
  EXPECT_LT(*call->options().deadline_ns, clock_.NowNs() + 400'000'000);
  EXPECT_TRUE(call->WaitForRelease());
  EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::DEADLINE_EXCEEDED);
  // The client's own deadline cancels the call too; whichever reaches the server first counts.
  const std::map<std::pair<Rpc, int>, int> seen = observer_.WaitForTotal(1);
  ASSERT_EQ(seen.size(), 1u);
  EXPECT_EQ(seen.begin()->first.first, Rpc::kGenerate);
  const int code = seen.begin()->first.second;
  EXPECT_TRUE(code == grpc::StatusCode::DEADLINE_EXCEEDED || code == grpc::StatusCode::CANCELLED)
      << code;
}

TEST_F(GenerateTest, NoDeadlineIsNoDeadline) {
  grpc::ClientContext context;
  const Reader reader = inference_->Generate(&context, GenerateTokens());
  const auto call = engine_.WaitForCall(0);
  ASSERT_NE(call, nullptr);
  EXPECT_FALSE(call->options().deadline_ns.has_value());
  call->Finish(engine::FinishReason::kStop);
  v1::GenerateResponse response;
  EXPECT_TRUE(reader->Read(&response));
  EXPECT_TRUE(reader->Finish().ok());
}

// What the transport buffers is bounded, so most of what a reader does not take stays undrained,
// where the engine sees it and pauses. Everybody else goes on.
TEST_F(GenerateTest, ASlowReaderHoldsUpOnlyItself) {
  constexpr int kTokens = 64;
  Context slow_context;
  const Reader slow = inference_->Generate(&slow_context, GenerateTokens());
  const auto slow_call = engine_.WaitForCall(0);
  ASSERT_NE(slow_call, nullptr);
  for (int32_t i = 0; i < kTokens; ++i) slow_call->Push({MakeToken(i, 1 << 18)});  // 64 MiB.

  for (int i = 0; i < 20; ++i) {
    Context context;
    const Reader reader = inference_->Generate(&context, GenerateTokens());
    const auto call = engine_.WaitForCall(static_cast<size_t>(i) + 1);
    ASSERT_NE(call, nullptr);
    call->Push({MakeToken(5)});
    call->Finish(engine::FinishReason::kStop);
    v1::GenerateResponse response;
    while (reader->Read(&response)) {
    }
    EXPECT_TRUE(reader->Finish().ok());
  }
  slow_call->Push({MakeToken(kTokens, 1)});
  EXPECT_GT(slow_call->pending_tokens(), 0);

  slow_call->Finish(engine::FinishReason::kStop);
  v1::GenerateResponse response;
  int next = 0;
  while (slow->Read(&response)) {
    for (const v1::Token& token : response.tokens()) EXPECT_EQ(token.id(), next++);
  }
  EXPECT_EQ(next, kTokens + 1);
  EXPECT_TRUE(slow->Finish().ok());
}

TEST_F(GenerateTest, CancellingABlockedWriteReleasesIt) {
  Context context;
  const Reader reader = inference_->Generate(&context, GenerateTokens());
  const auto call = engine_.WaitForCall(0);
  ASSERT_NE(call, nullptr);
  call->Push({MakeToken(1, 4 << 20)});  // Far more than is buffered on the way.
  ASSERT_TRUE(call->WaitForDrain());    // Being written from now on.
  context.TryCancel();
  EXPECT_TRUE(call->WaitForRelease());
  ExpectServes();
}

// Cancels at all moments race with tokens and ends.
TEST_F(GenerateTest, CancellationRacesAreHarmless) {
  constexpr uint64_t kCalls = 300;
  for (uint64_t i = 0; i < kCalls; ++i) {
    Context context;
    v1::GenerateRequest request = GenerateTokens();
    request.mutable_sampling()->set_seed(i);
    const Reader reader = inference_->Generate(&context, request);
    std::shared_ptr<FakeCall> call;
    if (i % 4 > 0) {
      call = engine_.WaitForSeed(i);
      ASSERT_NE(call, nullptr);
    }
    std::thread canceller([&context] { context.TryCancel(); });
    if (i % 4 > 1) call->Push({MakeToken(1)});
    if (i % 4 > 2) call->Finish(engine::FinishReason::kStop);
    canceller.join();
    reader->Finish();
    if (call != nullptr) {
      EXPECT_TRUE(call->WaitForRelease()) << "call " << i;
    }
  }
  for (size_t i = 0; i < engine_.num_calls(); ++i) {
    EXPECT_TRUE(engine_.WaitForCall(i)->WaitForRelease()) << "call " << i;
  }
  ExpectServes();
}

TEST_F(GenerateTest, TheFirstCallAfterSilenceWorks) {
  ExpectServes();
  std::this_thread::sleep_for(std::chrono::milliseconds(1500));  // The silence itself.
  Context context;
  const Reader reader = inference_->Generate(&context, GenerateTokens());
  const auto call = engine_.WaitForCall(0);
  ASSERT_NE(call, nullptr);
  call->Push({MakeToken(1)});
  call->Finish(engine::FinishReason::kStop);
  v1::GenerateResponse response;
  EXPECT_TRUE(reader->Read(&response));
  while (reader->Read(&response)) {
  }
  EXPECT_TRUE(reader->Finish().ok());
}

}  // namespace
}  // namespace gdn::rpc
