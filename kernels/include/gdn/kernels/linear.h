/*! \file linear.h
 *  \brief The dense part of a layer in one op: RMSNorm, product, SiLU gate, residual.
 *
 *  n[m, :] = norm_weight ? x * rsqrt(mean(x^2) + norm_eps) * norm_weight : x      (per row m)
 *  p[m, j] = sum_k n[m, k] * w[j, k]
 *  y[m, j] = GDN_LINEAR_PLAIN:     p[m, j]                     J = N
 *            GDN_LINEAR_SILU_MUL:  silu(p[m, j]) * p[m, J + j]   J = N / 2, w's rows are gate|up
 *  y       = accumulate ? y + the above : the above
 *
 *  Numerics: n is rounded once to the weight's type, products are exact and summed in FP32, p stays
 *  in FP32, y is rounded once to its type. REF: the same roundings of n and y, all else FP64.
 *
 *  CUDA: up to 16 rows (on sm_90 up to 8) take one launch that streams the weights once; on sm_90
 *  up to 128 rows, up to 256 where that fills the device once, and any number for SILU_MUL, take
 *  one launch of the tensor cores, after one that makes n, if J is at most 32768 (and for
 *  SILU_MUL a multiple of 8); all else takes cuBLASLt. Passes of at most 8192 rows bound the
 *  workspace: n in the weight's type and what cuBLASLt asks for (32 MiB at most); SILU_MUL
 *  through cuBLASLt also takes p in FP32, in passes of 1024 rows. A workspace for some rows
 *  serves fewer rows too.
 *
 *  A norm in two parts: a product that adds to the residual stream can make the rows of the next
 *  norm's product as well, so that no launch of its own has to. With `after_norm` it also gives
 *
 *    after_n[m, j]       = y[m, j] * after_norm[j], rounded to the weight's type
 *    after_squares[c, m] = sum of y[m, j]^2 over the 32 columns j of group c
 *
 *  and the product that has n = after_n as x and `squares` = after_squares multiplies its p by
 *  rsqrt(sum_c squares[c, m] / K + norm_eps). That is the norm up to where it rounds; in FP16,
 *  after_n overflows where |y * after_norm| exceeds 65504. gdn_linear_splits_norm says for which
 *  plans and numbers of rows CUDA does this.
 *
 *  Weights are [N, K] dense, K contiguous, as checkpoints store them; they are not packed.
 *
 *  Plans: what depends on the shape alone (algorithms for every number of rows) is chosen when a
 *  plan is made, and layers of one shape share it. A plan is immutable; several threads may use it.
 *
 *  Batch independence: with `batch_invariant` a row's bits do not depend on the number of rows.
 *  Without it the algorithm may depend on it. On sm_90 it means the kernel of the tensor cores for
 *  all (but for SILU_MUL with N / 2 not a multiple of 8), which then costs most at one row and at
 *  many.
 *
 *  Back ends: REF and CUDA. Other host code uses matmul.h.
 */
#ifndef GDN_KERNELS_LINEAR_H_
#define GDN_KERNELS_LINEAR_H_

#include "gdn/kernels/types.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum gdn_linear_kind { GDN_LINEAR_PLAIN = 0, GDN_LINEAR_SILU_MUL = 1 } gdn_linear_kind;

typedef struct gdn_linear_shape {
  gdn_linear_kind kind;
  int64_t n;               /*!< Rows of the weight, >= 1; even for GDN_LINEAR_SILU_MUL. */
  int64_t k;               /*!< >= 1. CUDA: a multiple of 8 up to 32768. */
  gdn_dtype weight_dtype;  /*!< CUDA: GDN_BF16 or GDN_F16. */
  gdn_dtype y_dtype;       /*!< GDN_F32 or weight_dtype. */
  int32_t accumulate;      /*!< Non-zero: add to y. GDN_LINEAR_PLAIN with y_dtype GDN_F32 only. */
  int32_t batch_invariant; /*!< Non-zero: see above. */
  int64_t max_rows;        /*!< >= 1: no call has more. */
} gdn_linear_shape;

/*! \brief Opaque; made for the device that is current. */
typedef struct gdn_linear_plan gdn_linear_plan;

/*! \brief Chooses the algorithms for a shape. Allocates and may query the device: it belongs to
 *  model loading. \param[out] plan  Owned by the caller; free with gdn_linear_plan_destroy. */
gdn_status gdn_linear_plan_create(gdn_backend backend, const gdn_linear_shape* shape,
                                  gdn_linear_plan** plan);
void gdn_linear_plan_destroy(gdn_linear_plan* plan);

typedef struct gdn_linear_args {
  const gdn_linear_plan* plan;
  int64_t rows;             /*!< M in 0..max_rows. */
  const void* x;            /*!< [in] [M, K], last dimension dense. CUDA: 16-byte aligned rows. */
  gdn_dtype x_dtype;        /*!< GDN_F32 or weight_dtype. */
  int64_t x_row_stride;     /*!< >= K. */
  const float* norm_weight; /*!< [in] [K] multiplier, or NULL: no norm. CUDA: 16-byte aligned. */
  float norm_eps;           /*!< >= 0. */
  const void* weight;       /*!< [in] [N, K]. CUDA: 16-byte aligned. */
  void* y;                  /*!< [out], with accumulate [in,out] [M, J]; must not overlap x. */
  int64_t y_row_stride;     /*!< >= J. */

  /*! The first part of a norm, or NULL: see above. Needs accumulate. What it writes overlaps
   *  nothing else of the call. */
  const float* after_norm; /*!< [in] [J]. */
  void* after_n;           /*!< [out] [M, J] dense, in the weight's type. CUDA: 16-byte aligned. */
  float* after_squares;    /*!< [out] [(J + 31) / 32, M] dense. */
  /*! The second part, or NULL. x is then in the weight's type, and norm_weight NULL. */
  const float* squares; /*!< [in] [(K + 31) / 32, M] dense. */

  /*! CUDA: non-zero lets the kernel start while the one before it in the stream still runs
   *  (programmatic dependent launch); it may load weights at once, and reads x and squares, and
   *  writes y, after_n and after_squares, only after that kernel has finished. The caller promises
   * that the kernel just before writes neither weight nor norm_weight. Ignored where cuBLASLt runs.
   */
  int32_t early_start;
} gdn_linear_args;

/*! \brief Columns of a group of after_squares. */
#define GDN_LINEAR_SQUARES_COLUMNS 32

/*! \brief Whether calls with this plan and so many rows take after_norm, if it adds to y, or
 *  squares. REF: always. Elsewhere such a call is refused with GDN_UNSUPPORTED_SHAPE. */
int32_t gdn_linear_splits_norm(const gdn_linear_plan* plan, int64_t rows);

gdn_status gdn_linear(const gdn_exec* exec, const gdn_linear_args* args);
gdn_status gdn_linear_workspace(const gdn_exec* exec, const gdn_linear_args* args, size_t* bytes);

#ifdef __cplusplus
} /* extern "C" */
namespace gdn::ref {
gdn_status Linear(const gdn_exec&, const gdn_linear_args&);
}
namespace gdn::cuda {
gdn_status Linear(const gdn_exec&, const gdn_linear_args&);
size_t LinearWorkspace(const gdn_exec&, const gdn_linear_args&);
bool LinearSplitsNorm(const gdn_linear_plan&, int64_t rows);
}  // namespace gdn::cuda
#endif
#endif /* GDN_KERNELS_LINEAR_H_ */
