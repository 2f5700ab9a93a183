/*! \file silu_mul.h
 *  \brief The activation of the SiLU-gated MLP: y = silu(gate) * up, in FP32 (REF: FP64).
 *
 *  gate and up are usually the two halves of one projection [rows, 2*dim].
 */
#ifndef GDN_KERNELS_SILU_MUL_H_
#define GDN_KERNELS_SILU_MUL_H_

#include "gdn/kernels/types.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct gdn_silu_mul_args {
  int64_t rows;       /*!< >= 0. */
  int64_t dim;        /*!< >= 1. */
  const void* gate;   /*!< [in] [rows, dim], last dimension dense. */
  const void* up;     /*!< [in] [rows, dim]. */
  gdn_dtype dtype;    /*!< Type of gate and up. */
  int64_t row_stride; /*!< Of gate and up. */
  void* y;            /*!< [out] [rows, dim]; may be gate itself. */
  gdn_dtype y_dtype;
  int64_t y_row_stride;
} gdn_silu_mul_args;

gdn_status gdn_silu_mul(const gdn_exec* exec, const gdn_silu_mul_args* args);

#ifdef __cplusplus
} /* extern "C" */
namespace gdn::ref {
gdn_status SiluMul(const gdn_exec&, const gdn_silu_mul_args&);
}
namespace gdn::cpu {
gdn_status SiluMul(const gdn_exec&, const gdn_silu_mul_args&);
}
namespace gdn::cuda {
gdn_status SiluMul(const gdn_exec&, const gdn_silu_mul_args&);
}
#endif
#endif /* GDN_KERNELS_SILU_MUL_H_ */
