#include "gdn/client/client.h"

#include <grpcpp/create_channel.h>
#include <grpcpp/security/credentials.h>

#include <algorithm>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/cpp/src/rpc_status.h"
#include "client/cpp/src/streams_impl.h"
#include "gdn/v1/inference.grpc.pb.h"
#include "gdn/v1/sessions.grpc.pb.h"

namespace gdn::client {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;
using std::chrono::system_clock;

constexpr milliseconds kFirstConnectDelay{20};
constexpr milliseconds kLastConnectDelay{500};

std::shared_ptr<grpc::Channel> MakeChannel(const std::string& target,
                                           const ClientOptions& options) {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(options.max_message_bytes);
  // A transparent retry could step a session twice.
  arguments.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);
  // Connect() must notice a server that comes up within its timeout, not after gRPC's own backoff.
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 50);
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, 1'000);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 1'000);
  // Two clients of one process do not share a connection, nor each other's stalls.
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  return grpc::CreateCustomChannel(target, grpc::InsecureChannelCredentials(), arguments);
}

}  // namespace

struct Client::Impl {
  ClientOptions options;
  std::unique_ptr<v1::Inference::Stub> inference;
  std::unique_ptr<v1::Sessions::Stub> sessions;
  v1::ModelInfo model;

  void Prepare(const CallOptions& call, grpc::ClientContext* context) const {
    const std::optional<milliseconds> timeout = call.timeout ? call.timeout : options.call_timeout;
    if (timeout.has_value()) context->set_deadline(system_clock::now() + *timeout);
  }

  template <typename Response, typename Stub, typename Request>
  absl::StatusOr<Response> Call(Stub& stub,
                                grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&,
                                                             Response*),
                                const Request& request, const CallOptions& call) const {
    grpc::ClientContext context;
    Prepare(call, &context);
    Response response;
    const absl::Status status = FromGrpc((stub.*method)(&context, request, &response));
    if (!status.ok()) return status;
    return response;
  }
};

Client::Client(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Client::~Client() = default;

absl::StatusOr<std::unique_ptr<Client>> Client::Connect(const std::string& target,
                                                        const ClientOptions& options) {
  auto impl = std::make_unique<Impl>();
  const std::shared_ptr<grpc::Channel> channel = MakeChannel(target, options);
  impl->options = options;
  impl->inference = v1::Inference::NewStub(channel);
  impl->sessions = v1::Sessions::NewStub(channel);

  const auto deadline = steady_clock::now() + options.connect_timeout;
  absl::Status last_error;
  for (milliseconds delay = kFirstConnectDelay;; delay = std::min(2 * delay, kLastConnectDelay)) {
    const auto left =
        std::chrono::duration_cast<milliseconds>(deadline - steady_clock::now()) + milliseconds(1);
    absl::StatusOr<v1::ModelInfo> model =
        impl->Call(*impl->inference, &v1::Inference::Stub::GetModel, v1::GetModelRequest(),
                   CallOptions{.timeout = std::max(left, milliseconds(1))});
    if (model.ok()) {
      impl->model = *std::move(model);
      return std::unique_ptr<Client>(new Client(std::move(impl)));
    }
    const bool timed_out = absl::IsDeadlineExceeded(model.status());
    if (!timed_out && !absl::IsUnavailable(model.status())) return model.status();
    // Of the attempts that got no further, the first has the system's reason ("Connection
    // refused"), later ones gRPC's own. What a server answered says more than either.
    const bool answered = channel->GetState(/*try_to_connect=*/false) == GRPC_CHANNEL_READY;
    if (last_error.ok() || (answered && !timed_out)) last_error = model.status();
    if (steady_clock::now() + delay >= deadline) break;
    // Polls the channel while it waits: asleep, nobody would notice the server coming up.
    if (answered) {
      std::this_thread::sleep_for(delay);
    } else {
      channel->WaitForConnected(std::chrono::system_clock::now() + delay);
    }
  }
  return absl::UnavailableError(absl::StrCat("no answer from ", target, " within ",
                                             options.connect_timeout.count(),
                                             " ms: ", last_error.message()));
}

const v1::ModelInfo& Client::model() const { return impl_->model; }

absl::StatusOr<v1::ModelInfo> Client::GetModel(const CallOptions& options) {
  return impl_->Call(*impl_->inference, &v1::Inference::Stub::GetModel, v1::GetModelRequest(),
                     options);
}

absl::StatusOr<v1::Session> Client::CreateSession(std::optional<int64_t> ttl_ms,
                                                  const CallOptions& options) {
  v1::CreateSessionRequest request;
  if (ttl_ms.has_value()) request.set_ttl_ms(*ttl_ms);
  return impl_->Call(*impl_->sessions, &v1::Sessions::Stub::CreateSession, request, options);
}

absl::StatusOr<v1::Session> Client::GetSession(const std::string& session_id,
                                               const CallOptions& options) {
  v1::GetSessionRequest request;
  request.set_session_id(session_id);
  return impl_->Call(*impl_->sessions, &v1::Sessions::Stub::GetSession, request, options);
}

absl::StatusOr<v1::ListSessionsResponse> Client::ListSessions(
    const v1::ListSessionsRequest& request, const CallOptions& options) {
  return impl_->Call(*impl_->sessions, &v1::Sessions::Stub::ListSessions, request, options);
}

absl::StatusOr<std::vector<v1::Session>> Client::ListAllSessions(const CallOptions& options) {
  std::vector<v1::Session> sessions;
  v1::ListSessionsRequest request;
  do {
    absl::StatusOr<v1::ListSessionsResponse> page = ListSessions(request, options);
    if (!page.ok()) return page.status();
    sessions.insert(sessions.end(), page->sessions().begin(), page->sessions().end());
    request.set_page_token(page->next_page_token());
  } while (!request.page_token().empty());
  return sessions;
}

absl::StatusOr<int64_t> Client::DeleteSession(const std::string& session_id,
                                              const CallOptions& options) {
  v1::DeleteSessionRequest request;
  request.set_session_id(session_id);
  const auto response =
      impl_->Call(*impl_->sessions, &v1::Sessions::Stub::DeleteSession, request, options);
  if (!response.ok()) return response.status();
  return response->position();
}

absl::StatusOr<std::vector<v1::Session>> Client::ForkSession(const v1::ForkSessionRequest& request,
                                                             const CallOptions& options) {
  const auto response =
      impl_->Call(*impl_->sessions, &v1::Sessions::Stub::ForkSession, request, options);
  if (!response.ok()) return response.status();
  return std::vector<v1::Session>(response->sessions().begin(), response->sessions().end());
}

absl::StatusOr<v1::PrefillResponse> Client::Prefill(const v1::PrefillRequest& request,
                                                    const CallOptions& options) {
  return impl_->Call(*impl_->inference, &v1::Inference::Stub::Prefill, request, options);
}

absl::StatusOr<v1::StepResponse> Client::Step(const v1::StepRequest& request,
                                              const CallOptions& options) {
  return impl_->Call(*impl_->inference, &v1::Inference::Stub::Step, request, options);
}

std::unique_ptr<StepStream> Client::OpenStepStream(const CallOptions& options) {
  auto impl = std::make_unique<StepStream::Impl>();
  impl_->Prepare(options, &impl->context);
  impl->stream = impl_->inference->StepStream(&impl->context);
  return std::unique_ptr<StepStream>(new StepStream(std::move(impl)));
}

std::unique_ptr<GenerateStream> Client::Generate(const v1::GenerateRequest& request,
                                                 const CallOptions& options) {
  auto impl = std::make_unique<GenerateStream::Impl>();
  impl_->Prepare(options, &impl->context);
  impl->reader = impl_->inference->Generate(&impl->context, request);
  return std::unique_ptr<GenerateStream>(new GenerateStream(std::move(impl)));
}

absl::Status SequenceStatus(const v1::SequenceResponse& response) {
  return FromProto(response.status());
}

}  // namespace gdn::client
