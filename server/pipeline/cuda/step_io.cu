// The kernels behind StepIo.
#include <cstdint>

#include "server/pipeline/cuda/step_io.h"

namespace gdn::pipeline {
namespace {

constexpr int kThreads = 128;

// Rows of pinned memory, by turn.
struct Turns {
  const StepRow* rows[2];
  StepResult* results[2];
  uint32_t* turn;
};

// One thread per row of logits marks it as not wanted, then one per row unpacks it. A single block,
// so that the two are in order; batches are small.
__global__ void __launch_bounds__(1024)
    BeginKernel(const Turns turns, const StepArrays a, int64_t rows, int64_t one_token_rows,
                int64_t logits_rows) {
  const StepRow* in = turns.rows[*turns.turn & 1u];
  for (int64_t i = threadIdx.x; i < logits_rows; i += blockDim.x) a.position[i] = -1;
  __syncthreads();
  for (int64_t i = threadIdx.x; i < rows; i += blockDim.x) {
    const StepRow row = in[i];
    if (i < one_token_rows) a.ids[i] = row.chained >= 0 ? a.token[row.chained] : row.id;
    a.read_slot[i] = row.read_slot;
    a.write_slot[i] = row.write_slot;
    a.fresh[i] = static_cast<uint8_t>(row.fresh);
    a.sample_row[i] = row.sample_row;
    a.last_token[i] = row.last_token;
    if (row.sample_row >= 0) {
      gdn_sampling_params params;
      params.temperature = row.temperature;
      params.top_k = row.top_k;
      params.top_p = row.top_p;
      params.min_p = row.min_p;
      params.repetition_penalty = row.repetition_penalty;
      params.seed = row.seed;
      a.params[row.sample_row] = params;
      a.position[row.sample_row] = row.position;
    }
  }
}

// One block per row. A damaged state reaches every output that is read from it, so the last token's
// residual row tells.
__global__ void __launch_bounds__(kThreads)
    EndKernel(const Turns turns, const StepArrays a, const float* x, int64_t hidden) {
  const int64_t row = blockIdx.x;
  const int32_t last = a.last_token[row];
  bool finite = true;
  if (last >= 0) {
    for (int64_t i = threadIdx.x; i < hidden; i += kThreads) {
      finite = finite && isfinite(x[last * hidden + i]);
    }
  }
  const bool all_finite = __syncthreads_and(finite) != 0;
  if (threadIdx.x != 0) return;
  StepResult result;
  const int32_t sample_row = a.sample_row[row];
  if (sample_row >= 0) {
    result.token = a.token[sample_row];
    result.logprob = a.logprob[sample_row];
  }
  result.finite = all_finite ? 1 : 0;
  turns.results[*turns.turn & 1u][row] = result;
}

// After EndKernel, whose blocks all read the turn.
__global__ void NextTurnKernel(uint32_t* turn) { *turn += 1; }

__global__ void __launch_bounds__(kThreads)
    GatherKernel(const float* from, const int32_t* rows, int64_t width, float* to) {
  const float* source = from + rows[blockIdx.x] * width;
  float* target = to + static_cast<int64_t>(blockIdx.x) * width;
  for (int64_t i = threadIdx.x; i < width; i += kThreads) target[i] = source[i];
}

}  // namespace

absl::Status StepIo::Begin(int64_t rows, int64_t one_token_rows, int64_t logits_rows,
                           cudaStream_t stream) const {
  const Turns turns = {{inputs_[0].data(), inputs_[1].data()},
                       {results_[0].data(), results_[1].data()},
                       turn_.data()};
  const int64_t threads = rows > logits_rows ? rows : logits_rows;
  const auto block = static_cast<unsigned>(threads < 1024 ? (threads + 31) / 32 * 32 : 1024);
  BeginKernel<<<1, block, 0, stream>>>(turns, arrays_, rows, one_token_rows, logits_rows);
  return CudaStatus(cudaGetLastError(), "cannot launch the start of a step");
}

absl::Status StepIo::End(int64_t rows, const float* x, int64_t hidden, cudaStream_t stream) const {
  const Turns turns = {{inputs_[0].data(), inputs_[1].data()},
                       {results_[0].data(), results_[1].data()},
                       turn_.data()};
  if (rows > 0) {
    EndKernel<<<static_cast<unsigned>(rows), kThreads, 0, stream>>>(turns, arrays_, x, hidden);
  }
  NextTurnKernel<<<1, 1, 0, stream>>>(turn_.data());
  return CudaStatus(cudaGetLastError(), "cannot launch the end of a step");
}

absl::Status GatherRows(const float* from, const int32_t* rows, int64_t count, int64_t width,
                        float* to, cudaStream_t stream) {
  if (count == 0) return absl::OkStatus();
  GatherKernel<<<static_cast<unsigned>(count), kThreads, 0, stream>>>(from, rows, width, to);
  return CudaStatus(cudaGetLastError(), "cannot gather rows");
}

}  // namespace gdn::pipeline
