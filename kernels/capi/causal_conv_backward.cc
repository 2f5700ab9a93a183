#include "gdn/kernels/causal_conv_backward.h"

#include "kernels/capi/dense_checks.h"
#include "kernels/capi/dispatch.h"
#include "kernels/capi/sequences.h"

namespace {

using namespace gdn::kernels;  // NOLINT(build/namespaces): the checks

constexpr char kOp[] = "causal_conv_backward";

gdn_status Check(const gdn_causal_conv_backward_args& args) {
  GDN_RETURN_IF_ERROR(CheckExtent(kOp, "sequences", args.sequences, 0));
  GDN_RETURN_IF_ERROR(CheckExtent(kOp, "channels", args.channels, 1));
  GDN_CHECK_ARG(args.width >= 2 && args.width <= 8,
                args.width >= 1 ? GDN_UNSUPPORTED_SHAPE : GDN_INVALID_ARGUMENT,
                "%s: width must be in 2..8, got %d", kOp, args.width);
  GDN_RETURN_IF_ERROR(CheckElementType(kOp, "x_dtype", args.x_dtype));
  GDN_RETURN_IF_ERROR(CheckElementType(kOp, "d_y_dtype", args.d_y_dtype));
  GDN_RETURN_IF_ERROR(CheckElementType(kOp, "d_x_dtype", args.d_x_dtype));
  GDN_RETURN_IF_ERROR(CheckStride(kOp, "x_token_stride", args.x_token_stride, args.channels));
  GDN_RETURN_IF_ERROR(CheckStride(kOp, "d_y_token_stride", args.d_y_token_stride, args.channels));
  GDN_RETURN_IF_ERROR(CheckStride(kOp, "d_x_token_stride", args.d_x_token_stride, args.channels));
  GDN_RETURN_IF_ERROR(CheckPointer(kOp, "d_weight", args.d_weight));
  if (args.sequences == 0) return GDN_OK;
  GDN_RETURN_IF_ERROR(CheckCuSeqlens(kOp, args.cu_seqlens, args.sequences));
  if (args.cu_seqlens[args.sequences] == 0) return GDN_OK;
  GDN_RETURN_IF_ERROR(CheckPointer(kOp, "x", args.x));
  GDN_RETURN_IF_ERROR(CheckPointer(kOp, "weight", args.weight));
  GDN_RETURN_IF_ERROR(CheckPointer(kOp, "d_y", args.d_y));
  GDN_RETURN_IF_ERROR(CheckPointer(kOp, "d_x", args.d_x));
  GDN_CHECK_ARG(args.d_x != args.x && args.d_x != args.d_y, GDN_INVALID_ARGUMENT,
                "%s: d_x must not overlap x or d_y", kOp);
  return GDN_OK;
}

}  // namespace

gdn_status gdn_causal_conv_backward(const gdn_exec* exec,
                                    const gdn_causal_conv_backward_args* args) {
  GDN_RETURN_IF_ERROR(CheckHostExec(kOp, exec, args));
  GDN_RETURN_IF_ERROR(Check(*args));
  GDN_DISPATCH_HOST(exec, args, CausalConvBackward);
}
