/*! \file causal_conv.h
 *  \brief Depthwise causal convolution over the q|k|v columns, with carried state.
 *
 *  y[t,c] = act(sum_{j<W} weight[c,j] * x[t-W+1+j, c]),  act = SiLU or identity
 *
 *  Columns before a sequence's first token come from its state: the last W-1 raw inputs of the
 *  tokens before, oldest first, or zeros for a fresh sequence. After the call the state of the
 *  write slot holds the last W-1 raw inputs, those of the read slot included where a sequence is
 *  shorter than W-1. FP32 accumulation in tap order, one rounding after the activation.
 *
 *  Sequences are packed: sequence i covers tokens [cu_seqlens[i], cu_seqlens[i+1]). With cu_seqlens
 *  NULL each sequence is one token: the decode step. A sequence of length 0 with equal slots leaves
 *  its state bit-identical. Tokens from cu_seqlens[N] on, if any, are neither read nor written.
 *
 *  Slots: read_index[i] < 0 or write_index[i] < 0 is a padding row; no state is touched and its
 *  output rows are written as zeros. Write slots must be distinct, and none may be the read slot of
 *  another sequence; the op does not check this. Slot 0 is an ordinary slot.
 */
#ifndef GDN_KERNELS_CAUSAL_CONV_H_
#define GDN_KERNELS_CAUSAL_CONV_H_

#include "gdn/kernels/types.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct gdn_causal_conv_args {
  int64_t sequences;         /*!< N >= 0. */
  const int32_t* cu_seqlens; /*!< [in] [N+1], non-decreasing from 0; NULL: one token each. */
  int64_t channels;          /*!< C = 2*H*K + HV*V >= 1. */
  int32_t width;             /*!< W in 2..8. */
  int32_t silu;              /*!< Non-zero: SiLU after the sum. */
  const void* x;             /*!< [in] [T, C] raw projection, channels dense. */
  gdn_dtype x_dtype;
  int64_t x_token_stride; /*!< >= C; x may be a column range of a wider buffer. */
  const float* weight;    /*!< [in] [C, W] dense, tap W-1 meets the newest token. */
  void* y;                /*!< [out] [T, C]; must not overlap x. */
  gdn_dtype y_dtype;
  int64_t y_token_stride;
  void* state;                /*!< [in,out] [slot][W-1][C], oldest column first, type of x. */
  int64_t state_slot_stride;  /*!< Elements between slots, >= (W-1)*C. */
  const int64_t* read_index;  /*!< [in] [N] slot read, or < 0. */
  const int64_t* write_index; /*!< [in] [N] slot written, or < 0. */
  const uint8_t* fresh; /*!< [in] [N] non-zero: zero initial state, read slot ignored; or NULL. */
} gdn_causal_conv_args;

/*! \brief Step and packed prefill in one op; CPU and REF need no workspace. */
gdn_status gdn_causal_conv(const gdn_exec* exec, const gdn_causal_conv_args* args);

#ifdef __cplusplus
} /* extern "C" */
namespace gdn::ref {
gdn_status CausalConv(const gdn_exec&, const gdn_causal_conv_args&);
}
namespace gdn::cpu {
gdn_status CausalConv(const gdn_exec&, const gdn_causal_conv_args&);
}
namespace gdn::cuda {
gdn_status CausalConv(const gdn_exec&, const gdn_causal_conv_args&);
}
#endif
#endif /* GDN_KERNELS_CAUSAL_CONV_H_ */
