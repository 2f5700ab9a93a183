// An engine that costs nothing: batches come back as they are, Generate yields one token, from a
// thread of its own as from a real engine's.
#ifndef SERVER_RPC_BENCH_ECHO_ENGINE_H_
#define SERVER_RPC_BENCH_ECHO_ENGINE_H_

#include <memory>

#include "server/engine/engine.h"

namespace gdn::rpc {

std::unique_ptr<engine::Engine> MakeEchoEngine();

}  // namespace gdn::rpc

#endif  // SERVER_RPC_BENCH_ECHO_ENGINE_H_
