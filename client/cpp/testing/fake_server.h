// A gdn server of a made-up model, in the test's process: what the client does can be provoked and
// observed exactly.
#ifndef CLIENT_CPP_TESTING_FAKE_SERVER_H_
#define CLIENT_CPP_TESTING_FAKE_SERVER_H_

#include <grpcpp/server.h>

#include <chrono>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "gdn/v1/inference.grpc.pb.h"
#include "gdn/v1/sessions.grpc.pb.h"

namespace gdn::client::testing {

// Longer than any wait of a healthy test.
constexpr std::chrono::seconds kPatience{20};

grpc::Status PositionMismatchStatus(const std::string& session_id, int64_t expected,
                                    int64_t actual);
grpc::Status ExhaustedStatus(const std::string& message, int64_t retry_delay_ms);

// What the fake does and what it has seen. All access under Control's mutex.
class Control {
 public:
  v1::ModelInfo model;
  std::string reply = "Go in peace.";  // Bytes that Generate streams, one a message.
  size_t tokens_per_message = 1;
  // After this many tokens Generate waits to be cancelled.
  std::optional<size_t> hold_after;
  bool omit_finish_reason = false;
  bool hold_steps = false;  // Step waits to be cancelled.
  // Status of the next calls of any kind but GetModel, one each.
  std::vector<grpc::Status> failures;
  // Status of the next GetModel calls, one each.
  std::vector<grpc::Status> model_failures;
  std::optional<grpc::Status> sequence_fault;  // Of the sequences of the next batch.

  std::vector<v1::GenerateRequest> generate_requests;
  std::vector<v1::PrefillRequest> prefill_requests;
  std::vector<v1::StepRequest> step_requests;
  std::vector<v1::ForkSessionRequest> fork_requests;
  std::vector<v1::CreateSessionRequest> create_requests;
  std::map<std::string, v1::Session> sessions;
  int model_calls = 0;
  int cancelled_calls = 0;

  std::mutex mutex;
  std::condition_variable changed;

  // False if the calls are not cancelled within kPatience.
  bool WaitForCancelled(int count);
};

class FakeServer {
 public:
  FakeServer();
  ~FakeServer();

  Control& control() { return *control_; }
  const std::string& address() const { return address_; }

 private:
  std::unique_ptr<Control> control_;
  std::unique_ptr<v1::Inference::Service> inference_;
  std::unique_ptr<v1::Sessions::Service> sessions_;
  std::unique_ptr<grpc::Server> server_;
  std::string address_;
};

}  // namespace gdn::client::testing

#endif  // CLIENT_CPP_TESTING_FAKE_SERVER_H_
