#include "gdn/kernels/embedding.h"

#include <cstdint>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/linear_test_util.h"

namespace gdn::kernels {
namespace {

constexpr int64_t kVocab = 50;

TEST(EmbeddingTest, GathersAndConvertsForEveryTypeShapeAndTarget) {
  Random random(51);
  for (const int64_t dim : {1, 7, 16, 33, 256}) {
    for (const gdn_dtype table_dtype : kDtypes) {
      for (const gdn_dtype y_dtype : kDtypes) {
        Tensor table(table_dtype, kVocab * dim);
        FillNormal(random, table);
        std::vector<int32_t> ids = {0, kVocab - 1, 3, 3};
        for (int i = 0; i < 200; ++i) ids.push_back(static_cast<int32_t>(random.Integer(kVocab)));
        const auto rows = static_cast<int64_t>(ids.size());
        for (int v = -1; v < 3; ++v) {
          const BaselineTargetScope target(v >= 0 && kVariants[v].baseline);
          Execution execution(v < 0 ? kRef : CpuBackend(kVariants[v].threads));
          Tensor y(y_dtype, rows * (dim + 2));
          const gdn_embedding_args args = {rows,        kVocab,   dim,     ids.data(), table.data(),
                                           table_dtype, y.data(), y_dtype, dim + 2};
          ASSERT_EQ(gdn_embedding(execution.exec(), &args), GDN_OK) << gdn_last_error();
          Tensor one(y_dtype, 1);
          for (int64_t row = 0; row < rows; ++row) {
            for (int64_t i = 0; i < dim; ++i) {
              one.Set(0, table.Get(ids[static_cast<size_t>(row)] * dim + i));
              ASSERT_EQ(y.Get(row * (dim + 2) + i), one.Get(0))
                  << (v < 0 ? "ref" : kVariants[v].name) << " row " << row << " column " << i;
            }
            ASSERT_TRUE(IsPoison(y, row * (dim + 2) + dim));
            ASSERT_TRUE(IsPoison(y, row * (dim + 2) + dim + 1));
          }
        }
      }
    }
  }
}

TEST(EmbeddingTest, NamesTheIdAndItsIndexAndWritesNothing) {
  Tensor table(GDN_F32, kVocab * 4);
  Random random(52);
  FillNormal(random, table);
  Tensor y(GDN_F32, 64);
  for (const gdn_backend backend : {GDN_BACKEND_REF, GDN_BACKEND_CPU}) {
    Execution execution({"", backend, 0});
    std::vector<int32_t> ids = {1, 2, 50, 3};
    gdn_embedding_args args = {4,       kVocab,   4,       ids.data(), table.data(),
                               GDN_F32, y.data(), GDN_F32, 4};
    ExpectRefused(gdn_embedding(execution.exec(), &args), GDN_INVALID_ARGUMENT, y,
                  "ids[2] must be in 0..49, got 50");
    ids[2] = -1;
    ExpectRefused(gdn_embedding(execution.exec(), &args), GDN_INVALID_ARGUMENT, y,
                  "ids[2] must be in 0..49, got -1");
  }
}

TEST(EmbeddingTest, RefusesMisuseByName) {
  Tensor table(GDN_F32, kVocab * 4);
  Tensor y(GDN_F32, 64);
  const std::vector<int32_t> ids = {1, 2};
  auto refused = [&](const char* sentence, auto change) {
    gdn_embedding_args args = {2,       kVocab,   4,       ids.data(), table.data(),
                               GDN_F32, y.data(), GDN_F32, 4};
    change(args);
    ExpectRefused(gdn_embedding(Execution(CpuBackend(0)).exec(), &args), GDN_INVALID_ARGUMENT, y,
                  sentence);
  };
  refused("rows must be in 0..2^40, got -1", [](auto& a) { a.rows = -1; });
  refused("vocab must be in 1..2^40, got 0", [](auto& a) { a.vocab = 0; });
  refused("dim must be in 1..2^40, got 0", [](auto& a) { a.dim = 0; });
  refused("ids must not be NULL", [](auto& a) { a.ids = nullptr; });
  refused("table must not be NULL", [](auto& a) { a.table = nullptr; });
  refused("y must not be NULL", [](auto& a) { a.y = nullptr; });
  refused("table_dtype", [](auto& a) { a.table_dtype = Unlisted<gdn_dtype>(3); });
  refused("y_row_stride", [](auto& a) { a.y_row_stride = 3; });
}

}  // namespace
}  // namespace gdn::kernels
