#include "gdn/kernels/matmul.h"

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <random>
#include <vector>

#include "kernels/common/packed_weight.h"
#include "kernels/cpu/matmul_weight.h"

namespace gdn::cpu {

bool RowsAreIndependentOfPlace(const CpuWeight& weight, int64_t rows) {
  std::mt19937 engine(1);
  std::vector<float> x(static_cast<size_t>(rows * weight.k));
  for (int64_t i = 0; i < weight.k; ++i) {
    x[static_cast<size_t>(i)] = static_cast<float>(engine() >> 8) * 0x1p-23f - 1.0f;
  }
  for (int64_t row = 1; row < rows; ++row) {
    std::memcpy(x.data() + row * weight.k, x.data(), static_cast<size_t>(weight.k) * sizeof(float));
  }
  std::vector<float> y(static_cast<size_t>(rows * weight.n));
  constexpr size_t kAlignment = 64;
  const size_t bytes = (weight.Workspace(rows) + kAlignment - 1) / kAlignment * kAlignment;
  const std::unique_ptr<void, decltype(&std::free)> workspace(
      bytes == 0 ? nullptr : std::aligned_alloc(kAlignment, bytes), &std::free);
  if (bytes != 0 && workspace == nullptr) throw std::bad_alloc();
  const gdn_exec exec = {GDN_BACKEND_CPU, nullptr, workspace.get(), bytes};
  const gdn_matmul_args args = {rows, x.data(), weight.k, &weight, y.data(), weight.n, 0};
  if (weight.Run(exec, args) != GDN_OK) return false;
  for (int64_t row = 1; row < rows; ++row) {
    if (std::memcmp(y.data(), y.data() + row * weight.n,
                    static_cast<size_t>(weight.n) * sizeof(float)) != 0) {
      return false;
    }
  }
  return true;
}

std::unique_ptr<gdn_packed_weight> PackWeight(const kernels::PackRequest& request) {
  if (request.math == GDN_MATH_BF16 && OnednnHasNativeBf16()) {
    // Where oneDNN lacks the product or its rows are not independent, the panels serve; the
    // weight's kind says which it was.
    auto packed = PackOnednn(request, OnednnElement::kBf16);
    if (packed != nullptr &&
        (request.row_block == 0 || RowsAreIndependentOfPlace(*packed, request.row_block))) {
      return packed;
    }
  }
  return PackPanels(request);
}

gdn_status Matmul(const gdn_exec& exec, const gdn_matmul_args& args) {
  return static_cast<const CpuWeight*>(args.weight)->Run(exec, args);
}

size_t MatmulWorkspace(const gdn_exec&, const gdn_matmul_args& args) {
  return static_cast<const CpuWeight*>(args.weight)->Workspace(args.rows);
}

}  // namespace gdn::cpu
