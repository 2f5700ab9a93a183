/*! \file l2_norm_backward.h
 *  \brief Backward of gdn_l2_norm, from what its forward saved.
 *
 *  With the forward y = scale * x * rstd, rstd = 1 / sqrt(sum(x^2) + eps):
 *      c  = sum(y * dy) / scale
 *      dx = rstd * (scale * dy - y * c)
 *  accumulated in FP32 (REF: FP64). eps enters through rstd alone, and x is not needed. A row of
 *  zeros has y 0: its dx is rstd * scale * dy, finite, and 0 if eps was 0 (rstd is then 0).
 *
 *  Key heads that a caller replicated before the norm have one dx each: their sum is the caller's.
 *
 *  Every type of y, dy and dx, in any combination. CUDA is fastest with one 16-bit type, dim 64,
 *  128 or 256, and rows on 16 bytes. Source: flash-linear-attention, fla/modules/l2norm.py.
 */
#ifndef GDN_KERNELS_L2_NORM_BACKWARD_H_
#define GDN_KERNELS_L2_NORM_BACKWARD_H_

#include "gdn/kernels/types.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct gdn_l2_norm_backward_args {
  int64_t rows;  /*!< >= 0. */
  int64_t dim;   /*!< >= 1. */
  const void* y; /*!< [in] [rows, dim] the forward's output, last dimension dense. */
  gdn_dtype y_dtype;
  int64_t y_row_stride; /*!< Elements between rows, >= dim. */
  const float* rstd;    /*!< [in] [rows] dense, as the forward saved it. */
  const void* dy;       /*!< [in] [rows, dim]. */
  gdn_dtype dy_dtype;
  int64_t dy_row_stride;
  void* dx; /*!< [out] [rows, dim]; may be dy itself if type and stride agree, overlaps nothing
               else. */
  gdn_dtype dx_dtype;
  int64_t dx_row_stride;
  float scale; /*!< That of the forward: finite, not 0. */
} gdn_l2_norm_backward_args;

/*! \brief Needs no workspace. */
gdn_status gdn_l2_norm_backward(const gdn_exec* exec, const gdn_l2_norm_backward_args* args);

#ifdef __cplusplus
} /* extern "C" */
namespace gdn::ref {
gdn_status L2NormBackward(const gdn_exec&, const gdn_l2_norm_backward_args&);
}
namespace gdn::cpu {
gdn_status L2NormBackward(const gdn_exec&, const gdn_l2_norm_backward_args&);
}
namespace gdn::cuda {
gdn_status L2NormBackward(const gdn_exec&, const gdn_l2_norm_backward_args&);
}
#endif
#endif /* GDN_KERNELS_L2_NORM_BACKWARD_H_ */
