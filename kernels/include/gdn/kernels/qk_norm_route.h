/*! \file qk_norm_route.h
 *  \brief Where the L2 norm of q and k happens: in the caller or in the delta-rule kernel.
 *
 *  | variant | use_qk_l2norm | defer_to_kernel | normalize_in_caller | use_qk_l2norm_in_kernel |
 *  |---------|---------------|-----------------|---------------------|-------------------------|
 *  | GDN     | 1             | 1               | 0                   | 1                       |
 *  | GDN     | 0             | 1               | 0                   | 0                       |
 *  | GDN2    | 1             | 0               | 1                   | 0                       |
 *  | GDN2    | 0             | 0               | 0                   | 0                       |
 *
 *  Exactly one place normalises if the layer's use_qk_l2norm is on, and none if it is off. Twice
 *  would hardly show in the values, since a unit vector stays one; hence this one decision for both
 *  layers. Source: Megatron-LM, pull request 5396.
 */
#ifndef GDN_KERNELS_QK_NORM_ROUTE_H_
#define GDN_KERNELS_QK_NORM_ROUTE_H_

#include "gdn/kernels/types.h"

#ifdef __cplusplus
extern "C" {
#endif

/*! \brief eps of both places, added to the sum inside the root. */
#define GDN_QK_L2NORM_EPS 1e-6f

typedef enum gdn_rule_variant { GDN_RULE_GDN = 0, GDN_RULE_GDN2 = 1 } gdn_rule_variant;

typedef struct gdn_qk_norm_route {
  int32_t defer_to_kernel;         /*!< The preparation of q and k leaves the norm to the kernel. */
  int32_t normalize_in_caller;     /*!< The preparation normalises. */
  int32_t use_qk_l2norm_in_kernel; /*!< The flag for the rule: gdn_delta_rule_args.use_qk_l2norm. */
} gdn_qk_norm_route;

/*! \brief The route of a layer. Pure; \param[out] route  untouched if the variant is unknown. */
gdn_status gdn_qk_norm_route_of(gdn_rule_variant variant, int32_t use_qk_l2norm,
                                gdn_qk_norm_route* route);

typedef struct gdn_qk_norm_prepare_args {
  gdn_rule_variant variant;
  int32_t use_qk_l2norm; /*!< The layer's option; 0: q and k keep their bits. */
  int64_t tokens;        /*!< T >= 0. */
  int64_t vectors;       /*!< >= 1: vectors a token, normally 2 * H, q's heads beside k's. */
  int64_t key_dim;       /*!< K >= 1. */
  void* qk;              /*!< [in,out] [T, vectors, K], vectors and elements dense. */
  gdn_dtype dtype;
  int64_t token_stride; /*!< >= vectors * K. */
  float* rstd; /*!< [out] [T, vectors] for gdn_l2_norm_backward, or NULL; only where the route
                    normalises in the caller, else untouched. */
} gdn_qk_norm_prepare_args;

/*! \brief Takes the caller's side of the route on q and k, in place, with gdn_l2_norm on every back
 *  end that has it, and reports the route. \param[out] route  host memory. */
gdn_status gdn_qk_norm_prepare(const gdn_exec* exec, const gdn_qk_norm_prepare_args* args,
                               gdn_qk_norm_route* route);

#ifdef __cplusplus
} /* extern "C" */
#endif
#endif /* GDN_KERNELS_QK_NORM_ROUTE_H_ */
