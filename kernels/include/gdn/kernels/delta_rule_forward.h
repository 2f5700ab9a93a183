/*! \file delta_rule_forward.h
 *  \brief The gated delta rule's forward for training: dense states, and what the backward needs.
 *
 *  The recurrence of delta_rule.h over packed sequences. With use_qk_l2norm
 *      rstd = 1 / sqrt(sum(x^2) + 1e-6),  x_hat = x * rstd rounded to qkv_dtype    for q and k
 *  and the rule runs on those rounded q_hat and k_hat, which are also what it saves: outputs are
 *  bit-equal to gdn_l2_norm (eps 1e-6, scale 1) by the caller and use_qk_l2norm 0. Each key head is
 *  normalised and saved once, whatever the number of its value heads.
 *
 *  The backward (delta_rule_backward.h) then needs q_hat, k_hat, q_rstd, k_rstd, v, g, beta and the
 *  initial state; not the raw q and k. Without the norm it needs q and k as given here.
 *
 *  Sequences, lengths of 0 included, follow cu_seqlens; tokens from cu_seqlens[N] on are neither
 *  read nor written. FP32 arithmetic (REF: FP64). No output may overlap an input or another output.
 *
 *  Back ends: REF, CPU and CUDA; the last two run the prefill of delta_rule.h. On CUDA cu_seqlens
 * is only read on the device.
 */
#ifndef GDN_KERNELS_DELTA_RULE_FORWARD_H_
#define GDN_KERNELS_DELTA_RULE_FORWARD_H_

#include "gdn/kernels/types.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct gdn_delta_rule_forward_args {
  int64_t sequences;         /*!< N in 0..2^31. */
  const int32_t* cu_seqlens; /*!< [in] [N+1], non-decreasing from 0. */
  int64_t key_heads;         /*!< H >= 1. */
  int64_t value_heads;       /*!< HV <= 4096, HV/H in 1..8; hv uses key head hv/(HV/H). */
  int64_t key_dim;           /*!< K in 1..256. */
  int64_t value_dim;         /*!< V in 1..512. */
  const void* q;             /*!< [in] [T, H, K], heads and elements dense. */
  const void* k;             /*!< [in] [T, H, K]. */
  const void* v;             /*!< [in] [T, HV, V]. */
  gdn_dtype qkv_dtype;
  int64_t q_token_stride; /*!< Elements between tokens, >= H*K. */
  int64_t k_token_stride;
  int64_t v_token_stride;     /*!< >= HV*V. */
  const float* g;             /*!< [in] [T, HV] dense, log decay, <= 0. */
  const float* beta;          /*!< [in] [T, HV] dense. */
  float scale;                /*!< Applied to q after the norm; 0 means K^-1/2. */
  int32_t use_qk_l2norm;      /*!< Non-zero: normalise q and k here. */
  const float* initial_state; /*!< [in] [N, HV, V, K] dense, or NULL: zeros. */
  void* o;                    /*!< [out] [T, HV, V], heads and elements dense. */
  gdn_dtype o_dtype;
  int64_t o_token_stride; /*!< >= HV*V. */
  float* final_state;     /*!< [out] [N, HV, V, K] dense, or NULL: not wanted. */
  void* q_hat;            /*!< [out] [T, H, K] dense, type of q; with use_qk_l2norm only. */
  void* k_hat;            /*!< [out] [T, H, K] dense, type of k; with use_qk_l2norm only. */
  float* q_rstd;          /*!< [out] [T, H] dense; with use_qk_l2norm only. */
  float* k_rstd;          /*!< [out] [T, H] dense; with use_qk_l2norm only. */
} gdn_delta_rule_forward_args;

gdn_status gdn_delta_rule_forward(const gdn_exec* exec, const gdn_delta_rule_forward_args* args);
/*! \brief Scratch bytes of the call above; the pointers in args are not read. */
gdn_status gdn_delta_rule_forward_workspace(const gdn_exec* exec,
                                            const gdn_delta_rule_forward_args* args, size_t* bytes);

#ifdef __cplusplus
} /* extern "C" */
namespace gdn::ref {
gdn_status DeltaRuleForward(const gdn_exec&, const gdn_delta_rule_forward_args&);
}
namespace gdn::cpu {
gdn_status DeltaRuleForward(const gdn_exec&, const gdn_delta_rule_forward_args&);
size_t DeltaRuleForwardWorkspace(const gdn_exec&, const gdn_delta_rule_forward_args&);
}  // namespace gdn::cpu
namespace gdn::cuda {
gdn_status DeltaRuleForward(const gdn_exec&, const gdn_delta_rule_forward_args&);
size_t DeltaRuleForwardWorkspace(const gdn_delta_rule_forward_args&);
}  // namespace gdn::cuda
#endif
#endif /* GDN_KERNELS_DELTA_RULE_FORWARD_H_ */
