/*! \file l2_norm.h
 *  \brief Stand-alone L2 normalisation over the last dimension.
 *
 *  y = scale * x * rsqrt(sum(x^2) + eps), accumulated in FP32 (REF: FP64).
 *
 *  eps is added to the sum, inside the root: an all-zero row gives exactly 0. GDN layers do not
 *  call this op, since the delta rule normalises q and k itself (use_qk_l2norm in delta_rule.h);
 *  callers whose kernel flag is false (GDN2) do. Source: flash-linear-attention,
 *  fla/modules/l2norm.py.
 */
#ifndef GDN_KERNELS_L2_NORM_H_
#define GDN_KERNELS_L2_NORM_H_

#include "gdn/kernels/types.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct gdn_l2_norm_args {
  int64_t rows;  /*!< Number of rows, >= 0. */
  int64_t dim;   /*!< Length of a row, >= 1. */
  const void* x; /*!< [in] [rows, dim], last dimension dense. */
  gdn_dtype x_dtype;
  int64_t x_row_stride; /*!< Elements between rows, >= dim. */
  void* y;              /*!< [out] [rows, dim]; may be x itself. */
  gdn_dtype y_dtype;
  int64_t y_row_stride;
  float* rstd; /*!< [out] [rows] rsqrt(sum(x^2) + eps) for a backward pass, or NULL. */
  float eps;   /*!< >= 0; the published models use 1e-6. */
  float scale; /*!< Applied after the normalisation; 1 for none. */
  /*! 0: one run of rows. Else rows come in groups of so many, as heads of tokens do: the row
   * strides hold within a group, the group strides between the first rows of two. */
  int64_t group_rows;
  int64_t x_group_stride; /*!< >= group_rows * x_row_stride; not read without groups. */
  int64_t y_group_stride;
} gdn_l2_norm_args;

gdn_status gdn_l2_norm(const gdn_exec* exec, const gdn_l2_norm_args* args);

#ifdef __cplusplus
} /* extern "C" */
namespace gdn::ref {
gdn_status L2Norm(const gdn_exec&, const gdn_l2_norm_args&);
}
namespace gdn::cpu {
gdn_status L2Norm(const gdn_exec&, const gdn_l2_norm_args&);
}
namespace gdn::cuda {
gdn_status L2Norm(const gdn_exec&, const gdn_l2_norm_args&);
}
#endif
#endif /* GDN_KERNELS_L2_NORM_H_ */
