#include "gdn/kernels/linear_argmax.h"

#include <limits>

#include "kernels/capi/dense_checks.h"
#include "kernels/capi/dispatch.h"

namespace gdn::kernels {
namespace {

constexpr char kOp[] = "linear_argmax";
constexpr int64_t kMaxK = int64_t{1} << 30;

gdn_status CheckShape(const gdn_exec* exec, const gdn_linear_argmax_args* args) {
  GDN_RETURN_IF_ERROR(CheckAnyExec(kOp, exec, args));
  GDN_CHECK_ARG(exec->backend != GDN_BACKEND_CPU, GDN_BACKEND_UNAVAILABLE,
                "%s: the CPU back end has no such op; use matmul.h and sampling.h", kOp);
  GDN_RETURN_IF_ERROR(CheckExtent(kOp, "rows", args->rows, 0));
  GDN_CHECK_ARG(args->n >= 1 && args->n <= std::numeric_limits<int32_t>::max(),
                GDN_INVALID_ARGUMENT, "%s: n must be in 1..2^31-1, got %lld", kOp,
                static_cast<long long>(args->n));
  GDN_CHECK_ARG(args->k >= 1 && args->k <= kMaxK, GDN_INVALID_ARGUMENT,
                "%s: k must be in 1..2^30, got %lld", kOp, static_cast<long long>(args->k));
  GDN_RETURN_IF_ERROR(CheckElementType(kOp, "weight_dtype", args->weight_dtype));
  GDN_RETURN_IF_ERROR(CheckElementType(kOp, "x_dtype", args->x_dtype));
  GDN_CHECK_ARG(args->x_dtype == GDN_F32 || args->x_dtype == args->weight_dtype,
                GDN_INVALID_ARGUMENT, "%s: x_dtype must be GDN_F32 (0) or weight_dtype %d, got %d",
                kOp, static_cast<int>(args->weight_dtype), static_cast<int>(args->x_dtype));
  return CheckEps(kOp, args->norm_eps);
}

gdn_status Check(const gdn_exec* exec, const gdn_linear_argmax_args* args) {
  GDN_RETURN_IF_ERROR(CheckShape(exec, args));
  if (args->rows == 0) return GDN_OK;
  GDN_RETURN_IF_ERROR(CheckPointer(kOp, "x", args->x));
  GDN_RETURN_IF_ERROR(CheckPointer(kOp, "weight", args->weight));
  GDN_RETURN_IF_ERROR(CheckPointer(kOp, "position", args->position));
  GDN_RETURN_IF_ERROR(CheckPointer(kOp, "token", args->token));
  GDN_RETURN_IF_ERROR(CheckStride(kOp, "x_row_stride", args->x_row_stride, args->k));
  return exec->backend == GDN_BACKEND_CUDA ? CheckCudaProduct(kOp, *args) : GDN_OK;
}

gdn_status Workspace([[maybe_unused]] const gdn_exec& exec,
                     [[maybe_unused]] const gdn_linear_argmax_args& args, size_t* bytes) {
  *bytes = 0;
#ifdef GDN_HAS_CUDA
  if (exec.backend == GDN_BACKEND_CUDA && args.rows > 0) {
    return cuda::LinearArgmaxWorkspace(exec, args, bytes);
  }
#endif
  return GDN_OK;
}

}  // namespace
}  // namespace gdn::kernels

gdn_status gdn_linear_argmax_workspace(const gdn_exec* exec, const gdn_linear_argmax_args* args,
                                       size_t* bytes) {
  GDN_RETURN_IF_ERROR(gdn::kernels::CheckShape(exec, args));
  GDN_RETURN_IF_ERROR(gdn::kernels::CheckPointer("linear_argmax_workspace", "bytes", bytes));
  return gdn::kernels::Workspace(*exec, *args, bytes);
}

gdn_status gdn_linear_argmax(const gdn_exec* exec, const gdn_linear_argmax_args* args) {
  GDN_RETURN_IF_ERROR(gdn::kernels::Check(exec, args));
  if (args->rows == 0) return GDN_OK;
  size_t bytes = 0;
  GDN_RETURN_IF_ERROR(gdn::kernels::Workspace(*exec, *args, &bytes));
  GDN_RETURN_IF_ERROR(gdn::kernels::CheckWorkspace("linear_argmax", *exec, bytes));
#ifdef GDN_HAS_CUDA
  if (exec->backend == GDN_BACKEND_CUDA) return gdn::cuda::LinearArgmax(*exec, *args);
#endif
  return gdn::kernels::CallRef("linear_argmax", gdn::ref::LinearArgmax, *exec, *args);
}
