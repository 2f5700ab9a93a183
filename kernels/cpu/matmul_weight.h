// The CPU back end's packed weights: one class per algorithm behind one interface.
#ifndef KERNELS_CPU_MATMUL_WEIGHT_H_
#define KERNELS_CPU_MATMUL_WEIGHT_H_

#include <cstddef>
#include <memory>

#include "gdn/kernels/matmul.h"
#include "kernels/common/packed_weight.h"

namespace gdn::cpu {

struct CpuWeight : gdn_packed_weight {
  // Scratch bytes for a product of `rows` rows.
  virtual size_t Workspace(int64_t rows) const = 0;
  virtual gdn_status Run(const gdn_exec& exec, const gdn_matmul_args& args) const = 0;
};

// Panels for this library's own micro-kernels (matmul_panels.cc).
std::unique_ptr<CpuWeight> PackPanels(const kernels::PackRequest& request);

// The type oneDNN multiplies in. F32 exists so that everything but the element type is exercised on
// processors without native BF16 products.
enum class OnednnElement { kBf16, kF32 };

// Whether oneDNN multiplies BF16 natively on this processor.
bool OnednnHasNativeBf16();

// Whether a row's bits are the same at every place of a block of `rows` rows, tried on random data.
// oneDNN's kernels may sum the last rows of a block in another order.
bool RowsAreIndependentOfPlace(const CpuWeight& weight, int64_t rows);

// Null, with the reason stored for gdn_last_error(), if oneDNN has no such product here.
std::unique_ptr<CpuWeight> PackOnednn(const kernels::PackRequest& request, OnednnElement element);

}  // namespace gdn::cpu

#endif  // KERNELS_CPU_MATMUL_WEIGHT_H_
