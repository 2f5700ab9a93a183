#include "gdn/kernels/delta_rule_saved.h"

#include <initializer_list>

#include "kernels/capi/dense_checks.h"
#include "kernels/common/convert.h"

namespace {

using namespace gdn::kernels;  // NOLINT(build/namespaces): the checks

constexpr char kOp[] = "delta_rule_saved_bytes";

// Factors are non-negative; false where the product leaves int64.
template <typename... Factors>
bool Product(int64_t* out, Factors... factors) {
  *out = 1;
  return (!__builtin_mul_overflow(*out, static_cast<int64_t>(factors), out) && ...);
}

}  // namespace

gdn_status gdn_delta_rule_saved_bytes(const gdn_delta_rule_saved_args* args,
                                      gdn_delta_rule_saved_bytes_result* bytes) {
  GDN_RETURN_IF_ERROR(CheckPointer(kOp, "args", args));
  GDN_RETURN_IF_ERROR(CheckPointer(kOp, "bytes", bytes));
  GDN_RETURN_IF_ERROR(CheckExtent(kOp, "tokens", args->tokens, 0));
  GDN_RETURN_IF_ERROR(CheckExtent(kOp, "sequences", args->sequences, 0));
  GDN_RETURN_IF_ERROR(CheckExtent(kOp, "key_heads", args->key_heads, 1));
  GDN_RETURN_IF_ERROR(CheckExtent(kOp, "value_heads", args->value_heads, 1));
  GDN_RETURN_IF_ERROR(CheckExtent(kOp, "key_dim", args->key_dim, 1));
  GDN_RETURN_IF_ERROR(CheckExtent(kOp, "value_dim", args->value_dim, 1));
  GDN_RETURN_IF_ERROR(CheckExtent(kOp, "chunk", args->chunk, 0));
  GDN_CHECK_ARG(args->value_heads % args->key_heads == 0, GDN_INVALID_ARGUMENT,
                "%s: value_heads must be a multiple of key_heads %lld, got %lld", kOp,
                static_cast<long long>(args->key_heads), static_cast<long long>(args->value_heads));
  GDN_RETURN_IF_ERROR(CheckElementType(kOp, "dtype", args->dtype));
  const int route = EnumValue(args->route);
  GDN_CHECK_ARG(route >= GDN_SAVED_NO_NORM && route <= GDN_SAVED_KERNEL_NORM, GDN_INVALID_ARGUMENT,
                "%s: route must be NO_NORM (0), CALLER_NORM (1) or KERNEL_NORM (2), got %d", kOp,
                route);
  const bool caller = route == GDN_SAVED_CALLER_NORM;
  const bool kernel = route == GDN_SAVED_KERNEL_NORM;
  const bool replicated = args->replicated_heads != 0;
  const int64_t element = SizeOf(args->dtype);
  const int64_t T = args->tokens;
  const int64_t H = args->key_heads;
  const int64_t HV = args->value_heads;
  const int64_t heads = replicated ? HV : H;
  gdn_delta_rule_saved_bytes_result b{};
  bool fits = Product(&b.qk, 2, T, heads, args->key_dim, element);
  fits &= Product(&b.qk_rstd, kernel ? 2 : 0, T, heads, 4);
  fits &= Product(&b.v, T, HV, args->value_dim, element);
  fits &= Product(&b.g, T, HV, 4);
  fits &= Product(&b.beta, T, HV, 4);
  fits &= Product(&b.chunk_inverse, T, HV, args->chunk, element);
  fits &= Product(&b.initial_state, args->initial_state != 0 ? args->sequences : 0, HV,
                  args->value_dim, args->key_dim, 4);
  fits &= Product(&b.cu_seqlens, args->sequences + 1, 4);
  fits &= Product(&b.caller_qk, caller && replicated ? 2 : 0, T, H, args->key_dim, element);
  fits &= Product(&b.caller_rstd, caller ? 2 : 0, T, H, 4);
  for (int64_t part : {b.qk, b.qk_rstd, b.v, b.g, b.beta, b.chunk_inverse, b.initial_state,
                       b.cu_seqlens, b.caller_qk, b.caller_rstd}) {
    fits = fits && !__builtin_add_overflow(b.total, part, &b.total);
  }
  GDN_CHECK_ARG(fits, GDN_INVALID_ARGUMENT, "%s: the bytes of these extents exceed 64 bits", kOp);
  *bytes = b;
  return GDN_OK;
}
