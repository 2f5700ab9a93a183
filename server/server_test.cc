// A whole server in this process: a small model with made-up weights, gRPC and HTTP on loopback.
#include "server/server.h"

#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>
#include <grpcpp/create_channel.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>

#include "gdn/v1/inference.grpc.pb.h"
#include "gdn/v1/sessions.grpc.pb.h"

namespace gdn {
namespace {

constexpr const char* kConfig = R"({
  "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text",
  "vocab_size": 260, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
  "layer_types": ["linear_attention", "linear_attention"],
  "linear_conv_kernel_dim": 4, "linear_key_head_dim": 64, "linear_value_head_dim": 64,
  "linear_num_key_heads": 1, "linear_num_value_heads": 2, "num_attention_heads": 2,
  "num_key_value_heads": 1, "head_dim": 32, "hidden_act": "silu", "rms_norm_eps": 1e-6,
  "tie_word_embeddings": true, "bos_token_id": 256, "eos_token_id": 257,
  "max_position_embeddings": 4096, "dtype": "bfloat16"})";

struct Context : grpc::ClientContext {
  Context() { set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(30)); }
};

class ServerTest : public testing::Test {
 protected:
  void SetUp() override {
    folder_ =
        std::filesystem::temp_directory_path() / ("gdn_server_test_" + std::to_string(getpid()));
    std::filesystem::create_directories(folder_);
    std::ofstream(folder_ / "config.json") << kConfig;
    options_.model.load.path = folder_;
    options_.model.load.random_weights = 1;
    options_.model.name = "small";
    options_.device.device = Device::kCpu;
    options_.device.cpu_threads = 1;
    options_.max_sessions = 4;
    options_.rpc.listen = "127.0.0.1:0";
    options_.metrics.listen = "127.0.0.1:0";
    options_.drain_timeout_s = 10;
    options_.port_file = folder_ / "port";
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  void Connect(const Server& server) {
    channel_ = grpc::CreateChannel(server.address(), grpc::InsecureChannelCredentials());
    inference_ = v1::Inference::NewStub(channel_);
    sessions_ = v1::Sessions::NewStub(channel_);
  }

  std::filesystem::path folder_;
  ServerOptions options_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::Inference::Stub> inference_;
  std::unique_ptr<v1::Sessions::Stub> sessions_;
};

TEST_F(ServerTest, ServesFromLoadToDrain) {
  auto created = Server::Create(options_);
  ASSERT_TRUE(created.ok()) << created.status();
  Server& server = **created;
  int port = 0;
  std::ifstream(options_.port_file) >> port;
  EXPECT_EQ(port, server.port());
  EXPECT_GT(server.metrics_port(), 0);
  Connect(server);
  {
    Context context;
    v1::ModelInfo info;
    EXPECT_EQ(inference_->GetModel(&context, {}, &info).error_code(),
              grpc::StatusCode::UNAVAILABLE);
  }
  const absl::Status loaded = server.Load();
  ASSERT_TRUE(loaded.ok()) << loaded;
  EXPECT_TRUE(server.ready());
  {
    Context context;
    v1::ModelInfo info;
    const grpc::Status status = inference_->GetModel(&context, {}, &info);
    ASSERT_TRUE(status.ok()) << status.error_message();
    EXPECT_EQ(info.name(), "small");
    EXPECT_EQ(info.device(), "cpu");
    EXPECT_EQ(info.num_layers(), 2);
    EXPECT_EQ(info.limits().max_sessions(), 4);
    EXPECT_GT(info.state_bytes_per_session(), 2 * 2 * 64 * 64 * 4);
    EXPECT_TRUE(info.byte_vocabulary());
    EXPECT_EQ(info.eos_token_ids_size(), 1);
  }
  // All of the advertised sessions can be had, and not one more.
  v1::Session session;
  for (int i = 0; i < 4; ++i) {
    Context context;
    ASSERT_TRUE(sessions_->CreateSession(&context, {}, &session).ok());
  }
  {
    Context context;
    v1::Session none;
    EXPECT_EQ(sessions_->CreateSession(&context, {}, &none).error_code(),
              grpc::StatusCode::RESOURCE_EXHAUSTED);
  }
  Context context;
  v1::GenerateRequest request;
  request.set_session_id(session.session_id());
  request.mutable_input()->mutable_token_ids()->add_ids(65);
  request.set_max_new_tokens(20);
  request.set_ignore_eos(true);
  const auto reader = inference_->Generate(&context, request);
  v1::GenerateResponse response;
  ASSERT_TRUE(reader->Read(&response));

  // What has begun may finish.
  std::thread run([&server] { server.Run(); });
  server.RequestStop();
  int tokens = response.tokens_size();
  while (reader->Read(&response)) tokens += response.tokens_size();
  const grpc::Status status = reader->Finish();
  EXPECT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(tokens, 20);
  run.join();
  EXPECT_FALSE(server.ready());
}

TEST_F(ServerTest, StopsWithoutEverLoading) {
  auto created = Server::Create(options_);
  ASSERT_TRUE(created.ok()) << created.status();
  (*created)->RequestStop();
  (*created)->Run();
}

TEST_F(ServerTest, AModelThatIsMissingIsAnError) {
  options_.model.load.path = folder_ / "absent";
  auto created = Server::Create(options_);
  ASSERT_TRUE(created.ok()) << created.status();
  const absl::Status status = (*created)->Load();
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound) << status;
  EXPECT_NE(status.message().find("--model="), absl::string_view::npos) << status;
  EXPECT_NE(status.message().find("config.json"), absl::string_view::npos) << status;
  EXPECT_FALSE((*created)->ready());
}

TEST_F(ServerTest, AFolderThatCannotBeNamedNeedsAName) {
  options_.model.load.path = folder_ / "caf\xE9";
  options_.model.name = "";
  std::filesystem::create_directory(options_.model.load.path);
  std::filesystem::copy(folder_ / "config.json", options_.model.load.path);
  auto created = Server::Create(options_);
  ASSERT_TRUE(created.ok()) << created.status();
  const absl::Status status = (*created)->Load();
  EXPECT_NE(status.message().find("--model-name"), absl::string_view::npos) << status;
}

TEST_F(ServerTest, AFolderForThePortFileMustBeThere) {
  options_.port_file = folder_ / "absent" / "port";
  const auto created = Server::Create(options_);
  EXPECT_NE(created.status().message().find("--port-file"), absl::string_view::npos)
      << created.status();
}

TEST_F(ServerTest, TwoServersCannotShareAPort) {
  auto first = Server::Create(options_);
  ASSERT_TRUE(first.ok()) << first.status();
  ServerOptions second = options_;
  second.rpc.listen = (*first)->address();
  EXPECT_EQ(Server::Create(second).status().code(), absl::StatusCode::kUnavailable);
  second = options_;
  second.metrics.listen = "127.0.0.1:" + std::to_string((*first)->metrics_port());
  EXPECT_EQ(Server::Create(second).status().code(), absl::StatusCode::kUnavailable);
}

}  // namespace
}  // namespace gdn
