#include "client/cpp/testing/fake_server.h"

#include <grpcpp/security/server_credentials.h>
#include <grpcpp/server_builder.h>
#include <grpcpp/server_context.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "gdn/client/input.h"
#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"

namespace gdn::client::testing {
namespace {

grpc::Status WithDetail(grpc::StatusCode code, const std::string& message,
                        const google::protobuf::Message& detail) {
  google::rpc::Status status;
  status.set_code(code);
  status.set_message(message);
  status.add_details()->PackFrom(detail);
  return grpc::Status(code, message, status.SerializeAsString());
}

std::optional<grpc::Status> TakeFailure(std::vector<grpc::Status>* failures) {
  if (failures->empty()) return std::nullopt;
  grpc::Status status = failures->front();
  failures->erase(failures->begin());
  return status;
}

// Holds a call until its client is gone.
grpc::Status HoldUntilCancelled(Control* control, grpc::ServerContext* context) {
  const auto deadline = std::chrono::steady_clock::now() + kPatience;
  while (!context->IsCancelled() && std::chrono::steady_clock::now() < deadline) {
    std::unique_lock lock(control->mutex);
    control->changed.wait_for(lock, std::chrono::milliseconds(1));
  }
  const std::lock_guard lock(control->mutex);
  if (context->IsCancelled()) ++control->cancelled_calls;
  control->changed.notify_all();
  return grpc::Status::CANCELLED;
}

int64_t Length(const v1::Input& input) {
  return input.has_hidden_states() ? input.hidden_states().shape(0) : input.token_ids().ids_size();
}

class FakeInference final : public v1::Inference::Service {
 public:
  explicit FakeInference(Control* control) : control_(control) {}

  grpc::Status GetModel(grpc::ServerContext*, const v1::GetModelRequest*,
                        v1::ModelInfo* model) override {
    const std::lock_guard lock(control_->mutex);
    ++control_->model_calls;
    if (auto failure = TakeFailure(&control_->model_failures)) return *failure;
    *model = control_->model;
    return grpc::Status::OK;
  }

  grpc::Status Prefill(grpc::ServerContext*, const v1::PrefillRequest* request,
                       v1::PrefillResponse* response) override {
    const std::lock_guard lock(control_->mutex);
    control_->prefill_requests.push_back(*request);
    return Advance(*request, response);
  }

  grpc::Status Step(grpc::ServerContext* context, const v1::StepRequest* request,
                    v1::StepResponse* response) override {
    bool hold = false;
    {
      const std::lock_guard lock(control_->mutex);
      hold = control_->hold_steps;
    }
    if (hold) return HoldUntilCancelled(control_, context);
    const std::lock_guard lock(control_->mutex);
    control_->step_requests.push_back(*request);
    return Advance(*request, response);
  }

  grpc::Status StepStream(
      grpc::ServerContext* context,
      grpc::ServerReaderWriter<v1::StepResponse, v1::StepRequest>* stream) override {
    v1::StepRequest request;
    while (stream->Read(&request)) {
      v1::StepResponse response;
      const grpc::Status status = Step(context, &request, &response);
      if (!status.ok()) return status;
      stream->Write(response);
    }
    if (context->IsCancelled()) {
      const std::lock_guard lock(control_->mutex);
      ++control_->cancelled_calls;
      control_->changed.notify_all();
    }
    return grpc::Status::OK;
  }

  grpc::Status Generate(grpc::ServerContext* context, const v1::GenerateRequest* request,
                        grpc::ServerWriter<v1::GenerateResponse>* writer) override {
    std::string reply;
    size_t per_message = 1;
    std::optional<size_t> hold_after;
    bool finish = true;
    {
      const std::lock_guard lock(control_->mutex);
      control_->generate_requests.push_back(*request);
      if (auto failure = TakeFailure(&control_->failures)) return *failure;
      reply = control_->reply;
      per_message = control_->tokens_per_message;
      hold_after = control_->hold_after;
      finish = !control_->omit_finish_reason;
    }
    const size_t wanted =
        request->has_max_new_tokens() ? static_cast<size_t>(request->max_new_tokens()) : 256;
    const size_t count = std::min(wanted, reply.size());
    for (size_t begin = 0; begin < count; begin += per_message) {
      if (hold_after && begin >= *hold_after) return HoldUntilCancelled(control_, context);
      v1::GenerateResponse response;
      const size_t end = std::min(count, begin + per_message);
      for (size_t i = begin; i < end; ++i) {
        v1::Token* token = response.add_tokens();
        token->set_id(static_cast<unsigned char>(reply[i]));
        token->set_logprob(-0.5f);
        for (int32_t k = 0; k < request->top_logprobs(); ++k) {
          v1::TokenLogprob* top = token->add_top_logprobs();
          top->set_id(token->id() + k);
          top->set_logprob(-0.5f - static_cast<float>(k));
        }
      }
      response.set_position(Length(request->input()) + static_cast<int64_t>(end));
      if (begin == 0) {
        response.set_seed(request->sampling().has_seed() ? request->sampling().seed()
                                                         : 0xFFFFFFFFFFFFFFFFu);
      }
      if (end == count && finish) {
        response.set_finish_reason(count < wanted ? v1::FINISH_REASON_STOP
                                                  : v1::FINISH_REASON_LENGTH);
        response.mutable_usage()->set_input_tokens(Length(request->input()));
        response.mutable_usage()->set_output_tokens(static_cast<int64_t>(count));
      }
      writer->Write(response);
    }
    return grpc::Status::OK;
  }

 private:
  // Positions move; the next token is the last input plus one; hidden states come back doubled.
  template <typename Request, typename Response>
  grpc::Status Advance(const Request& request, Response* response) {
    if (auto failure = TakeFailure(&control_->failures)) return *failure;
    for (const v1::SequenceRequest& sequence : request.sequences()) {
      v1::SequenceResponse* result = response->add_sequences();
      result->set_session_id(sequence.session_id());
      if (control_->sequence_fault) {
        result->mutable_status()->ParseFromString(control_->sequence_fault->error_details());
        continue;
      }
      v1::Session& session = control_->sessions[sequence.session_id()];
      session.set_position(session.position() + Length(sequence.input()));
      result->set_position(session.position());
      const v1::OutputSelection& output = sequence.output();
      if (output.next_token()) {
        const auto& ids = sequence.input().token_ids().ids();
        result->mutable_next_token()->set_id(ids.empty() ? 0 : ids[ids.size() - 1] + 1);
        result->mutable_next_token()->set_logprob(-0.25f);
      }
      if (output.logits() != v1::POSITIONS_NONE) {
        const float logits[] = {1.5f, -2.0f, 0.25f};
        const int64_t shape[] = {1, 3};
        *result->mutable_logits() = Float32Tensor(logits, shape);
      }
      if (output.hidden_states() != v1::POSITIONS_NONE) {
        const auto rows = ToFloats(sequence.input().hidden_states());
        std::vector<float> values = rows.ok() ? *rows : std::vector<float>(4, 1.0f);
        for (float& value : values) value *= 2.0f;
        const int64_t shape[] = {static_cast<int64_t>(values.size()) / 4, 4};
        *result->mutable_hidden_states() = Float32Tensor(values, shape);
      }
    }
    response->mutable_timings()->set_queue_ns(1'000'000);
    response->mutable_timings()->set_compute_ns(2'000'000);
    response->mutable_timings()->set_total_ns(3'500'000);
    return grpc::Status::OK;
  }

  Control* const control_;
};

class FakeSessions final : public v1::Sessions::Service {
 public:
  explicit FakeSessions(Control* control) : control_(control) {}

  grpc::Status CreateSession(grpc::ServerContext*, const v1::CreateSessionRequest* request,
                             v1::Session* session) override {
    const std::lock_guard lock(control_->mutex);
    control_->create_requests.push_back(*request);
    if (auto failure = TakeFailure(&control_->failures)) return *failure;
    *session = Add(request->has_ttl_ms() ? request->ttl_ms() : 600'000, 0, "");
    return grpc::Status::OK;
  }

  grpc::Status GetSession(grpc::ServerContext*, const v1::GetSessionRequest* request,
                          v1::Session* session) override {
    const std::lock_guard lock(control_->mutex);
    const auto found = control_->sessions.find(request->session_id());
    if (found == control_->sessions.end()) return NotFound(request->session_id());
    *session = found->second;
    return grpc::Status::OK;
  }

  // Two sessions a page, whatever is asked for, so that paging happens.
  grpc::Status ListSessions(grpc::ServerContext*, const v1::ListSessionsRequest* request,
                            v1::ListSessionsResponse* response) override {
    const std::lock_guard lock(control_->mutex);
    auto it = control_->sessions.upper_bound(request->page_token());
    for (int i = 0; i < 2 && it != control_->sessions.end(); ++i, ++it) {
      *response->add_sessions() = it->second;
    }
    if (it != control_->sessions.end()) {
      response->set_next_page_token(std::prev(it)->first);
    }
    response->set_total(static_cast<int64_t>(control_->sessions.size()));
    return grpc::Status::OK;
  }

  grpc::Status DeleteSession(grpc::ServerContext*, const v1::DeleteSessionRequest* request,
                             v1::DeleteSessionResponse* response) override {
    const std::lock_guard lock(control_->mutex);
    const auto found = control_->sessions.find(request->session_id());
    if (found == control_->sessions.end()) return NotFound(request->session_id());
    response->set_position(found->second.position());
    control_->sessions.erase(found);
    return grpc::Status::OK;
  }

  grpc::Status ForkSession(grpc::ServerContext*, const v1::ForkSessionRequest* request,
                           v1::ForkSessionResponse* response) override {
    const std::lock_guard lock(control_->mutex);
    control_->fork_requests.push_back(*request);
    const auto found = control_->sessions.find(request->session_id());
    if (found == control_->sessions.end()) return NotFound(request->session_id());
    const v1::Session parent = found->second;
    if (request->has_expected_position() && request->expected_position() != parent.position()) {
      return PositionMismatchStatus(request->session_id(), request->expected_position(),
                                    parent.position());
    }
    const int32_t count = request->has_count() ? request->count() : 1;
    for (int32_t i = 0; i < count; ++i) {
      *response->add_sessions() = Add(request->has_ttl_ms() ? request->ttl_ms() : parent.ttl_ms(),
                                      parent.position(), parent.session_id());
    }
    return grpc::Status::OK;
  }

 private:
  static grpc::Status NotFound(const std::string& id) {
    return {grpc::StatusCode::NOT_FOUND, "session_id: no session '" + id + "'"};
  }

  v1::Session Add(int64_t ttl_ms, int64_t position, const std::string& parent) {
    v1::Session session;
    session.set_session_id(absl::StrCat("s", next_id_++));
    session.set_ttl_ms(ttl_ms);
    session.set_position(position);
    session.set_token_hash(0xFEDCBA9876543210u);
    session.set_parent_session_id(parent);
    session.set_last_use_time_ms(1'000'000'000'000);
    control_->sessions[session.session_id()] = session;
    return session;
  }

  Control* const control_;
  int next_id_ = 1;
};

}  // namespace

grpc::Status PositionMismatchStatus(const std::string& session_id, int64_t expected,
                                    int64_t actual) {
  v1::PositionMismatch mismatch;
  mismatch.set_session_id(session_id);
  mismatch.set_expected_position(expected);
  mismatch.set_actual_position(actual);
  return WithDetail(grpc::StatusCode::FAILED_PRECONDITION, "expected_position: wrong", mismatch);
}

grpc::Status ExhaustedStatus(const std::string& message, int64_t retry_delay_ms) {
  google::rpc::RetryInfo info;
  info.mutable_retry_delay()->set_seconds(retry_delay_ms / 1000);
  info.mutable_retry_delay()->set_nanos(static_cast<int32_t>(retry_delay_ms % 1000) * 1'000'000);
  return WithDetail(grpc::StatusCode::RESOURCE_EXHAUSTED, message, info);
}

bool Control::WaitForCancelled(int count) {
  std::unique_lock lock(mutex);
  return changed.wait_for(lock, kPatience, [&] { return cancelled_calls >= count; });
}

FakeServer::FakeServer()
    : control_(std::make_unique<Control>()),
      inference_(std::make_unique<FakeInference>(control_.get())),
      sessions_(std::make_unique<FakeSessions>(control_.get())) {
  v1::ModelInfo& model = control_->model;
  model.set_name("fake");
  model.set_byte_vocabulary(true);
  model.set_vocab_size(260);
  model.set_hidden_size(4);
  model.add_eos_token_ids(257);
  model.mutable_limits()->set_max_new_tokens(1000);
  grpc::ServerBuilder builder;
  int port = 0;
  builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
  builder.RegisterService(inference_.get());
  builder.RegisterService(sessions_.get());
  server_ = builder.BuildAndStart();
  address_ = absl::StrCat("127.0.0.1:", port);
}

FakeServer::~FakeServer() {
  server_->Shutdown(std::chrono::system_clock::now());
  server_->Wait();
}

}  // namespace gdn::client::testing
