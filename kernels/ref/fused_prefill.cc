#include "gdn/kernels/fused_prefill.h"

#include <cstdint>

#include "kernels/common/convert.h"

// The fused step's reference takes any number of tokens: a prefill equals stepping.

namespace gdn::ref {

gdn_status FusedPrefill(const gdn_exec& exec, const gdn_fused_prefill_args& args) {
  const gdn_fused_decode_args& layer = args.layer;
  const int64_t element = kernels::SizeOf(layer.dtype);
  for (int64_t i = 0; i < layer.rows; ++i) {
    const int64_t begin = args.cu_seqlens[i];
    const int64_t length = args.cu_seqlens[i + 1] - begin;
    const bool padding = layer.read_index[i] < 0 || layer.write_index[i] < 0;
    if (length == 0 && (padding || layer.read_index[i] == layer.write_index[i])) continue;
    gdn_fused_decode_args row = layer;
    row.rows = 1;
    row.tokens = length;
    row.x = static_cast<const char*>(layer.x) + begin * layer.x_token_stride * element;
    row.y = static_cast<char*>(layer.y) + begin * layer.y_token_stride * element;
    row.read_index += i;
    row.write_index += i;
    if (row.fresh != nullptr) row.fresh += i;
    if (const gdn_status status = FusedDecode(exec, row); status != GDN_OK) return status;
  }
  return GDN_OK;
}

}  // namespace gdn::ref
