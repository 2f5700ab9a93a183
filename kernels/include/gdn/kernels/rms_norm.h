/*! \file rms_norm.h
 *  \brief RMSNorm over the last dimension.
 *
 *  y = x * rsqrt(mean(x^2) + eps) * w       w = weight, or 1 + weight if zero_centered
 *
 *  FP32 statistics and products (REF: FP64). Source: transformers, Qwen3_5RMSNorm.
 */
#ifndef GDN_KERNELS_RMS_NORM_H_
#define GDN_KERNELS_RMS_NORM_H_

#include "gdn/kernels/types.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct gdn_rms_norm_args {
  int64_t rows;  /*!< >= 0. */
  int64_t dim;   /*!< >= 1. */
  const void* x; /*!< [in] [rows, dim], last dimension dense. */
  gdn_dtype x_dtype;
  int64_t x_row_stride;
  const float* weight;   /*!< [in] [dim]. */
  int32_t zero_centered; /*!< Non-zero: the multiplier is 1 + weight. */
  float eps;             /*!< >= 0. */
  void* y;               /*!< [out] [rows, dim]; may be x itself. */
  gdn_dtype y_dtype;
  int64_t y_row_stride;
} gdn_rms_norm_args;

gdn_status gdn_rms_norm(const gdn_exec* exec, const gdn_rms_norm_args* args);

#ifdef __cplusplus
} /* extern "C" */
namespace gdn::ref {
gdn_status RmsNorm(const gdn_exec&, const gdn_rms_norm_args&);
}
namespace gdn::cpu {
gdn_status RmsNorm(const gdn_exec&, const gdn_rms_norm_args&);
}
namespace gdn::cuda {
gdn_status RmsNorm(const gdn_exec&, const gdn_rms_norm_args&);
}
#endif
#endif /* GDN_KERNELS_RMS_NORM_H_ */
