#include "server/rpc/rpc_server.h"

#include <grpc/support/log.h>
#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/health_check_service_interface.h>
#include <grpcpp/resource_quota.h>
#include <grpcpp/server.h>
#include <grpcpp/server_builder.h>
#include <spdlog/spdlog.h>

#include <chrono>
#include <mutex>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/rpc/batch_handler.h"
#include "server/rpc/call.h"
#include "server/rpc/convert.h"
#include "server/rpc/generate.h"
#include "server/rpc/poller.h"
#include "server/rpc/session_handlers.h"
#include "server/rpc/step_stream.h"

namespace gdn::rpc {
namespace {

constexpr const char* kServiceNames[] = {"gdn.v1.Inference", "gdn.v1.Sessions"};

// What gRPC has to say is for those who ask: a failure that matters comes back as a status.
constexpr int kMaxSyncThreads = 32;

void LogOfGrpc(gpr_log_func_args* args) {
  // Out of file descriptors, gRPC stops accepting connections for good.
  if (std::string_view(args->message).find("accept4") != std::string_view::npos) {
    spdlog::error(
        "grpc: {}; no new connections are accepted: restart with a higher limit of open "
        "files (ulimit -n)",
        args->message);
    return;
  }
  spdlog::debug("grpc: {} ({}:{})", args->message, args->file, args->line);
}

void InitProcessOnce() {
  static std::once_flag once;
  std::call_once(once, [] {
    gpr_set_log_function(LogOfGrpc);
    grpc::EnableDefaultHealthCheckService(true);
    grpc::reflection::InitProtoReflectionServerBuilderPlugin();
  });
}

void Configure(const RpcOptions& options, grpc::ServerBuilder* builder) {
  builder->SetMaxReceiveMessageSize(options.max_message_bytes);
  builder->SetMaxSendMessageSize(options.max_message_bytes);
  builder->AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, options.max_concurrent_streams);
  builder->AddChannelArgument(GRPC_ARG_MAX_METADATA_SIZE, 16 << 10);
  // By default a second server could take half of the first one's connections, unnoticed.
  builder->AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
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
  int port() const override { return port_; }
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
  std::unique_ptr<grpc::Server> server_;
  RpcOptions options_;
  std::string address_;
  int port_ = 0;
};

absl::Status RpcServerImpl::Start(const RpcOptions& options) {
  options_ = options;
  const size_t colon = options.listen.rfind(':');
  if (colon == std::string::npos || colon + 1 == options.listen.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("--listen: '", options.listen, "' is not host:port, as in 127.0.0.1:50051"));
  }
  InitProcessOnce();
  grpc::ServerBuilder builder;
  Configure(options, &builder);
  builder.RegisterService(&env_.inference);
  builder.RegisterService(&env_.sessions);
  builder.AddListeningPort(options.listen, grpc::InsecureServerCredentials(), &port_);
  for (int32_t i = 0; i < options.threads; ++i) {
    pollers_.push_back(std::make_unique<Poller>(builder.AddCompletionQueue(), &live_count_));
  }
  server_ = builder.BuildAndStart();
  if (server_ == nullptr || port_ == 0) {
    return absl::UnavailableError(absl::StrCat(
        "cannot listen on ", options.listen,
        ": the port is taken, or the address is not one of this machine; choose another with "
        "--listen, where port 0 takes any free one"));
  }
  address_ = absl::StrCat(options.listen.substr(0, colon), ":", port_);
  SetServing(false);
  for (const auto& poller : pollers_) {
    poller->Start([this, &poller = *poller] {
      ServeSessions(env_, poller);
      ServePrefill(env_, poller);
      ServeStep(env_, poller);
      ServeStepStream(env_, poller);
      ServeGenerate(env_, poller);
    });
  }
  return absl::OkStatus();
}

void RpcServerImpl::SetServing(bool serving) {
  grpc::HealthCheckServiceInterface* health = server_->GetHealthCheckService();
  health->SetServingStatus(serving);  // Of "", and of every service it knows.
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
