#include "gdn/kernels/l2_norm.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/recurrence_test_util.h"

namespace gdn::kernels {
namespace {

struct L2Call {
  int64_t rows, dim, x_stride, y_stride;
  Tensor x, y;
  std::vector<float> rstd;
  float eps = 1e-6f;
  float scale = 1.0f;

  L2Call(int64_t n, int64_t d, gdn_dtype x_dtype, gdn_dtype y_dtype, int64_t pad)
      : rows(n),
        dim(d),
        x_stride(d + pad),
        y_stride(d + 2 * pad),
        x(x_dtype, n * x_stride),
        y(y_dtype, n * y_stride),
        rstd(n, -1.0f) {
    Random random(3);
    for (int64_t r = 0; r < n; ++r) {
      // Rows of zeros, tiny rows where eps rules, and ordinary ones.
      const float size = r % 4 == 3 ? 0.0f : r % 4 == 2 ? 1e-4f : 1.0f;
      for (int64_t i = 0; i < d; ++i) x.Set(r * x_stride + i, size * random.Normal());
    }
  }
  gdn_l2_norm_args Args() {
    return {rows,      dim,      x.data(),    x.dtype(), x_stride, y.data(),
            y.dtype(), y_stride, rstd.data(), eps,       scale};
  }
};

void RunL2Norm(const Backend& backend, L2Call& call) {
  Execution execution(backend);
  const gdn_l2_norm_args args = call.Args();
  ASSERT_EQ(gdn_l2_norm(execution.exec(), &args), GDN_OK) << gdn_last_error();
}

TEST(L2Norm, RefMatchesTheFormula) {
  L2Call call(8, 37, GDN_F32, GDN_F32, 2);
  call.scale = 0.25f;
  call.eps = 1e-3f;
  RunL2Norm(kRef, call);
  for (int64_t r = 0; r < 8; ++r) {
    double sum = 0;
    for (int64_t i = 0; i < 37; ++i) sum += std::pow(double{call.x.Get(r * call.x_stride + i)}, 2);
    const double rstd = std::pow(sum + double{1e-3f}, -0.5);
    EXPECT_NEAR(call.rstd[r], rstd, 1e-6 * rstd);
    for (int64_t i = 0; i < 37; ++i) {
      const double expected = 0.25 * double{call.x.Get(r * call.x_stride + i)} * rstd;
      EXPECT_NEAR(call.y.Get(r * call.y_stride + i), expected, 1e-7) << r;
    }
  }
}

TEST(L2Norm, MatchesRefInEveryTypeAndSize) {
  for (gdn_dtype x : {GDN_F32, GDN_BF16, GDN_F16}) {
    for (gdn_dtype y : {GDN_F32, GDN_BF16, GDN_F16}) {
      for (int64_t dim : {1, 3, 7, 8, 16, 31, 60, 64, 100, 128, 192, 256, 1000}) {
        const L2Call before(9, dim, x, y, 3);
        L2Call expected = before;
        RunL2Norm(kRef, expected);
        for (const Backend& backend : BackendsUnderTest()) {
          L2Call got = before;
          RunL2Norm(backend, got);
          RelativeL2 error;
          for (int64_t r = 0; r < 9; ++r) {
            for (int64_t i = 0; i < dim; ++i) {
              error.Add(got.y.Get(r * got.y_stride + i), expected.y.Get(r * got.y_stride + i));
              if (r % 4 == 3) {
                ASSERT_EQ(got.y.Get(r * got.y_stride + i), 0.0f);
              }
            }
            EXPECT_NEAR(got.rstd[r], expected.rstd[r], 1e-6 * double{expected.rstd[r]});
            EXPECT_EQ(got.y.Slice(r * got.y_stride + dim, (r + 1) * got.y_stride),
                      before.y.Slice(r * got.y_stride + dim, (r + 1) * got.y_stride));
          }
          EXPECT_LE(error.value(), RoundingBound(y)) << backend.name << " dim " << dim;
        }
      }
    }
  }
}

TEST(L2Norm, InPlaceWithoutRstdAndWithoutEps) {
  for (gdn_dtype dtype : {GDN_F32, GDN_BF16, GDN_F16}) {
    for (const Backend& backend : BackendsUnderTest()) {
      L2Call apart(50, 100, dtype, dtype, 0);
      apart.eps = 0.0f;
      L2Call together = apart;
      RunL2Norm(backend, apart);
      gdn_l2_norm_args args = together.Args();
      args.y = together.x.data();
      args.rstd = nullptr;
      Execution execution(backend);
      ASSERT_EQ(gdn_l2_norm(execution.exec(), &args), GDN_OK);
      EXPECT_EQ(together.x.bytes(), apart.y.bytes());
    }
  }
}

// Groups of three rows, the last one short: the bits of one call for each group, and nothing
// written between them.
TEST(L2Norm, GroupsOfRowsAreTheirOwnCalls) {
  constexpr int64_t kRows = 11, kGroup = 3, kGroups = 4;
  for (const gdn_dtype dtype : {GDN_F32, GDN_BF16}) {
    for (const int64_t dim : {16, 64, 100}) {
      std::vector<Backend> backends = BackendsUnderTest();
      backends.push_back(kRef);
      for (const Backend& backend : backends) {
        SCOPED_TRACE(backend.name);
        const int64_t x_group = kGroup * dim + 8, y_group = kGroup * dim + 24;
        Tensor x(dtype, kGroups * x_group);
        Random random(4);
        for (int64_t i = 0; i < x.size(); ++i) x.Set(i, random.Normal());
        Tensor grouped(dtype, kGroups * y_group), apart(dtype, kGroups * y_group);
        std::vector<float> grouped_rstd(kRows), apart_rstd(kRows);
        gdn_l2_norm_args args{
            kRows, dim,  x.data(), dtype,   dim,    grouped.data(), dtype, dim, grouped_rstd.data(),
            1e-6f, 2.0f, kGroup,   x_group, y_group};
        ASSERT_EQ(gdn_l2_norm(Execution(backend).exec(), &args), GDN_OK) << gdn_last_error();
        args.group_rows = 0;
        for (int64_t group = 0; group < kGroups; ++group) {
          args.rows = std::min(kGroup, kRows - group * kGroup);
          args.x = static_cast<uint8_t*>(x.data()) + group * x_group * SizeOf(dtype);
          args.y = static_cast<uint8_t*>(apart.data()) + group * y_group * SizeOf(dtype);
          args.rstd = apart_rstd.data() + group * kGroup;
          ASSERT_EQ(gdn_l2_norm(Execution(backend).exec(), &args), GDN_OK) << gdn_last_error();
        }
        EXPECT_EQ(grouped.bytes(), apart.bytes()) << dim;
        EXPECT_EQ(grouped_rstd, apart_rstd);
      }
    }
  }
}

TEST(L2Norm, RefusesGroupsThatOverlap) {
  L2Call call(6, 8, GDN_F32, GDN_F32, 0);
  Execution execution(kRef);
  const auto refused = [&](const char* sentence, auto change) {
    gdn_l2_norm_args args = call.Args();
    args.group_rows = 2;
    args.x_group_stride = args.y_group_stride = 16;
    EXPECT_EQ(gdn_l2_norm(execution.exec(), &args), GDN_OK) << gdn_last_error();
    change(args);
    EXPECT_EQ(gdn_l2_norm(execution.exec(), &args), GDN_INVALID_ARGUMENT);
    EXPECT_THAT(gdn_last_error(), testing::HasSubstr(sentence));
  };
  refused("group_rows must be", [](auto& a) { a.group_rows = -1; });
  refused("x_group_stride", [](auto& a) { a.x_group_stride = 15; });
  refused("y_group_stride", [](auto& a) { a.y_group_stride = 15; });
  refused("beyond 64 bits", [](auto& a) { a.x_row_stride = int64_t{1} << 62; });
  refused("the same group stride", [](auto& a) {
    a.y = const_cast<void*>(a.x);
    a.x_group_stride = 17;
  });
}

TEST(L2Norm, RowsDoNotDependOnTheThreads) {
  L2Call one(5000, 64, GDN_F32, GDN_F32, 0);
  L2Call four = one;
  RunL2Norm({"cpu", GDN_BACKEND_CPU, 0}, one);
  RunL2Norm({"cpu", GDN_BACKEND_CPU, 4}, four);
  EXPECT_EQ(one.y.bytes(), four.y.bytes());
  EXPECT_EQ(one.rstd, four.rstd);
}

}  // namespace
}  // namespace gdn::kernels
