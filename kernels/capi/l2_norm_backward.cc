#include "gdn/kernels/l2_norm_backward.h"

#include <cmath>

#include "kernels/capi/buffer_checks.h"
#include "kernels/capi/dense_checks.h"
#include "kernels/capi/dispatch.h"

namespace {

using namespace gdn::kernels;  // NOLINT(build/namespaces): the checks

constexpr char kOp[] = "l2_norm_backward";

gdn_status CheckRows(const char* name, const char* stride_name, const void* data, gdn_dtype dtype,
                     int64_t row_stride, const gdn_l2_norm_backward_args& args, Buffer* buffer) {
  GDN_RETURN_IF_ERROR(CheckPointer(kOp, name, data));
  GDN_RETURN_IF_ERROR(CheckAligned(kOp, name, data, SizeOf(dtype)));
  *buffer = {name, data, 0};
  const Axis axes[] = {{stride_name, args.rows, row_stride}, {"element", args.dim, 1}};
  return ViewBytes(kOp, name, axes, SizeOf(dtype), &buffer->bytes);
}

gdn_status Check(const gdn_l2_norm_backward_args& args) {
  GDN_RETURN_IF_ERROR(CheckExtent(kOp, "rows", args.rows, 0));
  GDN_RETURN_IF_ERROR(CheckExtent(kOp, "dim", args.dim, 1));
  GDN_RETURN_IF_ERROR(CheckElementType(kOp, "y_dtype", args.y_dtype));
  GDN_RETURN_IF_ERROR(CheckElementType(kOp, "dy_dtype", args.dy_dtype));
  GDN_RETURN_IF_ERROR(CheckElementType(kOp, "dx_dtype", args.dx_dtype));
  GDN_RETURN_IF_ERROR(CheckStride(kOp, "y_row_stride", args.y_row_stride, args.dim));
  GDN_RETURN_IF_ERROR(CheckStride(kOp, "dy_row_stride", args.dy_row_stride, args.dim));
  GDN_RETURN_IF_ERROR(CheckStride(kOp, "dx_row_stride", args.dx_row_stride, args.dim));
  GDN_CHECK_ARG(std::isfinite(args.scale) && args.scale != 0.0f, GDN_INVALID_ARGUMENT,
                "%s: scale must be finite and not 0, got %g", kOp, static_cast<double>(args.scale));
  if (args.rows == 0) return GDN_OK;
  Buffer y, dy, dx;
  GDN_RETURN_IF_ERROR(
      CheckRows("y", "y_row_stride", args.y, args.y_dtype, args.y_row_stride, args, &y));
  GDN_RETURN_IF_ERROR(CheckPointer(kOp, "rstd", args.rstd));
  GDN_RETURN_IF_ERROR(CheckAligned(kOp, "rstd", args.rstd, sizeof(float)));
  GDN_RETURN_IF_ERROR(
      CheckRows("dy", "dy_row_stride", args.dy, args.dy_dtype, args.dy_row_stride, args, &dy));
  GDN_RETURN_IF_ERROR(
      CheckRows("dx", "dx_row_stride", args.dx, args.dx_dtype, args.dx_row_stride, args, &dx));
  const bool in_place = args.dx == args.dy && args.dx_dtype == args.dy_dtype &&
                        args.dx_row_stride == args.dy_row_stride;
  if (in_place) dy.data = nullptr;  // the one overlap that is safe
  const Buffer inputs[] = {
      y, {"rstd", args.rstd, args.rows * static_cast<int64_t>(sizeof(float))}, dy};
  const Buffer outputs[] = {dx};
  return CheckDisjoint(kOp, inputs, outputs);
}

}  // namespace

gdn_status gdn_l2_norm_backward(const gdn_exec* exec, const gdn_l2_norm_backward_args* args) {
  GDN_RETURN_IF_ERROR(CheckAnyExec(kOp, exec, args));
  GDN_RETURN_IF_ERROR(Check(*args));
  GDN_DISPATCH(exec, args, L2NormBackward);
}
