// Checks shared by the ops on packed sequences.
#ifndef KERNELS_CAPI_SEQUENCES_H_
#define KERNELS_CAPI_SEQUENCES_H_

#include <cstdint>

#include "gdn/kernels/types.h"
#include "kernels/common/check.h"

namespace gdn::kernels {

// cu_seqlens starts at 0 and never decreases.
inline gdn_status CheckCuSeqlens(const char* op, const int32_t* cu_seqlens, int64_t sequences) {
  GDN_CHECK_ARG(cu_seqlens != nullptr, GDN_INVALID_ARGUMENT, "%s: cu_seqlens must not be NULL", op);
  GDN_CHECK_ARG(cu_seqlens[0] == 0, GDN_INVALID_ARGUMENT, "%s: cu_seqlens[0] must be 0, got %d", op,
                cu_seqlens[0]);
  for (int64_t i = 0; i < sequences; ++i) {
    GDN_CHECK_ARG(cu_seqlens[i + 1] >= cu_seqlens[i], GDN_INVALID_ARGUMENT,
                  "%s: cu_seqlens must not decrease, got %d after %d at index %lld", op,
                  cu_seqlens[i + 1], cu_seqlens[i], static_cast<long long>(i + 1));
  }
  return GDN_OK;
}

// On a GPU cu_seqlens lives there and cannot be read here: the kernels rely on its contract. `last`
// is its last element, or `unknown`.
inline gdn_status CheckCuSeqlensOf(const char* op, gdn_backend backend, const int32_t* cu_seqlens,
                                   int64_t sequences, int64_t unknown, int64_t* last) {
  *last = unknown;
  if (backend == GDN_BACKEND_CUDA) {
    GDN_CHECK_ARG(cu_seqlens != nullptr, GDN_INVALID_ARGUMENT, "%s: cu_seqlens must not be NULL",
                  op);
    return GDN_OK;
  }
  if (const gdn_status status = CheckCuSeqlens(op, cu_seqlens, sequences); status != GDN_OK) {
    return status;
  }
  *last = cu_seqlens[sequences];
  return GDN_OK;
}

}  // namespace gdn::kernels

#endif  // KERNELS_CAPI_SEQUENCES_H_
