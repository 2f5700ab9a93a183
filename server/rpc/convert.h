// Wire messages to engine requests and engine results to wire messages. What a message alone shows
// to be wrong is refused here, by field path; everything that needs the model or the sessions is
// the engine's to judge.
#ifndef SERVER_RPC_CONVERT_H_
#define SERVER_RPC_CONVERT_H_

#include <cstdint>

#include "absl/status/statusor.h"
#include "gdn/v1/inference.pb.h"
#include "gdn/v1/sessions.pb.h"
#include "gdn/v1/types.pb.h"
#include "server/engine/engine.h"
#include "server/engine/types.h"
#include "server/rpc/model_facts.h"

namespace gdn::rpc {

using SequenceRequests = google::protobuf::RepeatedPtrField<v1::SequenceRequest>;
using SequenceResponses = google::protobuf::RepeatedPtrField<v1::SequenceResponse>;

v1::ModelInfo EncodeModel(const ModelFacts& facts, const engine::EngineOptions& limits,
                          int64_t max_message_bytes);

// Lengths are held against the limits before anything is copied: a request over them costs its
// sender, not the other calls.
absl::StatusOr<engine::BatchRequest> DecodeBatch(const SequenceRequests& sequences,
                                                 engine::CallKind kind, int64_t hidden_size,
                                                 const engine::EngineOptions& limits);
// `requests` says which tensors were asked for: an asked one is present even if it has no rows.
void EncodeBatch(const engine::BatchResult& result, const SequenceRequests& requests,
                 const ModelFacts& facts, SequenceResponses* responses, v1::Timings* timings);

absl::StatusOr<engine::GenerateRequest> DecodeGenerate(const v1::GenerateRequest& request,
                                                       int64_t hidden_size,
                                                       const engine::EngineOptions& limits);
void EncodeToken(const engine::ChosenToken& token, v1::Token* proto);
void EncodeTimings(const engine::Timings& timings, v1::Timings* proto);
void EncodeSession(const engine::SessionInfo& info, v1::Session* proto);

}  // namespace gdn::rpc

#endif  // SERVER_RPC_CONVERT_H_
