// The functions behind the calls that the engine answers at once.
#ifndef SERVER_RPC_SESSION_HANDLERS_H_
#define SERVER_RPC_SESSION_HANDLERS_H_

#include "server/rpc/call.h"
#include "server/rpc/poller.h"

namespace gdn::rpc {

// Posts GetModel and the methods of Sessions.
void ServeSessions(Env& env, Poller& poller);

}  // namespace gdn::rpc

#endif  // SERVER_RPC_SESSION_HANDLERS_H_
