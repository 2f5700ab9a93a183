/*! \file delta_rule.h
 *  \brief The gated delta rule: recurrent step and chunked prefill on slots of a state pool.
 *
 *  Per value head hv, with key head hv / (HV/H), in FP32 (REF: FP64):
 *      q, k <- x * rsqrt(sum(x^2) + 1e-6)       if use_qk_l2norm; eps inside the root, on the sum
 *      q    <- q * scale
 *      S    <- exp(g) * S                       decay first
 *      u    =  beta * (v - S k)                 error against the decayed state
 *      S    <- S + u k^T
 *      o    =  S q                              read after the update
 *
 *  q and k arrive raw: with use_qk_l2norm the normalisation happens here and nowhere else.
 *
 *  State: [slot][HV][V][K], K contiguous, FP32 or BF16 in memory, FP32 in arithmetic; o comes from
 *  the unrounded state. Slot stride is free (>= HV*V*K). read_index and write_index may differ: the
 *  old state is read, the new one written elsewhere, and the old slot keeps its bits (a fork).
 *  Index < 0 is a padding row: no state is touched, its output rows are zeros. Write slots must be
 *  distinct, and none may be the read slot of another row; the op does not check this.
 *
 *  Step: one token a row. Prefill: packed sequences through cu_seqlens; any split of a sequence
 *  into calls gives the same result up to FP32 rounding, since every exponent is formed as a
 *  difference under the causal mask and is <= 0. A zero-length sequence leaves an equal read and
 *  write slot bit-identical, and copies the state (or zeros, if fresh) where they differ.
 *
 *  CUDA prefill on compute capability 9.0 (a build for 90a) with K = V = 128, BF16 or FP16 q, k, v,
 *  aligned to 16 bytes with strides of 8 elements, and a state aligned to pairs: chunks on the
 *  tensor cores with FP16 operands, to whose rounding splits then agree (docs/numerics.md); v and
 *  the state must stay within +-65,504. Every other prefill steps through the tokens in FP32. Which
 *  one is chosen depends on the call's shape and addresses alone, never on lengths. cu_seqlens is
 *  only read on the device: a captured graph serves other lengths.
 *
 *  Source: Yang et al., Gated Delta Networks, arXiv 2412.06464; transformers, modeling_qwen3_5.py.
 */
#ifndef GDN_KERNELS_DELTA_RULE_H_
#define GDN_KERNELS_DELTA_RULE_H_

#include "gdn/kernels/types.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct gdn_delta_rule_args {
  int64_t sequences;         /*!< N >= 0: rows of a step, sequences of a prefill. */
  const int32_t* cu_seqlens; /*!< [in] [N+1] for prefill; ignored (may be NULL) by the step. */
  int64_t key_heads;         /*!< H >= 1. */
  int64_t value_heads;       /*!< HV, a multiple of H, HV/H in 1..8. */
  int64_t key_dim;           /*!< K in 1..256; multiples of 8 are vectorised. */
  int64_t value_dim;         /*!< V in 1..512. */
  const void* q;             /*!< [in] [T, H, K], heads and elements dense. */
  const void* k;             /*!< [in] [T, H, K]. */
  const void* v;             /*!< [in] [T, HV, V]. */
  gdn_dtype qkv_dtype;
  int64_t q_token_stride; /*!< Elements between tokens; q, k, v may be columns of one buffer. */
  int64_t k_token_stride;
  int64_t v_token_stride;
  const float* g;             /*!< [in] [T, HV] dense, log decay, <= 0. */
  const float* beta;          /*!< [in] [T, HV] dense. */
  float scale;                /*!< Applied to q after the norm; 0 means K^-1/2. */
  int32_t use_qk_l2norm;      /*!< Non-zero: normalise q and k here. */
  void* state;                /*!< [in,out] [slot][HV][V][K]. */
  gdn_dtype state_dtype;      /*!< GDN_F32 or GDN_BF16. */
  int64_t state_slot_stride;  /*!< Elements between slots. */
  const int64_t* read_index;  /*!< [in] [N]. */
  const int64_t* write_index; /*!< [in] [N]. */
  const uint8_t* fresh; /*!< [in] [N] non-zero: zero initial state, read slot ignored; or NULL. */
  void* o;              /*!< [out] [T, HV, V], heads and elements dense. */
  gdn_dtype o_dtype;
  int64_t o_token_stride;
} gdn_delta_rule_args;

/*! \brief One token for each of N rows; token i belongs to row i. */
gdn_status gdn_delta_rule_step(const gdn_exec* exec, const gdn_delta_rule_args* args);
/*! \brief Packed prefill. */
gdn_status gdn_delta_rule_prefill(const gdn_exec* exec, const gdn_delta_rule_args* args);
/*! \brief Scratch bytes of the two calls above; the pointers in args are not read. */
gdn_status gdn_delta_rule_step_workspace(const gdn_exec* exec, const gdn_delta_rule_args* args,
                                         size_t* bytes);
gdn_status gdn_delta_rule_prefill_workspace(const gdn_exec* exec, const gdn_delta_rule_args* args,
                                            size_t* bytes);

#ifdef __cplusplus
} /* extern "C" */
namespace gdn::ref {
gdn_status DeltaRuleStep(const gdn_exec&, const gdn_delta_rule_args&);
gdn_status DeltaRulePrefill(const gdn_exec&, const gdn_delta_rule_args&);
}  // namespace gdn::ref
namespace gdn::cpu {
gdn_status DeltaRuleStep(const gdn_exec&, const gdn_delta_rule_args&);
gdn_status DeltaRulePrefill(const gdn_exec&, const gdn_delta_rule_args&);
size_t DeltaRuleStepWorkspace(const gdn_exec&, const gdn_delta_rule_args&);
size_t DeltaRulePrefillWorkspace(const gdn_exec&, const gdn_delta_rule_args&);
}  // namespace gdn::cpu
namespace gdn::cuda {
gdn_status DeltaRuleStep(const gdn_exec&, const gdn_delta_rule_args&);
gdn_status DeltaRulePrefill(const gdn_exec&, const gdn_delta_rule_args&);
}  // namespace gdn::cuda
#endif
#endif /* GDN_KERNELS_DELTA_RULE_H_ */
