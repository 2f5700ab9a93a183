#include "gdn/kernels/embedding.h"

#include <cmath>
#include <cstdint>
#include <vector>

#include "kernels/cuda/cuda_test_util.h"
#include "kernels/linear_test_util.h"

namespace gdn::kernels {
namespace {

using EmbeddingCuda = CudaTest;
constexpr int64_t kVocab = 50;

// Equal to REF bit for bit: a gather rounds at most once. Dimensions and strides with and without
// 16-byte accesses; padding rows give zeros, other illegal ids NaN, and nothing else is written.
TEST_F(EmbeddingCuda, EqualsRefForEveryTypeAndShape) {
  Random random(51);
  const Stream stream;
  const gdn_exec exec = stream.Exec();
  const gdn_exec ref_exec{};
  for (const int64_t dim : {1, 7, 16, 33, 256, 2048}) {
    for (const int64_t pad : {0, 2, 8}) {
      for (const gdn_dtype table_dtype : kDtypes) {
        for (const gdn_dtype y_dtype : kDtypes) {
          Tensor table(table_dtype, kVocab * dim);
          FillNormal(random, table);
          std::vector<int32_t> ids = {0, kVocab - 1, 3, 3};
          for (int i = 0; i < 40; ++i) ids.push_back(static_cast<int32_t>(random.Integer(kVocab)));
          const auto legal = static_cast<int64_t>(ids.size());
          const int64_t stride = dim + pad;
          Tensor expected(y_dtype, (legal + 4) * stride);
          gdn_embedding_args args = {legal,           kVocab,       dim,
                                     ids.data(),      table.data(), table_dtype,
                                     expected.data(), y_dtype,      stride};
          ASSERT_EQ(gdn_embedding(&ref_exec, &args), GDN_OK) << gdn_last_error();
          ids.insert(ids.end(), {-1, kVocab, -2, 2147483647});
          for (int64_t row = legal; row < legal + 4; ++row) {
            for (int64_t i = 0; i < dim; ++i) {
              expected.Set(row * stride + i, row == legal ? 0.0f : std::nanf(""));
            }
          }
          Tensor got(y_dtype, (legal + 4) * stride);
          const DeviceBuffer ids_device(ids);
          const DeviceBuffer table_device(table);
          const DeviceBuffer y_device(got);
          args.rows = legal + 4;
          args.ids = ids_device.get<int32_t>();
          args.table = table_device.get();
          args.y = y_device.get();
          ASSERT_EQ(gdn_embedding(&exec, &args), GDN_OK) << gdn_last_error();
          stream.Synchronize();
          y_device.Download(got.data());
          for (int64_t i = 0; i < got.size(); ++i) {
            const int64_t row = i / stride;
            if (i % stride >= dim) {
              ASSERT_TRUE(IsPoison(got, i)) << "dim " << dim << " row " << row;
            } else if (row > legal) {
              ASSERT_TRUE(std::isnan(got.Get(i))) << "dim " << dim << " row " << row;
            } else {
              ASSERT_EQ(got.Slice(i, i + 1), expected.Slice(i, i + 1))
                  << "dim " << dim << " types " << table_dtype << y_dtype << " row " << row;
            }
          }
        }
      }
    }
  }
}

TEST_F(EmbeddingCuda, RefusesWhatTheHostCanSee) {
  const Stream stream;
  const gdn_exec exec = stream.Exec();
  gdn_embedding_args args = {2, kVocab, 4, nullptr, nullptr, GDN_F32, nullptr, GDN_F32, 4};
  EXPECT_EQ(gdn_embedding(&exec, &args), GDN_INVALID_ARGUMENT);
  EXPECT_THAT(gdn_last_error(), testing::HasSubstr("ids must not be NULL"));
  args.rows = 0;
  EXPECT_EQ(gdn_embedding(&exec, &args), GDN_OK);
}

}  // namespace
}  // namespace gdn::kernels
