// The extents that every op of the delta-rule family checks alike.
#ifndef KERNELS_CAPI_DELTA_RULE_SHAPE_H_
#define KERNELS_CAPI_DELTA_RULE_SHAPE_H_

#include "kernels/common/validate.h"

namespace gdn::kernels {

template <typename Args>
gdn_status CheckRuleHeads(const char* op, const Args& args) {
  GDN_RETURN_IF_ERROR(CheckExtent(op, "key_heads", args.key_heads, 1));
  GDN_RETURN_IF_ERROR(CheckExtent(op, "value_heads", args.value_heads, 1));
  GDN_RETURN_IF_ERROR(CheckExtent(op, "key_dim", args.key_dim, 1));
  GDN_RETURN_IF_ERROR(CheckExtent(op, "value_dim", args.value_dim, 1));
  GDN_CHECK_ARG(args.value_heads % args.key_heads == 0, GDN_INVALID_ARGUMENT,
                "%s: value_heads must be a multiple of key_heads %lld, got %lld", op,
                static_cast<long long>(args.key_heads), static_cast<long long>(args.value_heads));
  GDN_CHECK_ARG(args.value_heads / args.key_heads <= 8, GDN_UNSUPPORTED_SHAPE,
                "%s: value_heads / key_heads must be in 1..8, got %lld / %lld", op,
                static_cast<long long>(args.value_heads), static_cast<long long>(args.key_heads));
  GDN_CHECK_ARG(args.key_dim <= 256, GDN_UNSUPPORTED_SHAPE,
                "%s: key_dim must be in 1..256, got %lld", op,
                static_cast<long long>(args.key_dim));
  GDN_CHECK_ARG(args.value_dim <= 512, GDN_UNSUPPORTED_SHAPE,
                "%s: value_dim must be in 1..512, got %lld", op,
                static_cast<long long>(args.value_dim));
  return GDN_OK;
}

template <typename Args>
gdn_status CheckDeltaRuleShape(const char* op, const Args& args) {
  GDN_RETURN_IF_ERROR(CheckExtent(op, "sequences", args.sequences, 0));
  return CheckRuleHeads(op, args);
}

// And those of the ops whose gates have heads of their own.
template <typename Args>
gdn_status CheckGdn2Shape(const char* op, const Args& args) {
  GDN_RETURN_IF_ERROR(CheckDeltaRuleShape(op, args));
  GDN_CHECK_ARG(args.gate_heads == args.key_heads || args.gate_heads == args.value_heads,
                GDN_INVALID_ARGUMENT,
                "%s: gate_heads must be key_heads %lld or value_heads %lld, got %lld", op,
                static_cast<long long>(args.key_heads), static_cast<long long>(args.value_heads),
                static_cast<long long>(args.gate_heads));
  return GDN_OK;
}

}  // namespace gdn::kernels

#endif  // KERNELS_CAPI_DELTA_RULE_SHAPE_H_
