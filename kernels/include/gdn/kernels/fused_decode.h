/*! \file fused_decode.h
 *  \brief A whole GDN decode step in one op: convolution, gates, delta rule and gated norm.
 *
 *  Equals this chain of ops, for each row and its T tokens in order, without the traffic between:
 *      q|k|v <- causal_conv(x, SiLU), rounded once to `dtype`        (causal_conv.h)
 *      g, beta <- gates(a, b)                                        (gates.h)
 *      o <- delta_rule_step(q, k, v, g, beta), S updated             (delta_rule.h)
 *      y <- gated_rms_norm(o, z)                                     (gated_rms_norm.h)
 *  Each state is read once and written once per call, whatever T is.
 *
 *  Rounding of the epilogue. By default o and the normalised n stay in FP32 and y is rounded once.
 *  With round_o, o is rounded to `dtype` before the norm; with round_before_gate, n is rounded to
 *  `dtype` before the gate product. Both together are the contract of the separate kernels with o
 *  in `dtype`; see docs/numerics.md.
 *
 *  Slots: read_index[i] < 0 or write_index[i] < 0 is a padding row; no state is touched and its
 *  output rows are written as zeros. One index addresses both pools. Read and write slot may
 *  differ: the read slot then keeps its bits. Write slots must be distinct, and none may be the
 *  read slot of another row; the op does not check this. Indices and fresh flags live on the
 *  device, so a captured CUDA graph serves other slots by changing their contents. Slot 0 is an
 *  ordinary slot.
 *
 *  A row's bits do not depend on the number of rows. No workspace is needed. CUDA: K = V = 128,
 *  W = 4 with 16-bit activations is tuned (states aligned to 16 bytes, columns and strides even);
 *  every other legal call is correct, and slower.
 */
#ifndef GDN_KERNELS_FUSED_DECODE_H_
#define GDN_KERNELS_FUSED_DECODE_H_

#include "gdn/kernels/gated_rms_norm.h"
#include "gdn/kernels/types.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct gdn_fused_decode_args {
  int64_t rows;        /*!< B >= 0. */
  int64_t tokens;      /*!< T in 1..8, tokens per row. */
  int64_t key_heads;   /*!< H >= 1. */
  int64_t value_heads; /*!< HV, a multiple of H, HV/H in 1..8. */
  int64_t key_dim;     /*!< K in 1..256. */
  int64_t value_dim;   /*!< V in 1..512. */
  int64_t conv_width;  /*!< W in 2..8. */

  const void* x;          /*!< [in] The layer's projections, line i*T + t: token t of row i. */
  gdn_dtype dtype;        /*!< Type of x, conv_state and y. */
  int64_t x_token_stride; /*!< Elements between lines. */
  int64_t q_offset;       /*!< Column of q, [H, K] dense; all offsets in elements, >= 0. */
  int64_t k_offset;       /*!< Column of k, [H, K]. */
  int64_t v_offset;       /*!< Column of v, [HV, V]. */
  int64_t z_offset;       /*!< Column of the output gate z, [HV, V]. */
  int64_t b_offset;       /*!< Column of b (write strength), [HV]. */
  int64_t a_offset;       /*!< Column of a (decay), [HV]. */

  const float* conv_weight; /*!< [in] [C, W] dense, channels q|k|v, C = 2*H*K + HV*V. */
  const float* a_log;       /*!< [in] [HV]. */
  const float* dt_bias;     /*!< [in] [HV]. */
  float beta_scale;         /*!< 1, or 2 where negative eigenvalues are allowed. */
  float scale;              /*!< Applied to q after its norm; 0 means K^-1/2. */
  int32_t use_qk_l2norm;    /*!< Non-zero: normalise q and k here. */

  const float* norm_weight; /*!< [in] [V], shared by all heads. */
  int32_t zero_centered;    /*!< Non-zero: the multiplier is 1 + norm_weight. */
  gdn_gate_activation activation;
  int32_t round_o;           /*!< Non-zero: round o to `dtype` before the norm. */
  int32_t round_before_gate; /*!< Non-zero: round n to `dtype` before the gate product. */
  float eps;                 /*!< >= 0, added to the mean inside the root. */

  void* state;                /*!< [in,out] [slot][HV][V][K], K contiguous. */
  gdn_dtype state_dtype;      /*!< GDN_F32 or GDN_BF16; FP32 in arithmetic. */
  int64_t state_slot_stride;  /*!< Elements between slots, >= HV*V*K. */
  void* conv_state;           /*!< [in,out] [slot][W-1][C], raw inputs, oldest first. */
  int64_t conv_slot_stride;   /*!< Elements between slots, >= (W-1)*C. */
  const int64_t* read_index;  /*!< [in] [B] slot read, or < 0. */
  const int64_t* write_index; /*!< [in] [B] slot written, or < 0. */
  const uint8_t* fresh; /*!< [in] [B] non-zero: zero initial states, slot not read; or NULL. */

  void* y;                /*!< [out] [B*T, HV*V]; must not overlap x. */
  int64_t y_token_stride; /*!< >= HV*V. */

  /*! CUDA: non-zero starts the kernel while the one before it in the stream still runs
   *  (programmatic dependent launch) and loads states, indices and weights at once; x is read, and
   *  everything written, only after that kernel has finished. The caller promises that the kernel
   *  just before writes none of state, conv_state, indices, fresh and weights. Other back ends
   *  ignore it. */
  int32_t early_start;
} gdn_fused_decode_args;

gdn_status gdn_fused_decode(const gdn_exec* exec, const gdn_fused_decode_args* args);

#ifdef __cplusplus
} /* extern "C" */
namespace gdn::ref {
gdn_status FusedDecode(const gdn_exec&, const gdn_fused_decode_args&);
}
namespace gdn::cuda {
gdn_status FusedDecode(const gdn_exec&, const gdn_fused_decode_args&);
}
#endif
#endif /* GDN_KERNELS_FUSED_DECODE_H_ */
