#include "gdn/kernels/silu_mul.h"

#include "kernels/capi/dense_checks.h"
#include "kernels/capi/dispatch.h"

namespace gdn::kernels {
namespace {

constexpr char kOp[] = "silu_mul";

gdn_status Check(const gdn_exec* exec, const gdn_silu_mul_args* args) {
  GDN_RETURN_IF_ERROR(CheckAnyExec(kOp, exec, args));
  GDN_RETURN_IF_ERROR(CheckExtent(kOp, "rows", args->rows, 0));
  GDN_RETURN_IF_ERROR(CheckExtent(kOp, "dim", args->dim, 1));
  GDN_RETURN_IF_ERROR(CheckElementType(kOp, "dtype", args->dtype));
  GDN_RETURN_IF_ERROR(CheckElementType(kOp, "y_dtype", args->y_dtype));
  if (args->rows == 0) return GDN_OK;
  GDN_RETURN_IF_ERROR(CheckPointer(kOp, "gate", args->gate));
  GDN_RETURN_IF_ERROR(CheckPointer(kOp, "up", args->up));
  GDN_RETURN_IF_ERROR(CheckPointer(kOp, "y", args->y));
  GDN_RETURN_IF_ERROR(CheckStride(kOp, "row_stride", args->row_stride, args->dim));
  GDN_RETURN_IF_ERROR(CheckStride(kOp, "y_row_stride", args->y_row_stride, args->dim));
  GDN_CHECK_ARG(args->gate != args->y ||
                    (args->dtype == args->y_dtype && args->row_stride == args->y_row_stride),
                GDN_INVALID_ARGUMENT,
                "silu_mul: in place, y must have the type and stride of gate, got types %d and %d, "
                "strides %lld and %lld",
                static_cast<int>(args->dtype), static_cast<int>(args->y_dtype),
                static_cast<long long>(args->row_stride),
                static_cast<long long>(args->y_row_stride));
  return GDN_OK;
}

}  // namespace
}  // namespace gdn::kernels

gdn_status gdn_silu_mul(const gdn_exec* exec, const gdn_silu_mul_args* args) {
  GDN_RETURN_IF_ERROR(gdn::kernels::Check(exec, args));
  if (args->rows == 0) return GDN_OK;
  GDN_DISPATCH(exec, args, SiluMul);
}
