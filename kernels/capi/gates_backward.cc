#include "gdn/kernels/gates_backward.h"

#include <cmath>

#include "kernels/capi/dense_checks.h"
#include "kernels/capi/dispatch.h"

namespace {

using namespace gdn::kernels;  // NOLINT(build/namespaces): the checks

// Bytes that the back end needs for a checked shape.
size_t Workspace(const gdn_exec& exec, const gdn_gates_backward_args& args) {
#ifdef GDN_HAS_CUDA
  if (exec.backend == GDN_BACKEND_CUDA) return gdn::cuda::GatesBackwardWorkspace(args);
#endif
  return exec.backend == GDN_BACKEND_CPU ? gdn::cpu::GatesBackwardWorkspace(args) : 0;
}

gdn_status CheckShape(const char* op, const gdn_gates_backward_args& args) {
  GDN_RETURN_IF_ERROR(CheckExtent(op, "tokens", args.tokens, 0));
  GDN_RETURN_IF_ERROR(CheckExtent(op, "value_heads", args.value_heads, 1));
  // The workspace grows with their product.
  GDN_CHECK_ARG(args.value_heads <= 65536, GDN_UNSUPPORTED_SHAPE,
                "%s: value_heads must be in 1..65536, got %lld", op,
                static_cast<long long>(args.value_heads));
  return CheckElementType(op, "dtype", args.dtype);
}

gdn_status Check(const char* op, const gdn_gates_backward_args& args) {
  GDN_RETURN_IF_ERROR(CheckShape(op, args));
  const int64_t heads = args.value_heads;
  GDN_RETURN_IF_ERROR(CheckStride(op, "a_token_stride", args.a_token_stride, heads));
  GDN_RETURN_IF_ERROR(CheckStride(op, "b_token_stride", args.b_token_stride, heads));
  GDN_RETURN_IF_ERROR(CheckStride(op, "d_a_token_stride", args.d_a_token_stride, heads));
  GDN_RETURN_IF_ERROR(CheckStride(op, "d_b_token_stride", args.d_b_token_stride, heads));
  GDN_CHECK_ARG(std::isfinite(args.beta_scale), GDN_INVALID_ARGUMENT,
                "%s: beta_scale must be finite, got %g", op, static_cast<double>(args.beta_scale));
  GDN_RETURN_IF_ERROR(CheckPointer(op, "a_log", args.a_log));
  GDN_RETURN_IF_ERROR(CheckPointer(op, "dt_bias", args.dt_bias));
  GDN_RETURN_IF_ERROR(CheckPointer(op, "d_a_log", args.d_a_log));
  GDN_RETURN_IF_ERROR(CheckPointer(op, "d_dt_bias", args.d_dt_bias));
  if (args.tokens == 0) return GDN_OK;
  GDN_RETURN_IF_ERROR(CheckPointer(op, "a", args.a));
  GDN_RETURN_IF_ERROR(CheckPointer(op, "b", args.b));
  GDN_RETURN_IF_ERROR(CheckPointer(op, "d_g", args.d_g));
  GDN_RETURN_IF_ERROR(CheckPointer(op, "d_beta", args.d_beta));
  GDN_RETURN_IF_ERROR(CheckPointer(op, "d_a", args.d_a));
  GDN_RETURN_IF_ERROR(CheckPointer(op, "d_b", args.d_b));
  GDN_CHECK_ARG(args.d_a != args.d_b && args.d_a != args.a && args.d_a != args.b &&
                    args.d_b != args.a && args.d_b != args.b,
                GDN_INVALID_ARGUMENT, "%s: d_a and d_b must not overlap a, b or each other", op);
  return GDN_OK;
}

}  // namespace

gdn_status gdn_gates_backward_workspace(const gdn_exec* exec, const gdn_gates_backward_args* args,
                                        size_t* bytes) {
  constexpr char kOp[] = "gates_backward_workspace";
  GDN_RETURN_IF_ERROR(CheckAnyExec(kOp, exec, args));
  GDN_RETURN_IF_ERROR(CheckPointer(kOp, "bytes", bytes));
  GDN_RETURN_IF_ERROR(CheckShape(kOp, *args));
  *bytes = Workspace(*exec, *args);
  return GDN_OK;
}

gdn_status gdn_gates_backward(const gdn_exec* exec, const gdn_gates_backward_args* args) {
  constexpr char kOp[] = "gates_backward";
  GDN_RETURN_IF_ERROR(CheckAnyExec(kOp, exec, args));
  GDN_RETURN_IF_ERROR(Check(kOp, *args));
  GDN_RETURN_IF_ERROR(CheckWorkspace(kOp, *exec, Workspace(*exec, *args)));
  GDN_DISPATCH(exec, args, GatesBackward);
}
