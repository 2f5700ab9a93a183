#include "gdn/kernels/gates.h"

#include <cmath>

#include "kernels/capi/dense_checks.h"
#include "kernels/capi/dispatch.h"

namespace {

using namespace gdn::kernels;  // NOLINT(build/namespaces): the checks

constexpr char kOp[] = "gates";

gdn_status Check(const gdn_gates_args& args) {
  GDN_RETURN_IF_ERROR(CheckExtent(kOp, "tokens", args.tokens, 0));
  GDN_RETURN_IF_ERROR(CheckExtent(kOp, "value_heads", args.value_heads, 1));
  GDN_RETURN_IF_ERROR(CheckDtype(kOp, "dtype", args.dtype));
  GDN_RETURN_IF_ERROR(CheckStride(kOp, "a_token_stride", args.a_token_stride, args.value_heads));
  GDN_RETURN_IF_ERROR(CheckStride(kOp, "b_token_stride", args.b_token_stride, args.value_heads));
  GDN_CHECK_ARG(std::isfinite(args.beta_scale), GDN_INVALID_ARGUMENT,
                "%s: beta_scale must be finite, got %g", kOp, static_cast<double>(args.beta_scale));
  if (args.tokens == 0) return GDN_OK;
  GDN_RETURN_IF_ERROR(CheckPointer(kOp, "a", args.a));
  GDN_RETURN_IF_ERROR(CheckPointer(kOp, "b", args.b));
  GDN_RETURN_IF_ERROR(CheckPointer(kOp, "a_log", args.a_log));
  GDN_RETURN_IF_ERROR(CheckPointer(kOp, "dt_bias", args.dt_bias));
  GDN_RETURN_IF_ERROR(CheckPointer(kOp, "g", args.g));
  GDN_RETURN_IF_ERROR(CheckPointer(kOp, "beta", args.beta));
  return GDN_OK;
}

}  // namespace

gdn_status gdn_gates(const gdn_exec* exec, const gdn_gates_args* args) {
  GDN_RETURN_IF_ERROR(CheckAnyExec(kOp, exec, args));
  GDN_RETURN_IF_ERROR(Check(*args));
  GDN_DISPATCH(exec, args, Gates);
}
