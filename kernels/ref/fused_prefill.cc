#include "gdn/kernels/fused_prefill.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "kernels/common/convert.h"

// The fused step's reference takes any number of tokens: a prefill equals stepping.

namespace gdn::ref {
namespace {

// Copies a slot's contents, without what lies between slots, to another one in both pools.
void CopySlot(const gdn_fused_decode_args& layer, int64_t from, int64_t to) {
  const auto copy = [&](void* pool, int64_t stride, int64_t count, gdn_dtype dtype) {
    const int64_t element = kernels::SizeOf(dtype);
    char* const bytes = static_cast<char*>(pool);
    std::memcpy(bytes + to * stride * element, bytes + from * stride * element,
                static_cast<size_t>(count * element));
  };
  const int64_t values = layer.value_heads * layer.value_dim;
  const int64_t channels = 2 * layer.key_heads * layer.key_dim + values;
  copy(layer.state, layer.state_slot_stride, values * layer.key_dim, layer.state_dtype);
  copy(layer.conv_state, layer.conv_slot_stride, (layer.conv_width - 1) * channels, layer.dtype);
}

// One sequence, whose tokens begin at `begin`.
gdn_status Sequence(const gdn_exec& exec, const gdn_fused_prefill_args& args, int64_t i,
                    int64_t begin, int64_t length) {
  const gdn_fused_decode_args& layer = args.layer;
  const int64_t element = kernels::SizeOf(layer.dtype);
  const bool padding = layer.read_index[i] < 0 || layer.write_index[i] < 0;
  const int64_t every = padding || args.checkpoint_every == 0 ? length : args.checkpoint_every;
  gdn_fused_decode_args row = layer;
  row.rows = 1;
  row.read_index += i;
  row.write_index += i;
  if (row.fresh != nullptr) row.fresh += i;
  int64_t first = 0;
  do {  // Once for an empty sequence too, which may fork.
    row.tokens = std::min(every, length - first);
    row.x = static_cast<const char*>(layer.x) + (begin + first) * layer.x_token_stride * element;
    row.y = static_cast<char*>(layer.y) + (begin + first) * layer.y_token_stride * element;
    if (const gdn_status status = FusedDecode(exec, row); status != GDN_OK) return status;
    row.read_index = row.write_index;
    row.fresh = nullptr;
    if (!padding && args.checkpoint_every > 0 && row.tokens == every) {
      const int64_t to = args.checkpoint_slots[args.checkpoint_begin[i] + first / every];
      if (to >= 0) CopySlot(layer, *row.write_index, to);
    }
    first += every;
  } while (first < length);
  return GDN_OK;
}

}  // namespace

gdn_status FusedPrefill(const gdn_exec& exec, const gdn_fused_prefill_args& args) {
  const gdn_fused_decode_args& layer = args.layer;
  for (int64_t i = 0; i < layer.rows; ++i) {
    const int64_t begin = args.cu_seqlens[i];
    const int64_t length = args.cu_seqlens[i + 1] - begin;
    const bool padding = layer.read_index[i] < 0 || layer.write_index[i] < 0;
    if (length == 0 && (padding || layer.read_index[i] == layer.write_index[i])) continue;
    const gdn_status status = Sequence(exec, args, i, begin, length);
    if (status != GDN_OK) return status;
  }
  return GDN_OK;
}

}  // namespace gdn::ref
