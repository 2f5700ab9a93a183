// What the fused step and the fused prefill check of a layer's arguments.
#ifndef KERNELS_CAPI_FUSED_CHECKS_H_
#define KERNELS_CAPI_FUSED_CHECKS_H_

#include <cmath>

#include "gdn/kernels/fused_decode.h"
#include "kernels/capi/delta_rule_shape.h"
#include "kernels/capi/dense_checks.h"

namespace gdn::kernels {

inline gdn_status CheckFusedShape(const char* op, const gdn_fused_decode_args& args) {
  GDN_RETURN_IF_ERROR(CheckExtent(op, "rows", args.rows, 0));
  GDN_RETURN_IF_ERROR(CheckExtent(op, "tokens", args.tokens, 1));
  GDN_RETURN_IF_ERROR(CheckRuleHeads(op, args));
  GDN_RETURN_IF_ERROR(CheckExtent(op, "conv_width", args.conv_width, 1));
  GDN_CHECK_ARG(args.tokens <= 8, GDN_UNSUPPORTED_SHAPE, "%s: tokens must be in 1..8, got %lld", op,
                static_cast<long long>(args.tokens));
  GDN_CHECK_ARG(args.conv_width >= 2 && args.conv_width <= 8, GDN_UNSUPPORTED_SHAPE,
                "%s: conv_width must be in 2..8, got %lld", op,
                static_cast<long long>(args.conv_width));
  GDN_RETURN_IF_ERROR(CheckDtype(op, "dtype", args.dtype));
  GDN_RETURN_IF_ERROR(CheckDtype(op, "state_dtype", args.state_dtype));
  GDN_CHECK_ARG(args.state_dtype != GDN_F16, GDN_UNSUPPORTED_TYPE,
                "%s: state_dtype must be GDN_F32 or GDN_BF16, got GDN_F16", op);
  return GDN_OK;
}

// A block of columns lies within a line of x.
inline gdn_status CheckFusedColumns(const char* op, const gdn_fused_decode_args& args,
                                    const char* name, int64_t offset, int64_t count) {
  GDN_CHECK_ARG(offset >= 0 && offset <= args.x_token_stride - count, GDN_INVALID_ARGUMENT,
                "%s: %s must be in 0..x_token_stride - %lld = %lld, got %lld", op, name,
                static_cast<long long>(count), static_cast<long long>(args.x_token_stride - count),
                static_cast<long long>(offset));
  return GDN_OK;
}

inline gdn_status CheckFusedLayer(const char* op, const gdn_fused_decode_args& args) {
  GDN_RETURN_IF_ERROR(CheckFusedShape(op, args));
  const int64_t keys = args.key_heads * args.key_dim;
  const int64_t values = args.value_heads * args.value_dim;
  GDN_RETURN_IF_ERROR(CheckExtent(op, "x_token_stride", args.x_token_stride, 1));
  GDN_RETURN_IF_ERROR(CheckFusedColumns(op, args, "q_offset", args.q_offset, keys));
  GDN_RETURN_IF_ERROR(CheckFusedColumns(op, args, "k_offset", args.k_offset, keys));
  GDN_RETURN_IF_ERROR(CheckFusedColumns(op, args, "v_offset", args.v_offset, values));
  GDN_RETURN_IF_ERROR(CheckFusedColumns(op, args, "z_offset", args.z_offset, values));
  GDN_RETURN_IF_ERROR(CheckFusedColumns(op, args, "b_offset", args.b_offset, args.value_heads));
  GDN_RETURN_IF_ERROR(CheckFusedColumns(op, args, "a_offset", args.a_offset, args.value_heads));
  GDN_RETURN_IF_ERROR(CheckStride(op, "y_token_stride", args.y_token_stride, values));
  GDN_RETURN_IF_ERROR(
      CheckStride(op, "state_slot_stride", args.state_slot_stride, values * args.key_dim));
  GDN_RETURN_IF_ERROR(CheckStride(op, "conv_slot_stride", args.conv_slot_stride,
                                  (args.conv_width - 1) * (2 * keys + values)));
  GDN_RETURN_IF_ERROR(CheckEps(op, args.eps));
  GDN_CHECK_ARG(std::isfinite(args.scale), GDN_INVALID_ARGUMENT, "%s: scale must be finite, got %g",
                op, static_cast<double>(args.scale));
  GDN_CHECK_ARG(std::isfinite(args.beta_scale), GDN_INVALID_ARGUMENT,
                "%s: beta_scale must be finite, got %g", op, static_cast<double>(args.beta_scale));
  const int activation = EnumValue(args.activation);
  GDN_CHECK_ARG(activation == GDN_GATE_SILU || activation == GDN_GATE_SIGMOID, GDN_INVALID_ARGUMENT,
                "%s: activation must be SILU (0) or SIGMOID (1), got %d", op, activation);
  if (args.rows == 0) return GDN_OK;
  GDN_RETURN_IF_ERROR(CheckPointer(op, "x", args.x));
  GDN_RETURN_IF_ERROR(CheckPointer(op, "conv_weight", args.conv_weight));
  GDN_RETURN_IF_ERROR(CheckPointer(op, "a_log", args.a_log));
  GDN_RETURN_IF_ERROR(CheckPointer(op, "dt_bias", args.dt_bias));
  GDN_RETURN_IF_ERROR(CheckPointer(op, "norm_weight", args.norm_weight));
  GDN_RETURN_IF_ERROR(CheckPointer(op, "state", args.state));
  GDN_RETURN_IF_ERROR(CheckPointer(op, "conv_state", args.conv_state));
  GDN_RETURN_IF_ERROR(CheckPointer(op, "read_index", args.read_index));
  GDN_RETURN_IF_ERROR(CheckPointer(op, "write_index", args.write_index));
  GDN_RETURN_IF_ERROR(CheckPointer(op, "y", args.y));
  GDN_CHECK_ARG(args.x != args.y, GDN_INVALID_ARGUMENT, "%s: y must not overlap x", op);
  return GDN_OK;
}

}  // namespace gdn::kernels

#endif  // KERNELS_CAPI_FUSED_CHECKS_H_
