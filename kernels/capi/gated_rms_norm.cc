#include "gdn/kernels/gated_rms_norm.h"

#include "kernels/capi/dense_checks.h"
#include "kernels/capi/dispatch.h"

namespace gdn::kernels {
namespace {

constexpr char kOp[] = "gated_rms_norm";

// A stride of 0 broadcasts (x and gate only); an extent of 1 leaves its stride unused.
gdn_status CheckStrides(const char* token_name, int64_t token_stride, const char* head_name,
                        int64_t head_stride, const gdn_gated_rms_norm_args& args, bool output) {
  const int64_t least = output ? args.dim : 0;
  if (args.tokens > 1) {
    GDN_RETURN_IF_ERROR(CheckStride(kOp, token_name, token_stride, least));
  }
  if (args.heads > 1) GDN_RETURN_IF_ERROR(CheckStride(kOp, head_name, head_stride, least));
  return GDN_OK;
}

gdn_status Check(const gdn_exec* exec, const gdn_gated_rms_norm_args* args) {
  GDN_RETURN_IF_ERROR(CheckAnyExec(kOp, exec, args));
  GDN_RETURN_IF_ERROR(CheckExtent(kOp, "tokens", args->tokens, 0));
  GDN_RETURN_IF_ERROR(CheckExtent(kOp, "heads", args->heads, 1));
  GDN_RETURN_IF_ERROR(CheckExtent(kOp, "dim", args->dim, 1));
  GDN_RETURN_IF_ERROR(CheckElementType(kOp, "x_dtype", args->x_dtype));
  GDN_RETURN_IF_ERROR(CheckElementType(kOp, "gate_dtype", args->gate_dtype));
  GDN_RETURN_IF_ERROR(CheckElementType(kOp, "y_dtype", args->y_dtype));
  GDN_RETURN_IF_ERROR(CheckEps(kOp, args->eps));
  const int activation = EnumValue(args->activation);
  GDN_CHECK_ARG(activation == GDN_GATE_SILU || activation == GDN_GATE_SIGMOID, GDN_INVALID_ARGUMENT,
                "gated_rms_norm: activation must be SILU (0) or SIGMOID (1), got %d", activation);
  if (args->tokens == 0) return GDN_OK;
  GDN_RETURN_IF_ERROR(CheckPointer(kOp, "x", args->x));
  GDN_RETURN_IF_ERROR(CheckPointer(kOp, "gate", args->gate));
  GDN_RETURN_IF_ERROR(CheckPointer(kOp, "weight", args->weight));
  GDN_RETURN_IF_ERROR(CheckPointer(kOp, "y", args->y));
  GDN_RETURN_IF_ERROR(CheckStrides("x_token_stride", args->x_token_stride, "x_head_stride",
                                   args->x_head_stride, *args, false));
  GDN_RETURN_IF_ERROR(CheckStrides("gate_token_stride", args->gate_token_stride, "gate_head_stride",
                                   args->gate_head_stride, *args, false));
  GDN_RETURN_IF_ERROR(CheckStrides("y_token_stride", args->y_token_stride, "y_head_stride",
                                   args->y_head_stride, *args, true));
  GDN_CHECK_ARG(
      args->x != args->y ||
          (args->x_dtype == args->y_dtype && args->x_token_stride == args->y_token_stride &&
           args->x_head_stride == args->y_head_stride),
      GDN_INVALID_ARGUMENT,
      "gated_rms_norm: in place, y must have the type and strides of x, got types %d and "
      "%d, strides (%lld, %lld) and (%lld, %lld)",
      static_cast<int>(args->x_dtype), static_cast<int>(args->y_dtype),
      static_cast<long long>(args->x_token_stride), static_cast<long long>(args->x_head_stride),
      static_cast<long long>(args->y_token_stride), static_cast<long long>(args->y_head_stride));
  GDN_CHECK_ARG(args->gate != args->y, GDN_INVALID_ARGUMENT,
                "gated_rms_norm: y must not be the gate buffer");
  return GDN_OK;
}

}  // namespace
}  // namespace gdn::kernels

gdn_status gdn_gated_rms_norm(const gdn_exec* exec, const gdn_gated_rms_norm_args* args) {
  GDN_RETURN_IF_ERROR(gdn::kernels::Check(exec, args));
  if (args->tokens == 0) return GDN_OK;
  GDN_DISPATCH(exec, args, GatedRmsNorm);
}
