/*! \file delta_rule_saved.h
 *  \brief The bytes that stay allocated between the gated delta rule's forward and its backward.
 *
 *  Counted per layer, for the three places where q and k may be normalised. Each tensor counts
 * once:
 *  - qk: the q and k that the rule ran on, [T, heads, K] each, in the activation type;
 *  - qk_rstd: with the kernel's norm, one FP32 per token, head and tensor;
 *  - v, g (FP32), beta (FP32), the chunk inverse [T, HV, chunk] in the activation type, the initial
 *    state in FP32, cu_seqlens;
 *  - caller_rstd: with the caller's norm, the FP32 [T, 2*H] that its backward needs;
 *  - caller_qk: with the caller's norm, its output [T, 2*H, K], where the rule does not read that
 *    tensor itself: where q and k are split off and replicated to HV heads before the rule. Without
 *    replication the rule reads it through strides and it is counted as qk.
 *  heads is HV with replicated_heads, else H.
 */
#ifndef GDN_KERNELS_DELTA_RULE_SAVED_H_
#define GDN_KERNELS_DELTA_RULE_SAVED_H_

#include "gdn/kernels/types.h"

#ifdef __cplusplus
extern "C" {
#endif

/*! \brief Where q and k are normalised: exactly once, or not at all. */
typedef enum gdn_saved_route {
  GDN_SAVED_NO_NORM = 0,
  GDN_SAVED_CALLER_NORM = 1,
  GDN_SAVED_KERNEL_NORM = 2,
} gdn_saved_route;

typedef struct gdn_delta_rule_saved_args {
  int64_t tokens;      /*!< T >= 0. */
  int64_t sequences;   /*!< N >= 0. */
  int64_t key_heads;   /*!< H >= 1. */
  int64_t value_heads; /*!< HV, a multiple of H. */
  int64_t key_dim;     /*!< K >= 1. */
  int64_t value_dim;   /*!< V >= 1. */
  gdn_dtype dtype;     /*!< Activation type. */
  gdn_saved_route route;
  int32_t replicated_heads; /*!< Non-zero: q and k are copied to HV heads before the rule. */
  int32_t initial_state;    /*!< Non-zero: there is one. */
  int64_t chunk;            /*!< Columns of a saved chunk inverse; 0: it is computed again. */
} gdn_delta_rule_saved_args;

typedef struct gdn_delta_rule_saved_bytes_result {
  int64_t qk;
  int64_t qk_rstd;
  int64_t v;
  int64_t g;
  int64_t beta;
  int64_t chunk_inverse;
  int64_t initial_state;
  int64_t cu_seqlens;
  int64_t caller_qk;
  int64_t caller_rstd;
  int64_t total;
} gdn_delta_rule_saved_bytes_result;

/*! \brief Arithmetic only; no device is needed. \param[out] bytes  Written on GDN_OK. */
gdn_status gdn_delta_rule_saved_bytes(const gdn_delta_rule_saved_args* args,
                                      gdn_delta_rule_saved_bytes_result* bytes);

#ifdef __cplusplus
} /* extern "C" */
#endif
#endif /* GDN_KERNELS_DELTA_RULE_SAVED_H_ */
