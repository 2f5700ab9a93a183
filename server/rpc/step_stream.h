// StepStream: batches in, their results out in the same order, one at a time.
#ifndef SERVER_RPC_STEP_STREAM_H_
#define SERVER_RPC_STEP_STREAM_H_

#include "server/rpc/call.h"
#include "server/rpc/poller.h"

namespace gdn::rpc {

void ServeStepStream(Env& env, Poller& poller);

}  // namespace gdn::rpc

#endif  // SERVER_RPC_STEP_STREAM_H_
