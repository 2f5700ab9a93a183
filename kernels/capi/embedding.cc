#include "gdn/kernels/embedding.h"

#include "kernels/capi/dense_checks.h"
#include "kernels/capi/dispatch.h"

namespace gdn::kernels {
namespace {

constexpr char kOp[] = "embedding";

gdn_status Check(const gdn_exec* exec, const gdn_embedding_args* args) {
  GDN_RETURN_IF_ERROR(CheckAnyExec(kOp, exec, args));
  GDN_RETURN_IF_ERROR(CheckExtent(kOp, "rows", args->rows, 0));
  GDN_RETURN_IF_ERROR(CheckExtent(kOp, "vocab", args->vocab, 1));
  GDN_RETURN_IF_ERROR(CheckExtent(kOp, "dim", args->dim, 1));
  GDN_RETURN_IF_ERROR(CheckElementType(kOp, "table_dtype", args->table_dtype));
  GDN_RETURN_IF_ERROR(CheckElementType(kOp, "y_dtype", args->y_dtype));
  if (args->rows == 0) return GDN_OK;
  GDN_RETURN_IF_ERROR(CheckPointer(kOp, "ids", args->ids));
  GDN_RETURN_IF_ERROR(CheckPointer(kOp, "table", args->table));
  GDN_RETURN_IF_ERROR(CheckPointer(kOp, "y", args->y));
  GDN_RETURN_IF_ERROR(CheckStride(kOp, "y_row_stride", args->y_row_stride, args->dim));
  if (exec->backend == GDN_BACKEND_CUDA) return GDN_OK;  // The ids are out of reach.
  for (int64_t i = 0; i < args->rows; ++i) {
    GDN_CHECK_ARG(args->ids[i] >= 0 && args->ids[i] < args->vocab, GDN_INVALID_ARGUMENT,
                  "embedding: ids[%lld] must be in 0..%lld, got %d", static_cast<long long>(i),
                  static_cast<long long>(args->vocab - 1), args->ids[i]);
  }
  return GDN_OK;
}

}  // namespace
}  // namespace gdn::kernels

gdn_status gdn_embedding(const gdn_exec* exec, const gdn_embedding_args* args) {
  GDN_RETURN_IF_ERROR(gdn::kernels::Check(exec, args));
  if (args->rows == 0) return GDN_OK;
  GDN_DISPATCH(exec, args, Embedding);
}
