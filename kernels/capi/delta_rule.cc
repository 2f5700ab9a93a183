#include "gdn/kernels/delta_rule.h"

#include <cmath>

#include "kernels/capi/delta_rule_shape.h"
#include "kernels/capi/dense_checks.h"
#include "kernels/capi/dispatch.h"
#include "kernels/capi/sequences.h"

namespace {

using namespace gdn::kernels;  // NOLINT(build/namespaces): the checks

gdn_status CheckShape(const char* op, const gdn_delta_rule_args& args) {
  GDN_RETURN_IF_ERROR(CheckDeltaRuleShape(op, args));
  GDN_RETURN_IF_ERROR(CheckDtype(op, "qkv_dtype", args.qkv_dtype));
  GDN_RETURN_IF_ERROR(CheckDtype(op, "o_dtype", args.o_dtype));
  GDN_RETURN_IF_ERROR(CheckDtype(op, "state_dtype", args.state_dtype));
  GDN_CHECK_ARG(args.state_dtype != GDN_F16, GDN_UNSUPPORTED_TYPE,
                "%s: state_dtype must be GDN_F32 or GDN_BF16, got GDN_F16", op);
  return GDN_OK;
}

// On a GPU cu_seqlens lives there and cannot be read here: the kernels rely on its contract.
gdn_status CheckArgs(const char* op, const gdn_delta_rule_args& args, bool prefill, bool on_host) {
  GDN_RETURN_IF_ERROR(CheckShape(op, args));
  const int64_t heads = args.value_heads;
  GDN_RETURN_IF_ERROR(
      CheckStride(op, "q_token_stride", args.q_token_stride, args.key_heads * args.key_dim));
  GDN_RETURN_IF_ERROR(
      CheckStride(op, "k_token_stride", args.k_token_stride, args.key_heads * args.key_dim));
  GDN_RETURN_IF_ERROR(
      CheckStride(op, "v_token_stride", args.v_token_stride, heads * args.value_dim));
  GDN_RETURN_IF_ERROR(
      CheckStride(op, "o_token_stride", args.o_token_stride, heads * args.value_dim));
  GDN_RETURN_IF_ERROR(CheckStride(op, "state_slot_stride", args.state_slot_stride,
                                  heads * args.value_dim * args.key_dim));
  GDN_CHECK_ARG(std::isfinite(args.scale), GDN_INVALID_ARGUMENT, "%s: scale must be finite, got %g",
                op, static_cast<double>(args.scale));
  if (args.sequences == 0) return GDN_OK;
  int64_t tokens = args.sequences;
  if (prefill && !on_host) {
    GDN_RETURN_IF_ERROR(CheckPointer(op, "cu_seqlens", args.cu_seqlens));
  } else if (prefill) {
    GDN_RETURN_IF_ERROR(CheckCuSeqlens(op, args.cu_seqlens, args.sequences));
    tokens = args.cu_seqlens[args.sequences];
  }
  if (tokens > 0) {
    GDN_RETURN_IF_ERROR(CheckPointer(op, "q", args.q));
    GDN_RETURN_IF_ERROR(CheckPointer(op, "k", args.k));
    GDN_RETURN_IF_ERROR(CheckPointer(op, "v", args.v));
    GDN_RETURN_IF_ERROR(CheckPointer(op, "g", args.g));
    GDN_RETURN_IF_ERROR(CheckPointer(op, "beta", args.beta));
    GDN_RETURN_IF_ERROR(CheckPointer(op, "o", args.o));
  }
  GDN_RETURN_IF_ERROR(CheckPointer(op, "state", args.state));
  GDN_RETURN_IF_ERROR(CheckPointer(op, "read_index", args.read_index));
  GDN_RETURN_IF_ERROR(CheckPointer(op, "write_index", args.write_index));
  return GDN_OK;
}

}  // namespace

gdn_status gdn_delta_rule_step_workspace(const gdn_exec* exec, const gdn_delta_rule_args* args,
                                         size_t* bytes) {
  constexpr char kOp[] = "delta_rule_step_workspace";
  GDN_RETURN_IF_ERROR(CheckAnyExec(kOp, exec, args));
  GDN_RETURN_IF_ERROR(CheckPointer(kOp, "bytes", bytes));
  GDN_RETURN_IF_ERROR(CheckShape(kOp, *args));
  *bytes = exec->backend == GDN_BACKEND_CPU ? gdn::cpu::DeltaRuleStepWorkspace(*exec, *args) : 0;
  return GDN_OK;
}

gdn_status gdn_delta_rule_prefill_workspace(const gdn_exec* exec, const gdn_delta_rule_args* args,
                                            size_t* bytes) {
  constexpr char kOp[] = "delta_rule_prefill_workspace";
  GDN_RETURN_IF_ERROR(CheckAnyExec(kOp, exec, args));
  GDN_RETURN_IF_ERROR(CheckPointer(kOp, "bytes", bytes));
  GDN_RETURN_IF_ERROR(CheckShape(kOp, *args));
  *bytes = exec->backend == GDN_BACKEND_CPU ? gdn::cpu::DeltaRulePrefillWorkspace(*exec, *args) : 0;
  return GDN_OK;
}

gdn_status gdn_delta_rule_step(const gdn_exec* exec, const gdn_delta_rule_args* args) {
  constexpr char kOp[] = "delta_rule_step";
  GDN_RETURN_IF_ERROR(CheckAnyExec(kOp, exec, args));
  GDN_RETURN_IF_ERROR(CheckArgs(kOp, *args, /*prefill=*/false, exec->backend != GDN_BACKEND_CUDA));
  if (exec->backend == GDN_BACKEND_CPU) {
    GDN_RETURN_IF_ERROR(CheckWorkspace(kOp, *exec, gdn::cpu::DeltaRuleStepWorkspace(*exec, *args)));
  }
  GDN_DISPATCH(exec, args, DeltaRuleStep);
}

gdn_status gdn_delta_rule_prefill(const gdn_exec* exec, const gdn_delta_rule_args* args) {
  constexpr char kOp[] = "delta_rule_prefill";
  GDN_RETURN_IF_ERROR(CheckAnyExec(kOp, exec, args));
  GDN_RETURN_IF_ERROR(CheckArgs(kOp, *args, /*prefill=*/true, exec->backend != GDN_BACKEND_CUDA));
  if (exec->backend == GDN_BACKEND_CPU) {
    GDN_RETURN_IF_ERROR(
        CheckWorkspace(kOp, *exec, gdn::cpu::DeltaRulePrefillWorkspace(*exec, *args)));
  }
  GDN_DISPATCH(exec, args, DeltaRulePrefill);
}
