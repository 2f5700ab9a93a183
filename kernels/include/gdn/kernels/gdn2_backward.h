/*! \file gdn2_backward.h
 *  \brief Gradients of GDN2.
 *
 *  Per value head, t downwards, dS starting as d_final_state; S[t-1] is the state before token t,
 *  S1 = S[t-1] diag(exp(g)), u = write * v - S1 (erase * k), S[t] = S1 + u k^T (states [V][K]):
 *      dq_hat += scale * S[t]^T d_o            dS += scale * d_o q^T
 *      du      = dS k                          d_write = du * v         d_v = du * write
 *      m       = -S1^T du                      d_erase += m * k
 *      dk_hat += dS^T u + m * erase            dS -= du (erase * k)^T
 *      d_g[i] += exp(g[i]) <dS[:,i], S[t-1][:,i]>       dS <- dS diag(exp(g))
 *  and at the end d_initial_state = dS. dq_hat and dk_hat sum over the value heads of a key head,
 *  d_g and d_erase over those of a gate head, in their order. use_qk_l2norm, the saved q_hat, k_hat
 *  and rstd, types, boundaries and determinism: as in delta_rule_backward.h. The gates' own
 *  gradients: gdn2_gates.h.
 *
 *  Back ends: REF, CPU and CUDA. On CUDA cu_seqlens is only read on the device.
 */
#ifndef GDN_KERNELS_GDN2_BACKWARD_H_
#define GDN_KERNELS_GDN2_BACKWARD_H_

#include "gdn/kernels/types.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct gdn2_backward_args {
  int64_t tokens;            /*!< T >= cu_seqlens[N]: sizes the workspace. */
  int64_t sequences;         /*!< N >= 0. */
  const int32_t* cu_seqlens; /*!< [in] [N+1], non-decreasing from 0. */
  int64_t key_heads;         /*!< H >= 1. */
  int64_t value_heads;       /*!< HV, a multiple of H, HV/H in 1..8. */
  int64_t gate_heads;        /*!< G: H or HV. */
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
  const float* g;             /*!< [in] [T, G, K] dense, log decay. */
  const void* erase;          /*!< [in] [T, G, K] dense. */
  const void* write;          /*!< [in] [T, HV, V] dense. */
  gdn_dtype gate_dtype;       /*!< Type of erase and write. */
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
  float* d_g;               /*!< [out] [T, G, K] dense. */
  float* d_erase;           /*!< [out] [T, G, K] dense. */
  float* d_write;           /*!< [out] [T, HV, V] dense. */
  float* d_initial_state;   /*!< [out] [N, HV, V, K] dense, or NULL: not wanted. */
} gdn2_backward_args;

gdn_status gdn_gdn2_backward(const gdn_exec* exec, const gdn2_backward_args* args);
/*! \brief Scratch bytes of the call above; the pointers in args are not read. */
gdn_status gdn_gdn2_backward_workspace(const gdn_exec* exec, const gdn2_backward_args* args,
                                       size_t* bytes);

#ifdef __cplusplus
} /* extern "C" */
namespace gdn::ref {
gdn_status Gdn2Backward(const gdn_exec&, const gdn2_backward_args&);
size_t Gdn2BackwardWorkspace(const gdn2_backward_args&);
}  // namespace gdn::ref
namespace gdn::cpu {
gdn_status Gdn2Backward(const gdn_exec&, const gdn2_backward_args&);
size_t Gdn2BackwardWorkspace(const gdn_exec&, const gdn2_backward_args&);
}  // namespace gdn::cpu
namespace gdn::cuda {
gdn_status Gdn2Backward(const gdn_exec&, const gdn2_backward_args&);
size_t Gdn2BackwardWorkspace(const gdn2_backward_args&);
}  // namespace gdn::cuda
#endif
#endif /* GDN_KERNELS_GDN2_BACKWARD_H_ */
