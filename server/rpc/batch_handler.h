// Prefill and Step: one batch in, its result out.
#ifndef SERVER_RPC_BATCH_HANDLER_H_
#define SERVER_RPC_BATCH_HANDLER_H_

#include "server/rpc/call.h"
#include "server/rpc/poller.h"

namespace gdn::rpc {

void ServePrefill(Env& env, Poller& poller);
void ServeStep(Env& env, Poller& poller);

}  // namespace gdn::rpc

#endif  // SERVER_RPC_BATCH_HANDLER_H_
