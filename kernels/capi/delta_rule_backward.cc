#include "gdn/kernels/delta_rule_backward.h"

#include <cmath>
#include <initializer_list>

#include "kernels/capi/delta_rule_shape.h"
#include "kernels/capi/dense_checks.h"
#include "kernels/capi/dispatch.h"
#include "kernels/capi/sequences.h"

namespace {

using namespace gdn::kernels;  // NOLINT(build/namespaces): the checks

gdn_status CheckShape(const char* op, const gdn_delta_rule_backward_args& args) {
  GDN_RETURN_IF_ERROR(CheckExtent(op, "tokens", args.tokens, 0));
  GDN_RETURN_IF_ERROR(CheckDeltaRuleShape(op, args));
  GDN_RETURN_IF_ERROR(CheckElementType(op, "qkv_dtype", args.qkv_dtype));
  GDN_RETURN_IF_ERROR(CheckElementType(op, "d_o_dtype", args.d_o_dtype));
  return CheckElementType(op, "d_qkv_dtype", args.d_qkv_dtype);
}

gdn_status CheckStrides(const char* op, const gdn_delta_rule_backward_args& args) {
  const int64_t keys = args.key_heads * args.key_dim;
  const int64_t values = args.value_heads * args.value_dim;
  GDN_RETURN_IF_ERROR(CheckStride(op, "q_token_stride", args.q_token_stride, keys));
  GDN_RETURN_IF_ERROR(CheckStride(op, "k_token_stride", args.k_token_stride, keys));
  GDN_RETURN_IF_ERROR(CheckStride(op, "v_token_stride", args.v_token_stride, values));
  GDN_RETURN_IF_ERROR(CheckStride(op, "d_o_token_stride", args.d_o_token_stride, values));
  GDN_RETURN_IF_ERROR(CheckStride(op, "d_q_token_stride", args.d_q_token_stride, keys));
  GDN_RETURN_IF_ERROR(CheckStride(op, "d_k_token_stride", args.d_k_token_stride, keys));
  return CheckStride(op, "d_v_token_stride", args.d_v_token_stride, values);
}

gdn_status CheckBuffers(const char* op, const gdn_delta_rule_backward_args& args) {
  GDN_RETURN_IF_ERROR(CheckPointer(op, "q", args.q));
  GDN_RETURN_IF_ERROR(CheckPointer(op, "k", args.k));
  GDN_RETURN_IF_ERROR(CheckPointer(op, "v", args.v));
  GDN_RETURN_IF_ERROR(CheckPointer(op, "g", args.g));
  GDN_RETURN_IF_ERROR(CheckPointer(op, "beta", args.beta));
  GDN_RETURN_IF_ERROR(CheckPointer(op, "d_o", args.d_o));
  GDN_RETURN_IF_ERROR(CheckPointer(op, "d_q", args.d_q));
  GDN_RETURN_IF_ERROR(CheckPointer(op, "d_k", args.d_k));
  GDN_RETURN_IF_ERROR(CheckPointer(op, "d_v", args.d_v));
  GDN_RETURN_IF_ERROR(CheckPointer(op, "d_g", args.d_g));
  GDN_RETURN_IF_ERROR(CheckPointer(op, "d_beta", args.d_beta));
  if (args.use_qk_l2norm != 0) {
    GDN_RETURN_IF_ERROR(CheckPointer(op, "q_rstd", args.q_rstd));
    GDN_RETURN_IF_ERROR(CheckPointer(op, "k_rstd", args.k_rstd));
  }
  for (const void* output : {args.d_q, args.d_k, args.d_v}) {
    GDN_CHECK_ARG(output != args.q && output != args.k && output != args.v && output != args.d_o,
                  GDN_INVALID_ARGUMENT, "%s: d_q, d_k and d_v must not overlap q, k, v or d_o", op);
  }
  GDN_CHECK_ARG(args.d_q != args.d_k && args.d_q != args.d_v && args.d_k != args.d_v,
                GDN_INVALID_ARGUMENT, "%s: d_q, d_k and d_v must not overlap each other", op);
  return GDN_OK;
}

gdn_status Check(const char* op, const gdn_delta_rule_backward_args& args) {
  GDN_RETURN_IF_ERROR(CheckShape(op, args));
  GDN_RETURN_IF_ERROR(CheckStrides(op, args));
  GDN_CHECK_ARG(std::isfinite(args.scale), GDN_INVALID_ARGUMENT, "%s: scale must be finite, got %g",
                op, static_cast<double>(args.scale));
  if (args.sequences == 0) return GDN_OK;
  GDN_RETURN_IF_ERROR(CheckCuSeqlens(op, args.cu_seqlens, args.sequences));
  const int64_t used = args.cu_seqlens[args.sequences];
  GDN_CHECK_ARG(used <= args.tokens, GDN_INVALID_ARGUMENT,
                "%s: cu_seqlens must end at tokens %lld or before, got %lld", op,
                static_cast<long long>(args.tokens), static_cast<long long>(used));
  return used == 0 ? GDN_OK : CheckBuffers(op, args);
}

size_t Needed(const gdn_exec& exec, const gdn_delta_rule_backward_args& args) {
  return exec.backend == GDN_BACKEND_CPU ? gdn::cpu::DeltaRuleBackwardWorkspace(exec, args)
                                         : gdn::ref::DeltaRuleBackwardWorkspace(args);
}

}  // namespace

gdn_status gdn_delta_rule_backward_workspace(const gdn_exec* exec,
                                             const gdn_delta_rule_backward_args* args,
                                             size_t* bytes) {
  constexpr char kOp[] = "delta_rule_backward_workspace";
  GDN_RETURN_IF_ERROR(CheckHostExec(kOp, exec, args));
  GDN_RETURN_IF_ERROR(CheckPointer(kOp, "bytes", bytes));
  GDN_RETURN_IF_ERROR(CheckShape(kOp, *args));
  *bytes = Needed(*exec, *args);
  return GDN_OK;
}

gdn_status gdn_delta_rule_backward(const gdn_exec* exec, const gdn_delta_rule_backward_args* args) {
  constexpr char kOp[] = "delta_rule_backward";
  GDN_RETURN_IF_ERROR(CheckHostExec(kOp, exec, args));
  GDN_RETURN_IF_ERROR(Check(kOp, *args));
  GDN_RETURN_IF_ERROR(CheckWorkspace(kOp, *exec, Needed(*exec, *args)));
  GDN_DISPATCH_HOST(exec, args, DeltaRuleBackward);
}
