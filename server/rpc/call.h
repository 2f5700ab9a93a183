// File: call.h
//
// What every call has while it lives in its coroutine's frame: the gRPC context, the event the
// coroutine waits on, the way to be woken by the engine, and the notice of its end.
//
// The order in a handler: construct Call, post the request, Begin() once it arrived, work, Finish()
// through the responder, End() with what came of it, wait until done(). Engine handles are declared
// after the Call, so that nobody wakes it any more when it is destroyed.
#ifndef SERVER_RPC_CALL_H_
#define SERVER_RPC_CALL_H_

#include <grpcpp/server_context.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "gdn/v1/inference.grpc.pb.h"
#include "gdn/v1/sessions.grpc.pb.h"
#include "server/engine/clock.h"
#include "server/engine/engine.h"
#include "server/rpc/coro.h"
#include "server/rpc/model_facts.h"
#include "server/rpc/observer.h"
#include "server/rpc/poller.h"
#include "server/rpc/request_log.h"

namespace gdn::rpc {

// What is served, once it is ready.
struct Served {
  engine::Engine* engine = nullptr;
  ModelFacts facts;
  v1::ModelInfo info;
};

// What the handlers of a server share. Thread-safe.
struct Env {
  // StepStream is raw: a completion queue cannot tell a message that does not parse from the end of
  // the stream, so its handler parses.
  v1::Inference::WithRawMethod_StepStream<v1::Inference::AsyncService> inference;
  v1::Sessions::AsyncService sessions;
  const engine::Clock* clock = nullptr;
  RpcObserver* observer = nullptr;
  RequestLogOptions log;
  std::atomic<const Served*> served = nullptr;  // Null until the model is loaded and warmed.
};

// UNAVAILABLE while there is nothing to serve.
absl::Status NotReadyError();
absl::Status DrainingError();

class Call final : private Tag, private Poller::Waker, private Poller::LiveCall {
 public:
  Call(Env& env, Poller& poller, Rpc rpc);
  ~Call();
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  grpc::ServerContext context;
  Event event;  // Set when anything a handler may wait for has happened.
  // Runs as soon as the call is cancelled, and drops the engine's handle: a write to a peer that
  // has gone away may stay pending for longer than that.
  std::function<void()> on_cancel;
  RequestRecord record;  // For the log.

  // The request has arrived.
  void Begin();
  // The deadline and wake-up for the engine.
  engine::CallOptions Options();
  bool done() const { return done_; }
  // The client has gone away, or the deadline has passed.
  bool cancelled() const { return cancelled_; }
  // The call's result: `status` if it was `sent`, else cancelled.
  void End(const grpc::Status& status, bool sent);

 private:
  void Run(bool ok) override;  // The notice of the end.

  Env& env_;
  Poller& poller_;
  const Rpc rpc_;
  std::optional<int64_t> deadline_ns_;
  int64_t begin_ns_ = 0;
  bool begun_ = false;
  bool done_ = false;
  bool cancelled_ = false;
  int code_ = 0;
  std::string message_;
};

}  // namespace gdn::rpc

#endif  // SERVER_RPC_CALL_H_
