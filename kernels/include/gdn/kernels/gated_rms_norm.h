/*! \file gated_rms_norm.h
 *  \brief Gated RMSNorm over the value dimension of one head: norm before gate.
 *
 *  n = x * rsqrt(mean(x^2) + eps) * w       w = weight, or 1 + weight if zero_centered
 *  y = n * act(gate)                        act = SiLU or sigmoid
 *
 *  Statistics and products in FP32 (REF: FP64). With round_before_gate, n is rounded to the type of
 *  x before the gate product: the published contract of training stacks. Without it nothing is
 *  rounded before y. With FP32 x the two agree.
 *
 *  The weight of Qwen3-Next's and Qwen3.5's GDN norm is plain, although their other norms are
 *  zero-centred. Source: transformers, Qwen3_5RMSNormGated; flash-linear-attention,
 *  fla/modules/fused_norm_gate.py.
 */
#ifndef GDN_KERNELS_GATED_RMS_NORM_H_
#define GDN_KERNELS_GATED_RMS_NORM_H_

#include "gdn/kernels/types.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum gdn_gate_activation { GDN_GATE_SILU = 0, GDN_GATE_SIGMOID = 1 } gdn_gate_activation;

typedef struct gdn_gated_rms_norm_args {
  int64_t tokens; /*!< T >= 0. */
  int64_t heads;  /*!< HV >= 1. */
  int64_t dim;    /*!< V >= 1. */
  const void* x;  /*!< [in] [T, HV, V], last dimension dense. */
  gdn_dtype x_dtype;
  int64_t x_token_stride;
  int64_t x_head_stride;
  const void* gate; /*!< [in] [T, HV, V], last dimension dense; may be columns of a wider buffer. */
  gdn_dtype gate_dtype;
  int64_t gate_token_stride;
  int64_t gate_head_stride;
  const float* weight;   /*!< [in] [V], shared by all heads. */
  int32_t zero_centered; /*!< Non-zero: the multiplier is 1 + weight. */
  gdn_gate_activation activation;
  int32_t round_before_gate;
  float eps; /*!< >= 0, added to the mean inside the root. */
  void* y;   /*!< [out] [T, HV, V]; may be x itself if types and strides agree. */
  gdn_dtype y_dtype;
  int64_t y_token_stride;
  int64_t y_head_stride;
} gdn_gated_rms_norm_args;

gdn_status gdn_gated_rms_norm(const gdn_exec* exec, const gdn_gated_rms_norm_args* args);

#ifdef __cplusplus
} /* extern "C" */
namespace gdn::ref {
gdn_status GatedRmsNorm(const gdn_exec&, const gdn_gated_rms_norm_args&);
}
namespace gdn::cpu {
gdn_status GatedRmsNorm(const gdn_exec&, const gdn_gated_rms_norm_args&);
}
namespace gdn::cuda {
gdn_status GatedRmsNorm(const gdn_exec&, const gdn_gated_rms_norm_args&);
}
#endif
#endif /* GDN_KERNELS_GATED_RMS_NORM_H_ */
