#include "kernels/cpu/matmul_panels.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <new>
#include <vector>

#include "gdn/kernels/cpu_pool.h"
#include "kernels/common/convert.h"
#include "kernels/common/packed_weight.h"
#include "kernels/cpu/matmul_weight.h"

namespace gdn::cpu {
namespace {

constexpr std::align_val_t kAlignment{64};
struct AlignedDelete {
  void operator()(std::byte* data) const { ::operator delete[](data, kAlignment); }
};
using AlignedBytes = std::unique_ptr<std::byte[], AlignedDelete>;

// Fewer multiply-adds than this are not worth waking a thread for.
constexpr int64_t kMinMacsPerThread = 24 * 1024;
// What reading the weights costs beside multiplying, in rows.
constexpr int64_t kWeightReadRows = 4;

struct SourceRow {
  const gdn_weight_rows* block;
  int64_t offset;  // elements
};

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

bool AllBf16(const kernels::PackRequest& request) {
  return std::all_of(request.blocks.begin(), request.blocks.end(),
                     [](const gdn_weight_rows& block) { return block.dtype == GDN_BF16; });
}

struct PanelWeight final : CpuWeight {
  const PanelKernels* kernels = nullptr;
  AlignedBytes panels;
  int64_t num_panels = 0;
  bool bf16 = false;

  void StorePanel(int64_t panel, const std::vector<SourceRow>& rows) {
    const int64_t lanes = kernels->lanes;
    const int64_t width = 2 * lanes;
    const int64_t columns = std::min(width, n - panel * width);
    // The destination of 64 k stays in the first-level cache while the columns fill it.
    constexpr int64_t kBlock = 64;
    for (int64_t k0 = 0; k0 < k; k0 += kBlock) {
      const int64_t k1 = std::min(k, k0 + kBlock);
      for (int64_t column = 0; column < columns; ++column) {
        const SourceRow& row = rows[static_cast<size_t>(panel * width + column)];
        for (int64_t i = k0; i < k1; ++i) {
          const float value = kernels::Load(row.block->data, row.block->dtype, row.offset + i);
          const int64_t line = (panel * k + i) * width;
          if (bf16) {
            reinterpret_cast<uint16_t*>(
                panels.get())[line + 2 * (column % lanes) + column / lanes] =
                kernels::F32ToBf16(value);
          } else {
            reinterpret_cast<float*>(panels.get())[line + column] = value;
          }
        }
      }
    }
  }

  size_t Workspace(int64_t) const override { return 0; }

  gdn_status Run(const gdn_exec& exec, const gdn_matmul_args& args) const override {
    const PanelProduct product = {
        args.x, args.x_row_stride,   args.y, args.y_row_stride, panels.get(), n, k,
        bf16,   args.accumulate != 0};
    const int64_t rows = args.rows;
    const PanelGrid grid =
        ChoosePanelGrid(rows, num_panels, 2 * kernels->lanes * k, gdn_cpu_pool_threads(exec.pool));
    auto body = [&](int64_t begin, int64_t end, int32_t) {
      for (int64_t cell = begin; cell < end; ++cell) {
        const int64_t r = cell / grid.panel_parts;
        const int64_t p = cell % grid.panel_parts;
        kernels->run(product, rows * r / grid.row_parts, rows * (r + 1) / grid.row_parts,
                     num_panels * p / grid.panel_parts, num_panels * (p + 1) / grid.panel_parts);
      }
    };
    ParallelFor(exec.pool, int64_t{grid.row_parts} * grid.panel_parts, 1, body);
    return GDN_OK;
  }
};

}  // namespace

PanelGrid ChoosePanelGrid(int64_t rows, int64_t panels, int64_t panel_macs, int32_t threads) {
  const int64_t macs = panels * panel_macs * (rows + kWeightReadRows);
  const int64_t useful = std::clamp<int64_t>(macs / kMinMacsPerThread, 1, threads);
  PanelGrid best = {1, 1};
  int64_t best_cost = std::numeric_limits<int64_t>::max();
  // Fewest row parts first: each row part reads the weights again.
  for (int64_t row_parts = 1; row_parts <= std::min(useful, rows); ++row_parts) {
    const int64_t panel_parts = std::min(useful / row_parts, panels);
    const int64_t cost =
        CeilDiv(panels, panel_parts) * (CeilDiv(rows, row_parts) + kWeightReadRows);
    if (cost < best_cost) {
      best_cost = cost;
      best = {static_cast<int32_t>(row_parts), static_cast<int32_t>(panel_parts)};
    }
  }
  return best;
}

std::unique_ptr<CpuWeight> PackPanels(const kernels::PackRequest& request) {
  auto packed = std::make_unique<PanelWeight>();
  packed->backend = GDN_BACKEND_CPU;
  packed->n = request.n;
  packed->k = request.k;
  packed->bf16 = request.math == GDN_MATH_BF16 || AllBf16(request);
  packed->kind = packed->bf16 ? "highway-bf16" : "highway-f32";
  packed->kernels = &BestPanelKernels();
  const int64_t width = 2 * packed->kernels->lanes;
  packed->num_panels = CeilDiv(request.n, width);
  packed->bytes = static_cast<size_t>(packed->num_panels * width * request.k) *
                  (packed->bf16 ? sizeof(uint16_t) : sizeof(float));
  // Value-initialised: the padding columns are multiplied too.
  packed->panels.reset(new (kAlignment) std::byte[packed->bytes]());

  std::vector<SourceRow> rows(static_cast<size_t>(request.n));
  kernels::ForEachRow(request, [&](int64_t n, const gdn_weight_rows& block, int64_t row) {
    rows[static_cast<size_t>(n)] = {&block, row * request.k};
  });
  for (int64_t panel = 0; panel < packed->num_panels; ++panel) packed->StorePanel(panel, rows);
  return packed;
}

}  // namespace gdn::cpu
