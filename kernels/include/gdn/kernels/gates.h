/*! \file gates.h
 *  \brief Decay and write strength of the gated delta rule from their projections.
 *
 *  g[t,h]    = -exp(A_log[h]) * softplus(a[t,h] + dt_bias[h])     (log decay, <= 0)
 *  beta[t,h] = beta_scale * sigmoid(b[t,h])
 *
 *  softplus(x) is x above 20, log1p(exp(x)) else, so no input overflows. FP32 throughout (REF:
 * FP64). Source: transformers, modeling_qwen3_5.py; flash-linear-attention,
 *  fla/ops/gated_delta_rule/gate.py.
 */
#ifndef GDN_KERNELS_GATES_H_
#define GDN_KERNELS_GATES_H_

#include "gdn/kernels/types.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct gdn_gates_args {
  int64_t tokens;      /*!< T >= 0. */
  int64_t value_heads; /*!< HV >= 1. */
  const void* a;       /*!< [in] [T, HV] decay projection, heads dense. */
  const void* b;       /*!< [in] [T, HV] write projection, heads dense. */
  gdn_dtype dtype;     /*!< Type of a and b. */
  int64_t a_token_stride;
  int64_t b_token_stride;
  const float* a_log;   /*!< [in] [HV]. */
  const float* dt_bias; /*!< [in] [HV]. */
  float beta_scale;     /*!< 1, or 2 where negative eigenvalues are allowed. */
  float* g;             /*!< [out] [T, HV] dense. */
  float* beta;          /*!< [out] [T, HV] dense. */
} gdn_gates_args;

gdn_status gdn_gates(const gdn_exec* exec, const gdn_gates_args* args);

#ifdef __cplusplus
} /* extern "C" */
namespace gdn::ref {
gdn_status Gates(const gdn_exec&, const gdn_gates_args&);
}
namespace gdn::cpu {
gdn_status Gates(const gdn_exec&, const gdn_gates_args&);
}
namespace gdn::cuda {
gdn_status Gates(const gdn_exec&, const gdn_gates_args&);
}
#endif
#endif /* GDN_KERNELS_GATES_H_ */
