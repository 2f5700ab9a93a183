#include "tests/training/ops.h"

#include "gdn/kernels/linear.h"

namespace gdn::kernels {

Tensor Product(OpRunner& run, const char* name, const Tensor& x, const Tensor& weight, int64_t k,
               gdn_dtype y_dtype) {
  const bool on_gpu = OnGpu(run.backend()) && weight.dtype() != GDN_F32;
  OpRunner ref(kRef, false);
  OpRunner& with = on_gpu ? run : ref;
  gdn_linear_shape shape{};
  shape.n = weight.size() / k;
  shape.k = k;
  shape.weight_dtype = weight.dtype();
  shape.y_dtype = y_dtype;
  shape.max_rows = x.size() / k;
  gdn_linear_plan* plan = nullptr;
  EXPECT_EQ(gdn_linear_plan_create(with.backend().backend, &shape, &plan), GDN_OK)
      << gdn_last_error();
  Buffer from(with.backend(), x), weights(with.backend(), weight);
  Buffer y(with.backend(), y_dtype, shape.max_rows * shape.n);
  gdn_linear_args args{};
  args.plan = plan;
  args.rows = shape.max_rows;
  args.x = from.at();
  args.x_dtype = x.dtype();
  args.x_row_stride = k;
  args.weight = weights.at();
  args.y = y.at();
  args.y_row_stride = shape.n;
  with.Run(name, gdn_linear, gdn_linear_workspace, args);
  gdn_linear_plan_destroy(plan);
  return y.Take();
}

Tensor Transposed(const Tensor& matrix, int64_t rows, int64_t stride) {
  const int64_t columns = matrix.size() / rows;
  Tensor transposed(matrix.dtype(), columns * stride);
  for (int64_t column = 0; column < columns; ++column) {
    for (int64_t row = 0; row < stride; ++row) {
      transposed.Set(column * stride + row, row < rows ? matrix.Get(row * columns + column) : 0.0f);
    }
  }
  return transposed;
}

}  // namespace gdn::kernels
