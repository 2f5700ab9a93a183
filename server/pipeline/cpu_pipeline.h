// File: cpu_pipeline.h
//
// The pipeline on the CPU back end of the kernels.
#ifndef SERVER_PIPELINE_CPU_PIPELINE_H_
#define SERVER_PIPELINE_CPU_PIPELINE_H_

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "server/model/weights.h"
#include "server/pipeline/pipeline.h"

namespace gdn::pipeline {

// Arithmetic of the matrix products; everything else is FP32 either way.
enum class Precision { kFloat32, kBFloat16 };
// Element type of the recurrent state in memory.
enum class StateType { kFloat32, kBFloat16 };

struct CpuOptions {
  int32_t threads = 0;  // Of the products and the recurrence; 0: as many as there are cores.
  Precision precision = Precision::kBFloat16;
  // Matrix products run in fixed row blocks by one algorithm: a sequence's bits do not depend on
  // the batch it shares.
  bool batch_invariant = false;
  StateType state_type = StateType::kFloat32;
  int64_t num_slots = 64;
  // Buffers are sized for this many tokens up front; a larger Run grows them once.
  int64_t max_step_tokens = 1024;
};

// Packs the weights (which are freed afterwards) and reserves the state pool, whose pages are only
// taken as slots are used. INVALID_ARGUMENT: an option is out of range. UNIMPLEMENTED: no kernel
// covers the model's dimensions. RESOURCE_EXHAUSTED: the pool cannot be reserved; has the
// arithmetic.
absl::StatusOr<std::unique_ptr<Pipeline>> CreateCpuPipeline(model::Model model,
                                                            const CpuOptions& options);

}  // namespace gdn::pipeline

#endif  // SERVER_PIPELINE_CPU_PIPELINE_H_
