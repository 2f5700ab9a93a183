// The interface between the packed panels and the micro-kernels that multiply with them.
#ifndef KERNELS_CPU_MATMUL_PANELS_H_
#define KERNELS_CPU_MATMUL_PANELS_H_

#include <cstdint>

namespace gdn::cpu {

// A weight [N, K] is stored as panels of 2L columns, L the vector's lanes: [panel][K][2L], zero
// padded. FP32 panels hold columns in order. BF16 panels hold column j in the low and column j + L
// in the high half of 32-bit word j, so that one load, a shift and a mask widen it to two vectors.
struct PanelProduct {
  const float* x;
  int64_t x_row_stride;
  float* y;
  int64_t y_row_stride;
  const void* panels;
  int64_t n;
  int64_t k;
  bool bf16;
  bool accumulate;
};

// The micro-kernels of one instruction set.
struct PanelKernels {
  int64_t lanes;
  int64_t max_tile_rows;
  // Rows [row_begin, row_end) times panels [panel_begin, panel_end). Every element of y is one
  // accumulator summed over k in order, so its bits do not depend on the ranges.
  void (*run)(const PanelProduct& product, int64_t row_begin, int64_t row_end, int64_t panel_begin,
              int64_t panel_end);
};

// Those of the best instruction set of this processor.
const PanelKernels& BestPanelKernels();

// How threads share a product: a grid of row parts by panel parts.
struct PanelGrid {
  int32_t row_parts;
  int32_t panel_parts;
};
PanelGrid ChoosePanelGrid(int64_t rows, int64_t panels, int64_t panel_macs, int32_t threads);

}  // namespace gdn::cpu

#endif  // KERNELS_CPU_MATMUL_PANELS_H_
