// L2 norm: every element and the ratio of all against exact arithmetic, with the limits of the
// published contract in the names.
#include <cmath>
#include <vector>

#include "gdn/kernels/l2_norm.h"
#include "kernels/linear_test_util.h"
#include "kernels/op_call_test_util.h"

namespace gdn::kernels {
namespace {

GDN_BACKEND_SUITE(L2NormPrecision);

// Ordinary rows, rows where eps rules, large ones.
Tensor Rows(uint32_t seed, gdn_dtype dtype, int64_t rows, int64_t dim) {
  constexpr float kSizes[] = {1.0f, 1e-4f, 30.0f};
  Random random(seed);
  Tensor x(dtype, rows * dim);
  for (int64_t i = 0; i < x.size(); ++i) x.Set(i, kSizes[i / dim % 3] * random.Normal());
  return x;
}

// y is rounded once: half a unit in the last place, 2^-8 and 2^-11, and no more than FP32 errs.
// That is half of what the contract allows.
GDN_BACKEND_TEST(L2NormPrecision, Y1T1ErrorAgainstExactArithmetic) {
  constexpr double kWorst[] = {2e-6, 0x1p-8 + 2e-6, 0x1p-11 + 2e-6};
  constexpr double kRatio[] = {2e-6, 3e-3, 3e-3 / 8};
  for (const gdn_dtype x_dtype : kDtypes) {
    for (const gdn_dtype y_dtype : {x_dtype, GDN_F32}) {
      for (const int64_t dim : {60, 64, 100, 128, 256, 1000, 1024, 2048}) {
        const int64_t rows = dim > 256 ? 30 : 300;
        const Tensor x = Rows(static_cast<uint32_t>(dim), x_dtype, rows, dim);
        for (const Backend& backend : {kRef, Tested(0)}) {
          Tensor y(y_dtype, rows * dim), rstd(GDN_F32, rows);
          gdn_l2_norm_args args{};
          args.rows = rows;
          args.dim = args.x_row_stride = args.y_row_stride = dim;
          args.x = x.data();
          args.x_dtype = x_dtype;
          args.y = y.data();
          args.y_dtype = y_dtype;
          args.rstd = static_cast<float*>(rstd.data());
          args.eps = 1e-6f;
          args.scale = 1.0f;
          ASSERT_EQ(CallOp(Execution(backend), gdn_l2_norm, args, {In(x), Out(y), Out(rstd)},
                           {args.x, args.y, args.rstd}),
                    GDN_OK)
              << gdn_last_error();
          double largest = 0.0;
          RelativeL2 ratio;
          for (int64_t row = 0; row < rows; ++row) {
            double sum = 0.0;
            for (int64_t i = 0; i < dim; ++i) sum += std::pow(x.Get(row * dim + i), 2);
            const double inverse = 1.0 / std::sqrt(sum + double{args.eps});
            EXPECT_NEAR(rstd.Get(row), inverse, 1e-6 * inverse);
            for (int64_t i = row * dim; i < (row + 1) * dim; ++i) {
              const double exact = x.Get(i) * inverse;
              ratio.Add(y.Get(i), exact);
              // Below the normal numbers of FP16 a relative error has no bound.
              if (exact == 0.0 || (y_dtype == GDN_F16 && std::abs(exact) < 0x1p-14)) continue;
              const double error = std::abs(y.Get(i) - exact) / std::abs(exact);
              if (!(error <= largest)) largest = error;  // A NaN stays.
            }
          }
          SCOPED_TRACE(testing::Message()
                       << backend.name << " types " << x_dtype << y_dtype << " dim " << dim);
          EXPECT_LE(largest, kWorst[y_dtype]);
          EXPECT_LE(ratio.value(), kRatio[y_dtype]);
        }
      }
    }
  }
}

}  // namespace
}  // namespace gdn::kernels
