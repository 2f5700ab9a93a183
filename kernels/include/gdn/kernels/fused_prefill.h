/*! \file fused_prefill.h
 *  \brief A whole GDN layer's mixing of packed prompts in one op: convolution, gates, chunked delta
 *  rule and gated norm.
 *
 *  Equals this chain of ops over the sequences of cu_seqlens, without most of the traffic between:
 *      q|k|v <- causal_conv(x, SiLU), rounded once to `dtype`        (causal_conv.h)
 *      g, beta <- gates(a, b)                                        (gates.h)
 *      o <- delta_rule_prefill(q, k, v, g, beta), S updated          (delta_rule.h)
 *      y <- gated_rms_norm(o, z)                                     (gated_rms_norm.h)
 *  The slot contract is theirs, one index addresses both pools. x and y have `tokens` lines: from
 *  cu_seqlens[N] on those of y are not written, those of x may be read and change nothing. A
 *  sequence's bits do not depend on the others. The tuned form (below) rounds elsewhere than the
 *  chain does (docs/numerics.md). An infinity or NaN in x or a carried state spoils its channel,
 *  for that token and the three behind it, and what is made of it.
 *
 *  CUDA: needs a workspace, about as large as the activations of causal_conv and delta_rule; the
 *  call neither synchronises nor reads cu_seqlens on the host, so a captured graph serves any
 *  lengths within the capacities `tokens` and `layer.rows`. K = V = 128, W = 4, 16-bit activations,
 *  use_qk_l2norm on sm_90a is tuned (columns and strides multiples of 8 elements, states aligned to
 *  8 bytes); every other legal call is correct, and slower. CPU: call the separate ops.
 */
#ifndef GDN_KERNELS_FUSED_PREFILL_H_
#define GDN_KERNELS_FUSED_PREFILL_H_

#include "gdn/kernels/fused_decode.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct gdn_fused_prefill_args {
  int64_t tokens;            /*!< T >= 0: lines that cu_seqlens may cover. */
  const int32_t* cu_seqlens; /*!< [in] [N+1], non-decreasing from 0, last <= T. */
  /*! As for the step: `rows` is N, the number of sequences, and line t of x and y is packed token
   * t; `tokens` and `early_start` are ignored. */
  gdn_fused_decode_args layer;

  /*! Checkpoints: the states after every so many tokens of a sequence, a multiple of 64; 0 for
   * none. Those after (j + 1) * checkpoint_every tokens of sequence i, if it has as many, are
   * written to slot checkpoint_slots[checkpoint_begin[i] + j] of both pools; none where that is
   * negative. These slots must be distinct, and no row may read or write them. CUDA: tuned calls
   * only. */
  int64_t checkpoint_every;
  const int64_t* checkpoint_begin; /*!< [in] [N]. */
  const int64_t* checkpoint_slots; /*!< [in] As many as the sequences need. */
} gdn_fused_prefill_args;

gdn_status gdn_fused_prefill(const gdn_exec* exec, const gdn_fused_prefill_args* args);
/*! \brief Scratch bytes of the call; no pointer in args is read. */
gdn_status gdn_fused_prefill_workspace(const gdn_exec* exec, const gdn_fused_prefill_args* args,
                                       size_t* bytes);

#ifdef __cplusplus
} /* extern "C" */
namespace gdn::ref {
gdn_status FusedPrefill(const gdn_exec&, const gdn_fused_prefill_args&);
}
namespace gdn::cuda {
gdn_status FusedPrefill(const gdn_exec&, const gdn_fused_prefill_args&);
size_t FusedPrefillWorkspace(const gdn_exec&, const gdn_fused_prefill_args&);
}  // namespace gdn::cuda
#endif
#endif /* GDN_KERNELS_FUSED_PREFILL_H_ */
