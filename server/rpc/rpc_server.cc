#include "server/rpc/rpc_server.h"

#include <google/protobuf/stubs/logging.h>
#include <grpc/support/log.h>
#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/health_check_service_interface.h>
#include <grpcpp/resource_quota.h>
#include <grpcpp/server.h>
#include <grpcpp/server_builder.h>
#include <spdlog/spdlog.h>

#include <chrono>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/rpc/acceptor.h"
#include "server/rpc/batch_handler.h"
#include "server/rpc/call.h"
#include "server/rpc/convert.h"
#include "server/rpc/generate.h"
#include "server/rpc/poller.h"
#include "server/rpc/session_handlers.h"
#include "server/rpc/step_stream.h"

namespace gdn::rpc {
namespace {

// The server as a whole, and its services: SERVING while calls are served.
constexpr const char* kServiceNames[] = {"", "gdn.v1.Inference", "gdn.v1.Sessions"};
// SERVING for as long as the process answers, also while it loads or drains.
constexpr const char* kLivenessName = "liveness";

constexpr int kMaxSyncThreads = 32;

// What gRPC has to say is for those who ask: a failure that matters comes back as a status.
void LogOfGrpc(gpr_log_func_args* args) {
  spdlog::debug("grpc: {} ({}:{})", args->message, args->file, args->line);
}

// So has protobuf: a message that does not parse fails its call.
void LogOfProtobuf(google::protobuf::LogLevel level, const char* file, int line,
                   const std::string& message) {
  spdlog::log(
      level == google::protobuf::LOGLEVEL_FATAL ? spdlog::level::critical : spdlog::level::debug,
      "protobuf: {} ({}:{})", message, file, line);
}

void InitProcessOnce() {
  static std::once_flag once;
  std::call_once(once, [] {
    gpr_set_log_function(LogOfGrpc);
    google::protobuf::SetLogHandler(LogOfProtobuf);
    grpc::EnableDefaultHealthCheckService(true);
    grpc::reflection::InitProtoReflectionServerBuilderPlugin();
  });
}

void Configure(const RpcOptions& options, grpc::ServerBuilder* builder) {
  builder->SetMaxReceiveMessageSize(options.max_message_bytes);
  builder->SetMaxSendMessageSize(options.max_message_bytes);
  builder->AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, options.max_concurrent_streams);
  builder->AddChannelArgument(GRPC_ARG_MAX_METADATA_SIZE, 16 << 10);
  // A client may ping every 10 s, also through a long silent prefill or without a call. Half of
  // that is the limit, because pings are bunched up by the network.
  builder->AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, 5'000);
  builder->AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  // Finds clients that vanished without closing their connection.
  builder->AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, 60'000);
  builder->AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 20'000);
  // Reflection is the only synchronous service.
  builder->SetSyncServerOption(grpc::ServerBuilder::NUM_CQS, 1);
  builder->SetSyncServerOption(grpc::ServerBuilder::MIN_POLLERS, 1);
  builder->SetSyncServerOption(grpc::ServerBuilder::MAX_POLLERS, 1);
  // It takes a thread for each open stream.
  builder->SetResourceQuota(grpc::ResourceQuota("gdn_server").SetMaxThreads(kMaxSyncThreads));
}

class RpcServerImpl final : public RpcServer {
 public:
  RpcServerImpl(const engine::Clock* clock, RpcObserver* observer) {
    env_.clock = clock;
    env_.observer = observer;
  }
  ~RpcServerImpl() override { Shutdown(0); }

  absl::Status Start(const RpcOptions& options);
  int port() const override { return acceptor_->port(); }
  const std::string& address() const override { return address_; }
  void SetReady(engine::Engine* engine, const ModelFacts& facts) override;
  void BeginDrain() override;
  bool WaitForCalls(int64_t timeout_ms) override;
  void Shutdown(int64_t grace_ms) override;

 private:
  void SetServing(bool serving);

  Env env_;
  LiveCount live_count_;
  std::unique_ptr<Served> served_;
  std::vector<std::unique_ptr<Poller>> pollers_;
  std::unique_ptr<Acceptor> acceptor_;
  std::unique_ptr<grpc::experimental::ExternalConnectionAcceptor> connections_;  // Into server_.
  std::unique_ptr<grpc::Server> server_;
  RpcOptions options_;
  std::string address_;
};

absl::Status RpcServerImpl::Start(const RpcOptions& options) {
  options_ = options;
  env_.log = options.log;
  auto acceptor = Acceptor::Listen(options.listen);
  if (!acceptor.ok()) return acceptor.status();
  acceptor_ = *std::move(acceptor);
  InitProcessOnce();
  grpc::ServerBuilder builder;
  Configure(options, &builder);
  builder.RegisterService(&env_.inference);
  builder.RegisterService(&env_.sessions);
  connections_ = builder.experimental().AddExternalConnectionAcceptor(
      grpc::ServerBuilder::experimental_type::ExternalConnectionType::FROM_FD,
      grpc::InsecureServerCredentials());
  for (int32_t i = 0; i < options.threads; ++i) {
    pollers_.push_back(std::make_unique<Poller>(builder.AddCompletionQueue(), &live_count_));
  }
  server_ = builder.BuildAndStart();
  if (server_ == nullptr) {
    return absl::UnavailableError(
        "cannot start gRPC; --log-level=debug shows what it says about it");
  }
  const size_t host_size = options.listen.rfind(':');
  address_ = absl::StrCat(options.listen.substr(0, host_size), ":", acceptor_->port());
  SetServing(false);
  server_->GetHealthCheckService()->SetServingStatus(kLivenessName, true);
  for (const auto& poller : pollers_) {
    poller->Start([this, &poller = *poller] {
      ServeSessions(env_, poller);
      ServePrefill(env_, poller);
      ServeStep(env_, poller);
      ServeStepStream(env_, poller);
      ServeGenerate(env_, poller);
    });
  }
  acceptor_->Start([this](int listener_fd, int fd) {
    grpc::experimental::ExternalConnectionAcceptor::NewConnectionParameters connection;
    connection.listener_fd = listener_fd;
    connection.fd = fd;
    connections_->HandleNewConnection(&connection);
  });
  return absl::OkStatus();
}

void RpcServerImpl::SetServing(bool serving) {
  grpc::HealthCheckServiceInterface* health = server_->GetHealthCheckService();
  for (const char* name : kServiceNames) health->SetServingStatus(name, serving);
}

void RpcServerImpl::SetReady(engine::Engine* engine, const ModelFacts& facts) {
  served_ = std::make_unique<Served>(
      Served{engine, facts, EncodeModel(facts, engine->options(), options_.max_message_bytes)});
  env_.served.store(served_.get(), std::memory_order_release);
  SetServing(true);
}

void RpcServerImpl::BeginDrain() {
  SetServing(false);
  for (const auto& poller : pollers_) poller->BeginDrain();
}

bool RpcServerImpl::WaitForCalls(int64_t timeout_ms) {
  return live_count_.WaitForNone(std::chrono::steady_clock::now() +
                                 std::chrono::milliseconds(timeout_ms));
}

void RpcServerImpl::Shutdown(int64_t grace_ms) {
  if (server_ == nullptr) return;
  acceptor_->Stop();  // First: gRPC would leak a connection that it gets later.
  // Returns once every call has ended, which the handlers see to; the pollers run until then.
  server_->Shutdown(std::chrono::system_clock::now() + std::chrono::milliseconds(grace_ms));
  for (const auto& poller : pollers_) poller->Stop();
  for (const auto& poller : pollers_) poller->Join();
  server_ = nullptr;
}

}  // namespace

absl::StatusOr<std::unique_ptr<RpcServer>> RpcServer::Create(const RpcOptions& options,
                                                             const engine::Clock* clock,
                                                             RpcObserver* observer) {
  auto server = std::make_unique<RpcServerImpl>(clock, observer);
  if (absl::Status status = server->Start(options); !status.ok()) return status;
  return std::unique_ptr<RpcServer>(std::move(server));
}

}  // namespace gdn::rpc
