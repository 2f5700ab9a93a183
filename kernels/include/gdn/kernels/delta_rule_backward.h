/*! \file delta_rule_backward.h
 *  \brief Gradients of the gated delta rule, through the in-kernel norm of q and k.
 *
 *  Per value head, t downwards, dS starting as d_final_state; S[t-1] is the state before token t,
 *  S1 = exp(g) S[t-1], e = v - S1 k, u = beta e, S[t] = S1 + u k^T (states are [V][K]):
 *      dq_hat += scale * S[t]^T d_o           dS += scale * d_o q^T
 *      du      = dS k                         d_beta = du . e         d_v = beta du
 *      dk_hat += dS^T u - beta S1^T du        dS -= beta du k^T
 *      d_g     = exp(g) <dS, S[t-1]>          dS *= exp(g)
 *  and at the end d_initial_state = dS. q and k above are those the rule ran on. dq_hat and dk_hat
 *  sum over the value heads of a key head, in their order, in FP32: no replicated head exists.
 *  With use_qk_l2norm q and k are the saved q_hat and k_hat, and
 *      d_x = rstd * (dx_hat - x_hat * sum(dx_hat * x_hat))
 *  for both; without it d_q = dq_hat, d_k = dk_hat. The gates' own gradients: gates_backward.h.
 *
 *  FP32 arithmetic (REF: FP64), one rounding on the store, no atomics: repeats are bit-equal.
 *  Outputs are overwritten, not added to; none may overlap an input or another output. No term
 *  crosses a sequence's boundary; a sequence without tokens passes d_final_state on. Tokens from
 *  cu_seqlens[N] on are neither read nor written.
 *
 *  CUDA on compute capability 9.0 (a build for 90a) with K = V = 64 or 128, q, k, v, d_o, d_q, d_k
 *  and d_v of one 16-bit type, aligned to 16 bytes with strides of 8 elements, and states aligned
 *  to pairs: chunks on the tensor cores, whose operands, U, dR and the states among them, are
 *  rounded to that type; d_v is beta times the rounded dR. Every other call steps through the
 *  tokens in FP32. Which one is chosen depends on the call's shape, types and addresses alone,
 *  never on lengths; the workspace is enough for either. cu_seqlens is only read on the device.
 *
 *  Back ends: REF, CPU and CUDA.
 */
#ifndef GDN_KERNELS_DELTA_RULE_BACKWARD_H_
#define GDN_KERNELS_DELTA_RULE_BACKWARD_H_

#include "gdn/kernels/types.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct gdn_delta_rule_backward_args {
  int64_t tokens;            /*!< T >= cu_seqlens[N]: sizes the workspace. */
  int64_t sequences;         /*!< N >= 0. */
  const int32_t* cu_seqlens; /*!< [in] [N+1], non-decreasing from 0. */
  int64_t key_heads;         /*!< H >= 1. */
  int64_t value_heads;       /*!< HV, a multiple of H, HV/H in 1..8; hv uses key head hv/(HV/H). */
  int64_t key_dim;           /*!< K in 1..256. */
  int64_t value_dim;         /*!< V in 1..512. */
  const void* q;       /*!< [in] [T, H, K]: saved q_hat with use_qk_l2norm, else the forward's q. */
  const void* k;       /*!< [in] [T, H, K]: saved k_hat with use_qk_l2norm, else the forward's k. */
  const float* q_rstd; /*!< [in] [T, H] dense; read with use_qk_l2norm only. */
  const float* k_rstd; /*!< [in] [T, H] dense; read with use_qk_l2norm only. */
  const void* v;       /*!< [in] [T, HV, V]. */
  gdn_dtype qkv_dtype;
  int64_t q_token_stride; /*!< Elements between tokens, >= H*K; heads and elements are dense. */
  int64_t k_token_stride;
  int64_t v_token_stride;     /*!< >= HV*V. */
  const float* g;             /*!< [in] [T, HV] dense, log decay. */
  const float* beta;          /*!< [in] [T, HV] dense. */
  float scale;                /*!< That of the forward; 0 means K^-1/2. */
  int32_t use_qk_l2norm;      /*!< That of the forward. */
  const float* initial_state; /*!< [in] [N, HV, V, K] dense, or NULL: zeros. */
  const void* d_o;            /*!< [in] [T, HV, V]. */
  gdn_dtype d_o_dtype;
  int64_t d_o_token_stride;   /*!< >= HV*V. */
  const float* d_final_state; /*!< [in] [N, HV, V, K] dense, or NULL: zeros. */
  void* d_q;                  /*!< [out] [T, H, K], by the forward's raw q. */
  void* d_k;                  /*!< [out] [T, H, K], by the forward's raw k. */
  void* d_v;                  /*!< [out] [T, HV, V]. */
  gdn_dtype d_qkv_dtype;
  int64_t d_q_token_stride; /*!< >= H*K. */
  int64_t d_k_token_stride;
  int64_t d_v_token_stride; /*!< >= HV*V. */
  float* d_g;               /*!< [out] [T, HV] dense. */
  float* d_beta;            /*!< [out] [T, HV] dense. */
  float* d_initial_state;   /*!< [out] [N, HV, V, K] dense, or NULL: not wanted. */
} gdn_delta_rule_backward_args;

gdn_status gdn_delta_rule_backward(const gdn_exec* exec, const gdn_delta_rule_backward_args* args);
/*! \brief Scratch bytes of the call above; the pointers in args are not read. */
gdn_status gdn_delta_rule_backward_workspace(const gdn_exec* exec,
                                             const gdn_delta_rule_backward_args* args,
                                             size_t* bytes);

#ifdef __cplusplus
} /* extern "C" */
namespace gdn::ref {
gdn_status DeltaRuleBackward(const gdn_exec&, const gdn_delta_rule_backward_args&);
size_t DeltaRuleBackwardWorkspace(const gdn_delta_rule_backward_args&);
}  // namespace gdn::ref
namespace gdn::cpu {
gdn_status DeltaRuleBackward(const gdn_exec&, const gdn_delta_rule_backward_args&);
size_t DeltaRuleBackwardWorkspace(const gdn_exec&, const gdn_delta_rule_backward_args&);
}  // namespace gdn::cpu
namespace gdn::cuda {
gdn_status DeltaRuleBackward(const gdn_exec&, const gdn_delta_rule_backward_args&);
size_t DeltaRuleBackwardWorkspace(const gdn_delta_rule_backward_args&);
}  // namespace gdn::cuda
#endif
#endif /* GDN_KERNELS_DELTA_RULE_BACKWARD_H_ */
