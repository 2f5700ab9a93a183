// What the transport tells whoever measures it, in terms that need no gRPC header.
#ifndef SERVER_RPC_OBSERVER_H_
#define SERVER_RPC_OBSERVER_H_

#include <array>
#include <cstdint>
#include <string_view>

namespace gdn::rpc {

enum class Rpc {
  kGetModel,
  kPrefill,
  kStep,
  kStepStream,
  kGenerate,
  kCreateSession,
  kGetSession,
  kListSessions,
  kDeleteSession,
  kForkSession,
};

inline constexpr std::array<std::string_view, 10> kRpcNames = {
    "GetModel",      "Prefill",    "Step",         "StepStream",    "Generate",
    "CreateSession", "GetSession", "ListSessions", "DeleteSession", "ForkSession"};

// Names of the status codes, in their numeric order.
inline constexpr std::array<std::string_view, 17> kCodeNames = {
    "OK",        "CANCELLED",      "UNKNOWN",           "INVALID_ARGUMENT",   "DEADLINE_EXCEEDED",
    "NOT_FOUND", "ALREADY_EXISTS", "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION",
    "ABORTED",   "OUT_OF_RANGE",   "UNIMPLEMENTED",     "INTERNAL",           "UNAVAILABLE",
    "DATA_LOSS", "UNAUTHENTICATED"};

class RpcObserver {
 public:
  virtual ~RpcObserver() = default;
  // Once for every call that was received, as it is.
  virtual void OnCallStarted(Rpc /*rpc*/) {}
  // Once for each of those, when it is over. Any poller thread.
  virtual void OnCallDone(Rpc rpc, int code, int64_t duration_ns) = 0;
};

}  // namespace gdn::rpc

#endif  // SERVER_RPC_OBSERVER_H_
