// File: op_runner.h
//
// Runs ops of the C ABI: owns the workspace and the worker threads, times each op, turns its status
// into absl::Status.
#ifndef SERVER_PIPELINE_OP_RUNNER_H_
#define SERVER_PIPELINE_OP_RUNNER_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>

#include "absl/status/status.h"
#include "gdn/kernels/cpu_pool.h"
#include "gdn/kernels/types.h"
#include "server/pipeline/aligned_buffer.h"
#include "server/pipeline/kernel_status.h"
#include "server/pipeline/pipeline.h"

namespace gdn::pipeline {

class OpRunner {
 public:
  struct PoolDeleter {
    void operator()(gdn_cpu_pool* pool) const { gdn_cpu_pool_destroy(pool); }
  };
  using PoolPtr = std::unique_ptr<gdn_cpu_pool, PoolDeleter>;

  OpRunner(gdn_backend backend, PoolPtr pool) : pool_(std::move(pool)) {
    exec_.backend = backend;
    exec_.pool = pool_.get();
  }

  void set_timer(KernelTimer* timer) { timer_ = timer; }
  KernelTimer* timer() const { return timer_; }
  void set_phase(Phase phase) { phase_ = phase; }

  template <typename Args>
  using Op = gdn_status (*)(const gdn_exec*, const Args*);
  template <typename Args>
  using WorkspaceQuery = gdn_status (*)(const gdn_exec*, const Args*, size_t*);

  // `name` must be a string literal: one of Pipeline::OpNames().
  template <typename Args>
  absl::Status Run(const char* name, Op<Args> op, const Args& args,
                   WorkspaceQuery<Args> query = nullptr) {
    if (query != nullptr) {
      size_t bytes = 0;
      GDN_RETURN_IF_ERROR(KernelStatus(query(&exec_, &args, &bytes), name));
      workspace_.Reserve(static_cast<int64_t>(bytes));
      exec_.workspace = workspace_.data();
      exec_.workspace_bytes = static_cast<size_t>(workspace_.capacity());
    }
    if (timer_ == nullptr) return KernelStatus(op(&exec_, &args), name);
    const auto start = std::chrono::steady_clock::now();
    const gdn_status status = op(&exec_, &args);
    const auto elapsed = std::chrono::steady_clock::now() - start;
    timer_->OnKernel(name, phase_, std::chrono::nanoseconds(elapsed).count());
    return KernelStatus(status, name);
  }

 private:
  PoolPtr pool_;
  gdn_exec exec_{};
  AlignedBuffer<std::byte> workspace_;
  KernelTimer* timer_ = nullptr;
  Phase phase_ = Phase::kDecode;
};

}  // namespace gdn::pipeline

#endif  // SERVER_PIPELINE_OP_RUNNER_H_
