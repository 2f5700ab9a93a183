#include "gdn/kernels/silu_mul.h"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "kernels/cuda/cuda_test_util.h"
#include "kernels/linear_test_util.h"

namespace gdn::kernels {
namespace {

using SiluMulCuda = CudaTest;

// Gate and up are the halves of one buffer; returns y as the device wrote it.
Tensor OnDevice(const Tensor& both, int64_t rows, int64_t dim, gdn_dtype y_dtype, int64_t stride) {
  const Stream stream;
  const gdn_exec exec = stream.Exec();
  const DeviceBuffer both_device(both);
  Tensor y(y_dtype, rows * stride);
  const DeviceBuffer y_device(y);
  const gdn_silu_mul_args args = {rows,
                                  dim,
                                  both_device.get(),
                                  both_device.get<uint8_t>() + dim * SizeOf(both.dtype()),
                                  both.dtype(),
                                  2 * dim,
                                  y_device.get(),
                                  y_dtype,
                                  stride};
  EXPECT_EQ(gdn_silu_mul(&exec, &args), GDN_OK) << gdn_last_error();
  stream.Synchronize();
  y_device.Download(y.data());
  return y;
}

double Expected(const Tensor& both, int64_t dim, int64_t row, int64_t i) {
  const double gate = both.Get(row * 2 * dim + i);
  return gate / (1.0 + std::exp(-gate)) * both.Get(row * 2 * dim + dim + i);
}

TEST_F(SiluMulCuda, MatchesTheFormulaForEveryTypeAndShape) {
  Random random(41);
  constexpr int64_t kRows = 5;
  for (const int64_t dim : {1, 3, 8, 17, 64, 251, 3584, 5000}) {
    for (const int64_t pad : {0, 1, 8}) {
      for (const gdn_dtype dtype : kDtypes) {
        for (const gdn_dtype y_dtype : kDtypes) {
          Tensor both(dtype, kRows * 2 * dim);
          FillNormal(random, both, 4.0f);
          const int64_t stride = dim + pad;
          const Tensor y = OnDevice(both, kRows, dim, y_dtype, stride);
          RelativeL2 error;
          for (int64_t row = 0; row < kRows; ++row) {
            for (int64_t i = 0; i < dim; ++i) {
              const double got = y.Get(row * stride + i);
              const double expected = Expected(both, dim, row, i);
              ASSERT_TRUE(std::isfinite(got));
              error.Add(got, expected);
              if (y_dtype == GDN_F32) {
                ASSERT_NEAR(got, expected, 5e-6 * std::abs(expected));
              }
            }
            for (int64_t i = dim; i < stride; ++i) ASSERT_TRUE(IsPoison(y, row * stride + i));
          }
          EXPECT_LE(error.value(), WorstRounding(y_dtype))
              << "dim " << dim << " types " << dtype << y_dtype;
        }
      }
    }
  }
}

TEST_F(SiluMulCuda, SaturatesAtTheExtremes) {
  const std::vector<float> gates = {-1e30f, -100.0f, -88.0f, -50.0f, -0.0f,
                                    0.0f,   88.0f,   100.0f, 1e30f};
  const auto dim = static_cast<int64_t>(gates.size());
  Tensor both(GDN_F32, 2 * dim);
  for (int64_t i = 0; i < dim; ++i) {
    both.Set(i, gates[static_cast<size_t>(i)]);
    both.Set(dim + i, 2.0f);
  }
  const Tensor y = OnDevice(both, 1, dim, GDN_F32, dim);
  for (int64_t i = 0; i < dim; ++i) {
    const double expected = Expected(both, dim, 0, i);
    EXPECT_NEAR(y.Get(i), expected, 1e-5 * std::abs(expected) + 1e-35) << both.Get(i);
  }
}

TEST_F(SiluMulCuda, InPlaceGivesTheSameBits) {
  Random random(42);
  constexpr int64_t kRows = 33;
  for (const int64_t dim : {1000, 1001}) {
    for (const gdn_dtype dtype : kDtypes) {
      Tensor both(dtype, kRows * 2 * dim);
      FillNormal(random, both, 4.0f);
      const Tensor expected = OnDevice(both, kRows, dim, dtype, dim);
      const Stream stream;
      const gdn_exec exec = stream.Exec();
      const DeviceBuffer device(both);
      uint8_t* const up = device.get<uint8_t>() + dim * SizeOf(dtype);
      const gdn_silu_mul_args args = {kRows,   dim,          device.get(), up,     dtype,
                                      2 * dim, device.get(), dtype,        2 * dim};
      ASSERT_EQ(gdn_silu_mul(&exec, &args), GDN_OK) << gdn_last_error();
      stream.Synchronize();
      Tensor got = both;
      device.Download(got.data());
      for (int64_t row = 0; row < kRows; ++row) {
        const int64_t first = row * 2 * dim;
        ASSERT_EQ(got.Slice(first, first + dim), expected.Slice(row * dim, (row + 1) * dim));
        ASSERT_EQ(got.Slice(first + dim, first + 2 * dim),
                  both.Slice(first + dim, first + 2 * dim));
      }
    }
  }
}

}  // namespace
}  // namespace gdn::kernels
