// StepStream and Generate over gRPC's callback API: what the transport is measured against.
#ifndef SERVER_RPC_BENCH_CALLBACK_SERVER_H_
#define SERVER_RPC_BENCH_CALLBACK_SERVER_H_

#include <memory>

#include "server/engine/engine.h"

namespace gdn::rpc {

class CallbackServer {
 public:
  virtual ~CallbackServer() = default;
  virtual int port() const = 0;
};

// Listens on a free port of loopback. The engine must outlive it.
std::unique_ptr<CallbackServer> MakeCallbackServer(engine::Engine* engine, int64_t hidden_size);

}  // namespace gdn::rpc

#endif  // SERVER_RPC_BENCH_CALLBACK_SERVER_H_
