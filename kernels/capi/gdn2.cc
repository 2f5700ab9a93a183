#include "gdn/kernels/gdn2.h"

#include <cmath>

#include "kernels/capi/delta_rule_shape.h"
#include "kernels/capi/dense_checks.h"
#include "kernels/capi/dispatch.h"
#include "kernels/capi/sequences.h"

namespace {

using namespace gdn::kernels;  // NOLINT(build/namespaces): the checks

size_t NeededByPrefill([[maybe_unused]] const gdn_exec& exec,
                       [[maybe_unused]] const gdn2_args& args) {
#ifdef GDN_HAS_CUDA
  if (exec.backend == GDN_BACKEND_CUDA) return gdn::cuda::Gdn2PrefillWorkspace(args);
#endif
  return 0;
}

gdn_status CheckTypesAndStrides(const char* op, const gdn2_args& args) {
  GDN_RETURN_IF_ERROR(CheckElementType(op, "qkv_dtype", args.qkv_dtype));
  GDN_RETURN_IF_ERROR(CheckElementType(op, "gate_dtype", args.gate_dtype));
  GDN_RETURN_IF_ERROR(CheckElementType(op, "o_dtype", args.o_dtype));
  GDN_RETURN_IF_ERROR(CheckElementType(op, "state_dtype", args.state_dtype));
  GDN_CHECK_ARG(args.state_dtype != GDN_F16, GDN_UNSUPPORTED_TYPE,
                "%s: state_dtype must be GDN_F32 or GDN_BF16, got GDN_F16", op);
  const int64_t keys = args.key_heads * args.key_dim;
  const int64_t values = args.value_heads * args.value_dim;
  GDN_RETURN_IF_ERROR(CheckStride(op, "q_token_stride", args.q_token_stride, keys));
  GDN_RETURN_IF_ERROR(CheckStride(op, "k_token_stride", args.k_token_stride, keys));
  GDN_RETURN_IF_ERROR(CheckStride(op, "v_token_stride", args.v_token_stride, values));
  GDN_RETURN_IF_ERROR(CheckStride(op, "o_token_stride", args.o_token_stride, values));
  return CheckStride(op, "state_slot_stride", args.state_slot_stride, values * args.key_dim);
}

gdn_status Check(const char* op, gdn_backend backend, const gdn2_args& args, bool prefill) {
  if (prefill) GDN_RETURN_IF_ERROR(CheckExtent(op, "tokens", args.tokens, 0));
  GDN_RETURN_IF_ERROR(CheckGdn2Shape(op, args));
  GDN_RETURN_IF_ERROR(CheckTypesAndStrides(op, args));
  GDN_CHECK_ARG(std::isfinite(args.scale), GDN_INVALID_ARGUMENT, "%s: scale must be finite, got %g",
                op, static_cast<double>(args.scale));
  if (args.sequences == 0) return GDN_OK;
  int64_t tokens = args.sequences;
  if (prefill) {
    GDN_RETURN_IF_ERROR(
        CheckCuSeqlensOf(op, backend, args.cu_seqlens, args.sequences, args.tokens, &tokens));
    GDN_CHECK_ARG(tokens <= args.tokens, GDN_INVALID_ARGUMENT,
                  "%s: cu_seqlens must end at tokens %lld or before, got %lld", op,
                  static_cast<long long>(args.tokens), static_cast<long long>(tokens));
  }
  if (tokens > 0) {
    GDN_RETURN_IF_ERROR(CheckPointer(op, "q", args.q));
    GDN_RETURN_IF_ERROR(CheckPointer(op, "k", args.k));
    GDN_RETURN_IF_ERROR(CheckPointer(op, "v", args.v));
    GDN_RETURN_IF_ERROR(CheckPointer(op, "g", args.g));
    GDN_RETURN_IF_ERROR(CheckPointer(op, "erase", args.erase));
    GDN_RETURN_IF_ERROR(CheckPointer(op, "write", args.write));
    GDN_RETURN_IF_ERROR(CheckPointer(op, "o", args.o));
  }
  GDN_RETURN_IF_ERROR(CheckPointer(op, "state", args.state));
  GDN_RETURN_IF_ERROR(CheckPointer(op, "read_index", args.read_index));
  return CheckPointer(op, "write_index", args.write_index);
}

}  // namespace

gdn_status gdn_gdn2_step(const gdn_exec* exec, const gdn2_args* args) {
  constexpr char kOp[] = "gdn2_step";
  GDN_RETURN_IF_ERROR(CheckAnyExec(kOp, exec, args));
  GDN_RETURN_IF_ERROR(Check(kOp, exec->backend, *args, /*prefill=*/false));
  GDN_DISPATCH(exec, args, Gdn2Step);
}

gdn_status gdn_gdn2_prefill(const gdn_exec* exec, const gdn2_args* args) {
  constexpr char kOp[] = "gdn2_prefill";
  GDN_RETURN_IF_ERROR(CheckAnyExec(kOp, exec, args));
  GDN_RETURN_IF_ERROR(Check(kOp, exec->backend, *args, /*prefill=*/true));
  GDN_RETURN_IF_ERROR(CheckWorkspace(kOp, *exec, NeededByPrefill(*exec, *args)));
  GDN_DISPATCH(exec, args, Gdn2Prefill);
}

gdn_status gdn_gdn2_prefill_workspace(const gdn_exec* exec, const gdn2_args* args, size_t* bytes) {
  constexpr char kOp[] = "gdn2_prefill_workspace";
  GDN_RETURN_IF_ERROR(CheckAnyExec(kOp, exec, args));
  GDN_RETURN_IF_ERROR(CheckPointer(kOp, "bytes", bytes));
  GDN_RETURN_IF_ERROR(CheckExtent(kOp, "tokens", args->tokens, 0));
  GDN_RETURN_IF_ERROR(CheckGdn2Shape(kOp, *args));
  GDN_RETURN_IF_ERROR(CheckTypesAndStrides(kOp, *args));
  *bytes = NeededByPrefill(*exec, *args);
  return GDN_OK;
}
