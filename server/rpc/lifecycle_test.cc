// A server's life: listening before it is ready, health, reflection, draining, stopping.
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/support/byte_buffer.h>
#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "server/rpc/rpc_server.h"
#include "server/rpc/testing/rpc_fixture.h"

namespace gdn::rpc {
namespace {

enum Health { kServing = 1, kNotServing = 2 };

class LifecycleTest : public RpcTest {
 protected:
  // One call of a method that has no generated stub here, as bytes in and bytes out.
  grpc::Status CallRaw(const std::string& method, const std::string& request,
                       std::string* response) {
    grpc::GenericStub stub(channel_);
    grpc::CompletionQueue queue;
    Context context;
    const auto call = stub.PrepareCall(&context, method, &queue);
    void* tag = nullptr;
    bool ok = false;
    call->StartCall(nullptr);
    queue.Next(&tag, &ok);
    const grpc::Slice slice(request);
    call->WriteLast(grpc::ByteBuffer(&slice, 1), grpc::WriteOptions(), nullptr);
    queue.Next(&tag, &ok);
    grpc::ByteBuffer buffer;
    call->Read(&buffer, nullptr);
    queue.Next(&tag, &ok);
    grpc::Slice whole;
    if (ok && buffer.DumpToSingleSlice(&whole).ok()) {
      response->assign(reinterpret_cast<const char*>(whole.begin()), whole.size());
    }
    grpc::Status status;
    call->Finish(&status, nullptr);
    queue.Next(&tag, &ok);
    queue.Shutdown();
    while (queue.Next(&tag, &ok)) {
    }
    return status;
  }

  // grpc.health.v1: request { string service = 1; }, response { Status status = 1; }
  grpc::Status CheckHealth(const std::string& service, int* health) {
    std::string request;
    if (!service.empty()) {
      request = {'\x0A', static_cast<char>(service.size())};
      request += service;
    }
    std::string response;
    const grpc::Status status = CallRaw("/grpc.health.v1.Health/Check", request, &response);
    *health = response.size() == 2 && response[0] == '\x08' ? response[1] : 0;
    return status;
  }

  void ExpectHealth(Health expected) {
    for (const char* service : {"", "gdn.v1.Inference", "gdn.v1.Sessions"}) {
      int health = 0;
      const grpc::Status status = CheckHealth(service, &health);
      EXPECT_TRUE(status.ok()) << status.error_message();
      EXPECT_EQ(health, expected) << "'" << service << "'";
    }
  }
};

class NotReadyTest : public LifecycleTest {
 protected:
  NotReadyTest() { start_ready_ = false; }
};

TEST_F(NotReadyTest, RefusesUntilReady) {
  ExpectHealth(kNotServing);
  v1::ModelInfo info;
  Context model_context;
  EXPECT_EQ(inference_->GetModel(&model_context, {}, &info).error_code(),
            grpc::StatusCode::UNAVAILABLE);
  Context prefill_context;
  v1::PrefillResponse prefill;
  EXPECT_EQ(
      inference_->Prefill(&prefill_context, Batch<v1::PrefillRequest>("a"), &prefill).error_code(),
      grpc::StatusCode::UNAVAILABLE);
  Context generate_context;
  EXPECT_EQ(inference_->Generate(&generate_context, GenerateTokens())->Finish().error_code(),
            grpc::StatusCode::UNAVAILABLE);
  Context stream_context;
  const auto stream = inference_->StepStream(&stream_context);
  stream->Write(Batch<v1::StepRequest>("a"));
  EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::UNAVAILABLE);
  Context session_context;
  v1::Session session;
  EXPECT_EQ(sessions_->CreateSession(&session_context, {}, &session).error_code(),
            grpc::StatusCode::UNAVAILABLE);

  server_->SetReady(&engine_, Facts());
  ExpectHealth(kServing);
  ExpectServes();
}

TEST_F(LifecycleTest, UnknownServiceHasNoHealth) {
  int health = 0;
  EXPECT_EQ(CheckHealth("no.such.Service", &health).error_code(), grpc::StatusCode::NOT_FOUND);
}

TEST_F(LifecycleTest, ReflectionListsTheServices) {
  // ServerReflectionRequest { string list_services = 7; }
  std::string response;
  const grpc::Status status =
      CallRaw("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
              std::string({'\x3A', '\x01', '*'}), &response);
  EXPECT_TRUE(status.ok()) << status.error_message();
  for (const char* service : {"gdn.v1.Inference", "gdn.v1.Sessions", "grpc.health.v1.Health"}) {
    EXPECT_NE(response.find(service), std::string::npos) << service;
  }
}

TEST_F(LifecycleTest, APortThatIsTakenIsAnErrorWithACure) {
  RpcOptions options;
  options.listen = server_->address();
  const auto second = RpcServer::Create(options, &clock_, nullptr);
  ASSERT_FALSE(second.ok());
  const std::string message(second.status().message());
  EXPECT_NE(message.find(server_->address()), std::string::npos) << message;
  EXPECT_NE(message.find("--listen"), std::string::npos) << message;
  ExpectServes();
}

TEST_F(LifecycleTest, DrainLetsRunningCallsFinish) {
  Context context;
  const auto reader = inference_->Generate(&context, GenerateTokens());
  const auto call = engine_.WaitForCall(0);
  ASSERT_NE(call, nullptr);
  server_->BeginDrain();
  engine_.BeginDrain();
  ExpectHealth(kNotServing);
  Context late;
  EXPECT_EQ(inference_->Generate(&late, GenerateTokens())->Finish().error_code(),
            grpc::StatusCode::UNAVAILABLE);
  EXPECT_FALSE(server_->WaitForCalls(0)) << "one is running";
  call->Push({MakeToken(1)});
  call->Finish(engine::FinishReason::kLength);
  v1::GenerateResponse response;
  while (reader->Read(&response)) {
  }
  EXPECT_TRUE(reader->Finish().ok());
  EXPECT_TRUE(server_->WaitForCalls(10'000));
  server_->Shutdown(0);
}

// A reader that has stopped, a call that never ends, an idle stream, and a client that watches
// health: none may keep the server from going.
TEST_F(LifecycleTest, ShutdownIsNotHeldUp) {
  Context slow_context;
  const auto slow = inference_->Generate(&slow_context, GenerateTokens());
  const auto slow_call = engine_.WaitForCall(0);
  ASSERT_NE(slow_call, nullptr);
  slow_call->Push({MakeToken(1, 4 << 20)});
  ASSERT_TRUE(slow_call->WaitForDrain());
  Context stuck_context;
  const auto stuck = inference_->Generate(&stuck_context, GenerateTokens());
  const auto stuck_call = engine_.WaitForCall(1);
  ASSERT_NE(stuck_call, nullptr);
  Context stream_context;
  const auto stream = inference_->StepStream(&stream_context);
  ASSERT_TRUE(stream->Write(Batch<v1::StepRequest>("a")));
  ASSERT_NE(engine_.WaitForCall(2), nullptr);

  server_->BeginDrain();
  // The engine ends what it has; the slow reader still does not read.
  slow_call->End(absl::UnavailableError("stopping"));
  stuck_call->End(absl::UnavailableError("stopping"));
  EXPECT_EQ(stuck->Finish().error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_FALSE(server_->WaitForCalls(0));
  server_->Shutdown(50);
  EXPECT_TRUE(slow_call->WaitForRelease());
  slow_context.TryCancel();  // Its client has the rest of a message to take, and will not.
  EXPECT_FALSE(slow->Finish().ok());
  EXPECT_FALSE(stream->Finish().ok());
  server_->Shutdown(0);  // Again is fine.
  v1::ModelInfo info;
  Context context;
  EXPECT_EQ(inference_->GetModel(&context, {}, &info).error_code(), grpc::StatusCode::UNAVAILABLE);
}

TEST_F(LifecycleTest, ShutdownDuringTrafficIsClean) {
  engine_.set_answer(Echo);
  std::vector<std::thread> clients;
  std::atomic<int> answered = 0;
  for (int i = 0; i < 4; ++i) {
    clients.emplace_back([this, &answered] {
      for (;;) {
        Context context;
        v1::StepResponse response;
        if (!inference_->Step(&context, Batch<v1::StepRequest>("a"), &response).ok()) return;
        ++answered;
        answered.notify_all();
      }
    });
  }
  answered.wait(0);
  server_->Shutdown(0);
  for (std::thread& client : clients) client.join();
  EXPECT_GT(answered, 0);
}

TEST(RpcServerTest, StartsAndStopsWithoutACall) {
  const engine::SystemClock clock;
  for (int i = 0; i < 20; ++i) {
    RpcOptions options;
    options.listen = "127.0.0.1:0";
    options.threads = 3;
    auto server = RpcServer::Create(options, &clock, nullptr);
    ASSERT_TRUE(server.ok()) << server.status();
    EXPECT_GT((*server)->port(), 0);
  }
}

TEST(RpcServerTest, RefusesAnAddressWithoutAPort) {
  const engine::SystemClock clock;
  RpcOptions options;
  options.listen = "localhost";
  EXPECT_EQ(RpcServer::Create(options, &clock, nullptr).status().code(),
            absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace gdn::rpc
