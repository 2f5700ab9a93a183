// What the back ends of the matrix product share: the packed weight's base and the packing request.
#ifndef KERNELS_COMMON_PACKED_WEIGHT_H_
#define KERNELS_COMMON_PACKED_WEIGHT_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "gdn/kernels/matmul.h"
#include "gdn/kernels/types.h"

// Each algorithm derives from this; only the back end that made a weight may look inside.
struct gdn_packed_weight {
  virtual ~gdn_packed_weight() = default;

  gdn_backend backend = GDN_BACKEND_REF;
  int64_t n = 0;
  int64_t k = 0;
  const char* kind = "";
  size_t bytes = 0;
};

namespace gdn::kernels {

// Validated arguments of gdn_packed_weight_create.
struct PackRequest {
  gdn_matmul_math math = GDN_MATH_F32;
  int64_t n = 0;
  int64_t k = 0;
  std::span<const gdn_weight_rows> blocks;
  int32_t row_block = 0;
  int32_t max_threads = 1;
};

// Calls visit(block, row of the block) for every row of the stacked weight in order.
template <typename Visit>
void ForEachRow(const PackRequest& request, Visit&& visit) {
  int64_t n = 0;
  for (const gdn_weight_rows& block : request.blocks) {
    for (int64_t row = 0; row < block.rows; ++row) visit(n++, block, row);
  }
}

}  // namespace gdn::kernels

namespace gdn::ref {
// May throw std::bad_alloc, like the other packing functions: packing belongs to model loading.
std::unique_ptr<gdn_packed_weight> PackWeight(const kernels::PackRequest& request);
}  // namespace gdn::ref

namespace gdn::cpu {
// Null with the reason stored if oneDNN refuses.
std::unique_ptr<gdn_packed_weight> PackWeight(const kernels::PackRequest& request);
}  // namespace gdn::cpu

#endif  // KERNELS_COMMON_PACKED_WEIGHT_H_
