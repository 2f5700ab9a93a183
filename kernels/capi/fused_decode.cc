#include "gdn/kernels/fused_decode.h"

#include <cmath>

#include "kernels/capi/dense_checks.h"
#include "kernels/capi/dispatch.h"

namespace {

using namespace gdn::kernels;  // NOLINT(build/namespaces): the checks

constexpr char kOp[] = "fused_decode";

gdn_status CheckShape(const gdn_fused_decode_args& args) {
  GDN_RETURN_IF_ERROR(CheckExtent(kOp, "rows", args.rows, 0));
  GDN_RETURN_IF_ERROR(CheckExtent(kOp, "tokens", args.tokens, 1));
  GDN_RETURN_IF_ERROR(CheckExtent(kOp, "key_heads", args.key_heads, 1));
  GDN_RETURN_IF_ERROR(CheckExtent(kOp, "value_heads", args.value_heads, 1));
  GDN_RETURN_IF_ERROR(CheckExtent(kOp, "key_dim", args.key_dim, 1));
  GDN_RETURN_IF_ERROR(CheckExtent(kOp, "value_dim", args.value_dim, 1));
  GDN_RETURN_IF_ERROR(CheckExtent(kOp, "conv_width", args.conv_width, 1));
  GDN_CHECK_ARG(args.value_heads % args.key_heads == 0, GDN_INVALID_ARGUMENT,
                "%s: value_heads must be a multiple of key_heads %lld, got %lld", kOp,
                static_cast<long long>(args.key_heads), static_cast<long long>(args.value_heads));
  GDN_CHECK_ARG(args.value_heads / args.key_heads <= 8, GDN_UNSUPPORTED_SHAPE,
                "%s: value_heads / key_heads must be in 1..8, got %lld / %lld", kOp,
                static_cast<long long>(args.value_heads), static_cast<long long>(args.key_heads));
  GDN_CHECK_ARG(args.tokens <= 8, GDN_UNSUPPORTED_SHAPE, "%s: tokens must be in 1..8, got %lld",
                kOp, static_cast<long long>(args.tokens));
  GDN_CHECK_ARG(args.key_dim <= 256, GDN_UNSUPPORTED_SHAPE,
                "%s: key_dim must be in 1..256, got %lld", kOp,
                static_cast<long long>(args.key_dim));
  GDN_CHECK_ARG(args.value_dim <= 512, GDN_UNSUPPORTED_SHAPE,
                "%s: value_dim must be in 1..512, got %lld", kOp,
                static_cast<long long>(args.value_dim));
  GDN_CHECK_ARG(args.conv_width >= 2 && args.conv_width <= 8, GDN_UNSUPPORTED_SHAPE,
                "%s: conv_width must be in 2..8, got %lld", kOp,
                static_cast<long long>(args.conv_width));
  GDN_RETURN_IF_ERROR(CheckDtype(kOp, "dtype", args.dtype));
  GDN_RETURN_IF_ERROR(CheckDtype(kOp, "state_dtype", args.state_dtype));
  GDN_CHECK_ARG(args.state_dtype != GDN_F16, GDN_UNSUPPORTED_TYPE,
                "%s: state_dtype must be GDN_F32 or GDN_BF16, got GDN_F16", kOp);
  return GDN_OK;
}

// A block of columns lies within a line of x.
gdn_status CheckColumns(const gdn_fused_decode_args& args, const char* name, int64_t offset,
                        int64_t count) {
  GDN_CHECK_ARG(offset >= 0 && offset <= args.x_token_stride - count, GDN_INVALID_ARGUMENT,
                "%s: %s must be in 0..x_token_stride - %lld = %lld, got %lld", kOp, name,
                static_cast<long long>(count), static_cast<long long>(args.x_token_stride - count),
                static_cast<long long>(offset));
  return GDN_OK;
}

gdn_status Check(const gdn_fused_decode_args& args) {
  GDN_RETURN_IF_ERROR(CheckShape(args));
  const int64_t keys = args.key_heads * args.key_dim;
  const int64_t values = args.value_heads * args.value_dim;
  GDN_RETURN_IF_ERROR(CheckExtent(kOp, "x_token_stride", args.x_token_stride, 1));
  GDN_RETURN_IF_ERROR(CheckColumns(args, "q_offset", args.q_offset, keys));
  GDN_RETURN_IF_ERROR(CheckColumns(args, "k_offset", args.k_offset, keys));
  GDN_RETURN_IF_ERROR(CheckColumns(args, "v_offset", args.v_offset, values));
  GDN_RETURN_IF_ERROR(CheckColumns(args, "z_offset", args.z_offset, values));
  GDN_RETURN_IF_ERROR(CheckColumns(args, "b_offset", args.b_offset, args.value_heads));
  GDN_RETURN_IF_ERROR(CheckColumns(args, "a_offset", args.a_offset, args.value_heads));
  GDN_RETURN_IF_ERROR(CheckStride(kOp, "y_token_stride", args.y_token_stride, values));
  GDN_RETURN_IF_ERROR(
      CheckStride(kOp, "state_slot_stride", args.state_slot_stride, values * args.key_dim));
  GDN_RETURN_IF_ERROR(CheckStride(kOp, "conv_slot_stride", args.conv_slot_stride,
                                  (args.conv_width - 1) * (2 * keys + values)));
  GDN_RETURN_IF_ERROR(CheckEps(kOp, args.eps));
  GDN_CHECK_ARG(std::isfinite(args.scale), GDN_INVALID_ARGUMENT, "%s: scale must be finite, got %g",
                kOp, static_cast<double>(args.scale));
  GDN_CHECK_ARG(std::isfinite(args.beta_scale), GDN_INVALID_ARGUMENT,
                "%s: beta_scale must be finite, got %g", kOp, static_cast<double>(args.beta_scale));
  const int activation = EnumValue(args.activation);
  GDN_CHECK_ARG(activation == GDN_GATE_SILU || activation == GDN_GATE_SIGMOID, GDN_INVALID_ARGUMENT,
                "%s: activation must be SILU (0) or SIGMOID (1), got %d", kOp, activation);
  if (args.rows == 0) return GDN_OK;
  GDN_RETURN_IF_ERROR(CheckPointer(kOp, "x", args.x));
  GDN_RETURN_IF_ERROR(CheckPointer(kOp, "conv_weight", args.conv_weight));
  GDN_RETURN_IF_ERROR(CheckPointer(kOp, "a_log", args.a_log));
  GDN_RETURN_IF_ERROR(CheckPointer(kOp, "dt_bias", args.dt_bias));
  GDN_RETURN_IF_ERROR(CheckPointer(kOp, "norm_weight", args.norm_weight));
  GDN_RETURN_IF_ERROR(CheckPointer(kOp, "state", args.state));
  GDN_RETURN_IF_ERROR(CheckPointer(kOp, "conv_state", args.conv_state));
  GDN_RETURN_IF_ERROR(CheckPointer(kOp, "read_index", args.read_index));
  GDN_RETURN_IF_ERROR(CheckPointer(kOp, "write_index", args.write_index));
  GDN_RETURN_IF_ERROR(CheckPointer(kOp, "y", args.y));
  GDN_CHECK_ARG(args.x != args.y, GDN_INVALID_ARGUMENT, "%s: y must not overlap x", kOp);
  return GDN_OK;
}

}  // namespace

gdn_status gdn_fused_decode(const gdn_exec* exec, const gdn_fused_decode_args* args) {
  GDN_RETURN_IF_ERROR(CheckAnyExec(kOp, exec, args));
  GDN_RETURN_IF_ERROR(Check(*args));
#ifdef GDN_HAS_CUDA
  if (exec->backend == GDN_BACKEND_CUDA) return gdn::cuda::FusedDecode(*exec, *args);
#endif
  GDN_CHECK_ARG(exec->backend == GDN_BACKEND_REF, GDN_BACKEND_UNAVAILABLE,
                "%s: the CPU back end has no fused step; call the separate ops", kOp);
  return gdn::ref::FusedDecode(*exec, *args);
}
