/*! \file embedding.h
 *  \brief Row gather: y[i, :] = table[ids[i], :].
 *
 *  An id outside [0, vocab) is GDN_INVALID_ARGUMENT on host back ends; nothing is written. On CUDA,
 *  where the ids are in device memory, id -1 marks a padding row and gives zeros; any other id
 *  outside [0, vocab) gives NaNs, so that it cannot pass unnoticed.
 */
#ifndef GDN_KERNELS_EMBEDDING_H_
#define GDN_KERNELS_EMBEDDING_H_

#include "gdn/kernels/types.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct gdn_embedding_args {
  int64_t rows;       /*!< Number of ids, >= 0. */
  int64_t vocab;      /*!< Rows of the table, >= 1. */
  int64_t dim;        /*!< >= 1. */
  const int32_t* ids; /*!< [in] [rows]. */
  const void* table;  /*!< [in] [vocab, dim] dense. */
  gdn_dtype table_dtype;
  void* y; /*!< [out] [rows, dim], last dimension dense. */
  gdn_dtype y_dtype;
  int64_t y_row_stride;
} gdn_embedding_args;

gdn_status gdn_embedding(const gdn_exec* exec, const gdn_embedding_args* args);

#ifdef __cplusplus
} /* extern "C" */
namespace gdn::ref {
gdn_status Embedding(const gdn_exec&, const gdn_embedding_args&);
}
namespace gdn::cpu {
gdn_status Embedding(const gdn_exec&, const gdn_embedding_args&);
}
namespace gdn::cuda {
gdn_status Embedding(const gdn_exec&, const gdn_embedding_args&);
}
#endif
#endif /* GDN_KERNELS_EMBEDDING_H_ */
