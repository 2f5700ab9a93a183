// File: cuda_ops.h
//
// Launches ops of the C ABI on a stream: owns the workspace, turns an op's status into
// absl::Status, and on chosen steps brackets each op with events.
#ifndef SERVER_PIPELINE_CUDA_CUDA_OPS_H_
#define SERVER_PIPELINE_CUDA_CUDA_OPS_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "gdn/kernels/linear.h"
#include "gdn/kernels/types.h"
#include "server/pipeline/cuda/device_memory.h"
#include "server/pipeline/kernel_status.h"
#include "server/pipeline/pipeline.h"

namespace gdn::pipeline {

struct LinearPlanDestroy {
  void operator()(gdn_linear_plan* plan) const { gdn_linear_plan_destroy(plan); }
};
using LinearPlan = std::unique_ptr<gdn_linear_plan, LinearPlanDestroy>;

class CudaOps {
 public:
  absl::Status Create();
  cudaStream_t stream() const { return stream_.get(); }

  template <typename Args>
  using Op = gdn_status (*)(const gdn_exec*, const Args*);
  template <typename Args>
  using WorkspaceQuery = gdn_status (*)(const gdn_exec*, const Args*, size_t*);

  // Before the first Run: makes sure that the workspace covers this call.
  template <typename Args>
  absl::Status NeedWorkspace(const char* name, WorkspaceQuery<Args> query, const Args& args) {
    size_t bytes = 0;
    GDN_RETURN_IF_ERROR(KernelStatus(query(&exec_, &args, &bytes), name));
    if (static_cast<int64_t>(bytes) > workspace_bytes_) {
      workspace_bytes_ = static_cast<int64_t>(bytes);
    }
    return absl::OkStatus();
  }
  absl::Status AllocateWorkspace();
  int64_t workspace_bytes() const { return workspace_bytes_; }

  // `name` must be a string literal: one of Pipeline::OpNames().
  template <typename Args>
  absl::Status Run(const char* name, Op<Args> op, const Args& args) {
    if (timing_) GDN_RETURN_IF_ERROR(Mark(name));
    return KernelStatus(op(&exec_, &args), name);
  }
  // For launches that are not ops: names what comes next.
  absl::Status Section(const char* name) { return timing_ ? Mark(name) : absl::OkStatus(); }

  // Between the two, ops are timed one by one. Not while a graph is captured.
  void StartTiming();
  absl::Status StopTiming();
  bool timing() const { return timing_; }
  // Once the stream has passed StopTiming: reports the times, once.
  absl::Status Report(Phase phase, KernelTimer* timer);

 private:
  absl::Status Mark(const char* name);

  CudaStream stream_;
  gdn_exec exec_{};
  int64_t workspace_bytes_ = 0;
  DeviceArray<std::byte> workspace_;
  bool timing_ = false;
  std::vector<CudaEvent> events_;
  std::vector<const char*> marks_;  // Name of the op that starts at the event of the same index.
};

}  // namespace gdn::pipeline

#endif  // SERVER_PIPELINE_CUDA_CUDA_OPS_H_
