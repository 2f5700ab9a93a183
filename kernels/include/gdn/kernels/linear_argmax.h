/*! \file linear_argmax.h
 *  \brief The greedy end of a step in one op: RMSNorm, head, the largest logit, its probability.
 *
 *  n[m, :]    = norm_weight ? x * rsqrt(mean(x^2) + norm_eps) * norm_weight : x      (per row m)
 *  l[m, j]    = sum_k n[m, k] * w[j, k]                                              j in [0, N)
 *  token[m]   = the j of the largest l[m, j], the lowest on ties
 *  logprob[m] = l[m, token] - log sum_j exp(l[m, j])
 *
 *  What linear.h and a sampler of temperature 0 (sampling.h) give one after the other, without the
 *  logits, [M, N] FP32, going through memory. Numerics as there: n is rounded once to the weight's
 *  type, l is an FP32 sum. Rows whose l holds NaN or +inf, or only -inf, give token -1 and
 *  log-probability NaN. A row whose position is negative is padding: its token is -1, and nothing
 *  else of it is written.
 *
 *  A token's bits and those of its log-probability do not depend on the other rows' values; they
 *  may depend on the number of rows.
 *
 *  CUDA needs compute capability 9.0 and at most 256 rows. More rows or another device
 *  are refused with GDN_UNSUPPORTED_SHAPE, also by the workspace query, which is how to ask. Three
 * launches: one that makes n, the product, and one that joins what its blocks found.
 *
 *  Back ends: REF and CUDA.
 */
#ifndef GDN_KERNELS_LINEAR_ARGMAX_H_
#define GDN_KERNELS_LINEAR_ARGMAX_H_

#include "gdn/kernels/types.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct gdn_linear_argmax_args {
  int64_t rows;             /*!< M >= 0. */
  int64_t n;                /*!< Rows of the weight, 1..2^31-1. CUDA: at most 2^30. */
  int64_t k;                /*!< >= 1. CUDA: a multiple of 8. */
  const void* x;            /*!< [in] [M, K], last dimension dense. CUDA: 16-byte aligned rows. */
  gdn_dtype x_dtype;        /*!< GDN_F32 or weight_dtype. */
  int64_t x_row_stride;     /*!< >= K. */
  const float* norm_weight; /*!< [in] [K] multiplier, or NULL: no norm. CUDA: 16-byte aligned. */
  float norm_eps;           /*!< >= 0. */
  const void* weight;       /*!< [in] [N, K] dense. CUDA: 16-byte aligned. */
  gdn_dtype weight_dtype;   /*!< CUDA: GDN_BF16 or GDN_F16. */
  const int64_t* position;  /*!< [in] [M]; < 0: padding. */
  int32_t* token;           /*!< [out] [M]. */
  float* logprob;           /*!< [out] [M], or NULL. */

  /*! CUDA: as in linear.h. The caller promises that the kernel just before writes neither weight
   *  nor norm_weight. */
  int32_t early_start;
} gdn_linear_argmax_args;

gdn_status gdn_linear_argmax(const gdn_exec* exec, const gdn_linear_argmax_args* args);
/*! \brief Of the extents and types alone; no pointer is looked at. */
gdn_status gdn_linear_argmax_workspace(const gdn_exec* exec, const gdn_linear_argmax_args* args,
                                       size_t* bytes);

#ifdef __cplusplus
} /* extern "C" */
namespace gdn::ref {
gdn_status LinearArgmax(const gdn_exec&, const gdn_linear_argmax_args&);
}
namespace gdn::cuda {
gdn_status LinearArgmax(const gdn_exec&, const gdn_linear_argmax_args&);
gdn_status LinearArgmaxWorkspace(const gdn_exec&, const gdn_linear_argmax_args&, size_t* bytes);
}  // namespace gdn::cuda
#endif
#endif /* GDN_KERNELS_LINEAR_ARGMAX_H_ */
