#include "gdn/kernels/rms_norm.h"

#include "kernels/capi/dense_checks.h"
#include "kernels/capi/dispatch.h"

namespace gdn::kernels {
namespace {

constexpr char kOp[] = "rms_norm";

gdn_status Check(const gdn_exec* exec, const gdn_rms_norm_args* args) {
  GDN_RETURN_IF_ERROR(CheckAnyExec(kOp, exec, args));
  GDN_RETURN_IF_ERROR(CheckExtent(kOp, "rows", args->rows, 0));
  GDN_RETURN_IF_ERROR(CheckExtent(kOp, "dim", args->dim, 1));
  GDN_RETURN_IF_ERROR(CheckElementType(kOp, "x_dtype", args->x_dtype));
  GDN_RETURN_IF_ERROR(CheckElementType(kOp, "y_dtype", args->y_dtype));
  GDN_RETURN_IF_ERROR(CheckEps(kOp, args->eps));
  if (args->rows == 0) return GDN_OK;
  GDN_RETURN_IF_ERROR(CheckPointer(kOp, "x", args->x));
  GDN_RETURN_IF_ERROR(CheckPointer(kOp, "weight", args->weight));
  GDN_RETURN_IF_ERROR(CheckPointer(kOp, "y", args->y));
  GDN_RETURN_IF_ERROR(CheckStride(kOp, "x_row_stride", args->x_row_stride, args->dim));
  GDN_RETURN_IF_ERROR(CheckStride(kOp, "y_row_stride", args->y_row_stride, args->dim));
  GDN_CHECK_ARG(args->x != args->y ||
                    (args->x_dtype == args->y_dtype && args->x_row_stride == args->y_row_stride),
                GDN_INVALID_ARGUMENT,
                "rms_norm: in place, y must have the type and stride of x, got types %d and %d, "
                "strides %lld and %lld",
                static_cast<int>(args->x_dtype), static_cast<int>(args->y_dtype),
                static_cast<long long>(args->x_row_stride),
                static_cast<long long>(args->y_row_stride));
  return GDN_OK;
}

}  // namespace
}  // namespace gdn::kernels

gdn_status gdn_rms_norm(const gdn_exec* exec, const gdn_rms_norm_args* args) {
  GDN_RETURN_IF_ERROR(gdn::kernels::Check(exec, args));
  if (args->rows == 0) return GDN_OK;
  GDN_DISPATCH(exec, args, RmsNorm);
}
