// Backward of the L2 norm against finite differences, REF and its own bits; the names carry the
// item of the published contract that a test holds.
#include "gdn/kernels/l2_norm_backward.h"

#include <cmath>
#include <vector>

#include "gdn/kernels/l2_norm.h"
#include "kernels/linear_test_util.h"
#include "kernels/op_call_test_util.h"

namespace gdn::kernels {
namespace {

GDN_BACKEND_SUITE(L2NormBackward);

// A forward and its backward over rows with gaps between them.
struct Call {
  int64_t rows, dim, stride;
  Tensor x, y, dy, dx;
  std::vector<float> rstd;
  float eps = 1e-6f;
  float scale = 1.0f;

  Call(int64_t n, int64_t d, gdn_dtype dtype, uint32_t seed, gdn_dtype dx_dtype, int64_t pad = 3)
      : rows(n),
        dim(d),
        stride(d + pad),
        x(dtype, n * stride),
        y(dtype, n * stride),
        dy(dtype, n * stride),
        dx(dx_dtype, n * stride),
        rstd(static_cast<size_t>(n)) {
    Random random(seed);
    for (int64_t row = 0; row < n; ++row) {
      // A row of zeros, rows where eps rules, ordinary and large ones.
      const float sizes[] = {1.0f, 0.0f, 1e-4f, 3.0f};
      for (int64_t i = 0; i < d; ++i) {
        x.Set(row * stride + i, sizes[row % 4] * random.Normal());
        dy.Set(row * stride + i, random.Normal());
      }
    }
  }
  gdn_l2_norm_backward_args Args() {
    return {rows,       dim,    y.data(),  y.dtype(),  stride, rstd.data(), dy.data(),
            dy.dtype(), stride, dx.data(), dx.dtype(), stride, scale};
  }
  void Run(const Backend& backend) {
    const Execution execution(backend);
    gdn_l2_norm_args forward = {rows,      dim,    x.data(),    x.dtype(), stride, y.data(),
                                y.dtype(), stride, rstd.data(), eps,       scale};
    ASSERT_EQ(CallOp(execution, gdn_l2_norm, forward, {In(x), Out(y), Out(rstd)},
                     {forward.x, forward.y, forward.rstd}),
              GDN_OK)
        << gdn_last_error();
    gdn_l2_norm_backward_args args = Args();
    ASSERT_EQ(CallOp(execution, gdn_l2_norm_backward, args, {In(y), In(rstd), In(dy), Out(dx)},
                     {args.y, args.rstd, args.dy, args.dx}),
              GDN_OK)
        << gdn_last_error();
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t i = dim; i < stride; ++i) ASSERT_TRUE(IsPoison(dx, row * stride + i));
    }
  }
};

double ErrorOf(const Call& got, const Call& expected) {
  RelativeL2 error;
  for (int64_t row = 0; row < got.rows; ++row) {
    for (int64_t i = 0; i < got.dim; ++i) {
      error.Add(got.dx.Get(row * got.stride + i), expected.dx.Get(row * got.stride + i));
    }
  }
  return error.value();
}

GDN_BACKEND_TEST(L2NormBackward, A7MatchesFiniteDifferences) {
  for (const float scale : {1.0f, 0.25f, -3.0f}) {
    for (const float eps : {1e-6f, 0.5f}) {
      for (const Backend& backend : {kRef, Tested(0)}) {
        Call call(8, 17, GDN_F32, 1, GDN_F32);
        call.scale = scale;
        call.eps = eps;
        call.Run(backend);
        for (int64_t row = 0; row < 8; ++row) {
          std::vector<double> x;
          for (int64_t i = 0; i < 17; ++i) x.push_back(call.x.Get(row * call.stride + i));
          const auto loss = [&] {
            double sum = 0.0, dot = 0.0;
            for (size_t i = 0; i < 17; ++i) {
              sum += x[i] * x[i];
              dot += x[i] * call.dy.Get(row * call.stride + static_cast<int64_t>(i));
            }
            return static_cast<double>(scale) * dot / std::sqrt(sum + static_cast<double>(eps));
          };
          RelativeL2 error;
          for (size_t i = 0; i < 17; ++i) {
            const double kept = x[i];
            const double step = 1e-6;  // small beside sqrt(eps)
            x[i] = kept + step;
            const double above = loss();
            x[i] = kept - step;
            const double below = loss();
            x[i] = kept;
            error.Add(call.dx.Get(row * call.stride + static_cast<int64_t>(i)),
                      (above - below) / (2.0 * step));
          }
          EXPECT_LE(error.value(), 4e-6) << backend.name << " row " << row << " eps " << eps;
        }
      }
    }
  }
}

GDN_BACKEND_TEST(L2NormBackward, T1EveryTypeAndSizeMatchesRef) {
  for (const Variant& variant : kVariants) {
    const BaselineTargetScope target(variant.baseline);
    for (const gdn_dtype dtype : kDtypes) {
      for (const gdn_dtype dx : kDtypes) {
        for (const int64_t dim : {1, 3, 8, 16, 31, 60, 64, 100, 128, 256, 1024, 2048}) {
          Call got(9, dim, dtype, 2, dx, variant.threads == 0 ? 8 : 3);  // on 16 bytes, or not
          Call expected = got;
          got.Run(Tested(variant.threads));
          expected.Run(kRef);
          // REF's y may differ in a last bit from the one this back end saved: compare backwards.
          expected.y = got.y;
          expected.rstd = got.rstd;
          const gdn_l2_norm_backward_args args = expected.Args();
          ASSERT_EQ(gdn_l2_norm_backward(Execution(kRef).exec(), &args), GDN_OK);
          // With one element dx is the small rest of a cancellation.
          if (dim > 1) {
            EXPECT_LE(ErrorOf(got, expected), WorstRounding(dx)) << dtype << dx << " dim " << dim;
          }
        }
      }
    }
  }
}

// With BF16 the saved y is rounded; dx stays within the published ratio of exact arithmetic.
GDN_BACKEND_TEST(L2NormBackward, T1RatioAgainstExactArithmetic) {
  for (const gdn_dtype dtype : {GDN_BF16, GDN_F16}) {
    Call call(400, 1024, dtype, 3, dtype);
    call.Run(Tested(3));
    RelativeL2 error;
    for (int64_t row = 0; row < 400; ++row) {
      double sum = 0.0, dot = 0.0;
      const auto x = [&](int64_t i) -> double { return call.x.Get(row * call.stride + i); };
      const auto dy = [&](int64_t i) -> double { return call.dy.Get(row * call.stride + i); };
      for (int64_t i = 0; i < 1024; ++i) sum += x(i) * x(i);
      const double rstd = 1.0 / std::sqrt(sum + 1e-6);
      for (int64_t i = 0; i < 1024; ++i) dot += x(i) * rstd * dy(i);
      for (int64_t i = 0; i < 1024; ++i) {
        error.Add(call.dx.Get(row * call.stride + i), rstd * (dy(i) - x(i) * rstd * dot));
      }
    }
    EXPECT_LE(error.value(), 5e-3) << dtype;
  }
}

GDN_BACKEND_TEST(L2NormBackward, A3ZeroRowsAndTinyRowsStayFinite) {
  for (const Backend& backend : {kRef, Tested(0)}) {
    Call call(4, 64, GDN_F32, 4, GDN_F32);
    call.Run(backend);
    for (int64_t i = 0; i < 64; ++i) {  // row 1: y is 0, so dx is dy / sqrt(eps)
      EXPECT_NEAR(call.dx.Get(call.stride + i), 1e3 * call.dy.Get(call.stride + i), 1e-2);
      EXPECT_TRUE(std::isfinite(call.dx.Get(2 * call.stride + i)));
    }
    call.eps = 0.0f;
    call.Run(backend);
    for (int64_t i = 0; i < 64; ++i) EXPECT_EQ(call.dx.Get(call.stride + i), 0.0f);
  }
}

// A8: replicating a head before the norm, its gradient is the sum over the replicas.
GDN_BACKEND_TEST(L2NormBackward, A8ReplicasSumToTheGradientOfTheirHead) {
  Call head(1, 128, GDN_F32, 5, GDN_F32);
  Call replica = head;
  Random random(6);
  for (int64_t i = 0; i < 128; ++i) replica.dy.Set(i, random.Normal());
  Call sum = head;
  for (int64_t i = 0; i < 128; ++i) sum.dy.Set(i, head.dy.Get(i) + replica.dy.Get(i));
  for (Call* call : {&head, &replica, &sum}) call->Run(Tested(0));
  for (int64_t i = 0; i < 128; ++i) {
    EXPECT_NEAR(head.dx.Get(i) + replica.dx.Get(i), sum.dx.Get(i), 1e-6);
  }
}

GDN_BACKEND_TEST(L2NormBackward, A16InPlaceThreadsAndRepeatsKeepEveryBit) {
  for (const gdn_dtype dtype : kDtypes) {
    for (const int64_t dim : {60, 128}) {
      Call one(3000, dim, dtype, 7, dtype, 8);
      Call four = one;
      one.Run(Tested(0));
      four.Run(Tested(4));
      EXPECT_EQ(one.dx.bytes(), four.dx.bytes());
      gdn_l2_norm_backward_args args = four.Args();
      args.dx = four.dy.data();
      ASSERT_EQ(
          CallOp(Execution(Tested(2)), gdn_l2_norm_backward, args,
                 {In(four.y), In(four.rstd), Out(four.dy)}, {args.y, args.rstd, args.dy, args.dx}),
          GDN_OK);
      for (int64_t i = 0; i < one.dx.size(); ++i) {
        if (i % one.stride < dim) {
          ASSERT_EQ(four.dy.Get(i), one.dx.Get(i));
        }
      }
    }
  }
}

GDN_BACKEND_TEST(L2NormBackward, RefusesMisuseByName) {
  Call call(2, 10, GDN_F32, 8, GDN_F32);
  const auto kBad = GDN_INVALID_ARGUMENT;
  for (const gdn_backend backend : CheckingBackends()) {
    const Execution execution({"", backend, 0});
    auto refused = [&](const char* sentence, auto change) {
      gdn_l2_norm_backward_args args = call.Args();
      change(args);
      ExpectRefused(gdn_l2_norm_backward(execution.exec(), &args), kBad, call.dx, sentence);
    };
    refused("rows must be", [](auto& a) { a.rows = -1; });
    refused("dim must be", [](auto& a) { a.dim = 0; });
    refused("y_dtype", [](auto& a) { a.y_dtype = Unlisted<gdn_dtype>(3); });
    refused("dy_dtype", [](auto& a) { a.dy_dtype = Unlisted<gdn_dtype>(3); });
    refused("dx_dtype", [](auto& a) { a.dx_dtype = Unlisted<gdn_dtype>(3); });
    refused("y_row_stride", [](auto& a) { a.y_row_stride = 9; });
    refused("dy_row_stride", [](auto& a) { a.dy_row_stride = 9; });
    refused("dx_row_stride", [](auto& a) { a.dx_row_stride = -10; });
    refused("beyond 64 bits", [](auto& a) { a.dx_row_stride = INT64_MAX; });
    refused("scale", [](auto& a) { a.scale = 0.0f; });
    refused("scale", [](auto& a) { a.scale = NAN; });
    refused("y must not be NULL", [](auto& a) { a.y = nullptr; });
    refused("rstd must not be NULL", [](auto& a) { a.rstd = nullptr; });
    refused("dy must not be NULL", [](auto& a) { a.dy = nullptr; });
    refused("dx must not be NULL", [](auto& a) { a.dx = nullptr; });
    refused("dx must not overlap y", [&](auto& a) { a.y = call.dx.data(); });
    refused("dx must not overlap dy", [&](auto& a) {
      a.dy = call.dx.data();
      a.dy_row_stride = 12;
    });
    gdn_l2_norm_backward_args empty{};
    empty.dim = empty.y_row_stride = empty.dy_row_stride = empty.dx_row_stride = 4;
    empty.scale = 1.0f;
    EXPECT_EQ(gdn_l2_norm_backward(execution.exec(), &empty), GDN_OK) << gdn_last_error();
  }
}

}  // namespace
}  // namespace gdn::kernels
