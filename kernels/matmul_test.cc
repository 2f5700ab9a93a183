#include "gdn/kernels/matmul.h"

#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/common/convert.h"
#include "kernels/cpu/matmul_panels.h"
#include "kernels/linear_test_util.h"

namespace gdn::kernels {
namespace {

struct WeightDeleter {
  void operator()(gdn_packed_weight* weight) const { gdn_packed_weight_destroy(weight); }
};
using Weight = std::unique_ptr<gdn_packed_weight, WeightDeleter>;

// A weight of several row blocks, whose types may differ.
struct Blocks {
  int64_t k;
  std::vector<Tensor> data;
  std::vector<gdn_weight_rows> rows;

  Blocks(Random& random, int64_t columns, std::vector<std::pair<int64_t, gdn_dtype>> shapes)
      : k(columns) {
    for (const auto& [n, dtype] : shapes) {
      data.emplace_back(dtype, n * k);
      FillNormal(random, data.back(), 0.25f);
    }
    for (size_t i = 0; i < shapes.size(); ++i) {
      rows.push_back({data[i].data(), shapes[i].second, shapes[i].first});
    }
  }
  int64_t n() const {
    int64_t sum = 0;
    for (const gdn_weight_rows& block : rows) sum += block.rows;
    return sum;
  }
  Weight Pack(gdn_backend backend, gdn_matmul_math math, int32_t row_block = 0,
              int32_t max_threads = 1) const {
    gdn_packed_weight* packed = nullptr;
    EXPECT_EQ(
        gdn_packed_weight_create(backend, math, k, rows.data(), static_cast<int32_t>(rows.size()),
                                 row_block, max_threads, &packed),
        GDN_OK)
        << gdn_last_error();
    return Weight(packed);
  }
};

constexpr int64_t kXPadding = 3;
constexpr int64_t kYPadding = 5;

Tensor Inputs(Random& random, int64_t rows, int64_t k) {
  Tensor x(GDN_F32, rows * (k + kXPadding));
  for (int64_t m = 0; m < rows; ++m) {
    for (int64_t i = 0; i < k; ++i) x.Set(m * (k + kXPadding) + i, random.Normal());
  }
  return x;
}

// y of a product, [rows, n + kYPadding]; poisoned, or holding `residual` to add to.
Tensor Multiply(Execution& execution, const gdn_packed_weight* weight, const Tensor& x,
                int64_t rows, int64_t n, int64_t k, const Tensor* residual = nullptr) {
  Tensor y = residual != nullptr ? *residual : Tensor(GDN_F32, rows * (n + kYPadding));
  gdn_matmul_args args = {};
  args.rows = rows;
  args.x = static_cast<const float*>(x.data());
  args.x_row_stride = k + kXPadding;
  args.weight = weight;
  args.y = static_cast<float*>(y.data());
  args.y_row_stride = n + kYPadding;
  args.accumulate = residual != nullptr;
  size_t bytes = 0;
  EXPECT_EQ(gdn_matmul_workspace(execution.exec(), &args, &bytes), GDN_OK) << gdn_last_error();
  execution.SetWorkspace(bytes);
  EXPECT_EQ(gdn_matmul(execution.exec(), &args), GDN_OK) << gdn_last_error();
  return y;
}

Tensor Residual(Random& random, int64_t rows, int64_t n) {
  Tensor y(GDN_F32, rows * (n + kYPadding));
  for (int64_t m = 0; m < rows; ++m) {
    for (int64_t i = 0; i < n; ++i) y.Set(m * (n + kYPadding) + i, random.Normal());
  }
  return y;
}

void ExpectClose(const Tensor& got, const Tensor& expected, int64_t rows, int64_t n, double bound) {
  RelativeL2 error;
  for (int64_t m = 0; m < rows; ++m) {
    for (int64_t i = 0; i < n; ++i) {
      const int64_t at = m * (n + kYPadding) + i;
      const double value = expected.Get(at);
      // Every element; the constant stands for terms that cancel.
      ASSERT_NEAR(got.Get(at), value, bound * (16.0 + std::abs(value)))
          << "row " << m << " column " << i;
      error.Add(got.Get(at), value);
    }
    for (int64_t i = n; i < n + kYPadding; ++i) {
      ASSERT_TRUE(IsPoison(got, m * (n + kYPadding) + i)) << "padding of row " << m;
    }
  }
  constexpr int64_t kEnough = 64;  // elements for a cancelled one to drown in
  if (rows * n >= kEnough) {
    EXPECT_LE(error.value(), bound);
  }
}

double MathBound(const gdn_packed_weight* weight) {
  // Native BF16 products round x; the other algorithms do not.
  return std::string(gdn_packed_weight_kind(weight)) == "onednn-bf16" ? 4e-3 : 2e-6;
}

TEST(MatmulTest, MatchesRefForEveryShapeTypeAndTarget) {
  const std::array<std::pair<int64_t, int64_t>, 9> kShapes = {{// {K, N}
                                                               {1, 1},
                                                               {3, 5},
                                                               {17, 15},
                                                               {64, 16},
                                                               {33, 97},
                                                               {256, 260},
                                                               {300, 33},
                                                               {65, 1030},
                                                               {768, 31}}};
  Random random(1);
  Execution reference(kRef);
  for (const gdn_matmul_math math : {GDN_MATH_F32, GDN_MATH_BF16}) {
    for (const gdn_dtype dtype : kDtypes) {
      for (const auto& [k, n] : kShapes) {
        const Blocks blocks(random, k, {{n, dtype}});
        const Weight expected_weight = blocks.Pack(GDN_BACKEND_REF, math);
        for (const int64_t rows : {1, 2, 3, 4, 5, 6, 7, 13}) {
          const Tensor x = Inputs(random, rows, k);
          const Tensor residual = Residual(random, rows, n);
          for (const Tensor* start : {static_cast<const Tensor*>(nullptr), &residual}) {
            const Tensor expected =
                Multiply(reference, expected_weight.get(), x, rows, n, k, start);
            for (const Variant& variant : kVariants) {
              SCOPED_TRACE(testing::Message()
                           << variant.name << " math " << math << " type " << dtype << " K " << k
                           << " N " << n << " M " << rows);
              const BaselineTargetScope target(variant.baseline);
              Execution execution(CpuBackend(variant.threads));
              const Weight weight = blocks.Pack(GDN_BACKEND_CPU, math, 0, 3);
              ExpectClose(Multiply(execution, weight.get(), x, rows, n, k, start), expected, rows,
                          n, MathBound(weight.get()));
            }
          }
        }
      }
    }
  }
}

TEST(MatmulTest, StacksRowBlocksOfSeveralTypes) {
  Random random(2);
  const Blocks blocks(random, 40, {{7, GDN_BF16}, {1, GDN_F32}, {30, GDN_F16}, {11, GDN_BF16}});
  ASSERT_EQ(blocks.n(), 49);
  Execution execution(CpuBackend(2));
  Execution reference(kRef);
  for (const gdn_matmul_math math : {GDN_MATH_F32, GDN_MATH_BF16}) {
    const Weight weight = blocks.Pack(GDN_BACKEND_CPU, math);
    const Weight expected = blocks.Pack(GDN_BACKEND_REF, math);
    const Tensor x = Inputs(random, 9, 40);
    ExpectClose(Multiply(execution, weight.get(), x, 9, 49, 40),
                Multiply(reference, expected.get(), x, 9, 49, 40), 9, 49, MathBound(weight.get()));
  }
}

TEST(MatmulTest, ReferenceIsTheSumInFp64) {
  // Values whose FP32 sum would lose the small term.
  const std::array<float, 3> w = {1.0f, 0x1p-12f, -1.0f};
  const std::array<float, 3> x = {0x1p12f, 1.0f, 0x1p12f};
  const gdn_weight_rows block = {w.data(), GDN_F32, 1};
  gdn_packed_weight* packed = nullptr;
  ASSERT_EQ(gdn_packed_weight_create(GDN_BACKEND_REF, GDN_MATH_F32, 3, &block, 1, 0, 1, &packed),
            GDN_OK);
  const Weight weight(packed);
  float y = 0.5f;
  gdn_matmul_args args = {1, x.data(), 3, weight.get(), &y, 1, /*accumulate=*/1};
  ASSERT_EQ(gdn_matmul(Execution(kRef).exec(), &args), GDN_OK);
  EXPECT_EQ(y, 0.5f + 0x1p-12f);
}

TEST(MatmulTest, NamesTheAlgorithmAndPacksBf16WhereExact) {
  Random random(3);
  const Blocks bf16(random, 64, {{64, GDN_BF16}});
  const Blocks f32(random, 64, {{64, GDN_F32}});
  const Blocks mixed(random, 64, {{32, GDN_BF16}, {32, GDN_F16}});
  auto kind = [](const Weight& weight) {
    return std::string(gdn_packed_weight_kind(weight.get()));
  };
  EXPECT_EQ(kind(bf16.Pack(GDN_BACKEND_CPU, GDN_MATH_F32)), "highway-bf16");
  EXPECT_EQ(kind(f32.Pack(GDN_BACKEND_CPU, GDN_MATH_F32)), "highway-f32");
  EXPECT_EQ(kind(mixed.Pack(GDN_BACKEND_CPU, GDN_MATH_F32)), "highway-f32");
  EXPECT_EQ(kind(bf16.Pack(GDN_BACKEND_REF, GDN_MATH_BF16)), "ref");
  EXPECT_EQ(gdn_packed_weight_bytes(bf16.Pack(GDN_BACKEND_CPU, GDN_MATH_F32).get()), 64u * 64 * 2);
  EXPECT_EQ(gdn_packed_weight_bytes(f32.Pack(GDN_BACKEND_CPU, GDN_MATH_F32).get()), 64u * 64 * 4);
}

// Each row of a batch, with any threads and alone, gives the same bits.
TEST(MatmulTest, RowBitsDependOnNothingElse) {
  Random random(4);
  constexpr int64_t kRows = 61;
  for (const auto& [k, n] : {std::pair<int64_t, int64_t>{256, 260}, {100, 2056}, {768, 256}}) {
    for (const gdn_dtype dtype : {GDN_BF16, GDN_F32}) {
      const Blocks blocks(random, k, {{n, dtype}});
      const Weight weight = blocks.Pack(GDN_BACKEND_CPU, GDN_MATH_F32);
      const Tensor x = Inputs(random, kRows, k);
      const Tensor residual = Residual(random, kRows, n);
      Execution alone(CpuBackend(0));
      const Tensor expected = Multiply(alone, weight.get(), x, kRows, n, k, &residual);
      for (const int32_t threads : {0, 1, 2, 3, 5, 8}) {
        Execution execution(CpuBackend(threads));
        for (const int64_t rows : {1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 24, 61}) {
          for (int64_t first = 0; first + rows <= kRows; first += rows) {
            Tensor part_x(GDN_F32, rows * (k + kXPadding));
            std::memcpy(part_x.data(),
                        static_cast<const float*>(x.data()) + first * (k + kXPadding),
                        part_x.bytes().size());
            Tensor part(GDN_F32, rows * (n + kYPadding));
            std::memcpy(part.data(),
                        static_cast<const float*>(residual.data()) + first * (n + kYPadding),
                        part.bytes().size());
            const Tensor got = Multiply(execution, weight.get(), part_x, rows, n, k, &part);
            ASSERT_EQ(got.bytes(),
                      expected.Slice(first * (n + kYPadding), (first + rows) * (n + kYPadding)))
                << "rows " << first << " to " << first + rows << " threads " << threads;
          }
        }
      }
    }
  }
}

TEST(MatmulTest, NonFiniteInputsStayInTheirRow) {
  Random random(5);
  const Blocks blocks(random, 64, {{40, GDN_BF16}});
  const Weight weight = blocks.Pack(GDN_BACKEND_CPU, GDN_MATH_F32);
  Execution execution(CpuBackend(2));
  Tensor x = Inputs(random, 8, 64);
  const Tensor clean = Multiply(execution, weight.get(), x, 8, 40, 64);
  x.Set(3 * (64 + kXPadding) + 10, std::numeric_limits<float>::quiet_NaN());
  const Tensor got = Multiply(execution, weight.get(), x, 8, 40, 64);
  for (int64_t m = 0; m < 8; ++m) {
    for (int64_t i = 0; i < 40; ++i) {
      const int64_t at = m * (40 + kYPadding) + i;
      if (m == 3) {
        EXPECT_TRUE(std::isnan(got.Get(at)));
      } else {
        EXPECT_EQ(got.Get(at), clean.Get(at));
      }
    }
  }
}

TEST(MatmulTest, ColumnsOfOneBufferMayHoldInputAndOutput) {
  Random random(6);
  constexpr int64_t kPitch = 100;
  const Blocks blocks(random, 40, {{50, GDN_BF16}});
  const Weight weight = blocks.Pack(GDN_BACKEND_CPU, GDN_MATH_F32);
  std::vector<float> buffer(10 * kPitch, 0.5f);
  Execution execution(CpuBackend(0));
  gdn_matmul_args args = {9, buffer.data() + 3, kPitch, weight.get(), buffer.data() + 50, kPitch,
                          0};
  EXPECT_EQ(gdn_matmul(execution.exec(), &args), GDN_OK) << gdn_last_error();
  args.y = buffer.data() + 42;
  EXPECT_EQ(gdn_matmul(execution.exec(), &args), GDN_INVALID_ARGUMENT);
  EXPECT_THAT(gdn_last_error(), testing::HasSubstr("y must not overlap x"));
  args.y = buffer.data() + 54;  // its last column is the next row's first of x
  EXPECT_EQ(gdn_matmul(execution.exec(), &args), GDN_INVALID_ARGUMENT);
}

TEST(MatmulTest, GridUsesThreadsThatPayAndNoMore) {
  const int64_t macs = 16 * 256;
  for (const int64_t rows : {1, 6, 64, 4096}) {
    for (const int64_t panels : {1, 2, 17, 129}) {
      for (const int32_t threads : {1, 2, 3, 8, 64}) {
        const cpu::PanelGrid grid = cpu::ChoosePanelGrid(rows, panels, macs, threads);
        EXPECT_GE(grid.row_parts, 1);
        EXPECT_GE(grid.panel_parts, 1);
        EXPECT_LE(grid.row_parts, rows);
        EXPECT_LE(grid.panel_parts, panels);
        EXPECT_LE(grid.row_parts * grid.panel_parts, threads);
      }
    }
  }
  auto grid = cpu::ChoosePanelGrid(1, 1, macs, 8);
  EXPECT_EQ(grid.row_parts * grid.panel_parts, 1);
  grid = cpu::ChoosePanelGrid(4096, 1, macs, 8);
  EXPECT_EQ(grid.row_parts, 8);
  grid = cpu::ChoosePanelGrid(1, 129, macs, 8);
  EXPECT_EQ(grid.panel_parts, 8);
}

TEST(MatmulTest, RefusesMisuseByName) {
  Random random(7);
  const Blocks blocks(random, 8, {{4, GDN_F32}});
  const Weight weight = blocks.Pack(GDN_BACKEND_CPU, GDN_MATH_F32);
  const Weight ref_weight = blocks.Pack(GDN_BACKEND_REF, GDN_MATH_F32);
  const Tensor x = Inputs(random, 2, 8);
  Tensor y(GDN_F32, 64);
  Execution execution(CpuBackend(0));
  const gdn_matmul_args good = {
      2, static_cast<const float*>(x.data()), 11, weight.get(), static_cast<float*>(y.data()), 4,
      0};
  auto refused = [&](gdn_status status, const char* sentence, auto change) {
    gdn_matmul_args args = good;
    change(args);
    ExpectRefused(gdn_matmul(execution.exec(), &args), status, y, sentence);
  };
  ExpectRefused(gdn_matmul(nullptr, &good), GDN_INVALID_ARGUMENT, y, "exec must not be NULL");
  ExpectRefused(gdn_matmul(execution.exec(), nullptr), GDN_INVALID_ARGUMENT, y, "args must not");
  refused(GDN_INVALID_ARGUMENT, "rows must be in 0..2^40, got -1", [](auto& a) { a.rows = -1; });
  refused(GDN_INVALID_ARGUMENT, "x must not be NULL", [](auto& a) { a.x = nullptr; });
  refused(GDN_INVALID_ARGUMENT, "y must not be NULL", [](auto& a) { a.y = nullptr; });
  refused(GDN_INVALID_ARGUMENT, "weight must not be NULL", [](auto& a) { a.weight = nullptr; });
  refused(GDN_INVALID_ARGUMENT, "packed for 0", [&](auto& a) { a.weight = ref_weight.get(); });
  refused(GDN_INVALID_ARGUMENT, "x_row_stride", [](auto& a) { a.x_row_stride = 7; });
  refused(GDN_INVALID_ARGUMENT, "y_row_stride", [](auto& a) { a.y_row_stride = 3; });
  gdn_exec bad = *execution.exec();
  bad.backend = Unlisted<gdn_backend>(9);
  ExpectRefused(gdn_matmul(&bad, &good), GDN_BACKEND_UNAVAILABLE, y, "9");
  gdn_matmul_args empty = good;
  empty.rows = 0;
  empty.x = nullptr;
  EXPECT_EQ(gdn_matmul(execution.exec(), &empty), GDN_OK);
  EXPECT_TRUE(IsUntouched(y));
}

TEST(MatmulTest, PackingRefusesMisuseByName) {
  const float data[8] = {};
  gdn_packed_weight* const kSentinel = reinterpret_cast<gdn_packed_weight*>(8);
  gdn_packed_weight* packed = kSentinel;
  auto create = [&](gdn_weight_rows block, int64_t k, int32_t blocks = 1, int32_t row_block = 0,
                    int32_t threads = 1, gdn_backend backend = GDN_BACKEND_CPU,
                    gdn_matmul_math math = GDN_MATH_F32) {
    return gdn_packed_weight_create(backend, math, k, &block, blocks, row_block, threads, &packed);
  };
  auto says = [&](gdn_status got, gdn_status expected, const char* sentence) {
    EXPECT_EQ(got, expected) << sentence;
    EXPECT_THAT(gdn_last_error(), testing::HasSubstr(sentence));
    EXPECT_EQ(packed, kSentinel);
  };
  const gdn_weight_rows good = {data, GDN_F32, 2};
  says(create(good, 0), GDN_INVALID_ARGUMENT, "k must be in 1..2^30, got 0");
  says(create(good, 4, 0), GDN_INVALID_ARGUMENT, "num_blocks must be >= 1, got 0");
  says(create(good, 4, 1, -1), GDN_INVALID_ARGUMENT, "row_block must be in 0..65536, got -1");
  says(create(good, 4, 1, 0, 0), GDN_INVALID_ARGUMENT, "max_threads must be in 1..1024, got 0");
  says(create({nullptr, GDN_F32, 2}, 4), GDN_INVALID_ARGUMENT, "blocks[0].data");
  says(create({data, GDN_F32, 0}, 4), GDN_INVALID_ARGUMENT, "blocks[0].rows");
  says(create({data, Unlisted<gdn_dtype>(7), 2}, 4), GDN_INVALID_ARGUMENT,
       "blocks[0].dtype must be GDN_F32 (0), GDN_BF16 (1) or GDN_F16 (2), got 7");
  says(create(good, 4, 1, 0, 1, Unlisted<gdn_backend>(5)), GDN_BACKEND_UNAVAILABLE, "got 5");
  says(create(good, 4, 1, 0, 1, GDN_BACKEND_CPU, Unlisted<gdn_matmul_math>(3)),
       GDN_INVALID_ARGUMENT, "math must be F32 (0) or BF16 (1), got 3");
  EXPECT_EQ(gdn_packed_weight_create(GDN_BACKEND_CPU, GDN_MATH_F32, 4, &good, 1, 0, 1, nullptr),
            GDN_INVALID_ARGUMENT);
  gdn_packed_weight_destroy(nullptr);
}

}  // namespace
}  // namespace gdn::kernels
