/*! \file gated_rms_norm_training.h
 *  \brief Gated RMSNorm for training: forward that saves rstd, backward, optional FP8 output.
 *
 *  Rows are the [batch, seq, heads] of a [batch, seq, heads, dim] view; D = dim.
 *
 *  Forward, per row:
 *      rstd  = 1 / sqrt(mean(x^2) + eps)
 *      w     = gamma, or 1 + gamma if zero_centered_gamma      the 1 is added in FP32
 *      n     = round((x * rstd) * w)                           to the type of x: rounding point 1
 *      y     = round(n * act(gate))                            to the type of x
 *      act   = SiLU or sigmoid
 *  Backward, per row, from the saved rstd; s = sigmoid(gate):
 *      dn     = round(dy * act(gate))                          to the type of x: rounding point 2
 *      dgate  = (dy * n) * act'(gate)                          n rounded as above; gate's type
 *      act'   = s * (1 + gate * (1 - s)) or s * (1 - s)
 *      c      = mean(dn * w * x * rstd)
 *      dx     = rstd * (dn * w - x * rstd * c)                 type of x
 *      dgamma = sum over all rows of dn * x * rstd             FP32, then gamma's type
 *  Everything between the rounding points is FP32 (REF: FP64). With FP32 x they round nothing.
 *
 *  The bits of dgamma depend on the arguments alone: rows are summed in a number of partial rows
 *  that follows from the extents, and these in order; no atomics, whatever the threads or the
 *  device. With eps 0 an all-zero row has rstd 0 and y 0.
 *
 *  Types: x any; gate that of x, or FP32; gamma any, independent of x.
 *  Pointers need the alignment of their element and no more (2 bytes for 16-bit types).
 *  Outputs are dense. No output may overlap an input or another output; inputs may overlap. A gate
 *  that is broadcast (stride 0) still has a dgate of full size: the sum over the broadcast axis is
 *  the caller's.
 *
 *  Statuses: GDN_UNSUPPORTED_SHAPE for D above 8192, or above or below 128 with GDN_FP8_ROW;
 *  GDN_UNSUPPORTED_TYPE for a gate of the other 16-bit type. Zero rows succeed: amax and dgamma,
 *  where given, become 0.
 *
 *  CUDA: any layout gives the bits of the dense one. Fastest are 16-bit x with D = 32 (forward),
 * 64, 128 or 256, elements next to each other and every row on 16 bytes (y with FP8: on 8); rows of
 *  inputs on 8 bytes come next, but for FP8. All else takes slower kernels.
 *
 *  Serving uses gdn_gated_rms_norm, whose y has the same bits on the CPU with round_before_gate,
 *  for eps > 0 and gates above -1e4. Sources: Megatron-LM, megatron/core (fused gated norm);
 *  TransformerEngine, issue 3724.
 */
#ifndef GDN_KERNELS_GATED_RMS_NORM_TRAINING_H_
#define GDN_KERNELS_GATED_RMS_NORM_TRAINING_H_

#include "gdn/kernels/gated_rms_norm.h"
#include "gdn/kernels/types.h"

#ifdef __cplusplus
extern "C" {
#endif

/*! \brief Elements between neighbours along each axis of a [batch, seq, heads, dim] view: >= 0,
 *  0 broadcasts. The stride of an axis of extent 1 is not used. */
typedef struct gdn_row_strides {
  int64_t batch;
  int64_t seq;
  int64_t head;
  int64_t element;
} gdn_row_strides;

/*! \brief What forward and backward read alike. */
typedef struct gdn_gated_rms_norm_input {
  int64_t batch; /*!< >= 0. */
  int64_t seq;   /*!< >= 0. */
  int64_t heads; /*!< >= 1. */
  int64_t dim;   /*!< D in 1..8192. */
  const void* x; /*!< [in] [batch, seq, heads, D] through x_strides. */
  gdn_dtype x_dtype;
  gdn_row_strides x_strides;
  const void* gate;     /*!< [in] [batch, seq, heads, D] through gate_strides. */
  gdn_dtype gate_dtype; /*!< x_dtype or GDN_F32. */
  gdn_row_strides gate_strides;
  const void* gamma; /*!< [in] [D] dense, shared by all heads. */
  gdn_dtype gamma_dtype;
  int32_t zero_centered_gamma; /*!< Non-zero: the multiplier is 1 + gamma. */
  gdn_gate_activation activation;
} gdn_gated_rms_norm_input;

/*! \brief Whether y is quantised to FP8. E4M3 here is the OCP type: largest value 448, no infinity.
 *  A product beyond it saturates (an infinite one too), a NaN stays NaN (0x7f). */
typedef enum gdn_fp8_scaling {
  GDN_FP8_NONE = 0,
  GDN_FP8_ROW = 1,   /*!< One scale per row; D must be 128. */
  GDN_FP8_STATIC = 2 /*!< One scale, given by the caller. */
} gdn_fp8_scaling;

typedef struct gdn_gated_rms_norm_forward_args {
  gdn_gated_rms_norm_input in;
  float eps;   /*!< >= 0, finite; added to the mean inside the root. */
  void* y;     /*!< [out] [rows, D] dense: type of x, or E4M3 bytes with FP8. */
  float* rstd; /*!< [out] [rows] for the backward pass, or NULL. */
  /*! With FP8, y is first rounded to the type of x (the unquantised result), then
   *    ROW:    a = max(max|y| of the row, 2^-117)    y8 = e4m3(y * (448 / a))   scale_inv = a / 448
   *    STATIC: y8 = e4m3(y * fp8_scale)                                  scale_inv = 1 / fp8_scale
   *  so that y is about y8 * scale_inv. The floor keeps the scale of a row of zeros finite. */
  gdn_fp8_scaling fp8;
  const float* fp8_scale; /*!< [in] [1] for STATIC, else ignored. */
  float* fp8_scale_inv;   /*!< [out] [rows] for ROW, [1] or NULL for STATIC, else ignored. */
  float* amax; /*!< [out] [1] largest |y| after rounding to the type of x, before any scale; NaN if
                  a y is NaN. Overwritten, not accumulated. Or NULL. */
} gdn_gated_rms_norm_forward_args;

typedef struct gdn_gated_rms_norm_backward_args {
  gdn_gated_rms_norm_input in;
  const float* rstd; /*!< [in] [rows] as the forward saved it. */
  const void* dy;    /*!< [in] [batch, seq, heads, D] through dy_strides, type of x. */
  gdn_row_strides dy_strides;
  void* dx;     /*!< [out] [rows, D] dense, type of x. */
  void* dgate;  /*!< [out] [rows, D] dense, type of gate. */
  void* dgamma; /*!< [out] [D], type of gamma. */
} gdn_gated_rms_norm_backward_args;

/*! \brief Forward. Needs no workspace. */
gdn_status gdn_gated_rms_norm_forward(const gdn_exec* exec,
                                      const gdn_gated_rms_norm_forward_args* args);

/*! \brief Bytes of exec.workspace that the backward needs: the partial rows of dgamma. Reads the
 *  extents alone; pointers and strides may be unset. */
gdn_status gdn_gated_rms_norm_backward_workspace(const gdn_exec* exec,
                                                 const gdn_gated_rms_norm_backward_args* args,
                                                 size_t* bytes);

/*! \brief Backward. */
gdn_status gdn_gated_rms_norm_backward(const gdn_exec* exec,
                                       const gdn_gated_rms_norm_backward_args* args);

#ifdef __cplusplus
} /* extern "C" */
namespace gdn::ref {
gdn_status GatedRmsNormForward(const gdn_exec&, const gdn_gated_rms_norm_forward_args&);
gdn_status GatedRmsNormBackward(const gdn_exec&, const gdn_gated_rms_norm_backward_args&);
}  // namespace gdn::ref
namespace gdn::cpu {
gdn_status GatedRmsNormForward(const gdn_exec&, const gdn_gated_rms_norm_forward_args&);
size_t GatedRmsNormBackwardWorkspace(const gdn_gated_rms_norm_backward_args&);
gdn_status GatedRmsNormBackward(const gdn_exec&, const gdn_gated_rms_norm_backward_args&);
}  // namespace gdn::cpu
namespace gdn::cuda {
gdn_status GatedRmsNormForward(const gdn_exec&, const gdn_gated_rms_norm_forward_args&);
size_t GatedRmsNormBackwardWorkspace(const gdn_gated_rms_norm_backward_args&);
gdn_status GatedRmsNormBackward(const gdn_exec&, const gdn_gated_rms_norm_backward_args&);
}  // namespace gdn::cuda
#endif
#endif /* GDN_KERNELS_GATED_RMS_NORM_TRAINING_H_ */
