// File: request_log.h
//
// The log lines of a call. Each has the call's id, which is the caller's x-request-id or made up,
// and goes back to the caller under that name. What a prompt says is only in them if asked for.
#ifndef SERVER_RPC_REQUEST_LOG_H_
#define SERVER_RPC_REQUEST_LOG_H_

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "server/engine/types.h"
#include "server/rpc/observer.h"

namespace gdn::rpc {

enum class LoggedRequests {
  kNone,
  kFailures,  // Those the server is to blame for: UNKNOWN, INTERNAL, DATA_LOSS.
  kAll,
};

struct RequestLogOptions {
  LoggedRequests which = LoggedRequests::kFailures;
  bool prompts = false;  // Token ids of the inputs too.
};

// The metadata key of the id, both ways.
inline constexpr char kRequestIdKey[] = "x-request-id";

// `given` if it is fit for a log: at most 64 of letters, digits and "-_.:"; else a fresh one.
std::string ChooseRequestId(std::string_view given);

// What a call's last line says; filled as it becomes known.
struct RequestRecord {
  std::string id;
  std::string session_id;  // The first one's, of a batch.
  int64_t sequences = 0;   // That ran; of a step stream those of all its requests.
  int64_t input_tokens = 0;
  int64_t output_tokens = 0;
  engine::Timings timings;
  absl::Status fault;     // The first of a sequence whose call was OK.
  std::string input_ids;  // Only with RequestLogOptions.prompts.

  // Of the sequences as they are admitted; of the result as it is there.
  void AddInput(const RequestLogOptions& options, std::string_view session,
                const engine::Input& input, int64_t hidden_size);
  void AddResult(std::span<const engine::SequenceResult> sequences, const engine::Timings& spent);
};

void LogRequestBegin(const RequestRecord& record, Rpc rpc);
// `code` is a gRPC status code.
void LogRequestEnd(const RequestLogOptions& options, const RequestRecord& record, Rpc rpc, int code,
                   std::string_view message, int64_t duration_ns);

}  // namespace gdn::rpc

#endif  // SERVER_RPC_REQUEST_LOG_H_
