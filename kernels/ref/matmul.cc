#include "gdn/kernels/matmul.h"

#include <memory>
#include <vector>

#include "kernels/common/convert.h"
#include "kernels/common/packed_weight.h"

namespace gdn::ref {
namespace {

struct RowMajorWeight final : gdn_packed_weight {
  std::vector<float> rows;  // [N, K]
};

}  // namespace

std::unique_ptr<gdn_packed_weight> PackWeight(const kernels::PackRequest& request) {
  auto packed = std::make_unique<RowMajorWeight>();
  packed->backend = GDN_BACKEND_REF;
  packed->n = request.n;
  packed->k = request.k;
  packed->kind = "ref";
  packed->rows.resize(static_cast<size_t>(request.n * request.k));
  packed->bytes = packed->rows.size() * sizeof(float);
  kernels::ForEachRow(request, [&](int64_t n, const gdn_weight_rows& block, int64_t row) {
    for (int64_t k = 0; k < request.k; ++k) {
      float value = kernels::Load(block.data, block.dtype, row * request.k + k);
      if (request.math == GDN_MATH_BF16) value = kernels::Bf16ToF32(kernels::F32ToBf16(value));
      packed->rows[static_cast<size_t>(n * request.k + k)] = value;
    }
  });
  return packed;
}

gdn_status Matmul(const gdn_exec&, const gdn_matmul_args& args) {
  const auto& weight = static_cast<const RowMajorWeight&>(*args.weight);
  for (int64_t m = 0; m < args.rows; ++m) {
    const float* x = args.x + m * args.x_row_stride;
    float* y = args.y + m * args.y_row_stride;
    for (int64_t n = 0; n < weight.n; ++n) {
      const float* w = weight.rows.data() + n * weight.k;
      double sum = args.accumulate ? y[n] : 0.0;
      for (int64_t k = 0; k < weight.k; ++k) sum += static_cast<double>(x[k]) * w[k];
      y[n] = static_cast<float>(sum);
    }
  }
  return GDN_OK;
}

}  // namespace gdn::ref
