// What can be said of a request without looking at the sessions: runs on the caller's thread,
// before anything is queued. Messages name the field as it is spelt on the wire, the value, and the
// range.
#ifndef SERVER_ENGINE_VALIDATE_H_
#define SERVER_ENGINE_VALIDATE_H_

#include <cstdint>
#include <optional>

#include "absl/status/status.h"
#include "server/engine/engine.h"
#include "server/engine/types.h"
#include "server/pipeline/pipeline.h"

namespace gdn::engine {

absl::Status ValidateOptions(const EngineOptions& options, const pipeline::PipelineInfo& info);
absl::Status ValidateBatch(const BatchRequest& request, const EngineOptions& options,
                           const pipeline::PipelineInfo& info);
absl::Status ValidateGenerate(const GenerateRequest& request, const EngineOptions& options,
                              const pipeline::PipelineInfo& info);
absl::Status ValidateFork(const ForkRequest& request, int64_t max_sessions);
absl::Status ValidateTtl(std::optional<int64_t> ttl_ms);

// Tokens, or rows of hidden states.
int64_t InputLength(const Input& input, const pipeline::PipelineInfo& info);
// Logits a stream may hold undelivered, as a number of tokens: at least one.
int64_t StreamBufferLimit(const GenerateRequest& request, const EngineOptions& options,
                          const pipeline::PipelineInfo& info);

}  // namespace gdn::engine

#endif  // SERVER_ENGINE_VALIDATE_H_
