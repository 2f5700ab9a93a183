// Rows of a [batch, seq, heads, dim] view on the device: from the number of a row to its elements.
#ifndef KERNELS_CUDA_ROW_VIEW_CUH_
#define KERNELS_CUDA_ROW_VIEW_CUH_

#include <cstdint>

#include "gdn/kernels/gated_rms_norm_training.h"
#include "kernels/cuda/vector.cuh"

namespace gdn::cuda {

// Division of numbers below 2^31 by a divisor known at the launch: multiply and shift (Granlund and
// Montgomery).
struct Divider {
  uint32_t divisor = 1;
  uint32_t multiplier = 0;
  uint32_t shift = 0;

  Divider() = default;
  explicit Divider(uint32_t by) : divisor(by) {
    if (by <= 1) return;
    uint32_t log = 0;
    while ((uint64_t{1} << log) < by) ++log;
    multiplier = static_cast<uint32_t>(((uint64_t{1} << (31 + log)) + by - 1) / by);
    shift = log - 1;
  }
  __device__ uint32_t Quotient(uint32_t n) const {
    return divisor == 1 ? n : __umulhi(n, multiplier) >> shift;
  }
};

constexpr int64_t kMaxDivided = int64_t{1} << 31;

// The axes that a row's number is made of.
struct RowAxes {
  int64_t rows;
  int64_t seq;
  int64_t heads;
  Divider by_seq;  // Both only where rows is below kMaxDivided.
  Divider by_heads;
};

struct RowIndex {
  int64_t batch;
  int64_t seq;
  int64_t head;
};

__device__ inline RowIndex IndexOf(const RowAxes& axes, uint32_t row) {
  const uint32_t token = axes.by_heads.Quotient(row);
  const uint32_t batch = axes.by_seq.Quotient(token);
  return {batch, token - batch * axes.by_seq.divisor, row - token * axes.by_heads.divisor};
}
// The same for any number of rows.
__device__ inline RowIndex IndexOfAny(const RowAxes& axes, int64_t row) {
  if (axes.rows < kMaxDivided) return IndexOf(axes, static_cast<uint32_t>(row));
  const int64_t token = row / axes.heads;
  return {token / axes.seq, token % axes.seq, row % axes.heads};
}

__device__ inline int64_t OffsetOf(const gdn_row_strides& strides, const RowIndex& index) {
  return index.batch * strides.batch + index.seq * strides.seq + index.head * strides.head;
}

inline RowAxes AxesOf(const gdn_gated_rms_norm_input& in) {
  RowAxes axes{in.batch * in.seq * in.heads, in.seq, in.heads, {}, {}};
  if (axes.rows > 0 && axes.rows < kMaxDivided) {
    axes.by_seq = Divider(static_cast<uint32_t>(in.seq));
    axes.by_heads = Divider(static_cast<uint32_t>(in.heads));
  }
  return axes;
}

// The strides of axes of extent 1 mean nothing: as if they were those of a dense tensor.
inline gdn_row_strides UsedStrides(const gdn_gated_rms_norm_input& in, gdn_row_strides strides) {
  if (in.dim == 1) strides.element = 1;
  if (in.heads == 1) strides.head = in.dim;
  if (in.seq == 1) strides.seq = in.heads * in.dim;
  if (in.batch == 1) strides.batch = in.seq * in.heads * in.dim;
  return strides;
}

inline bool IsDense(const gdn_gated_rms_norm_input& in, const gdn_row_strides& used) {
  return used.element == 1 && used.head == in.dim && used.seq == in.heads * in.dim &&
         used.batch == in.seq * in.heads * in.dim;
}

// The most bytes, up to 16, on which each vector of eight neighbouring elements of each row lies; 0
// where rows are not made of such vectors.
inline int UnitOf(const gdn_gated_rms_norm_input& in, const void* data, int64_t element_size,
                  const gdn_row_strides& used) {
  if (used.element != 1 || in.dim % kVectorElements != 0) return 0;
  const int64_t strides = used.head | used.seq | used.batch;
  const uint64_t bits =
      reinterpret_cast<uintptr_t>(data) | static_cast<uint64_t>(strides) * element_size | 16u;
  return static_cast<int>(bits & -bits);
}

// Eight neighbouring elements by accesses of a unit's size. Not a choice at run time: where
// branches of a load join, the thread waits for it.
template <typename Unit, typename T>
__device__ inline Vector<T> LoadUnits(const T* data) {
  constexpr int kParts = sizeof(Vector<T>) / sizeof(Unit);
  Unit parts[kParts];
#pragma unroll
  for (int i = 0; i < kParts; ++i) parts[i] = reinterpret_cast<const Unit*>(data)[i];
  Vector<T> vector;
  memcpy(&vector, parts, sizeof(vector));
  return vector;
}

// Elements i to i + 7 of a row, widened; those beyond its end are zeros.
template <typename T>
__device__ inline void LoadRow(const T* row, int64_t element_stride, bool vectors, int64_t i,
                               int64_t dim, float (&to)[kVectorElements]) {
  if (vectors && i < dim) {
    const Vector<T> vector = LoadVector(row + i);
#pragma unroll
    for (int e = 0; e < kVectorElements; ++e) to[e] = Widen(vector.element[e]);
    return;
  }
#pragma unroll
  for (int e = 0; e < kVectorElements; ++e) {
    to[e] = i + e < dim ? Widen(row[(i + e) * element_stride]) : 0.0f;
  }
}
template <typename T>
__device__ inline void StoreRow(T* row, bool vectors, int64_t i, int64_t dim,
                                const Vector<T>& from) {
  if (vectors) {
    if (i < dim) StoreVector(row + i, from);
    return;
  }
#pragma unroll
  for (int e = 0; e < kVectorElements; ++e) {
    if (i + e < dim) row[i + e] = from.element[e];
  }
}

}  // namespace gdn::cuda

#endif  // KERNELS_CUDA_ROW_VIEW_CUH_
