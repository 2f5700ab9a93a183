/*! \file gdn2_gates.h
 *  \brief Decay, erase and write gates of GDN2 from their projections; forward and backward.
 *
 *  Per token t, gate head h, key channel i and value channel j:
 *      x = f[t,h,i] + dt_bias[h,i],  r = exp(A_log[h])
 *      g[t,h,i]     = -r * softplus(x)                  GDN2_DECAY_SOFTPLUS
 *      g[t,h,i]     = lower_bound * sigmoid(r * x)      GDN2_DECAY_BOUNDED
 *      erase[t,h,i] = erase_scale * sigmoid(b[t,h,i])
 *      write[t,j]   = sigmoid(w[t,j])
 *  softplus(x) is x above 20, log1p(exp(x)) else. A_log and dt_bias belong to the gate heads.
 *
 *  Backward, with s = sigmoid:
 *      d_f = -r * softplus'(x) * d_g                               softplus' is exactly 1 above 20
 *      d_f = lower_bound * s(r x) * (1 - s(r x)) * r * d_g         bounded
 *      d_dt_bias[h,i] = sum_t d_f
 *      d_a_log[h]     = sum_{t,i} d_g * g                          softplus
 *      d_a_log[h]     = sum_{t,i} d_f * x                          bounded
 *      d_b = d_erase * erase_scale * s(b) * (1 - s(b)),  d_w = d_write * s(w) * (1 - s(w))
 *  Nothing but the forward's inputs is saved. Sums have one order that depends on the shape alone,
 *  without atomics: repeats are bit-equal. Backward outputs are overwritten, not added to. No
 *  output may overlap an input or another output.
 *
 *  FP32 arithmetic (REF: FP64), one rounding on the store. Back ends: REF, CPU and CUDA. Only the
 *  backward on CUDA needs a workspace, for the partial sums over tokens.
 *
 *  Source: flash-linear-attention, fla/ops/gdn2; Megatron-LM,
 *  megatron/core/ssm/gated_delta_net/gdn2.py.
 */
#ifndef GDN_KERNELS_GDN2_GATES_H_
#define GDN_KERNELS_GDN2_GATES_H_

#include "gdn/kernels/types.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum gdn2_decay {
  GDN2_DECAY_SOFTPLUS = 0, /*!< Unbounded below. */
  GDN2_DECAY_BOUNDED = 1,  /*!< g in [lower_bound, 0]. */
} gdn2_decay;

typedef struct gdn2_gates_args {
  int64_t tokens;         /*!< T >= 0; with 0 the two sums are zeros. */
  int64_t gate_heads;     /*!< G >= 1: heads of g and erase. Backward: <= 65536. */
  int64_t key_dim;        /*!< K >= 1. */
  int64_t write_width;    /*!< HV*V >= 1. */
  const void* f;          /*!< [in] [T, G*K] decay projection, channels dense. */
  const void* b;          /*!< [in] [T, G*K] erase projection. */
  const void* w;          /*!< [in] [T, HV*V] write projection. */
  gdn_dtype fbw_dtype;    /*!< Type of f, b and w. */
  int64_t f_token_stride; /*!< >= G*K; f, b, w may be columns of one projection. */
  int64_t b_token_stride; /*!< >= G*K. */
  int64_t w_token_stride; /*!< >= HV*V. */
  gdn2_decay decay;
  float lower_bound;    /*!< In [-5, 0) with GDN2_DECAY_BOUNDED; else not read. */
  const float* a_log;   /*!< [in] [G], or NULL with GDN2_DECAY_BOUNDED only: zeros. */
  const float* dt_bias; /*!< [in] [G*K], or NULL: zeros. */
  float erase_scale;    /*!< 1, or 2 where negative eigenvalues are allowed. */
  float* g;             /*!< [out] [T, G, K] dense, log decay, <= 0. */
  void* erase;          /*!< [out] [T, G, K] dense. */
  void* write;          /*!< [out] [T, HV*V] dense. */
  gdn_dtype gate_dtype; /*!< Type of erase and write. */
} gdn2_gates_args;

typedef struct gdn2_gates_backward_args {
  gdn2_gates_args forward; /*!< Its inputs; g, erase, write and gate_dtype are not read. */
  const float* d_g;        /*!< [in] [T, G, K] dense. */
  const float* d_erase;    /*!< [in] [T, G, K] dense. */
  const float* d_write;    /*!< [in] [T, HV*V] dense. */
  void* d_f;               /*!< [out] [T, G*K] dense, type of f, as are the two below. */
  void* d_b;               /*!< [out] [T, G*K] dense. */
  void* d_w;               /*!< [out] [T, HV*V] dense. */
  float* d_a_log;          /*!< [out] [G], or NULL: not wanted. */
  float* d_dt_bias;        /*!< [out] [G*K], or NULL: not wanted. */
} gdn2_gates_backward_args;

gdn_status gdn_gdn2_gates(const gdn_exec* exec, const gdn2_gates_args* args);
gdn_status gdn_gdn2_gates_backward(const gdn_exec* exec, const gdn2_gates_backward_args* args);
/*! \brief Scratch bytes of the call above. The pointers in args are not read. */
gdn_status gdn_gdn2_gates_backward_workspace(const gdn_exec* exec,
                                             const gdn2_gates_backward_args* args, size_t* bytes);

#ifdef __cplusplus
} /* extern "C" */
namespace gdn::ref {
gdn_status Gdn2Gates(const gdn_exec&, const gdn2_gates_args&);
gdn_status Gdn2GatesBackward(const gdn_exec&, const gdn2_gates_backward_args&);
}  // namespace gdn::ref
namespace gdn::cpu {
gdn_status Gdn2Gates(const gdn_exec&, const gdn2_gates_args&);
gdn_status Gdn2GatesBackward(const gdn_exec&, const gdn2_gates_backward_args&);
}  // namespace gdn::cpu
namespace gdn::cuda {
gdn_status Gdn2Gates(const gdn_exec&, const gdn2_gates_args&);
gdn_status Gdn2GatesBackward(const gdn_exec&, const gdn2_gates_backward_args&);
size_t Gdn2GatesBackwardWorkspace(const gdn2_gates_backward_args&);
}  // namespace gdn::cuda
#endif
#endif /* GDN_KERNELS_GDN2_GATES_H_ */
