#include "gdn/kernels/delta_rule_forward.h"

#include <cmath>

#include "kernels/capi/delta_rule_shape.h"
#include "kernels/capi/dense_checks.h"
#include "kernels/capi/dispatch.h"
#include "kernels/capi/sequences.h"

namespace {

using namespace gdn::kernels;  // NOLINT(build/namespaces): the checks

constexpr char kOp[] = "delta_rule_forward";

gdn_status CheckShape(const char* op, const gdn_delta_rule_forward_args& args) {
  GDN_RETURN_IF_ERROR(CheckDeltaRuleShape(op, args));
  // The workspace grows with the product of these and of the dimensions.
  GDN_CHECK_ARG(
      args.sequences <= int64_t{1} << 31 && args.value_heads <= 4096, GDN_UNSUPPORTED_SHAPE,
      "%s: sequences must be at most 2^31 and value_heads at most 4096, got %lld and %lld", op,
      static_cast<long long>(args.sequences), static_cast<long long>(args.value_heads));
  GDN_RETURN_IF_ERROR(CheckElementType(op, "qkv_dtype", args.qkv_dtype));
  return CheckElementType(op, "o_dtype", args.o_dtype);
}

gdn_status Check(gdn_backend backend, const gdn_delta_rule_forward_args& args) {
  GDN_RETURN_IF_ERROR(CheckShape(kOp, args));
  const int64_t keys = args.key_heads * args.key_dim;
  const int64_t values = args.value_heads * args.value_dim;
  GDN_RETURN_IF_ERROR(CheckStride(kOp, "q_token_stride", args.q_token_stride, keys));
  GDN_RETURN_IF_ERROR(CheckStride(kOp, "k_token_stride", args.k_token_stride, keys));
  GDN_RETURN_IF_ERROR(CheckStride(kOp, "v_token_stride", args.v_token_stride, values));
  GDN_RETURN_IF_ERROR(CheckStride(kOp, "o_token_stride", args.o_token_stride, values));
  GDN_CHECK_ARG(std::isfinite(args.scale), GDN_INVALID_ARGUMENT, "%s: scale must be finite, got %g",
                kOp, static_cast<double>(args.scale));
  if (args.sequences == 0) return GDN_OK;
  int64_t tokens = 0;
  GDN_RETURN_IF_ERROR(
      CheckCuSeqlensOf(kOp, backend, args.cu_seqlens, args.sequences, /*unknown=*/1, &tokens));
  if (tokens == 0) return GDN_OK;
  GDN_RETURN_IF_ERROR(CheckPointer(kOp, "q", args.q));
  GDN_RETURN_IF_ERROR(CheckPointer(kOp, "k", args.k));
  GDN_RETURN_IF_ERROR(CheckPointer(kOp, "v", args.v));
  GDN_RETURN_IF_ERROR(CheckPointer(kOp, "g", args.g));
  GDN_RETURN_IF_ERROR(CheckPointer(kOp, "beta", args.beta));
  GDN_RETURN_IF_ERROR(CheckPointer(kOp, "o", args.o));
  if (args.use_qk_l2norm == 0) return GDN_OK;
  GDN_RETURN_IF_ERROR(CheckPointer(kOp, "q_hat", args.q_hat));
  GDN_RETURN_IF_ERROR(CheckPointer(kOp, "k_hat", args.k_hat));
  GDN_RETURN_IF_ERROR(CheckPointer(kOp, "q_rstd", args.q_rstd));
  GDN_RETURN_IF_ERROR(CheckPointer(kOp, "k_rstd", args.k_rstd));
  GDN_CHECK_ARG(args.q_hat != args.q && args.k_hat != args.k && args.q_hat != args.k_hat,
                GDN_INVALID_ARGUMENT, "%s: q_hat and k_hat must not overlap q, k or each other",
                kOp);
  return GDN_OK;
}

size_t Needed(const gdn_exec& exec, const gdn_delta_rule_forward_args& args) {
#ifdef GDN_HAS_CUDA
  if (exec.backend == GDN_BACKEND_CUDA) return gdn::cuda::DeltaRuleForwardWorkspace(args);
#endif
  return exec.backend == GDN_BACKEND_CPU ? gdn::cpu::DeltaRuleForwardWorkspace(exec, args) : 0;
}

}  // namespace

gdn_status gdn_delta_rule_forward_workspace(const gdn_exec* exec,
                                            const gdn_delta_rule_forward_args* args,
                                            size_t* bytes) {
  constexpr char kQuery[] = "delta_rule_forward_workspace";
  GDN_RETURN_IF_ERROR(CheckAnyExec(kQuery, exec, args));
  GDN_RETURN_IF_ERROR(CheckPointer(kQuery, "bytes", bytes));
  GDN_RETURN_IF_ERROR(CheckShape(kQuery, *args));
  *bytes = Needed(*exec, *args);
  return GDN_OK;
}

gdn_status gdn_delta_rule_forward(const gdn_exec* exec, const gdn_delta_rule_forward_args* args) {
  GDN_RETURN_IF_ERROR(CheckAnyExec(kOp, exec, args));
  GDN_RETURN_IF_ERROR(Check(exec->backend, *args));
  GDN_RETURN_IF_ERROR(CheckWorkspace(kOp, *exec, Needed(*exec, *args)));
  GDN_DISPATCH(exec, args, DeltaRuleForward);
}
