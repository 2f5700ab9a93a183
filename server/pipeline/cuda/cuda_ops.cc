#include "server/pipeline/cuda/cuda_ops.h"

namespace gdn::pipeline {

absl::Status CudaOps::Create() {
  absl::StatusOr<CudaStream> stream = CreateStream();
  if (!stream.ok()) return stream.status();
  stream_ = *std::move(stream);
  exec_.backend = GDN_BACKEND_CUDA;
  exec_.stream = stream_.get();
  return absl::OkStatus();
}

absl::Status CudaOps::AllocateWorkspace() {
  GDN_RETURN_IF_ERROR(workspace_.Allocate(workspace_bytes_, "cannot allocate the workspace"));
  exec_.workspace = workspace_.data();
  exec_.workspace_bytes = workspace_.bytes();
  return absl::OkStatus();
}

void CudaOps::StartTiming() {
  marks_.clear();
  timing_ = true;
}

absl::Status CudaOps::StopTiming() {
  absl::Status status = Mark("");
  timing_ = false;
  return status;
}

absl::Status CudaOps::Mark(const char* name) {
  if (marks_.size() == events_.size()) {
    absl::StatusOr<CudaEvent> event = CreateEvent(cudaEventDefault);
    if (!event.ok()) return event.status();
    events_.push_back(*std::move(event));
  }
  GDN_RETURN_IF_ERROR(CudaStatus(cudaEventRecord(events_[marks_.size()].get(), stream_.get()),
                                 "cannot time the ops"));
  marks_.push_back(name);
  return absl::OkStatus();
}

absl::Status CudaOps::Report(Phase phase, KernelTimer* timer) {
  for (size_t i = 0; i + 1 < marks_.size(); ++i) {
    float milliseconds = 0;
    GDN_RETURN_IF_ERROR(
        CudaStatus(cudaEventElapsedTime(&milliseconds, events_[i].get(), events_[i + 1].get()),
                   "cannot time the ops"));
    if (timer != nullptr) {
      timer->OnKernel(marks_[i], phase, static_cast<int64_t>(double{milliseconds} * 1e6));
    }
  }
  marks_.clear();
  return absl::OkStatus();
}

}  // namespace gdn::pipeline
