// Calls with one answer: GetModel, Prefill, Step, and those of Sessions.
#include "server/rpc/unary.h"

#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <thread>

#include "google/rpc/error_details.pb.h"
#include "server/engine/status_payload.h"
#include "server/rpc/testing/rpc_fixture.h"

namespace gdn::rpc {
namespace {

class UnaryTest : public RpcTest {};

TEST_F(UnaryTest, GetModelReportsFactsAndLimits) {
  Context context;
  v1::ModelInfo info;
  ASSERT_TRUE(inference_->GetModel(&context, {}, &info).ok());
  EXPECT_EQ(info.name(), "fake");
  EXPECT_EQ(info.vocab_size(), kVocab);
  EXPECT_EQ(info.eos_token_ids_size(), 2);
  EXPECT_EQ(info.bos_token_id(), 2);
  EXPECT_EQ(info.limits().max_sessions(), 9);
  EXPECT_EQ(info.limits().max_step_tokens(), engine_.options().max_step_tokens);
  EXPECT_EQ(info.limits().max_message_bytes(), 64 << 20);
}

TEST_F(UnaryTest, PrefillCarriesEverythingBothWays) {
  engine_.set_answer([](const engine::BatchRequest& request) {
    engine::BatchResult result = Echo(request);
    result.sequences[0].next_token = MakeToken(3, 2);
    result.sequences[0].next_token->top = {{3, -0.5f}, {9, -1.5f}};
    result.sequences[0].logits.assign(2 * kVocab, 1.5f);
    result.sequences[1].status = absl::DataLossError("damaged");
    result.timings = {1, 2, 3};
    return result;
  });
  v1::PrefillRequest request = Batch<v1::PrefillRequest>("a");
  v1::SequenceRequest* first = request.mutable_sequences(0);
  first->set_expected_position(4);
  first->mutable_output()->set_next_token(true);
  first->mutable_output()->set_top_logprobs(2);
  first->mutable_output()->set_logits(v1::POSITIONS_ALL);
  first->mutable_output()->set_hidden_states(v1::POSITIONS_LAST);
  first->mutable_output()->mutable_sampling()->set_top_k(6);
  v1::SequenceRequest* second = request.add_sequences();
  second->set_session_id("b");
  const float rows[2 * kHidden] = {1, 2, 3, 4, 5, 6, 7, 8};
  v1::Tensor* tensor = second->mutable_input()->mutable_hidden_states();
  tensor->set_element_type(v1::ELEMENT_TYPE_FLOAT32);
  tensor->add_shape(2);
  tensor->add_shape(kHidden);
  tensor->set_data(rows, sizeof(rows));

  Context context;
  v1::PrefillResponse response;
  const grpc::Status status = inference_->Prefill(&context, request, &response);
  ASSERT_TRUE(status.ok()) << status.error_message();
  const engine::BatchRequest seen = engine_.batches().at(0);
  EXPECT_EQ(seen.kind, engine::CallKind::kPrefill);
  EXPECT_EQ(seen.sequences[0].expected_position, 4);
  EXPECT_TRUE(seen.sequences[0].output.next_token);
  EXPECT_EQ(seen.sequences[0].output.sampling.top_k, 6);
  EXPECT_EQ(seen.sequences[0].output.top_logprobs, 2);
  EXPECT_EQ(seen.sequences[0].output.logits, engine::Positions::kAll);
  EXPECT_EQ(seen.sequences[0].output.hidden, engine::Positions::kLast);
  EXPECT_FALSE(seen.sequences[1].expected_position.has_value());
  EXPECT_TRUE(seen.sequences[1].input.is_hidden);
  EXPECT_EQ(seen.sequences[1].input.hidden, std::vector<float>(rows, rows + 2 * kHidden));

  ASSERT_EQ(response.sequences_size(), 2);
  const v1::SequenceResponse& a = response.sequences(0);
  EXPECT_EQ(a.session_id(), "a");
  EXPECT_FALSE(a.has_status());
  EXPECT_EQ(a.next_token().id(), 3);
  EXPECT_EQ(a.next_token().top_logprobs(1).id(), 9);
  EXPECT_FLOAT_EQ(a.next_token().top_logprobs(1).logprob(), -1.5f);
  EXPECT_EQ(a.logits().shape(0), 2);
  EXPECT_EQ(a.logits().shape(1), kVocab);
  EXPECT_EQ(a.logits().data().size(), 2 * kVocab * sizeof(float));
  // Asked for, though there are no rows.
  ASSERT_TRUE(a.has_hidden_states());
  EXPECT_EQ(a.hidden_states().shape(0), 0);
  EXPECT_EQ(a.hidden_states().shape(1), kHidden);
  const v1::SequenceResponse& b = response.sequences(1);
  EXPECT_EQ(b.status().code(), grpc::StatusCode::DATA_LOSS);
  EXPECT_EQ(b.status().message(), "damaged");
  EXPECT_FALSE(b.has_logits());
  EXPECT_EQ(response.timings().queue_ns(), 1);
  EXPECT_EQ(response.timings().compute_ns(), 2);
  EXPECT_EQ(response.timings().total_ns(), 3);
}

TEST_F(UnaryTest, CancellingReleasesTheBatch) {
  grpc::CompletionQueue queue;
  Context context;
  const auto reader = inference_->AsyncStep(&context, Batch<v1::StepRequest>("a"), &queue);
  v1::StepResponse response;
  grpc::Status status;
  reader->Finish(&response, &status, &queue);
  const auto call = engine_.WaitForCall(0);
  ASSERT_NE(call, nullptr);
  context.TryCancel();
  EXPECT_TRUE(call->WaitForRelease());
  void* tag = nullptr;
  bool ok = false;
  ASSERT_TRUE(queue.Next(&tag, &ok));
  EXPECT_EQ(status.error_code(), grpc::StatusCode::CANCELLED);
  queue.Shutdown();
  EXPECT_FALSE(queue.Next(&tag, &ok));
  ExpectServes();
}

TEST_F(UnaryTest, TheDeadlineEndsABatch) {
  Context context(std::chrono::milliseconds(200));
  v1::PrefillResponse response;
  const grpc::Status status =
      inference_->Prefill(&context, Batch<v1::PrefillRequest>("a"), &response);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::DEADLINE_EXCEEDED);
  EXPECT_TRUE(engine_.WaitForCall(0)->WaitForRelease());
}

// A message over the limit fails its own call; the connection and its other calls go on.
TEST_F(UnaryTest, AnOversizedMessageLeavesTheConnectionAlone) {
  Context stream_context;
  const auto reader = inference_->Generate(&stream_context, GenerateTokens());
  const auto call = engine_.WaitForCall(0);
  ASSERT_NE(call, nullptr);

  v1::PrefillRequest request = Batch<v1::PrefillRequest>("a");
  v1::Tensor* tensor = request.mutable_sequences(0)->mutable_input()->mutable_hidden_states();
  tensor->mutable_data()->resize(65 << 20);
  Context context;
  v1::PrefillResponse response;
  EXPECT_EQ(inference_->Prefill(&context, request, &response).error_code(),
            grpc::StatusCode::RESOURCE_EXHAUSTED);
  v1::StepRequest step;
  step.add_sequences()->mutable_input()->mutable_hidden_states()->mutable_data()->resize(65 << 20);
  Context step_context;
  const auto step_stream = inference_->StepStream(&step_context);
  step_stream->Write(step);
  EXPECT_EQ(step_stream->Finish().error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);

  EXPECT_EQ(channel_->GetState(false), GRPC_CHANNEL_READY);
  ExpectServes();
  call->Push({MakeToken(1)});
  call->Finish(engine::FinishReason::kStop);
  v1::GenerateResponse token;
  EXPECT_TRUE(reader->Read(&token));
  while (reader->Read(&token)) {
  }
  EXPECT_TRUE(reader->Finish().ok());
}

TEST_F(UnaryTest, ALargeMessageWithinTheLimitPasses) {
  engine_.set_answer(Echo);
  v1::PrefillRequest request = Batch<v1::PrefillRequest>("a");
  v1::Tensor* tensor = request.mutable_sequences(0)->mutable_input()->mutable_hidden_states();
  tensor->set_element_type(v1::ELEMENT_TYPE_BFLOAT16);
  constexpr int64_t kRows = (60 << 20) / (2 * kHidden);
  tensor->add_shape(kRows);
  tensor->add_shape(kHidden);
  tensor->mutable_data()->resize(60 << 20);
  Context context;
  v1::PrefillResponse response;
  const grpc::Status status = inference_->Prefill(&context, request, &response);
  EXPECT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(engine_.batches().at(0).sequences[0].input.hidden.size(),
            static_cast<size_t>(kRows * kHidden));
}

TEST_F(UnaryTest, RefusalsCarryRetryInfo) {
  engine_.set_refusal(engine::ExhaustedError("no free state slot", 1250));
  Context context;
  v1::Session session;
  const grpc::Status status = sessions_->CreateSession(&context, {}, &session);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  google::rpc::Status details;
  google::rpc::RetryInfo retry;
  ASSERT_TRUE(details.ParseFromString(status.error_details()));
  EXPECT_EQ(details.code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  ASSERT_EQ(details.details_size(), 1);
  ASSERT_TRUE(details.details(0).UnpackTo(&retry));
  EXPECT_EQ(retry.retry_delay().seconds(), 1);
  EXPECT_EQ(retry.retry_delay().nanos(), 250'000'000);
}

// Held against the limits before they are copied, and told in a few words.
TEST_F(UnaryTest, HugeRepeatedFieldsAreRefusedAtOnce) {
  v1::PrefillResponse response;
  {
    v1::PrefillRequest request;
    for (int i = 0; i < 100'000; ++i) request.add_sequences();
    Context context;
    const grpc::Status status = inference_->Prefill(&context, request, &response);
    EXPECT_EQ(status.error_code(), grpc::StatusCode::OUT_OF_RANGE);
    EXPECT_NE(status.error_message().find("100000 sequences"), std::string::npos);
  }
  {
    auto request = Batch<v1::PrefillRequest>("a");
    v1::Tensor* tensor = request.mutable_sequences(0)->mutable_input()->mutable_hidden_states();
    tensor->set_element_type(v1::ELEMENT_TYPE_FLOAT32);
    for (int i = 0; i < 100'000; ++i) tensor->add_shape(i);
    Context context;
    const grpc::Status status = inference_->Prefill(&context, request, &response);
    EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
    EXPECT_NE(status.error_message().find(", ...]"), std::string::npos);
    EXPECT_LT(status.error_message().size(), 300u);
  }
  {
    v1::GenerateRequest request;
    request.mutable_input()->mutable_token_ids()->add_ids(1);
    for (int i = 0; i < 1025; ++i) request.add_stop_token_ids(i);
    Context context;
    const auto reader = inference_->Generate(&context, request);
    v1::GenerateResponse unused;
    EXPECT_FALSE(reader->Read(&unused));
    EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::OUT_OF_RANGE);
  }
  EXPECT_TRUE(engine_.batches().empty());
}

TEST_F(UnaryTest, SessionsAreCreatedSeenForkedAndDeleted) {
  v1::CreateSessionRequest create;
  create.set_ttl_ms(0);
  v1::Session session;
  Context create_context;
  ASSERT_TRUE(sessions_->CreateSession(&create_context, create, &session).ok());
  EXPECT_EQ(session.ttl_ms(), 0);
  EXPECT_EQ(session.token_hash(), ~uint64_t{0});
  EXPECT_EQ(session.state_bytes(), 4);

  v1::GetSessionRequest get;
  get.set_session_id(session.session_id());
  Context get_context;
  EXPECT_TRUE(sessions_->GetSession(&get_context, get, &session).ok());
  get.set_session_id("other");
  Context other_context;
  EXPECT_EQ(sessions_->GetSession(&other_context, get, &session).error_code(),
            grpc::StatusCode::NOT_FOUND);

  v1::ForkSessionRequest fork;
  fork.set_session_id(session.session_id());
  v1::ForkSessionResponse forked;
  Context fork_context;
  ASSERT_TRUE(sessions_->ForkSession(&fork_context, fork, &forked).ok());
  ASSERT_EQ(forked.sessions_size(), 1) << "one copy by default";
  EXPECT_EQ(forked.sessions(0).parent_session_id(), session.session_id());
  EXPECT_EQ(forked.sessions(0).ttl_ms(), -1);
  fork.set_count(3);
  fork.set_ttl_ms(8);
  Context fork3_context;
  ASSERT_TRUE(sessions_->ForkSession(&fork3_context, fork, &forked).ok());
  ASSERT_EQ(forked.sessions_size(), 3);
  EXPECT_EQ(forked.sessions(2).ttl_ms(), 8);
  fork.set_expected_position(12);
  Context mismatch_context;
  EXPECT_EQ(sessions_->ForkSession(&mismatch_context, fork, &forked).error_code(),
            grpc::StatusCode::FAILED_PRECONDITION);

  v1::DeleteSessionRequest erase;
  erase.set_session_id(session.session_id());
  v1::DeleteSessionResponse erased;
  Context delete_context;
  ASSERT_TRUE(sessions_->DeleteSession(&delete_context, erase, &erased).ok());
  EXPECT_EQ(erased.position(), 5);
}

// The threads that poll serve others while forks wait for the engine; there are two of them.
TEST_F(UnaryTest, ForksThatWaitBlockNobody) {
  engine_.set_hold_forks(true);
  constexpr int kForks = 5;
  v1::ForkSessionRequest request;
  request.set_session_id("s00000000");
  request.set_count(2);
  std::vector<std::thread> clients;
  std::vector<grpc::Status> statuses(kForks);
  std::vector<v1::ForkSessionResponse> responses(kForks);
  for (int i = 0; i < kForks; ++i) {
    clients.emplace_back([&, i] {
      Context context;
      statuses[static_cast<size_t>(i)] =
          sessions_->ForkSession(&context, request, &responses[static_cast<size_t>(i)]);
    });
  }
  EXPECT_NE(engine_.WaitForCall(kForks - 1), nullptr);
  for (int i = 0; i < 10; ++i) ExpectServes();
  for (size_t i = 0; i < kForks; ++i) {
    const auto fork = engine_.WaitForCall(i);
    ASSERT_NE(fork, nullptr);
    fork->CompleteFork();
  }
  for (std::thread& client : clients) client.join();
  for (size_t i = 0; i < kForks; ++i) {
    EXPECT_TRUE(statuses[i].ok()) << statuses[i].error_message();
    EXPECT_EQ(responses[i].sessions_size(), 2);
    EXPECT_TRUE(engine_.WaitForCall(i)->WaitForRelease());
  }
}

TEST_F(UnaryTest, AForkIsGivenUpWithItsClient) {
  engine_.set_hold_forks(true);
  v1::ForkSessionRequest request;
  request.set_session_id("s00000000");
  v1::ForkSessionResponse response;
  Context context;
  grpc::Status status;
  std::thread client([&] { status = sessions_->ForkSession(&context, request, &response); });
  const auto fork = engine_.WaitForCall(0);
  EXPECT_NE(fork, nullptr);
  EXPECT_TRUE(fork == nullptr || fork->options().deadline_ns.has_value());
  context.TryCancel();
  client.join();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::CANCELLED);
  EXPECT_TRUE(fork == nullptr || fork->WaitForRelease());
  ExpectServes();
}

TEST_F(UnaryTest, ListSessionsPages) {
  engine_.set_num_sessions(2500);
  const auto list = [this](int32_t page_size, const std::string& token) {
    v1::ListSessionsRequest request;
    request.set_page_size(page_size);
    request.set_page_token(token);
    v1::ListSessionsResponse response;
    Context context;
    EXPECT_TRUE(sessions_->ListSessions(&context, request, &response).ok());
    EXPECT_EQ(response.total(), 2500);
    return response;
  };
  EXPECT_EQ(list(0, "").sessions_size(), 100);
  EXPECT_EQ(list(7, "").sessions_size(), 7);
  std::string token;
  std::vector<int> sizes;
  std::string last;
  do {
    const v1::ListSessionsResponse page = list(5000, token);  // Clamped to 1000.
    sizes.push_back(page.sessions_size());
    for (const v1::Session& session : page.sessions()) {
      EXPECT_GT(session.session_id(), last);
      last = session.session_id();
    }
    token = page.next_page_token();
  } while (!token.empty());
  EXPECT_EQ(sizes, (std::vector<int>{1000, 1000, 500}));
  engine_.set_num_sessions(2500);
  EXPECT_EQ(list(500, "s00001999").next_page_token(), "") << "exactly the rest: the last page";

  v1::ListSessionsRequest negative;
  negative.set_page_size(-1);
  v1::ListSessionsResponse response;
  Context context;
  EXPECT_EQ(sessions_->ListSessions(&context, negative, &response).error_code(),
            grpc::StatusCode::INVALID_ARGUMENT);
}

}  // namespace
}  // namespace gdn::rpc
