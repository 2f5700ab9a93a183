// Generate: one request in, a stream of tokens out.
#ifndef SERVER_RPC_GENERATE_H_
#define SERVER_RPC_GENERATE_H_

#include "server/rpc/call.h"
#include "server/rpc/poller.h"

namespace gdn::rpc {

void ServeGenerate(Env& env, Poller& poller);

}  // namespace gdn::rpc

#endif  // SERVER_RPC_GENERATE_H_
