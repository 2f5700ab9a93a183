// File: gdn/client/client.h
//
// A client of a gdn server. The messages are those of proto/gdn/v1, whose comments are the
// reference for every field and error; this library adds the connection, deadlines, the streams and
// the decoding of error details.
//
//   absl::StatusOr<std::unique_ptr<Client>> client = Client::Connect("127.0.0.1:50051");
//   if (!client.ok()) return client.status();
//   v1::GenerateRequest request;
//   *request.mutable_input() = BytesInput("In the beginning ");
//   auto stream = (*client)->Generate(request);
//
// Nothing is retried once connected: whether a call that failed may be repeated is the caller's to
// say (with expected_position a repetition is safe).
//
// Thread-safety: all methods may be called from any thread. The connection is not encrypted.
#ifndef GDN_CLIENT_CLIENT_H_
#define GDN_CLIENT_CLIENT_H_

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "gdn/client/streams.h"
#include "gdn/v1/inference.pb.h"
#include "gdn/v1/sessions.pb.h"

namespace gdn::client {

struct ClientOptions {
  // How long Connect() goes on trying to reach a server that is absent, loading or draining.
  std::chrono::milliseconds connect_timeout{5'000};
  // Deadline of each call from its start, streams included; absent: none.
  std::optional<std::chrono::milliseconds> call_timeout;
  // Largest message to receive. What is sent is limited by the server alone.
  int32_t max_message_bytes = 64 << 20;
};

struct CallOptions {
  // Overrides ClientOptions.call_timeout for this call.
  std::optional<std::chrono::milliseconds> timeout;
};

class Client {
 public:
  // Connects to "host:port" and asks for the model. UNAVAILABLE if no server answered in time.
  static absl::StatusOr<std::unique_ptr<Client>> Connect(const std::string& target,
                                                         const ClientOptions& options = {});
  ~Client();
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;

  // The model as it was when the connection was made.
  const v1::ModelInfo& model() const;
  absl::StatusOr<v1::ModelInfo> GetModel(const CallOptions& options = {});

  absl::StatusOr<v1::Session> CreateSession(std::optional<int64_t> ttl_ms = std::nullopt,
                                            const CallOptions& options = {});
  absl::StatusOr<v1::Session> GetSession(const std::string& session_id,
                                         const CallOptions& options = {});
  absl::StatusOr<v1::ListSessionsResponse> ListSessions(const v1::ListSessionsRequest& request,
                                                        const CallOptions& options = {});
  // Every page of ListSessions, one after the other.
  absl::StatusOr<std::vector<v1::Session>> ListAllSessions(const CallOptions& options = {});
  // The position at which the session was.
  absl::StatusOr<int64_t> DeleteSession(const std::string& session_id,
                                        const CallOptions& options = {});
  absl::StatusOr<std::vector<v1::Session>> ForkSession(const v1::ForkSessionRequest& request,
                                                       const CallOptions& options = {});

  // A call that succeeds may still carry the fault of one sequence in its SequenceResponse.status;
  // SequenceStatus() below turns that into an absl::Status.
  absl::StatusOr<v1::PrefillResponse> Prefill(const v1::PrefillRequest& request,
                                              const CallOptions& options = {});
  absl::StatusOr<v1::StepResponse> Step(const v1::StepRequest& request,
                                        const CallOptions& options = {});

  // Never null. A call that cannot start ends at once, with Finish() saying why.
  std::unique_ptr<StepStream> OpenStepStream(const CallOptions& options = {});
  std::unique_ptr<GenerateStream> Generate(const v1::GenerateRequest& request,
                                           const CallOptions& options = {});

 private:
  struct Impl;
  explicit Client(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

// The fault of one sequence in a batch, or OK.
absl::Status SequenceStatus(const v1::SequenceResponse& response);

}  // namespace gdn::client

#endif  // GDN_CLIENT_CLIENT_H_
