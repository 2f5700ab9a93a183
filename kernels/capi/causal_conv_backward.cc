#include "gdn/kernels/causal_conv_backward.h"

#include "kernels/capi/dense_checks.h"
#include "kernels/capi/dispatch.h"
#include "kernels/capi/sequences.h"

namespace {

using namespace gdn::kernels;  // NOLINT(build/namespaces): the checks

constexpr char kOp[] = "causal_conv_backward";

// Bytes that the back end needs for a checked shape.
size_t Workspace(const gdn_exec& exec, const gdn_causal_conv_backward_args& args) {
#ifdef GDN_HAS_CUDA
  if (exec.backend == GDN_BACKEND_CUDA) return gdn::cuda::CausalConvBackwardWorkspace(args);
#endif
  static_cast<void>(exec);
  static_cast<void>(args);
  return 0;
}

gdn_status CheckShape(const char* op, const gdn_causal_conv_backward_args& args) {
  GDN_RETURN_IF_ERROR(CheckExtent(op, "sequences", args.sequences, 0));
  GDN_RETURN_IF_ERROR(CheckExtent(op, "channels", args.channels, 1));
  GDN_CHECK_ARG(args.width >= 2 && args.width <= 8,
                args.width >= 1 ? GDN_UNSUPPORTED_SHAPE : GDN_INVALID_ARGUMENT,
                "%s: width must be in 2..8, got %d", op, args.width);
  return GDN_OK;
}

// On a GPU cu_seqlens lives there and cannot be read here: the kernels rely on its contract.
gdn_status Check(const gdn_causal_conv_backward_args& args, bool on_host) {
  GDN_RETURN_IF_ERROR(CheckShape(kOp, args));
  GDN_RETURN_IF_ERROR(CheckElementType(kOp, "x_dtype", args.x_dtype));
  GDN_RETURN_IF_ERROR(CheckElementType(kOp, "d_y_dtype", args.d_y_dtype));
  GDN_RETURN_IF_ERROR(CheckElementType(kOp, "d_x_dtype", args.d_x_dtype));
  GDN_RETURN_IF_ERROR(CheckStride(kOp, "x_token_stride", args.x_token_stride, args.channels));
  GDN_RETURN_IF_ERROR(CheckStride(kOp, "d_y_token_stride", args.d_y_token_stride, args.channels));
  GDN_RETURN_IF_ERROR(CheckStride(kOp, "d_x_token_stride", args.d_x_token_stride, args.channels));
  GDN_RETURN_IF_ERROR(CheckPointer(kOp, "d_weight", args.d_weight));
  if (args.sequences == 0) return GDN_OK;
  GDN_RETURN_IF_ERROR(CheckPointer(kOp, "cu_seqlens", args.cu_seqlens));
  if (on_host) {
    GDN_RETURN_IF_ERROR(CheckCuSeqlens(kOp, args.cu_seqlens, args.sequences));
    if (args.cu_seqlens[args.sequences] == 0) return GDN_OK;
  }
  GDN_RETURN_IF_ERROR(CheckPointer(kOp, "x", args.x));
  GDN_RETURN_IF_ERROR(CheckPointer(kOp, "weight", args.weight));
  GDN_RETURN_IF_ERROR(CheckPointer(kOp, "d_y", args.d_y));
  GDN_RETURN_IF_ERROR(CheckPointer(kOp, "d_x", args.d_x));
  GDN_CHECK_ARG(args.d_x != args.x && args.d_x != args.d_y, GDN_INVALID_ARGUMENT,
                "%s: d_x must not overlap x or d_y", kOp);
  return GDN_OK;
}

}  // namespace

gdn_status gdn_causal_conv_backward_workspace(const gdn_exec* exec,
                                              const gdn_causal_conv_backward_args* args,
                                              size_t* bytes) {
  constexpr char kQuery[] = "causal_conv_backward_workspace";
  GDN_RETURN_IF_ERROR(CheckAnyExec(kQuery, exec, args));
  GDN_RETURN_IF_ERROR(CheckPointer(kQuery, "bytes", bytes));
  GDN_RETURN_IF_ERROR(CheckShape(kQuery, *args));
  *bytes = Workspace(*exec, *args);
  return GDN_OK;
}

gdn_status gdn_causal_conv_backward(const gdn_exec* exec,
                                    const gdn_causal_conv_backward_args* args) {
  GDN_RETURN_IF_ERROR(CheckAnyExec(kOp, exec, args));
  GDN_RETURN_IF_ERROR(Check(*args, exec->backend != GDN_BACKEND_CUDA));
  GDN_RETURN_IF_ERROR(CheckWorkspace(kOp, *exec, Workspace(*exec, *args)));
  GDN_DISPATCH(exec, args, CausalConvBackward);
}
