// File: rpc_server.h
//
// The gRPC face of the server: gdn.v1, health and reflection on one address. It listens from
// Create() on and answers UNAVAILABLE until SetReady().
//
// Thread-safety: all methods may be called from any thread, but not concurrently with each other.
// Shutdown: BeginDrain(), then Engine::FinishDrain(), then Shutdown(); the engine must outlive
// that.
#ifndef SERVER_RPC_RPC_SERVER_H_
#define SERVER_RPC_RPC_SERVER_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "server/engine/clock.h"
#include "server/engine/engine.h"
#include "server/rpc/model_facts.h"
#include "server/rpc/observer.h"
#include "server/rpc/request_log.h"

namespace gdn::rpc {

struct RpcOptions {
  std::string listen = "127.0.0.1:50051";  // host:port; port 0: any free one.
  int32_t threads = 1;                     // Completion queues, each with its polling thread.
  int32_t max_concurrent_streams = 1024;   // Per connection; more wait at the client.
  int32_t max_message_bytes = 64 << 20;    // Either way.
  RequestLogOptions log;
};

class RpcServer {
 public:
  // Clock and observer (which may be null) must outlive the server. UNAVAILABLE, with the address
  // and the cure, if it cannot listen.
  static absl::StatusOr<std::unique_ptr<RpcServer>> Create(const RpcOptions& options,
                                                           const engine::Clock* clock,
                                                           RpcObserver* observer);
  virtual ~RpcServer() = default;  // Implies Shutdown(0).

  virtual int port() const = 0;
  // The address with the port in use.
  virtual const std::string& address() const = 0;
  // Everything is loaded and warm: health turns SERVING. Once.
  virtual void SetReady(engine::Engine* engine, const ModelFacts& facts) = 0;
  // Health turns NOT_SERVING, except that of "liveness"; step streams that are idle end with
  // UNAVAILABLE.
  virtual void BeginDrain() = 0;
  // Waits until no call is live, at most `timeout_ms`; false if some still are.
  virtual bool WaitForCalls(int64_t timeout_ms) = 0;
  // Stops listening, gives calls `grace_ms` to write what they have, cancels the rest, joins the
  // threads. Idempotent.
  virtual void Shutdown(int64_t grace_ms) = 0;
};

}  // namespace gdn::rpc

#endif  // SERVER_RPC_RPC_SERVER_H_
