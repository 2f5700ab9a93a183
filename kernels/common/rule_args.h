// What the back ends of the delta rule derive from their arguments.
#ifndef KERNELS_COMMON_RULE_ARGS_H_
#define KERNELS_COMMON_RULE_ARGS_H_

#include <cmath>
#include <cstdint>

#include "gdn/kernels/delta_rule.h"
#include "gdn/kernels/delta_rule_forward.h"

namespace gdn::kernels {

// The output's scale: 0 stands for K^-1/2.
inline double RuleScale(float scale, int64_t key_dim) {
  return scale != 0.0f ? static_cast<double>(scale) : 1.0 / std::sqrt(static_cast<double>(key_dim));
}

// Elements of a sequence's dense state.
inline int64_t StateSize(const gdn_delta_rule_forward_args& args) {
  return args.value_heads * args.value_dim * args.key_dim;
}

// The prefill that a training forward ends in, on dense states; but for the state pool and its
// indices.
inline gdn_delta_rule_args PrefillArgs(const gdn_delta_rule_forward_args& args) {
  gdn_delta_rule_args prefill{};
  prefill.sequences = args.sequences;
  prefill.cu_seqlens = args.cu_seqlens;
  prefill.key_heads = args.key_heads;
  prefill.value_heads = args.value_heads;
  prefill.key_dim = args.key_dim;
  prefill.value_dim = args.value_dim;
  const bool saved = args.use_qk_l2norm != 0;
  prefill.q = saved ? args.q_hat : args.q;
  prefill.k = saved ? args.k_hat : args.k;
  prefill.v = args.v;
  prefill.qkv_dtype = args.qkv_dtype;
  prefill.q_token_stride = saved ? args.key_heads * args.key_dim : args.q_token_stride;
  prefill.k_token_stride = saved ? args.key_heads * args.key_dim : args.k_token_stride;
  prefill.v_token_stride = args.v_token_stride;
  prefill.g = args.g;
  prefill.beta = args.beta;
  prefill.scale = args.scale;
  prefill.state_dtype = GDN_F32;
  prefill.state_slot_stride = StateSize(args);
  prefill.o = args.o;
  prefill.o_dtype = args.o_dtype;
  prefill.o_token_stride = args.o_token_stride;
  return prefill;
}

}  // namespace gdn::kernels

#endif  // KERNELS_COMMON_RULE_ARGS_H_
