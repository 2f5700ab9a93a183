// What the backwards of the delta rule and of GDN2 check alike.
#ifndef KERNELS_CAPI_RULE_BACKWARD_CHECKS_H_
#define KERNELS_CAPI_RULE_BACKWARD_CHECKS_H_

#include <cmath>
#include <initializer_list>

#include "kernels/capi/delta_rule_shape.h"
#include "kernels/capi/dense_checks.h"
#include "kernels/capi/sequences.h"

namespace gdn::kernels {

template <typename Args>
gdn_status CheckRuleBackwardStrides(const char* op, const Args& args) {
  const int64_t keys = args.key_heads * args.key_dim;
  const int64_t values = args.value_heads * args.value_dim;
  GDN_RETURN_IF_ERROR(CheckStride(op, "q_token_stride", args.q_token_stride, keys));
  GDN_RETURN_IF_ERROR(CheckStride(op, "k_token_stride", args.k_token_stride, keys));
  GDN_RETURN_IF_ERROR(CheckStride(op, "v_token_stride", args.v_token_stride, values));
  GDN_RETURN_IF_ERROR(CheckStride(op, "d_o_token_stride", args.d_o_token_stride, values));
  GDN_RETURN_IF_ERROR(CheckStride(op, "d_q_token_stride", args.d_q_token_stride, keys));
  GDN_RETURN_IF_ERROR(CheckStride(op, "d_k_token_stride", args.d_k_token_stride, keys));
  return CheckStride(op, "d_v_token_stride", args.d_v_token_stride, values);
}

template <typename Args>
gdn_status CheckRuleBackwardBuffers(const char* op, const Args& args) {
  GDN_RETURN_IF_ERROR(CheckPointer(op, "q", args.q));
  GDN_RETURN_IF_ERROR(CheckPointer(op, "k", args.k));
  GDN_RETURN_IF_ERROR(CheckPointer(op, "v", args.v));
  GDN_RETURN_IF_ERROR(CheckPointer(op, "g", args.g));
  GDN_RETURN_IF_ERROR(CheckPointer(op, "d_o", args.d_o));
  GDN_RETURN_IF_ERROR(CheckPointer(op, "d_q", args.d_q));
  GDN_RETURN_IF_ERROR(CheckPointer(op, "d_k", args.d_k));
  GDN_RETURN_IF_ERROR(CheckPointer(op, "d_v", args.d_v));
  GDN_RETURN_IF_ERROR(CheckPointer(op, "d_g", args.d_g));
  if (args.use_qk_l2norm != 0) {
    GDN_RETURN_IF_ERROR(CheckPointer(op, "q_rstd", args.q_rstd));
    GDN_RETURN_IF_ERROR(CheckPointer(op, "k_rstd", args.k_rstd));
  }
  for (const void* output : {args.d_q, args.d_k, args.d_v}) {
    GDN_CHECK_ARG(output != args.q && output != args.k && output != args.v && output != args.d_o,
                  GDN_INVALID_ARGUMENT, "%s: d_q, d_k and d_v must not overlap q, k, v or d_o", op);
  }
  GDN_CHECK_ARG(args.d_q != args.d_k && args.d_q != args.d_v && args.d_k != args.d_v,
                GDN_INVALID_ARGUMENT, "%s: d_q, d_k and d_v must not overlap each other", op);
  return GDN_OK;
}

// After the shape. `own_buffers` checks the pointers that only this op has.
template <typename Args>
gdn_status CheckRuleBackward(const char* op, gdn_backend backend, const Args& args,
                             gdn_status (*own_buffers)(const char*, const Args&)) {
  GDN_RETURN_IF_ERROR(CheckRuleBackwardStrides(op, args));
  GDN_CHECK_ARG(std::isfinite(args.scale), GDN_INVALID_ARGUMENT, "%s: scale must be finite, got %g",
                op, static_cast<double>(args.scale));
  if (args.sequences == 0) return GDN_OK;
  int64_t used = 0;
  GDN_RETURN_IF_ERROR(
      CheckCuSeqlensOf(op, backend, args.cu_seqlens, args.sequences, args.tokens, &used));
  GDN_CHECK_ARG(used <= args.tokens, GDN_INVALID_ARGUMENT,
                "%s: cu_seqlens must end at tokens %lld or before, got %lld", op,
                static_cast<long long>(args.tokens), static_cast<long long>(used));
  if (used == 0) return GDN_OK;
  GDN_RETURN_IF_ERROR(CheckRuleBackwardBuffers(op, args));
  return own_buffers(op, args);
}

}  // namespace gdn::kernels

#endif  // KERNELS_CAPI_RULE_BACKWARD_CHECKS_H_
