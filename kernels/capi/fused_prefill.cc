#include "gdn/kernels/fused_prefill.h"

#include "kernels/capi/dispatch.h"
#include "kernels/capi/fused_checks.h"
#include "kernels/capi/sequences.h"

namespace {

using namespace gdn::kernels;  // NOLINT(build/namespaces): the checks

// `tokens` of the layer is not read, and may hold anything.
gdn_fused_decode_args LayerOf(const gdn_fused_prefill_args& args) {
  gdn_fused_decode_args layer = args.layer;
  layer.tokens = 1;
  return layer;
}

gdn_status CheckCapacity(const char* op, const gdn_fused_prefill_args& args) {
  GDN_RETURN_IF_ERROR(CheckExtent(op, "tokens", args.tokens, 0));
  GDN_CHECK_ARG(args.checkpoint_every >= 0 && args.checkpoint_every % 64 == 0, GDN_INVALID_ARGUMENT,
                "%s: checkpoint_every must be 0 or a positive multiple of 64, got %lld", op,
                static_cast<long long>(args.checkpoint_every));
  return CheckFusedShape(op, LayerOf(args));
}

gdn_status CheckBackend(const char* op, const gdn_exec& exec) {
  GDN_CHECK_ARG(exec.backend != GDN_BACKEND_CPU, GDN_BACKEND_UNAVAILABLE,
                "%s: the CPU back end has no fused prefill; call the separate ops", op);
  return GDN_OK;
}

}  // namespace

gdn_status gdn_fused_prefill_workspace(const gdn_exec* exec, const gdn_fused_prefill_args* args,
                                       size_t* bytes) {
  constexpr char kOp[] = "fused_prefill_workspace";
  GDN_RETURN_IF_ERROR(CheckAnyExec(kOp, exec, args));
  GDN_RETURN_IF_ERROR(CheckPointer(kOp, "bytes", bytes));
  GDN_RETURN_IF_ERROR(CheckBackend(kOp, *exec));
  GDN_RETURN_IF_ERROR(CheckCapacity(kOp, *args));
  *bytes = 0;
#ifdef GDN_HAS_CUDA
  if (exec->backend == GDN_BACKEND_CUDA) {
    *bytes = gdn::cuda::FusedPrefillWorkspace(*exec, *args);
  }
#endif
  return GDN_OK;
}

gdn_status gdn_fused_prefill(const gdn_exec* exec, const gdn_fused_prefill_args* args) {
  constexpr char kOp[] = "fused_prefill";
  GDN_RETURN_IF_ERROR(CheckAnyExec(kOp, exec, args));
  GDN_RETURN_IF_ERROR(CheckBackend(kOp, *exec));
  GDN_RETURN_IF_ERROR(CheckCapacity(kOp, *args));
  GDN_RETURN_IF_ERROR(CheckFusedLayer(kOp, LayerOf(*args)));
  if (args->layer.rows == 0) return GDN_OK;
  GDN_RETURN_IF_ERROR(CheckPointer(kOp, "cu_seqlens", args->cu_seqlens));
  if (args->checkpoint_every > 0) {
    GDN_RETURN_IF_ERROR(CheckPointer(kOp, "checkpoint_begin", args->checkpoint_begin));
    GDN_RETURN_IF_ERROR(CheckPointer(kOp, "checkpoint_slots", args->checkpoint_slots));
  }
#ifdef GDN_HAS_CUDA
  if (exec->backend == GDN_BACKEND_CUDA) {
    GDN_RETURN_IF_ERROR(CheckWorkspace(kOp, *exec, gdn::cuda::FusedPrefillWorkspace(*exec, *args)));
    return gdn::cuda::FusedPrefill(*exec, *args);
  }
#endif
  GDN_RETURN_IF_ERROR(CheckCuSeqlens(kOp, args->cu_seqlens, args->layer.rows));
  GDN_CHECK_ARG(args->cu_seqlens[args->layer.rows] <= args->tokens, GDN_INVALID_ARGUMENT,
                "%s: cu_seqlens must end at most at tokens = %lld, got %d", kOp,
                static_cast<long long>(args->tokens), args->cu_seqlens[args->layer.rows]);
  return CallRef(kOp, gdn::ref::FusedPrefill, *exec, *args);
}
