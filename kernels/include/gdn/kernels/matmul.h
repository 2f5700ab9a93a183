/*! \file matmul.h
 *  \brief Products with a weight matrix that is packed once.
 *
 *  y[m, n] = (accumulate ? y[m, n] : 0) + sum_k x[m, k] * w[n, k]
 *
 *  x and y are FP32; the weight is [N, K] as checkpoints store it, given as one or more row blocks
 *  that are packed behind each other (q|k|v|z|b|a, gate|up). FP32 accumulation.
 *
 *  Modes
 *  - GDN_MATH_F32: every product and sum in FP32 (weights stored as BF16 are widened exactly).
 *  - GDN_MATH_BF16: weights are BF16; x may be rounded to BF16 where the processor multiplies BF16
 *    natively (oneDNN, AVX512_BF16), and is not rounded where it does not (Highway).
 *
 *  Batch independence: with row_block > 0 rows are multiplied in fixed blocks of that many rows by
 *  one algorithm, the last block padded, so a row's bits do not depend on how many rows share the
 *  call. Without it the algorithm may depend on `rows`. The Highway path is independent either way.
 */
#ifndef GDN_KERNELS_MATMUL_H_
#define GDN_KERNELS_MATMUL_H_

#include "gdn/kernels/types.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum gdn_matmul_math { GDN_MATH_F32 = 0, GDN_MATH_BF16 = 1 } gdn_matmul_math;

/*! \brief A block of weight rows, [rows, K] dense. */
typedef struct gdn_weight_rows {
  const void* data;
  gdn_dtype dtype;
  int64_t rows;
} gdn_weight_rows;

/*! \brief A packed weight, opaque. Immutable after creation; may be shared by threads for reading.
 */
typedef struct gdn_packed_weight gdn_packed_weight;

/*! \brief Packs `num_blocks` row blocks of K columns. Copies: the sources may be freed afterwards.
 *  The only call of this library that allocates; it belongs to model loading.
 *  \param[in]  row_block  0, or the fixed number of rows per product (see above).
 *  \param[in]  max_threads  Threads of the pool that will run the products (partition hint), >= 1.
 *  \param[out] packed     Owned by the caller; free with gdn_packed_weight_destroy. */
gdn_status gdn_packed_weight_create(gdn_backend backend, gdn_matmul_math math, int64_t k,
                                    const gdn_weight_rows* blocks, int32_t num_blocks,
                                    int32_t row_block, int32_t max_threads,
                                    gdn_packed_weight** packed);
void gdn_packed_weight_destroy(gdn_packed_weight* packed);
/*! \brief Bytes the packed weight occupies. */
size_t gdn_packed_weight_bytes(const gdn_packed_weight* packed);
/*! \brief Static name of the algorithm in use: "ref", "highway-bf16", "highway-f32", "onednn-bf16".
 */
const char* gdn_packed_weight_kind(const gdn_packed_weight* packed);

typedef struct gdn_matmul_args {
  int64_t rows;   /*!< M >= 0. */
  const float* x; /*!< [in] [M, K], last dimension dense. */
  int64_t x_row_stride;
  const gdn_packed_weight* weight; /*!< [in] N x K. */
  float* y; /*!< [in,out] [M, N], last dimension dense; must not overlap x. */
  int64_t y_row_stride;
  int32_t accumulate; /*!< Non-zero: add to y (residual connection). */
} gdn_matmul_args;

gdn_status gdn_matmul(const gdn_exec* exec, const gdn_matmul_args* args);
gdn_status gdn_matmul_workspace(const gdn_exec* exec, const gdn_matmul_args* args, size_t* bytes);

#ifdef __cplusplus
} /* extern "C" */
namespace gdn::ref {
gdn_status Matmul(const gdn_exec&, const gdn_matmul_args&);
}
namespace gdn::cpu {
gdn_status Matmul(const gdn_exec&, const gdn_matmul_args&);
size_t MatmulWorkspace(const gdn_exec&, const gdn_matmul_args&);
}  // namespace gdn::cpu
#endif
#endif /* GDN_KERNELS_MATMUL_H_ */
