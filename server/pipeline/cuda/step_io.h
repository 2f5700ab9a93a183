// File: step_io.h
//
// How a batch reaches the device and its results come back without a copy engine or a wait between
// steps: the host writes rows into pinned memory that the first kernel of a step reads, and the
// last kernel writes results into pinned memory that the host reads. There are two of each, used in
// turn; a counter on the device says whose turn it is, so that a captured graph need not change.
#ifndef SERVER_PIPELINE_CUDA_STEP_IO_H_
#define SERVER_PIPELINE_CUDA_STEP_IO_H_

#include <cuda_runtime_api.h>

#include <array>
#include <cstdint>

#include "absl/status/status.h"
#include "gdn/kernels/sampling.h"
#include "server/pipeline/cuda/device_memory.h"

namespace gdn::pipeline {

// One sequence of a batch. Rows stand in the order of the batch's tokens.
struct alignas(64) StepRow {
  int32_t id = -1;       // The input of a one-token sequence; -1: none, or see `chained`.
  int32_t chained = -1;  // Row of the step before whose choice is the input; -1: none.
  int32_t read_slot = -1;
  int32_t write_slot = -1;  // -1: a padding row.
  int64_t position = -1;    // Of the token to choose.
  uint64_t seed = 0;
  float temperature = 0.0f;
  float top_p = 1.0f;
  float min_p = 0.0f;
  float repetition_penalty = 1.0f;
  int32_t top_k = 0;
  int32_t fresh = 0;
  int32_t sample_row = -1;  // Among the rows of logits; -1: no choice.
  int32_t last_token = -1;  // Its last row among the tokens; -1: it has none.
};
static_assert(sizeof(StepRow) == 64);

struct StepResult {
  int32_t token = -1;
  float logprob = 0.0f;
  int32_t finite = 1;
  int32_t padding = 0;
};

// Device arrays that the kernels of a step read, one entry per row except where noted.
struct StepArrays {
  int32_t* ids = nullptr;  // [tokens]; entries of one-token rows are set by BeginStep.
  int64_t* read_slot = nullptr;
  int64_t* write_slot = nullptr;
  uint8_t* fresh = nullptr;
  int32_t* sample_row = nullptr;
  int32_t* last_token = nullptr;
  gdn_sampling_params* params = nullptr;  // By row of logits.
  int64_t* position = nullptr;            // By row of logits; -1: no choice.
  int32_t* token = nullptr;               // By row of logits: the choices, also of the step before.
  float* logprob = nullptr;               // By row of logits.
};

class StepIo {
 public:
  // A batch has at most max_rows sequences and max_tokens tokens.
  absl::Status Create(int64_t max_rows, int64_t max_tokens);

  // Makes the next step number 0, and all rows padding. With nothing in flight.
  absl::Status Reset();

  // The host's side of the batch launched as number `step`, counted from 0.
  StepRow* rows(int64_t step) const { return inputs_[step % 2].data(); }
  const StepResult* results(int64_t step) const { return results_[step % 2].data(); }
  const StepArrays& arrays() const { return arrays_; }
  int64_t max_rows() const { return max_rows_; }

  // Unpacks the rows of the step whose turn it is. `logits_rows` is the number of rows that the
  // sampler will see: those that no row asks for are marked as not wanted.
  absl::Status Begin(int64_t rows, int64_t one_token_rows, int64_t logits_rows,
                     cudaStream_t stream) const;
  // Writes the results, and gives the turn to the next step. x is the residual stream,
  // [tokens, hidden].
  absl::Status End(int64_t rows, const float* x, int64_t hidden, cudaStream_t stream) const;

 private:
  int64_t max_rows_ = 0;
  std::array<PinnedArray<StepRow>, 2> inputs_;
  std::array<PinnedArray<StepResult>, 2> results_;
  StepArrays arrays_;
  DeviceArray<int32_t> ints_;
  DeviceArray<int64_t> longs_;
  DeviceArray<uint8_t> bytes_;
  DeviceArray<float> floats_;
  DeviceArray<gdn_sampling_params> params_;
  DeviceArray<uint32_t> turn_;
};

// to[r] = from[rows[r]], rows of `width` floats.
absl::Status GatherRows(const float* from, const int32_t* rows, int64_t count, int64_t width,
                        float* to, cudaStream_t stream);

}  // namespace gdn::pipeline

#endif  // SERVER_PIPELINE_CUDA_STEP_IO_H_
