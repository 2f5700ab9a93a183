// Calls that are answered at once, by a function of the request.
#ifndef SERVER_RPC_UNARY_H_
#define SERVER_RPC_UNARY_H_

#include <grpcpp/support/async_unary_call.h>

#include "absl/status/status.h"
#include "server/rpc/call.h"
#include "server/rpc/coro.h"
#include "server/rpc/poller.h"
#include "server/rpc/status.h"

namespace gdn::rpc {

// The generated Request<Method> of an AsyncService.
template <typename Base, typename Request, typename Responder>
using RequestMethod = void (Base::*)(grpc::ServerContext*, Request*, Responder*,
                                     grpc::CompletionQueue*, grpc::ServerCompletionQueue*, void*);

// Serves one call, and keeps one posted. `handle` is called with the engine and fills the response.
template <typename Service, typename Base, typename Request, typename Response>
Detached ServeUnary(
    Env& env, Poller& poller, Rpc rpc, Service* service,
    RequestMethod<Base, Request, grpc::ServerAsyncResponseWriter<Response>> request_method,
    absl::Status (*handle)(const Served&, const Request&, Response*)) {
  Call call(env, poller, rpc);
  Request request;
  grpc::ServerAsyncResponseWriter<Response> responder(&call.context);
  Op op;
  (service->*request_method)(&call.context, &request, &responder, poller.queue(), poller.queue(),
                             op.Start());
  if (!co_await op) co_return;
  call.Begin();
  ServeUnary(env, poller, rpc, service, request_method, handle);

  Response response;
  const Served* served = env.served.load(std::memory_order_acquire);
  const grpc::Status status =
      ToGrpcStatus(served == nullptr ? NotReadyError() : handle(*served, request, &response));
  if (status.ok()) {
    responder.Finish(response, status, op.Start());
  } else {
    responder.FinishWithError(status, op.Start());
  }
  call.End(status, co_await op);
  while (!call.done()) co_await call.event;
}

}  // namespace gdn::rpc

#endif  // SERVER_RPC_UNARY_H_
