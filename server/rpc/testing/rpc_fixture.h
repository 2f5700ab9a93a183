// A server over a fake engine on loopback, with the plain synchronous client of gRPC against it.
#ifndef SERVER_RPC_TESTING_RPC_FIXTURE_H_
#define SERVER_RPC_TESTING_RPC_FIXTURE_H_

#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>
#include <grpcpp/create_channel.h>
#include <gtest/gtest.h>

#include <chrono>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "gdn/v1/inference.grpc.pb.h"
#include "gdn/v1/sessions.grpc.pb.h"
#include "server/rpc/rpc_server.h"
#include "server/rpc/testing/fake_engine.h"

namespace gdn::rpc {

// Counts calls by method and code.
class CountingObserver final : public RpcObserver {
 public:
  void OnCallDone(Rpc rpc, int code, int64_t duration_ns) override {
    EXPECT_GE(duration_ns, 0);
    std::lock_guard lock(mutex_);
    ++counts_[{rpc, code}];
    ++total_;
    changed_.notify_all();
  }
  // The counts once `total` calls are over; what there is after ten seconds.
  std::map<std::pair<Rpc, int>, int> WaitForTotal(int total) {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, std::chrono::seconds(10), [&] { return total_ >= total; });
    return counts_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::pair<Rpc, int>, int> counts_;
  int total_ = 0;
};

class RpcTest : public testing::Test {
 protected:
  // A client context that gives up, so that no test can hang.
  struct Context : grpc::ClientContext {
    explicit Context(std::chrono::milliseconds timeout = std::chrono::seconds(20)) {
      set_deadline(std::chrono::system_clock::now() + timeout);
    }
  };

  static constexpr int64_t kVocab = 16;
  static constexpr int64_t kHidden = 4;

  static ModelFacts Facts() {
    ModelFacts facts;
    facts.name = "fake";
    facts.vocab_size = kVocab;
    facts.hidden_size = kHidden;
    facts.eos_token_ids = {3, 5};
    facts.bos_token_id = 2;
    facts.max_sessions = 9;
    return facts;
  }

  void SetUp() override {
    options_.listen = "127.0.0.1:0";
    options_.threads = 2;
    auto server = RpcServer::Create(options_, &clock_, &observer_);
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
    grpc::ChannelArguments arguments;
    arguments.SetMaxReceiveMessageSize(-1);
    arguments.SetMaxSendMessageSize(-1);
    // Tests do not share connections.
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    channel_ = grpc::CreateCustomChannel(server_->address(), grpc::InsecureChannelCredentials(),
                                         arguments);
    inference_ = v1::Inference::NewStub(channel_);
    sessions_ = v1::Sessions::NewStub(channel_);
    if (start_ready_) server_->SetReady(&engine_, Facts());
  }

  void TearDown() override {
    if (server_ != nullptr) server_->Shutdown(0);
  }

  // The call is served and answered.
  void ExpectServes() {
    Context context;
    v1::ModelInfo info;
    const grpc::Status status = inference_->GetModel(&context, {}, &info);
    ASSERT_TRUE(status.ok()) << status.error_message();
    EXPECT_EQ(info.name(), "fake");
  }

  static v1::GenerateRequest GenerateTokens() {
    v1::GenerateRequest request;
    request.mutable_input()->mutable_token_ids()->add_ids(1);
    return request;
  }

  template <typename Request>
  static Request Batch(const std::string& session) {
    Request request;
    v1::SequenceRequest* sequence = request.add_sequences();
    sequence->set_session_id(session);
    sequence->mutable_input()->mutable_token_ids()->add_ids(1);
    return request;
  }

  // Echoes the session ids, at position 1.
  static engine::BatchResult Echo(const engine::BatchRequest& request) {
    engine::BatchResult result;
    for (const engine::SequenceRequest& sequence : request.sequences) {
      result.sequences.emplace_back();
      result.sequences.back().session_id = sequence.session_id;
      result.sequences.back().position = 1;
    }
    return result;
  }

  bool start_ready_ = true;
  RpcOptions options_;
  engine::SystemClock clock_;
  CountingObserver observer_;
  FakeEngine engine_;
  std::unique_ptr<RpcServer> server_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::Inference::Stub> inference_;
  std::unique_ptr<v1::Sessions::Stub> sessions_;
};

}  // namespace gdn::rpc

#endif  // SERVER_RPC_TESTING_RPC_FIXTURE_H_
