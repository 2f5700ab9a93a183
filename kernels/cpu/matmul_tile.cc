// Register-blocked micro-kernels over packed panels.
#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "kernels/cpu/matmul_panels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/matmul_tile.cc"
#include "hwy/foreach_target.h"
// After foreach_target.h.
#include "hwy/highway.h"

#ifndef GDN_UNROLL
#if defined(__clang__)
#define GDN_UNROLL _Pragma("unroll")
#else
#define GDN_UNROLL _Pragma("GCC unroll 16")
#endif
#endif

HWY_BEFORE_NAMESPACE();
namespace gdn::cpu::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;
using F32 = hn::ScalableTag<float>;
using U32 = hn::ScalableTag<uint32_t>;
using F32Vec = hn::Vec<F32>;

// Two accumulators per row and panel: 12 of 16 vector registers, or 24 of 32.
inline constexpr int kMaxTileRows = HWY_TARGET <= HWY_AVX3 ? 12 : 6;

// Panels that a tile of few rows takes at once: FMA latency times throughput needs 8 sums in
// flight, and a sum that does not stay in a register waits for its own store.
constexpr int TilePanels(int rows) {
  if (rows == 1) return 4;
  if (rows == 2) return kMaxTileRows == 12 ? 4 : 2;
  return kMaxTileRows == 12 && rows <= 6 ? 2 : 1;
}

// Bytes of weights that stay in the L2 cache while the rows sweep over them.
inline constexpr int64_t kSweepBytes = 128 * 1024;

template <bool kBf16>
using Stored = std::conditional_t<kBf16, uint16_t, float>;

template <bool kBf16>
HWY_INLINE void LoadColumns(const Stored<kBf16>* w, F32Vec& low, F32Vec& high) {
  const F32 d;
  if constexpr (kBf16) {
    const U32 du;
    const auto words = hn::LoadU(du, reinterpret_cast<const uint32_t*>(w));
    low = hn::BitCast(d, hn::ShiftLeft<16>(words));
    high = hn::BitCast(d, hn::And(words, hn::Set(du, 0xffff0000u)));
  } else {
    low = hn::LoadU(d, w);
    high = hn::LoadU(d, w + hn::Lanes(d));
  }
}

HWY_INLINE void StoreColumns(F32Vec sum, float* y, int64_t columns, bool accumulate) {
  const F32 d;
  if (columns >= static_cast<int64_t>(hn::Lanes(d))) {
    hn::StoreU(accumulate ? hn::Add(hn::LoadU(d, y), sum) : sum, d, y);
    return;
  }
  HWY_ALIGN float lanes[hn::MaxLanes(F32())];
  hn::Store(sum, d, lanes);
  for (int64_t i = 0; i < columns; ++i) y[i] = accumulate ? y[i] + lanes[i] : lanes[i];
}

template <bool kBf16, int kRows, int kPanels>
HWY_NOINLINE void Tile(const PanelProduct& product, int64_t row, int64_t panel) {
  const F32 d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  const int64_t panel_stride = product.k * 2 * lanes;
  const auto* w = static_cast<const Stored<kBf16>*>(product.panels) + panel * panel_stride;
  const float* x = product.x + row * product.x_row_stride;
  const int64_t x_row_stride = product.x_row_stride;

  F32Vec sums[kRows][kPanels][2];
  GDN_UNROLL
  for (int m = 0; m < kRows; ++m) {
    GDN_UNROLL
    for (int p = 0; p < kPanels; ++p) sums[m][p][0] = sums[m][p][1] = hn::Zero(d);
  }
  for (int64_t k = 0; k < product.k; ++k) {
    // Panel by panel: two vectors of weights live at a time leave the registers to the sums.
    GDN_UNROLL
    for (int p = 0; p < kPanels; ++p) {
      F32Vec low;
      F32Vec high;
      LoadColumns<kBf16>(w + p * panel_stride + k * 2 * lanes, low, high);
      GDN_UNROLL
      for (int m = 0; m < kRows; ++m) {
        const auto value = hn::Set(d, x[m * x_row_stride + k]);
        sums[m][p][0] = hn::MulAdd(value, low, sums[m][p][0]);
        sums[m][p][1] = hn::MulAdd(value, high, sums[m][p][1]);
      }
    }
  }
  GDN_UNROLL
  for (int m = 0; m < kRows; ++m) {
    float* y = product.y + (row + m) * product.y_row_stride;
    GDN_UNROLL
    for (int p = 0; p < kPanels; ++p) {
      const int64_t column = (panel + p) * 2 * lanes;
      StoreColumns(sums[m][p][0], y + column, product.n - column, product.accumulate);
      StoreColumns(sums[m][p][1], y + column + lanes, product.n - column - lanes,
                   product.accumulate);
    }
  }
}

// kPanels panels at a time, the remainder with ever fewer.
template <bool kBf16, int kRows, int kPanels>
void TileRow(const PanelProduct& product, int64_t row, int64_t panel, int64_t panel_end) {
  for (; panel + kPanels <= panel_end; panel += kPanels) {
    Tile<kBf16, kRows, kPanels>(product, row, panel);
  }
  if constexpr (kPanels > 1) {
    if (panel < panel_end) TileRow<kBf16, kRows, kPanels - 1>(product, row, panel, panel_end);
  }
}

template <bool kBf16, int kRows>
void DispatchRows(const PanelProduct& product, int64_t rows, int64_t row, int64_t panel,
                  int64_t panel_end) {
  if (rows == kRows) {
    TileRow<kBf16, kRows, TilePanels(kRows)>(product, row, panel, panel_end);
  } else if constexpr (kRows > 1) {
    DispatchRows<kBf16, kRows - 1>(product, rows, row, panel, panel_end);
  }
}

template <bool kBf16>
void RunTiles(const PanelProduct& product, int64_t row_begin, int64_t row_end, int64_t panel_begin,
              int64_t panel_end) {
  const int64_t rows = row_end - row_begin;
  const int64_t tiles = (rows + kMaxTileRows - 1) / kMaxTileRows;
  const auto panel_bytes =
      static_cast<int64_t>(2 * hn::Lanes(F32()) * sizeof(Stored<kBf16>)) * product.k;
  // Whole groups of panels for every tile height.
  constexpr int64_t kGroup = 4;
  const int64_t sweep = std::max(kGroup, kSweepBytes / panel_bytes / kGroup * kGroup);
  for (int64_t panel = panel_begin; panel < panel_end; panel += sweep) {
    const int64_t stop = std::min(panel_end, panel + sweep);
    for (int64_t tile = 0; tile < tiles; ++tile) {
      // Even heights: a remainder of one row would run at a fraction of the speed.
      const int64_t first = row_begin + rows * tile / tiles;
      const int64_t last = row_begin + rows * (tile + 1) / tiles;
      DispatchRows<kBf16, kMaxTileRows>(product, last - first, first, panel, stop);
    }
  }
}

void Run(const PanelProduct& product, int64_t row_begin, int64_t row_end, int64_t panel_begin,
         int64_t panel_end) {
  if (product.bf16) {
    RunTiles<true>(product, row_begin, row_end, panel_begin, panel_end);
  } else {
    RunTiles<false>(product, row_begin, row_end, panel_begin, panel_end);
  }
}

const PanelKernels* GetKernels() {
  static const PanelKernels kernels = {static_cast<int64_t>(hn::Lanes(F32())), kMaxTileRows, &Run};
  return &kernels;
}

}  // namespace gdn::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace gdn::cpu {

HWY_EXPORT(GetKernels);

const PanelKernels& BestPanelKernels() { return *HWY_DYNAMIC_DISPATCH(GetKernels)(); }

}  // namespace gdn::cpu
#endif  // HWY_ONCE
