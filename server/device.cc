#include "server/device.h"

#include <spdlog/spdlog.h>

#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "server/pipeline/cpu_pipeline.h"

#ifdef GDN_HAS_CUDA
#include "server/pipeline/cuda/cuda_pipeline.h"
#include "server/pipeline/cuda/device_info.h"
#endif

namespace gdn {
namespace {

constexpr int64_t kDefaultCpuSessions = 48;

int64_t MaxStepTokens(const ServerOptions& options) {
  return options.engine.prefill_token_budget + options.engine.max_batch_rows;
}

absl::StatusOr<std::unique_ptr<pipeline::Pipeline>> CreateOnCpu(model::Model model,
                                                                const ServerOptions& options) {
  const int64_t sessions = options.max_sessions > 0 ? options.max_sessions : kDefaultCpuSessions;
  const pipeline::CpuOptions cpu = {
      .threads = options.device.cpu_threads,
      .precision = options.device.precision,
      .batch_invariant = options.device.batch_invariant,
      .state_type = options.device.state_type,
      .num_slots = sessions + 1,  // The engine warms up in one of its own.
      .max_step_tokens = MaxStepTokens(options)};
  return pipeline::CreateCpuPipeline(std::move(model), cpu);
}

#ifdef GDN_HAS_CUDA

absl::Status CheckGpu(const DeviceOptions& options) {
  if (options.precision == pipeline::Precision::kFloat32) {
    return absl::FailedPreconditionError(
        "--precision=float32 runs on the CPU only; use --device=cpu or --precision=bfloat16");
  }
  return pipeline::UseDevice(options.index).status();
}

absl::StatusOr<std::unique_ptr<pipeline::Pipeline>> CreateOnGpu(model::Model model,
                                                                const ServerOptions& options) {
  const bool float32_state = options.device.state_type == pipeline::StateType::kFloat32;
  const pipeline::CudaOptions cuda = {
      .device_index = options.device.index,
      .batch_invariant = options.device.batch_invariant,
      .state_type = float32_state ? GDN_F32 : GDN_BF16,
      .num_slots = options.max_sessions > 0 ? options.max_sessions + 1 : 0,
      .max_rows = options.engine.max_batch_rows,
      .max_step_tokens = MaxStepTokens(options),
      .timed_interval = options.device.kernel_timing_interval};
  pipeline::CudaReport report;
  auto created = pipeline::CreateCudaPipeline(std::move(model), cuda, &report);
  if (!created.ok()) return created.status();
  spdlog::info(
      "{}: {} bytes of weights at {:.1f} GB/s, {} bytes of states in {} slots, {} decode graphs, "
      "{} bytes free",
      report.device_name, report.weight_bytes, report.upload_bytes_per_second / 1e9,
      report.state_bytes, (*created)->info().num_slots, report.num_graphs, report.free_bytes);
  return created;
}

#else

absl::Status CheckGpu(const DeviceOptions&) {
  return absl::FailedPreconditionError("this build has no CUDA back end");
}

absl::StatusOr<std::unique_ptr<pipeline::Pipeline>> CreateOnGpu(model::Model,
                                                                const ServerOptions&) {
  return absl::FailedPreconditionError("this build has no CUDA back end");
}

#endif

}  // namespace

absl::StatusOr<Device> ChooseDevice(const DeviceOptions& options) {
  if (options.device == Device::kCpu) return Device::kCpu;
  const absl::Status gpu = CheckGpu(options);
  if (gpu.ok()) return Device::kCuda;
  const std::string reason(gpu.message());
  if (options.device == Device::kCuda) {
    return absl::FailedPreconditionError(
        absl::StrCat("--device=cuda: ", reason, "; use --device=cpu or --device=auto"));
  }
  spdlog::info("--device=auto: running on the CPU: {}", reason);
  return Device::kCpu;
}

absl::StatusOr<std::unique_ptr<pipeline::Pipeline>> CreatePipeline(model::Model model,
                                                                   const ServerOptions& options,
                                                                   Device device) {
  return device == Device::kCuda ? CreateOnGpu(std::move(model), options)
                                 : CreateOnCpu(std::move(model), options);
}

}  // namespace gdn
