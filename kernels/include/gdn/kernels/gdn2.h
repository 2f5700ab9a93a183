/*! \file gdn2.h
 *  \brief GDN2: the delta rule with per-channel decay, erase gate and write gate.
 *
 *  Per value head hv, with key head hv / (HV/H) and gate head hv / (HV/G), in FP32 (REF: FP64):
 *      q, k <- x * rsqrt(sum(x^2) + 1e-6)       if use_qk_l2norm; eps inside the root, on the sum
 *      q    <- q * scale
 *      S    <- S * diag(exp(g))                 decay of each key channel, first
 *      u    =  write * v - S (erase * k)        against the decayed state
 *      S    <- S + u k^T
 *      o    =  S q                              read after the update
 *  erase = write = beta and one g for all channels is the gated delta rule (delta_rule.h); erase =
 *  write = beta with a g per channel is KDA. GDN2 layers normalise q and k before this op
 *  (use_qk_l2norm 0, l2_norm.h); where the flag is set the norm happens here and nowhere else.
 *
 *  Gate heads: G = H where the gates belong to the key heads, G = HV where each value head has its
 *  own. Neither these nor q and k are replicated in memory.
 *
 *  State, slots, padding rows and zero-length sequences: as in delta_rule.h. [slot][HV][V][K], K
 *  contiguous, FP32 or BF16 in memory, o from the unrounded state. Write slots must be distinct,
 *  and none may be the read slot of another row; the op does not check this. The output gate (SiLU
 *  or sigmoid) belongs to gated_rms_norm.h; f, b, w become g, erase, write in gdn2_gates.h.
 *
 *  Back ends: REF, CPU and CUDA, where cu_seqlens is only read on the device: a captured graph
 *  serves other lengths. Workspace of a prefill on CUDA, where it goes by chunks, only.
 *
 *  CUDA prefill on compute capability 9.0 (a build for 90a) with K = V = 128, BF16 or FP16 q, k, v,
 *  these, g, erase and write aligned to 16 bytes with token strides of multiples of 8 elements, and
 *  a state aligned to pairs: chunks of 64 tokens on the tensor cores with FP16 operands and FP32
 *  sums. There write * v and the state must stay within +-65,504 and g <= 0; splits of a sequence
 *  into calls agree to the operands' rounding; no exponent above 0 is formed. Every other prefill
 *  steps through the tokens in FP32. Which one is chosen depends on the call's shape and addresses
 *  alone, never on lengths.
 *
 *  Source: arXiv 2605.22791; flash-linear-attention, fla/ops/gdn2/naive.py.
 */
#ifndef GDN_KERNELS_GDN2_H_
#define GDN_KERNELS_GDN2_H_

#include "gdn/kernels/types.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct gdn2_args {
  int64_t tokens;            /*!< T >= cu_seqlens[N]: sizes a prefill's workspace; ignored by the
                                  step. */
  int64_t sequences;         /*!< N >= 0: rows of a step, sequences of a prefill. */
  const int32_t* cu_seqlens; /*!< [in] [N+1] for prefill; ignored (may be NULL) by the step. */
  int64_t key_heads;         /*!< H >= 1. */
  int64_t value_heads;       /*!< HV, a multiple of H, HV/H in 1..8. */
  int64_t gate_heads;        /*!< G: H or HV. */
  int64_t key_dim;           /*!< K in 1..256. */
  int64_t value_dim;         /*!< V in 1..512. */
  const void* q;             /*!< [in] [T, H, K], heads and elements dense. */
  const void* k;             /*!< [in] [T, H, K]. */
  const void* v;             /*!< [in] [T, HV, V]. */
  gdn_dtype qkv_dtype;
  int64_t q_token_stride; /*!< Elements between tokens, >= H*K. */
  int64_t k_token_stride;
  int64_t v_token_stride;     /*!< >= HV*V. */
  const float* g;             /*!< [in] [T, G, K] dense, log decay, <= 0. */
  const void* erase;          /*!< [in] [T, G, K] dense. */
  const void* write;          /*!< [in] [T, HV, V] dense. */
  gdn_dtype gate_dtype;       /*!< Type of erase and write. */
  float scale;                /*!< Applied to q after the norm; 0 means K^-1/2. */
  int32_t use_qk_l2norm;      /*!< Non-zero: normalise q and k here. */
  void* state;                /*!< [in,out] [slot][HV][V][K]. */
  gdn_dtype state_dtype;      /*!< GDN_F32 or GDN_BF16. */
  int64_t state_slot_stride;  /*!< Elements between slots, >= HV*V*K. */
  const int64_t* read_index;  /*!< [in] [N]; < 0: padding row, no state is touched, o is zeros. */
  const int64_t* write_index; /*!< [in] [N]; equal to read_index for an update in place. */
  const uint8_t* fresh; /*!< [in] [N] non-zero: zero initial state, read slot ignored; or NULL. */
  void* o;              /*!< [out] [T, HV, V], heads and elements dense. */
  gdn_dtype o_dtype;
  int64_t o_token_stride; /*!< >= HV*V. */
} gdn2_args;

/*! \brief One token for each of N rows; token i belongs to row i. */
gdn_status gdn_gdn2_step(const gdn_exec* exec, const gdn2_args* args);
/*! \brief Packed sequences. */
gdn_status gdn_gdn2_prefill(const gdn_exec* exec, const gdn2_args* args);
/*! \brief Scratch bytes of a prefill; the pointers in args are not read. The step needs none. */
gdn_status gdn_gdn2_prefill_workspace(const gdn_exec* exec, const gdn2_args* args, size_t* bytes);

#ifdef __cplusplus
} /* extern "C" */
namespace gdn::ref {
gdn_status Gdn2Step(const gdn_exec&, const gdn2_args&);
gdn_status Gdn2Prefill(const gdn_exec&, const gdn2_args&);
}  // namespace gdn::ref
namespace gdn::cpu {
gdn_status Gdn2Step(const gdn_exec&, const gdn2_args&);
gdn_status Gdn2Prefill(const gdn_exec&, const gdn2_args&);
}  // namespace gdn::cpu
namespace gdn::cuda {
gdn_status Gdn2Step(const gdn_exec&, const gdn2_args&);
gdn_status Gdn2Prefill(const gdn_exec&, const gdn2_args&);
size_t Gdn2PrefillWorkspace(const gdn2_args&);
}  // namespace gdn::cuda
#endif
#endif /* GDN_KERNELS_GDN2_H_ */
