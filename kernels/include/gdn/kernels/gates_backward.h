/*! \file gates_backward.h
 *  \brief Gradients of the decay and write-strength gates of the gated delta rule.
 *
 *  Forward: g = -exp(A_log[h]) * softplus(x),  x = a + dt_bias[h];  beta = beta_scale * sigmoid(b).
 *  Backward:
 *      d_a[t,h]     = -exp(A_log[h]) * softplus'(x) * d_g[t,h]
 *      d_b[t,h]     = d_beta[t,h] * beta_scale * s * (1 - s),  s = sigmoid(b)
 *      d_dt_bias[h] = sum_t d_a[t,h]
 *      d_a_log[h]   = sum_t d_g[t,h] * g[t,h]
 *  softplus'(x) is exactly 1 above 20, where softplus(x) is x, and sigmoid(x) else. g is computed
 *  again, so the forward saves nothing but its inputs. d_dt_bias sums the unrounded d_a.
 *
 *  FP32 (REF: FP64), one rounding on the store. Sums over tokens have a fixed order that depends on
 *  T alone, without atomics: repeats are bit-equal. Outputs are overwritten, not added to; none may
 *  overlap an input or another output.
 *
 *  Back ends: REF, CPU, CUDA.
 */
#ifndef GDN_KERNELS_GATES_BACKWARD_H_
#define GDN_KERNELS_GATES_BACKWARD_H_

#include "gdn/kernels/types.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct gdn_gates_backward_args {
  int64_t tokens;         /*!< T >= 0; with 0 the two sums are zeros. */
  int64_t value_heads;    /*!< HV in 1..65536. */
  const void* a;          /*!< [in] [T, HV] decay projection, heads dense. */
  const void* b;          /*!< [in] [T, HV] write projection, heads dense. */
  gdn_dtype dtype;        /*!< Type of a, b, d_a and d_b. */
  int64_t a_token_stride; /*!< >= HV, as the three below. */
  int64_t b_token_stride;
  const float* a_log;   /*!< [in] [HV]. */
  const float* dt_bias; /*!< [in] [HV]. */
  float beta_scale;     /*!< That of the forward: 1, or 2 with negative eigenvalues. */
  const float* d_g;     /*!< [in] [T, HV] dense. */
  const float* d_beta;  /*!< [in] [T, HV] dense. */
  void* d_a;            /*!< [out] [T, HV], heads dense. */
  void* d_b;            /*!< [out] [T, HV], heads dense. */
  int64_t d_a_token_stride;
  int64_t d_b_token_stride;
  float* d_a_log;   /*!< [out] [HV]. */
  float* d_dt_bias; /*!< [out] [HV]. */
} gdn_gates_backward_args;

gdn_status gdn_gates_backward(const gdn_exec* exec, const gdn_gates_backward_args* args);
/*! \brief Scratch bytes of the call above: partial sums. The pointers in args are not read. */
gdn_status gdn_gates_backward_workspace(const gdn_exec* exec, const gdn_gates_backward_args* args,
                                        size_t* bytes);

#ifdef __cplusplus
} /* extern "C" */
namespace gdn::ref {
gdn_status GatesBackward(const gdn_exec&, const gdn_gates_backward_args&);
}
namespace gdn::cpu {
gdn_status GatesBackward(const gdn_exec&, const gdn_gates_backward_args&);
size_t GatesBackwardWorkspace(const gdn_gates_backward_args&);
}  // namespace gdn::cpu
namespace gdn::cuda {
gdn_status GatesBackward(const gdn_exec&, const gdn_gates_backward_args&);
size_t GatesBackwardWorkspace(const gdn_gates_backward_args&);
}  // namespace gdn::cuda
#endif
#endif /* GDN_KERNELS_GATES_BACKWARD_H_ */
