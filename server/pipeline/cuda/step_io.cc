#include "server/pipeline/cuda/step_io.h"

#include <algorithm>

namespace gdn::pipeline {

absl::Status StepIo::Create(int64_t max_rows, int64_t max_tokens) {
  constexpr char kWhat[] = "cannot allocate the buffers of a step";
  max_rows_ = max_rows;
  for (PinnedArray<StepRow>& rows : inputs_) GDN_RETURN_IF_ERROR(rows.Allocate(max_rows, kWhat));
  for (PinnedArray<StepResult>& results : results_) {
    GDN_RETURN_IF_ERROR(results.Allocate(max_rows, kWhat));
  }
  GDN_RETURN_IF_ERROR(ints_.Allocate(max_tokens + 3 * max_rows, kWhat));
  GDN_RETURN_IF_ERROR(longs_.Allocate(3 * max_rows, kWhat));
  GDN_RETURN_IF_ERROR(bytes_.Allocate(max_rows, kWhat));
  GDN_RETURN_IF_ERROR(floats_.Allocate(max_rows, kWhat));
  GDN_RETURN_IF_ERROR(params_.Allocate(max_rows, kWhat));
  GDN_RETURN_IF_ERROR(turn_.Allocate(1, kWhat));
  arrays_.ids = ints_.data();
  arrays_.sample_row = ints_.data() + max_tokens;
  arrays_.last_token = arrays_.sample_row + max_rows;
  arrays_.token = arrays_.last_token + max_rows;
  arrays_.read_slot = longs_.data();
  arrays_.write_slot = longs_.data() + max_rows;
  arrays_.position = longs_.data() + 2 * max_rows;
  arrays_.fresh = bytes_.data();
  arrays_.logprob = floats_.data();
  arrays_.params = params_.data();
  return Reset();
}

absl::Status StepIo::Reset() {
  for (PinnedArray<StepRow>& rows : inputs_) {
    std::fill(rows.data(), rows.data() + rows.count(), StepRow());
  }
  GDN_RETURN_IF_ERROR(
      CudaStatus(cudaMemset(turn_.data(), 0, turn_.bytes()), "cannot reset the steps"));
  return CudaStatus(cudaDeviceSynchronize(), "cannot reset the steps");
}

}  // namespace gdn::pipeline
