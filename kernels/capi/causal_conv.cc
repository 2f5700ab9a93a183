#include "gdn/kernels/causal_conv.h"

#include "kernels/capi/dense_checks.h"
#include "kernels/capi/dispatch.h"
#include "kernels/capi/sequences.h"

namespace {

using namespace gdn::kernels;  // NOLINT(build/namespaces): the checks

constexpr char kOp[] = "causal_conv";

// On a GPU cu_seqlens lives there and cannot be read here: the kernels rely on its contract.
gdn_status Check(const gdn_causal_conv_args& args, bool on_host) {
  GDN_RETURN_IF_ERROR(CheckExtent(kOp, "sequences", args.sequences, 0));
  GDN_RETURN_IF_ERROR(CheckExtent(kOp, "channels", args.channels, 1));
  GDN_CHECK_ARG(args.width >= 2 && args.width <= 8,
                args.width >= 1 ? GDN_UNSUPPORTED_SHAPE : GDN_INVALID_ARGUMENT,
                "%s: width must be in 2..8, got %d", kOp, args.width);
  GDN_RETURN_IF_ERROR(CheckDtype(kOp, "x_dtype", args.x_dtype));
  GDN_RETURN_IF_ERROR(CheckDtype(kOp, "y_dtype", args.y_dtype));
  GDN_RETURN_IF_ERROR(CheckStride(kOp, "x_token_stride", args.x_token_stride, args.channels));
  GDN_RETURN_IF_ERROR(CheckStride(kOp, "y_token_stride", args.y_token_stride, args.channels));
  GDN_RETURN_IF_ERROR(CheckStride(kOp, "state_slot_stride", args.state_slot_stride,
                                  args.channels * (args.width - 1)));
  if (args.sequences == 0) return GDN_OK;
  if (args.cu_seqlens != nullptr && on_host) {
    GDN_RETURN_IF_ERROR(CheckCuSeqlens(kOp, args.cu_seqlens, args.sequences));
  }
  if (args.cu_seqlens == nullptr || !on_host || args.cu_seqlens[args.sequences] > 0) {
    GDN_RETURN_IF_ERROR(CheckPointer(kOp, "x", args.x));
    GDN_RETURN_IF_ERROR(CheckPointer(kOp, "weight", args.weight));
    GDN_RETURN_IF_ERROR(CheckPointer(kOp, "y", args.y));
    GDN_CHECK_ARG(args.x != args.y, GDN_INVALID_ARGUMENT, "%s: y must not overlap x", kOp);
  }
  GDN_RETURN_IF_ERROR(CheckPointer(kOp, "state", args.state));
  GDN_RETURN_IF_ERROR(CheckPointer(kOp, "read_index", args.read_index));
  GDN_RETURN_IF_ERROR(CheckPointer(kOp, "write_index", args.write_index));
  return GDN_OK;
}

}  // namespace

gdn_status gdn_causal_conv(const gdn_exec* exec, const gdn_causal_conv_args* args) {
  GDN_RETURN_IF_ERROR(CheckAnyExec(kOp, exec, args));
  GDN_RETURN_IF_ERROR(Check(*args, exec->backend != GDN_BACKEND_CUDA));
  GDN_DISPATCH(exec, args, CausalConv);
}
