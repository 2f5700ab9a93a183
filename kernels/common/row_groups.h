// Where a row lies that belongs to a group of rows.
#ifndef KERNELS_COMMON_ROW_GROUPS_H_
#define KERNELS_COMMON_ROW_GROUPS_H_

#include <cstdint>

#ifdef __CUDACC__
#define GDN_HOST_DEVICE __host__ __device__
#else
#define GDN_HOST_DEVICE
#endif

namespace gdn::kernels {

// In elements; group_rows 0: rows are not grouped.
GDN_HOST_DEVICE inline int64_t RowOffset(int64_t row, int64_t row_stride, int64_t group_rows,
                                         int64_t group_stride) {
  if (group_rows == 0) return row * row_stride;
  return row / group_rows * group_stride + row % group_rows * row_stride;
}

}  // namespace gdn::kernels

#endif  // KERNELS_COMMON_ROW_GROUPS_H_
