#include "server/rpc/bench/callback_server.h"

#include <grpcpp/server.h>
#include <grpcpp/server_builder.h>
#include <grpcpp/support/server_callback.h>

#include <mutex>
#include <optional>
#include <utility>

#include "gdn/v1/inference.grpc.pb.h"
#include "server/rpc/convert.h"
#include "server/rpc/model_facts.h"
#include "server/rpc/status.h"

namespace gdn::rpc {
namespace {

// Full duplex: the next request is read while the last answer is written.
class StepReactor final : public grpc::ServerBidiReactor<v1::StepRequest, v1::StepResponse> {
 public:
  StepReactor(engine::Engine* engine, const ModelFacts* facts) : engine_(engine), facts_(facts) {
    StartRead(&requests_[0]);
  }
  void OnReadDone(bool ok) override {
    std::lock_guard lock(mutex_);
    if (!ok) {
      half_closed_ = true;
      if (!writing_) FinishOnce();
      return;
    }
    read_ = true;
    if (!writing_ && !finished_) Answer();
  }
  void OnWriteDone(bool ok) override {
    std::lock_guard lock(mutex_);
    writing_ = false;
    if (read_ && ok) {
      Answer();
    } else if (half_closed_ || !ok) {
      FinishOnce();
    }
  }
  void OnDone() override { delete this; }

 private:
  void FinishOnce() {
    if (!std::exchange(finished_, true)) Finish(grpc::Status::OK);
  }
  void Answer() {
    const v1::StepRequest& request = requests_[current_];
    current_ ^= 1;
    read_ = false;
    StartRead(&requests_[current_]);
    auto batch = DecodeBatch(request.sequences(), engine::CallKind::kStep, facts_->hidden_size,
                             engine_->options());
    auto call = engine_->Submit(*std::move(batch), {.deadline_ns = {}, .on_ready = [] {}});
    const std::optional<engine::BatchResult> result = (*call)->Take();
    response_.Clear();
    EncodeBatch(*result, request.sequences(), *facts_, response_.mutable_sequences(),
                response_.mutable_timings());
    writing_ = true;
    StartWrite(&response_);
  }

  engine::Engine* const engine_;
  const ModelFacts* const facts_;
  std::mutex mutex_;
  v1::StepRequest requests_[2];
  v1::StepResponse response_;
  int current_ = 0;
  bool read_ = false;
  bool writing_ = false;
  bool half_closed_ = false;
  bool finished_ = false;
};

class GenerateReactor final : public grpc::ServerWriteReactor<v1::GenerateResponse> {
 public:
  GenerateReactor(engine::Engine* engine, const ModelFacts* facts,
                  const v1::GenerateRequest& request) {
    auto generate = DecodeGenerate(request, facts->hidden_size, {});
    call_ = *engine->Generate(*std::move(generate),
                              {.deadline_ns = {}, .on_ready = [this] { Ready(); }});
  }
  void OnDone() override { delete this; }

 private:
  // On the engine's thread, which has to leave before the handle can go: the transport of a real
  // server needs another hop here, so this one has the advantage.
  void Ready() {
    response_.add_tokens();
    response_.set_finish_reason(v1::FINISH_REASON_LENGTH);
    StartWriteAndFinish(&response_, grpc::WriteOptions(), grpc::Status::OK);
  }

  std::unique_ptr<engine::GenerateCall> call_;
  v1::GenerateResponse response_;
};

class Service final : public v1::Inference::CallbackService {
 public:
  explicit Service(engine::Engine* engine, int64_t hidden_size) : engine_(engine) {
    facts_.hidden_size = hidden_size;
  }
  grpc::ServerBidiReactor<v1::StepRequest, v1::StepResponse>* StepStream(
      grpc::CallbackServerContext*) override {
    return new StepReactor(engine_, &facts_);
  }
  grpc::ServerWriteReactor<v1::GenerateResponse>* Generate(
      grpc::CallbackServerContext*, const v1::GenerateRequest* request) override {
    return new GenerateReactor(engine_, &facts_, *request);
  }

 private:
  engine::Engine* const engine_;
  ModelFacts facts_;
};

class CallbackServerImpl final : public CallbackServer {
 public:
  CallbackServerImpl(engine::Engine* engine, int64_t hidden_size) : service_(engine, hidden_size) {
    grpc::ServerBuilder builder;
    builder.RegisterService(&service_);
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port_);
    server_ = builder.BuildAndStart();
  }
  ~CallbackServerImpl() override { server_->Shutdown(); }
  int port() const override { return port_; }

 private:
  Service service_;
  int port_ = 0;
  std::unique_ptr<grpc::Server> server_;
};

}  // namespace

std::unique_ptr<CallbackServer> MakeCallbackServer(engine::Engine* engine, int64_t hidden_size) {
  return std::make_unique<CallbackServerImpl>(engine, hidden_size);
}

}  // namespace gdn::rpc
