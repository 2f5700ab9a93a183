// Register-blocked FP32 products for the current Highway target: C <- scale * C_in + A B, where a
// tile of C stays in registers, elements of A are broadcast and rows of B are loaded as vectors.
// Row-major throughout; the number of columns is a multiple of a vector, so there are no tails.
#include <algorithm>
#include <cstdint>

#include "hwy/highway.h"

#if defined(KERNELS_CPU_TILE_PRODUCT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KERNELS_CPU_TILE_PRODUCT_INL_H_
#undef KERNELS_CPU_TILE_PRODUCT_INL_H_
#else
#define KERNELS_CPU_TILE_PRODUCT_INL_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace gdn::cpu::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// 6 x 2 accumulators, 2 vectors of B and a broadcast fill 15 of 16 registers, and twelve
// independent chains hide the latency of two FMA units.
inline constexpr int64_t kTileRows = 6;
inline constexpr int64_t kTileVectors = 2;

// Operands of a product; c_in NULL stands for zeros, and may equal c.
struct Product {
  const float* a;
  int64_t a_stride;
  const float* b;
  int64_t b_stride;
  int64_t depth;
  float scale;
  const float* c_in;
  int64_t c_in_stride;
  float* c;
  int64_t c_stride;
};

template <int kRows, int kVectors>
HWY_NOINLINE void Tile(const Product& p) {
  const hn::ScalableTag<float> d;
  using V = hn::Vec<decltype(d)>;
  constexpr size_t kLanes = hn::MaxLanes(d);
  V acc[kRows][kVectors];
  if (p.c_in == nullptr) {
    _Pragma("GCC unroll 8") for (int i = 0; i < kRows; ++i) {
      _Pragma("GCC unroll 8") for (int j = 0; j < kVectors; ++j) acc[i][j] = hn::Zero(d);
    }
  } else {
    const V scale = hn::Set(d, p.scale);
    _Pragma("GCC unroll 8") for (int i = 0; i < kRows; ++i) {
      _Pragma("GCC unroll 8") for (int j = 0; j < kVectors; ++j) {
        acc[i][j] = hn::Mul(scale, hn::LoadU(d, p.c_in + i * p.c_in_stride + j * kLanes));
      }
    }
  }
  const float* HWY_RESTRICT a = p.a;
  const float* HWY_RESTRICT b = p.b;
  const int64_t a_stride = p.a_stride;
  const int64_t b_stride = p.b_stride;
  for (int64_t k = 0; k < p.depth; ++k) {
    V row[kVectors];
    _Pragma("GCC unroll 8") for (int j = 0; j < kVectors; ++j) row[j] =
        hn::LoadU(d, b + j * kLanes);
    _Pragma("GCC unroll 8") for (int i = 0; i < kRows; ++i) {
      const V x = hn::Set(d, a[i * a_stride]);
      _Pragma("GCC unroll 8") for (int j = 0; j < kVectors; ++j) acc[i][j] =
          hn::MulAdd(x, row[j], acc[i][j]);
    }
    ++a;
    b += b_stride;
  }
  _Pragma("GCC unroll 8") for (int i = 0; i < kRows; ++i) {
    for (int j = 0; j < kVectors; ++j) {
      hn::StoreU(acc[i][j], d, p.c + i * p.c_stride + j * kLanes);
    }
  }
}

template <int kVectors>
HWY_INLINE void TileOfRows(int64_t rows, const Product& p) {
  switch (rows) {
    case 1:
      return Tile<1, kVectors>(p);
    case 2:
      return Tile<2, kVectors>(p);
    case 3:
      return Tile<3, kVectors>(p);
    case 4:
      return Tile<4, kVectors>(p);
    case 5:
      return Tile<5, kVectors>(p);
    default:
      return Tile<6, kVectors>(p);
  }
}

// Calls `body(first, count)` for blocks of at most kTileRows rows, as even as they go.
template <typename Body>
HWY_INLINE void ForRowBlocks(int64_t rows, const Body& body) {
  const int64_t blocks = (rows + kTileRows - 1) / kTileRows;
  for (int64_t i = 0; i < blocks; ++i) {
    const int64_t first = rows * i / blocks;
    body(first, rows * (i + 1) / blocks - first);
  }
}

}  // namespace gdn::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
