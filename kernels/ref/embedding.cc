#include "gdn/kernels/embedding.h"

#include "kernels/common/convert.h"

namespace gdn::ref {

gdn_status Embedding(const gdn_exec&, const gdn_embedding_args& args) {
  for (int64_t row = 0; row < args.rows; ++row) {
    for (int64_t i = 0; i < args.dim; ++i) {
      kernels::Store(args.y, args.y_dtype, row * args.y_row_stride + i,
                     kernels::Load(args.table, args.table_dtype, args.ids[row] * args.dim + i));
    }
  }
  return GDN_OK;
}

}  // namespace gdn::ref
