#include "gdn/kernels/delta_rule_backward.h"

#include "kernels/capi/dispatch.h"
#include "kernels/capi/rule_backward_checks.h"

namespace {

using namespace gdn::kernels;  // NOLINT(build/namespaces): the checks

gdn_status CheckShape(const char* op, const gdn_delta_rule_backward_args& args) {
  GDN_RETURN_IF_ERROR(CheckExtent(op, "tokens", args.tokens, 0));
  GDN_RETURN_IF_ERROR(CheckDeltaRuleShape(op, args));
  GDN_RETURN_IF_ERROR(CheckElementType(op, "qkv_dtype", args.qkv_dtype));
  GDN_RETURN_IF_ERROR(CheckElementType(op, "d_o_dtype", args.d_o_dtype));
  return CheckElementType(op, "d_qkv_dtype", args.d_qkv_dtype);
}

gdn_status CheckGates(const char* op, const gdn_delta_rule_backward_args& args) {
  GDN_RETURN_IF_ERROR(CheckPointer(op, "beta", args.beta));
  return CheckPointer(op, "d_beta", args.d_beta);
}

size_t Needed(const gdn_exec& exec, const gdn_delta_rule_backward_args& args) {
#ifdef GDN_HAS_CUDA
  if (exec.backend == GDN_BACKEND_CUDA) return gdn::cuda::DeltaRuleBackwardWorkspace(args);
#endif
  return exec.backend == GDN_BACKEND_CPU ? gdn::cpu::DeltaRuleBackwardWorkspace(exec, args)
                                         : gdn::ref::DeltaRuleBackwardWorkspace(args);
}

}  // namespace

gdn_status gdn_delta_rule_backward_workspace(const gdn_exec* exec,
                                             const gdn_delta_rule_backward_args* args,
                                             size_t* bytes) {
  constexpr char kOp[] = "delta_rule_backward_workspace";
  GDN_RETURN_IF_ERROR(CheckAnyExec(kOp, exec, args));
  GDN_RETURN_IF_ERROR(CheckPointer(kOp, "bytes", bytes));
  GDN_RETURN_IF_ERROR(CheckShape(kOp, *args));
  *bytes = Needed(*exec, *args);
  return GDN_OK;
}

gdn_status gdn_delta_rule_backward(const gdn_exec* exec, const gdn_delta_rule_backward_args* args) {
  constexpr char kOp[] = "delta_rule_backward";
  GDN_RETURN_IF_ERROR(CheckAnyExec(kOp, exec, args));
  GDN_RETURN_IF_ERROR(CheckShape(kOp, *args));
  GDN_RETURN_IF_ERROR(CheckRuleBackward(kOp, exec->backend, *args, CheckGates));
  GDN_RETURN_IF_ERROR(CheckWorkspace(kOp, *exec, Needed(*exec, *args)));
  GDN_DISPATCH(exec, args, DeltaRuleBackward);
}
