#include "gdn/kernels/qk_norm_route.h"

#include "gdn/kernels/l2_norm.h"
#include "kernels/capi/dense_checks.h"
#include "kernels/capi/dispatch.h"

namespace {

using namespace gdn::kernels;  // NOLINT(build/namespaces): the checks

constexpr char kPrepare[] = "qk_norm_prepare";

gdn_status RouteOf(const char* op, const gdn_rule_variant& stored, bool use,
                   gdn_qk_norm_route* route) {
  const int variant = EnumValue(stored);
  GDN_CHECK_ARG(variant == GDN_RULE_GDN || variant == GDN_RULE_GDN2, GDN_INVALID_ARGUMENT,
                "%s: variant must be GDN (0) or GDN2 (1), got %d", op, variant);
  const bool defer = variant == GDN_RULE_GDN;
  *route = {defer ? 1 : 0, use && !defer ? 1 : 0, use && defer ? 1 : 0};
  return GDN_OK;
}

gdn_status Check(const gdn_qk_norm_prepare_args& args) {
  GDN_RETURN_IF_ERROR(CheckExtent(kPrepare, "tokens", args.tokens, 0));
  GDN_RETURN_IF_ERROR(CheckExtent(kPrepare, "vectors", args.vectors, 1));
  GDN_RETURN_IF_ERROR(CheckExtent(kPrepare, "key_dim", args.key_dim, 1));
  int64_t row = 0;
  int64_t last = 0;
  GDN_CHECK_ARG(!__builtin_mul_overflow(args.vectors, args.key_dim, &row) && row <= kMaxExtent,
                GDN_INVALID_ARGUMENT, "%s: vectors * key_dim must be at most 2^40", kPrepare);
  GDN_RETURN_IF_ERROR(CheckElementType(kPrepare, "dtype", args.dtype));
  GDN_RETURN_IF_ERROR(CheckStride(kPrepare, "token_stride", args.token_stride, row));
  if (args.tokens == 0) return GDN_OK;
  GDN_CHECK_ARG(!__builtin_mul_overflow(args.tokens, args.token_stride, &last) &&
                    !__builtin_mul_overflow(last, int64_t{4}, &last),
                GDN_INVALID_ARGUMENT, "%s: token_stride %lld takes offsets beyond 64 bits",
                kPrepare, static_cast<long long>(args.token_stride));
  return CheckPointer(kPrepare, "qk", args.qk);
}

}  // namespace

gdn_status gdn_qk_norm_route_of(gdn_rule_variant variant, int32_t use_qk_l2norm,
                                gdn_qk_norm_route* route) {
  constexpr char kOp[] = "qk_norm_route_of";
  GDN_RETURN_IF_ERROR(CheckPointer(kOp, "route", route));
  return RouteOf(kOp, variant, use_qk_l2norm != 0, route);
}

gdn_status gdn_qk_norm_prepare(const gdn_exec* exec, const gdn_qk_norm_prepare_args* args,
                               gdn_qk_norm_route* route) {
  GDN_RETURN_IF_ERROR(CheckAnyExec(kPrepare, exec, args));
  GDN_RETURN_IF_ERROR(CheckPointer(kPrepare, "route", route));
  GDN_RETURN_IF_ERROR(Check(*args));
  gdn_qk_norm_route chosen{};
  GDN_RETURN_IF_ERROR(RouteOf(kPrepare, args->variant, args->use_qk_l2norm != 0, &chosen));
  if (chosen.normalize_in_caller && args->tokens > 0) {
    gdn_l2_norm_args norm{};
    norm.rows = args->tokens * args->vectors;
    norm.dim = norm.x_row_stride = norm.y_row_stride = args->key_dim;
    norm.group_rows = args->vectors;
    norm.x_group_stride = norm.y_group_stride = args->token_stride;
    norm.x = norm.y = args->qk;
    norm.x_dtype = norm.y_dtype = args->dtype;
    norm.rstd = args->rstd;
    norm.eps = GDN_QK_L2NORM_EPS;
    norm.scale = 1.0f;
    GDN_RETURN_IF_ERROR(gdn_l2_norm(exec, &norm));
  }
  *route = chosen;
  return GDN_OK;
}
