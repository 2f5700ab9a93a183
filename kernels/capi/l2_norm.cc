#include "gdn/kernels/l2_norm.h"

#include <cmath>

#include "kernels/capi/dense_checks.h"
#include "kernels/capi/dispatch.h"

namespace {

using namespace gdn::kernels;  // NOLINT(build/namespaces): the checks

constexpr char kOp[] = "l2_norm";

gdn_status CheckGroups(const gdn_l2_norm_args& args) {
  GDN_RETURN_IF_ERROR(CheckExtent(kOp, "group_rows", args.group_rows, 0));
  if (args.group_rows == 0) return GDN_OK;
  int64_t x_group = 0;
  int64_t y_group = 0;
  GDN_CHECK_ARG(!__builtin_mul_overflow(args.group_rows, args.x_row_stride, &x_group) &&
                    !__builtin_mul_overflow(args.group_rows, args.y_row_stride, &y_group),
                GDN_INVALID_ARGUMENT, "%s: group_rows %lld takes offsets beyond 64 bits", kOp,
                static_cast<long long>(args.group_rows));
  GDN_RETURN_IF_ERROR(CheckStride(kOp, "x_group_stride", args.x_group_stride, x_group));
  return CheckStride(kOp, "y_group_stride", args.y_group_stride, y_group);
}

gdn_status Check(const gdn_l2_norm_args& args) {
  GDN_RETURN_IF_ERROR(CheckExtent(kOp, "rows", args.rows, 0));
  GDN_RETURN_IF_ERROR(CheckExtent(kOp, "dim", args.dim, 1));
  GDN_RETURN_IF_ERROR(CheckDtype(kOp, "x_dtype", args.x_dtype));
  GDN_RETURN_IF_ERROR(CheckDtype(kOp, "y_dtype", args.y_dtype));
  GDN_RETURN_IF_ERROR(CheckStride(kOp, "x_row_stride", args.x_row_stride, args.dim));
  GDN_RETURN_IF_ERROR(CheckStride(kOp, "y_row_stride", args.y_row_stride, args.dim));
  GDN_RETURN_IF_ERROR(CheckGroups(args));
  GDN_RETURN_IF_ERROR(CheckEps(kOp, args.eps));
  GDN_CHECK_ARG(std::isfinite(args.scale), GDN_INVALID_ARGUMENT, "%s: scale must be finite, got %g",
                kOp, static_cast<double>(args.scale));
  if (args.rows == 0) return GDN_OK;
  GDN_RETURN_IF_ERROR(CheckPointer(kOp, "x", args.x));
  GDN_RETURN_IF_ERROR(CheckPointer(kOp, "y", args.y));
  GDN_CHECK_ARG(
      args.x != args.y || (args.x_dtype == args.y_dtype && args.x_row_stride == args.y_row_stride),
      GDN_INVALID_ARGUMENT,
      "%s: in place, x and y must have the same type and row stride, got types %d and "
      "%d, strides %lld and %lld",
      kOp, static_cast<int>(args.x_dtype), static_cast<int>(args.y_dtype),
      static_cast<long long>(args.x_row_stride), static_cast<long long>(args.y_row_stride));
  GDN_CHECK_ARG(
      args.x != args.y || args.group_rows == 0 || args.x_group_stride == args.y_group_stride,
      GDN_INVALID_ARGUMENT,
      "%s: in place, x and y must have the same group stride, got %lld and %lld", kOp,
      static_cast<long long>(args.x_group_stride), static_cast<long long>(args.y_group_stride));
  return GDN_OK;
}

}  // namespace

gdn_status gdn_l2_norm(const gdn_exec* exec, const gdn_l2_norm_args* args) {
  GDN_RETURN_IF_ERROR(CheckAnyExec(kOp, exec, args));
  GDN_RETURN_IF_ERROR(Check(*args));
  GDN_DISPATCH(exec, args, L2Norm);
}
