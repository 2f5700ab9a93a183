#include "gdn/kernels/sampling.h"

#include <cmath>
#include <limits>

#include "kernels/capi/dense_checks.h"
#include "kernels/capi/dispatch.h"

namespace gdn::kernels {
namespace {

constexpr char kOp[] = "sample";

gdn_status CheckExtents(const gdn_exec* exec, const gdn_sampling_args* args) {
  GDN_RETURN_IF_ERROR(CheckAnyExec(kOp, exec, args));
  GDN_RETURN_IF_ERROR(CheckExtent(kOp, "rows", args->rows, 0));
  GDN_CHECK_ARG(args->vocab >= 1 && args->vocab <= std::numeric_limits<int32_t>::max(),
                GDN_INVALID_ARGUMENT, "sample: vocab must be in 1..2^31-1, got %lld",
                static_cast<long long>(args->vocab));
  GDN_CHECK_ARG(args->top_logprobs >= 0 && args->top_logprobs <= args->vocab, GDN_INVALID_ARGUMENT,
                "sample: top_logprobs must be in 0..vocab (%lld), got %d",
                static_cast<long long>(args->vocab), args->top_logprobs);
  return GDN_OK;
}

gdn_status CheckParams(const gdn_sampling_params& params, long long row) {
  GDN_CHECK_ARG(std::isfinite(params.temperature) && params.temperature >= 0.0f,
                GDN_INVALID_ARGUMENT,
                "sample: params[%lld].temperature must be finite and >= 0, got %g", row,
                static_cast<double>(params.temperature));
  GDN_CHECK_ARG(params.top_k >= 0, GDN_INVALID_ARGUMENT,
                "sample: params[%lld].top_k must be >= 0, got %d", row, params.top_k);
  GDN_CHECK_ARG(params.top_p > 0.0f && params.top_p <= 1.0f, GDN_INVALID_ARGUMENT,
                "sample: params[%lld].top_p must be in (0, 1], got %g", row,
                static_cast<double>(params.top_p));
  GDN_CHECK_ARG(params.min_p >= 0.0f && params.min_p < 1.0f, GDN_INVALID_ARGUMENT,
                "sample: params[%lld].min_p must be in [0, 1), got %g", row,
                static_cast<double>(params.min_p));
  GDN_CHECK_ARG(std::isfinite(params.repetition_penalty) && params.repetition_penalty > 0.0f,
                GDN_INVALID_ARGUMENT,
                "sample: params[%lld].repetition_penalty must be finite and > 0, got %g", row,
                static_cast<double>(params.repetition_penalty));
  return GDN_OK;
}

gdn_status CheckHistory(const gdn_sampling_args& args) {
  if (args.history == nullptr) return GDN_OK;
  const int64_t* offsets = args.history_offsets;
  GDN_CHECK_ARG(offsets[0] >= 0, GDN_INVALID_ARGUMENT,
                "sample: history_offsets[0] must be >= 0, got %lld",
                static_cast<long long>(offsets[0]));
  for (int64_t row = 0; row < args.rows; ++row) {
    GDN_CHECK_ARG(offsets[row] <= offsets[row + 1], GDN_INVALID_ARGUMENT,
                  "sample: history_offsets must not decrease, got %lld then %lld at row %lld",
                  static_cast<long long>(offsets[row]), static_cast<long long>(offsets[row + 1]),
                  static_cast<long long>(row));
    for (int64_t i = offsets[row]; i < offsets[row + 1]; ++i) {
      GDN_CHECK_ARG(args.history[i] >= 0 && args.history[i] < args.vocab, GDN_INVALID_ARGUMENT,
                    "sample: history[%lld] of row %lld must be in 0..%lld, got %d",
                    static_cast<long long>(i), static_cast<long long>(row),
                    static_cast<long long>(args.vocab - 1), args.history[i]);
    }
  }
  return GDN_OK;
}

gdn_status Check(const gdn_exec* exec, const gdn_sampling_args* args) {
  GDN_RETURN_IF_ERROR(CheckExtents(exec, args));
  GDN_CHECK_ARG((args->top_logprobs == 0) == (args->top_ids == nullptr) &&
                    (args->top_logprobs == 0) == (args->top_values == nullptr),
                GDN_INVALID_ARGUMENT,
                "sample: top_ids and top_values must be NULL exactly if top_logprobs is 0, got %d",
                args->top_logprobs);
  if (args->rows == 0) return GDN_OK;
  GDN_RETURN_IF_ERROR(CheckPointer(kOp, "logits", args->logits));
  GDN_RETURN_IF_ERROR(CheckPointer(kOp, "params", args->params));
  GDN_RETURN_IF_ERROR(CheckPointer(kOp, "position", args->position));
  GDN_RETURN_IF_ERROR(CheckPointer(kOp, "token", args->token));
  GDN_RETURN_IF_ERROR(CheckStride(kOp, "logits_row_stride", args->logits_row_stride, args->vocab));
  GDN_CHECK_ARG((args->history == nullptr) == (args->history_offsets == nullptr),
                GDN_INVALID_ARGUMENT,
                "sample: history and history_offsets must both be given or both be NULL");
  if (exec->backend == GDN_BACKEND_CUDA) return GDN_OK;  // The arrays are out of reach.
  for (int64_t row = 0; row < args->rows; ++row) {
    if (args->position[row] < 0) continue;
    GDN_RETURN_IF_ERROR(CheckParams(args->params[row], row));
  }
  return CheckHistory(*args);
}

size_t Workspace(const gdn_exec& exec, const gdn_sampling_args& args) {
  if (args.rows == 0) return 0;
#ifdef GDN_HAS_CUDA
  if (exec.backend == GDN_BACKEND_CUDA) return cuda::SampleWorkspace(exec, args);
#endif
  return exec.backend == GDN_BACKEND_REF ? ref::SampleWorkspace(exec, args)
                                         : cpu::SampleWorkspace(exec, args);
}

}  // namespace
}  // namespace gdn::kernels

gdn_status gdn_sample_workspace(const gdn_exec* exec, const gdn_sampling_args* args,
                                size_t* bytes) {
  GDN_RETURN_IF_ERROR(gdn::kernels::CheckExtents(exec, args));
  GDN_RETURN_IF_ERROR(gdn::kernels::CheckPointer("sample_workspace", "bytes", bytes));
  *bytes = gdn::kernels::Workspace(*exec, *args);
  return GDN_OK;
}

gdn_status gdn_sample(const gdn_exec* exec, const gdn_sampling_args* args) {
  GDN_RETURN_IF_ERROR(gdn::kernels::Check(exec, args));
  if (args->rows == 0) return GDN_OK;
  GDN_RETURN_IF_ERROR(
      gdn::kernels::CheckWorkspace("sample", *exec, gdn::kernels::Workspace(*exec, *args)));
  GDN_DISPATCH(exec, args, Sample);
}
