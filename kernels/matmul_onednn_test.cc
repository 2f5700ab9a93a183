// The oneDNN path. Its BF16 products need a processor with AVX512_BF16; slices, row buckets,
// padding, accumulation and workspace do not depend on the element type and run with F32 anywhere.
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/common/convert.h"
#include "kernels/common/packed_weight.h"
#include "kernels/cpu/matmul_weight.h"
#include "kernels/linear_test_util.h"

extern "C" void omp_set_num_threads(int);
extern "C" int omp_get_max_threads(void);

namespace gdn::kernels {
namespace {

using cpu::OnednnElement;

struct Problem {
  int64_t n;
  int64_t k;
  Tensor data;
  gdn_weight_rows block;

  Problem(Random& random, int64_t columns, int64_t depth) : n(columns), k(depth) {
    data = Tensor(GDN_BF16, n * k);
    FillNormal(random, data, 0.25f);
    block = {data.data(), GDN_BF16, n};
  }
  PackRequest Request(int32_t row_block, int32_t max_threads) const {
    return {GDN_MATH_BF16, n, k, {&block, 1}, row_block, max_threads};
  }
};

std::vector<float> Multiply(const gdn_exec& exec_template, const gdn_packed_weight& weight,
                            const std::vector<float>& x, int64_t rows, float start) {
  const auto elements = static_cast<size_t>(rows * weight.n);
  std::vector<float> y(elements, start == 0.0f ? std::numeric_limits<float>::quiet_NaN() : start);
  gdn_matmul_args args = {rows, x.data(), weight.k, &weight, y.data(), weight.n, start != 0.0f};
  Execution execution({"cpu", exec_template.backend, 0});
  gdn_exec exec = exec_template;
  size_t bytes = 0;
  EXPECT_EQ(gdn_matmul_workspace(&exec, &args, &bytes), GDN_OK);
  execution.SetWorkspace(bytes);
  exec.workspace = execution.exec()->workspace;
  exec.workspace_bytes = bytes;
  EXPECT_EQ(gdn_matmul(&exec, &args), GDN_OK) << gdn_last_error();
  if (bytes > 0) {
    exec.workspace_bytes = bytes - 1;
    EXPECT_EQ(gdn_matmul(&exec, &args), GDN_WORKSPACE_TOO_SMALL);
    EXPECT_THAT(gdn_last_error(), testing::HasSubstr("exec.workspace must hold"));
  }
  return y;
}

std::vector<float> Inputs(Random& random, int64_t rows, int64_t k) {
  std::vector<float> x(static_cast<size_t>(rows * k));
  for (float& value : x) value = random.Normal();
  return x;
}

void ExpectMatchesRef(OnednnElement element, double bound) {
  Random random(11);
  for (const auto& [n, k] : {std::pair<int64_t, int64_t>{1, 1}, {130, 33}, {260, 256}, {97, 64}}) {
    const Problem problem(random, n, k);
    const auto reference = ref::PackWeight(problem.Request(0, 1));
    for (const int32_t row_block : {0, 4, 32}) {
      for (const int32_t threads : {1, 2, 3}) {
        const auto weight = cpu::PackOnednn(problem.Request(row_block, threads), element);
        ASSERT_NE(weight, nullptr) << gdn_last_error();
        Execution execution(CpuBackend(threads));
        for (const int64_t rows : {1, 5, 33, 300}) {
          for (const float start : {0.0f, 1.5f}) {
            SCOPED_TRACE(testing::Message()
                         << "N " << n << " K " << k << " row_block " << row_block << " threads "
                         << threads << " M " << rows << " start " << start);
            const std::vector<float> x = Inputs(random, rows, k);
            const auto got = Multiply(*execution.exec(), *weight, x, rows, start);
            const auto expected = Multiply(*Execution(kRef).exec(), *reference, x, rows, start);
            RelativeL2 error;
            for (size_t i = 0; i < got.size(); ++i) {
              ASSERT_NEAR(got[i], expected[i], 0.2) << i;
              error.Add(got[i], expected[i]);
            }
            EXPECT_LE(error.value(), bound);
          }
        }
      }
    }
  }
}

TEST(MatmulOnednnTest, MatchesRefInF32) { ExpectMatchesRef(OnednnElement::kF32, 2e-6); }

TEST(MatmulOnednnTest, Bf16IsUsedWhereNativeAndRefusedByNameElsewhere) {
  Random random(12);
  const Problem problem(random, 96, 64);
  gdn_packed_weight* packed = nullptr;
  ASSERT_EQ(gdn_packed_weight_create(GDN_BACKEND_CPU, GDN_MATH_BF16, problem.k, &problem.block, 1,
                                     0, 1, &packed),
            GDN_OK);
  const std::unique_ptr<gdn_packed_weight> weight(packed);
  if (cpu::OnednnHasNativeBf16()) {
    EXPECT_STREQ(weight->kind, "onednn-bf16");
    ExpectMatchesRef(OnednnElement::kBf16, 4e-3);
  } else {
    EXPECT_STREQ(weight->kind, "highway-bf16");
    // oneDNN may emulate BF16 on some processors without it; if it does not, it says so.
    if (cpu::PackOnednn(problem.Request(0, 1), OnednnElement::kBf16) == nullptr) {
      EXPECT_THAT(gdn_last_error(), testing::HasSubstr("oneDNN has no product 96 x 64"));
    }
  }
}

// What the probe admits is independent of the batch; what it refuses must show it.
TEST(MatmulOnednnTest, RowBlockThatPassesTheProbeMakesRowsIndependentOfTheBatch) {
  Random random(13);
  int admitted = 0;
  for (const int64_t n : {64, 200}) {
    const Problem problem(random, n, 96);
    constexpr int64_t kRows = 37;
    const std::vector<float> x = Inputs(random, kRows, problem.k);
    for (const int32_t row_block : {1, 2, 6, 8, 16}) {
      const auto weight = cpu::PackOnednn(problem.Request(row_block, 2), OnednnElement::kF32);
      ASSERT_NE(weight, nullptr) << gdn_last_error();
      const bool expected = cpu::RowsAreIndependentOfPlace(*weight, row_block);
      admitted += expected;
      Execution two(CpuBackend(2));
      const auto together = Multiply(*two.exec(), *weight, x, kRows, 0.0f);
      bool independent = true;
      for (const int64_t rows : {1, 3, 8, 20}) {
        for (int64_t first = 0; first + rows <= kRows; first += rows) {
          const std::vector<float> part(x.begin() + first * problem.k,
                                        x.begin() + (first + rows) * problem.k);
          const auto got = Multiply(*two.exec(), *weight, part, rows, 0.0f);
          independent = independent && std::memcmp(got.data(), together.data() + first * problem.n,
                                                   got.size() * sizeof(float)) == 0;
        }
      }
      EXPECT_EQ(independent, expected) << "N " << n << " row_block " << row_block;
    }
  }
  EXPECT_GT(admitted, 0);
}

TEST(MatmulOnednnTest, OneWeightServesSeveralEngines) {
  Random random(14);
  const Problem problem(random, 256, 128);
  const auto weight = cpu::PackOnednn(problem.Request(0, 2), OnednnElement::kF32);
  ASSERT_NE(weight, nullptr) << gdn_last_error();
  const std::vector<float> x = Inputs(random, 24, problem.k);
  const auto expected = Multiply(*Execution(CpuBackend(0)).exec(), *weight, x, 24, 0.0f);
  std::vector<std::vector<float>> got(2);
  std::vector<std::thread> engines;
  for (auto& result : got) {
    engines.emplace_back([&] {
      Execution execution(CpuBackend(2));
      for (int i = 0; i < 20; ++i) {
        result = Multiply(*execution.exec(), *weight, x, 24, 0.0f);
        ASSERT_EQ(result, expected);
      }
    });
  }
  for (std::thread& engine : engines) engine.join();
}

TEST(MatmulOnednnTest, LeavesTheCallersOpenMpSettingAlone) {
  const int before = omp_get_max_threads();
  omp_set_num_threads(5);
  Random random(15);
  const Problem problem(random, 64, 64);
  const auto weight = cpu::PackOnednn(problem.Request(0, 1), OnednnElement::kF32);
  ASSERT_NE(weight, nullptr) << gdn_last_error();
  EXPECT_EQ(omp_get_max_threads(), 5);
  Multiply(*Execution(CpuBackend(0)).exec(), *weight, Inputs(random, 4, 64), 4, 0.0f);
  EXPECT_EQ(omp_get_max_threads(), 5);
  omp_set_num_threads(before);
}

}  // namespace
}  // namespace gdn::kernels
