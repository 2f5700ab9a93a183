#include "gdn/kernels/fused_decode.h"

#include "kernels/capi/dispatch.h"
#include "kernels/capi/fused_checks.h"

namespace {

using namespace gdn::kernels;  // NOLINT(build/namespaces): the checks

constexpr char kOp[] = "fused_decode";

}  // namespace

gdn_status gdn_fused_decode(const gdn_exec* exec, const gdn_fused_decode_args* args) {
  GDN_RETURN_IF_ERROR(CheckAnyExec(kOp, exec, args));
  GDN_RETURN_IF_ERROR(CheckFusedLayer(kOp, *args));
#ifdef GDN_HAS_CUDA
  if (exec->backend == GDN_BACKEND_CUDA) return gdn::cuda::FusedDecode(*exec, *args);
#endif
  GDN_CHECK_ARG(exec->backend == GDN_BACKEND_REF, GDN_BACKEND_UNAVAILABLE,
                "%s: the CPU back end has no fused step; call the separate ops", kOp);
  return CallRef(kOp, gdn::ref::FusedDecode, *exec, *args);
}
