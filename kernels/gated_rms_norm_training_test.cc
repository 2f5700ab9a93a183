// Gated RMSNorm for training: precision, rounding points, types and bits. The names carry the item
// of the published contract that a test holds.
#include "kernels/gated_rms_norm_training_test_util.h"

#include "gdn/kernels/gated_rms_norm.h"
#include "gdn/kernels/rms_norm.h"
#include "gdn/kernels/silu_mul.h"

namespace gdn::kernels {
namespace {

GDN_BACKEND_SUITE(GatedRmsNormTraining);

Problem Make(uint32_t seed, Shape shape, gdn_dtype x, gdn_dtype gate, gdn_dtype gamma) {
  Problem p;
  p.shape = shape;
  p.x_dtype = x;
  p.gate_dtype = gate;
  p.gamma_dtype = gamma;
  Random random(seed);
  p.Fill(random);
  return p;
}

// y by the formula; `round` applies rounding point 1 (B8) and `hf` rounds before the gamma product.
std::vector<double> ExpectedY(const Problem& p, bool round, bool hf = false) {
  std::vector<double> y;
  for (int64_t row = 0; row < p.shape.rows(); ++row) {
    const double rstd = InverseRmsOf(p, row);
    for (int64_t i = 0; i < p.shape.dim; ++i) {
      double n = p.x.Get(p.shape, row, i) * rstd;
      if (hf) n = Rounded(p.x_dtype, n);
      n *= p.Weight(i);
      if (round) n = Rounded(p.x_dtype, n);
      y.push_back(n * Act(p, p.gate.Get(p.shape, row, i)));
    }
  }
  return y;
}

GDN_BACKEND_TEST(GatedRmsNormTraining, B1B6RefMatchesTheFormula) {
  for (const gdn_gate_activation activation : {GDN_GATE_SILU, GDN_GATE_SIGMOID}) {
    for (const bool zero_centered : {false, true}) {
      Problem p = Make(1, {2, 3, 2, 37}, GDN_F32, GDN_F32, GDN_F32);
      p.activation = activation;
      p.zero_centered = zero_centered;
      p.eps = 0.3f;
      const Results r = RunBoth(kRef, p);
      EXPECT_LE(ErrorOf(r.y, ExpectedY(p, false)), 2e-7);
      for (int64_t row = 0; row < p.shape.rows(); ++row) {
        EXPECT_NEAR(r.rstd.Get(row), InverseRmsOf(p, row), 1e-7 * InverseRmsOf(p, row));
      }
    }
  }
}

// Every type of x, gate and gamma, both gammas and activations, on every instruction set.
GDN_BACKEND_TEST(GatedRmsNormTraining, B11B17B18EveryTypeAndModeMatchesRef) {
  for (const gdn_dtype x : kDtypes) {
    for (const gdn_dtype gate : {x, GDN_F32}) {
      for (const gdn_dtype gamma : kDtypes) {
        for (const int64_t dim : {1, 19, 32, 50, 64, 128, 256, 264}) {
          for (int mode = 0; mode < 4; ++mode) {
            Problem p = Make(static_cast<uint32_t>(dim + mode), {2, 5, 3, dim}, x, gate, gamma);
            p.zero_centered = mode & 1;
            p.activation = mode & 2 ? GDN_GATE_SIGMOID : GDN_GATE_SILU;
            const Results expected = RunBoth(kRef, p);
            // A rounding of n or dn may fall the other way where it is a near tie.
            const double tie = x == GDN_F32 ? 0.0 : WorstRounding(x);
            for (const Variant& variant : kVariants) {
              const BaselineTargetScope target(variant.baseline);
              p.guard = variant.threads == 0 ? kAlignedGuard : kOddGuard;
              const Results got = RunBoth(Tested(variant.threads), p);
              SCOPED_TRACE(testing::Message() << variant.name << " types " << x << gate << gamma
                                              << " dim " << dim << " mode " << mode);
              ASSERT_LE(ErrorOf(got.rstd, expected.rstd), 1e-6);
              ASSERT_LE(ErrorOf(got.y, expected.y), WorstRounding(x));
              ASSERT_LE(ErrorOf(got.dgate, expected.dgate), WorstRounding(gate) + tie);
              // Rows of either sign partly cancel.
              ASSERT_LE(ErrorOf(got.dgamma, expected.dgamma), 2 * WorstRounding(gamma) + tie);
              // With one element x-hat is one, and dx the small rest of a cancellation.
              if (dim > 1) {
                ASSERT_LE(ErrorOf(got.dx, expected.dx), 2 * WorstRounding(x) + tie);
              }
            }
          }
        }
      }
    }
  }
}

// n is rounded once, to the type of x, after the gamma product and before the gate product.
GDN_BACKEND_TEST(GatedRmsNormTraining, B8B23RoundingPointOne) {
  const Problem p = Make(3, {1, 128, 8, 128}, GDN_BF16, GDN_BF16, GDN_F32);
  const Results got = RunBoth(Tested(0), p);
  const std::vector<double> published = ExpectedY(p, true);
  const std::vector<double> unrounded = ExpectedY(p, false);
  const std::vector<double> hf = ExpectedY(p, true, true);
  int64_t wrong = 0, from_unrounded = 0, from_hf = 0;
  const int64_t count = got.y.size();
  for (int64_t i = 0; i < count; ++i) {
    const auto at = static_cast<size_t>(i);
    wrong += got.y.Get(i) != Rounded(GDN_BF16, published[at]);
    from_unrounded += got.y.Get(i) != Rounded(GDN_BF16, unrounded[at]);
    from_hf += got.y.Get(i) != Rounded(GDN_BF16, hf[at]);
  }
  EXPECT_LE(wrong, count / 1000);
  EXPECT_GT(from_unrounded, count * 15 / 100);
  EXPECT_LT(from_unrounded, count * 40 / 100);
  EXPECT_GT(from_hf, count * 10 / 100);
}

// dn is rounded to the type of x before dgamma and dx; FP32 gamma shows it.
GDN_BACKEND_TEST(GatedRmsNormTraining, B9RoundingPointTwo) {
  const Problem p = Make(4, {1, 8, 1, 128}, GDN_BF16, GDN_BF16, GDN_F32);
  const Results got = RunBoth(Tested(0), p);
  std::vector<double> published(128), unrounded(128), dx;
  for (int64_t row = 0; row < p.shape.rows(); ++row) {
    const double rstd = InverseRmsOf(p, row);
    double c = 0.0;
    std::vector<double> weighted, x_hat;
    for (int64_t i = 0; i < 128; ++i) {
      const double dn = p.dy.Get(p.shape, row, i) * Act(p, p.gate.Get(p.shape, row, i));
      x_hat.push_back(p.x.Get(p.shape, row, i) * rstd);
      weighted.push_back(Rounded(GDN_BF16, dn) * p.Weight(i));
      c += weighted.back() * x_hat.back() / 128.0;
      published[static_cast<size_t>(i)] += Rounded(GDN_BF16, dn) * x_hat.back();
      unrounded[static_cast<size_t>(i)] += dn * x_hat.back();
    }
    for (size_t i = 0; i < 128; ++i) {
      dx.push_back(Rounded(GDN_BF16, rstd * (weighted[i] - x_hat[i] * c)));
    }
  }
  EXPECT_LE(ErrorOf(got.dgamma, published), 1e-5);
  EXPECT_GE(ErrorOf(got.dgamma, unrounded), 5e-4);
  EXPECT_LE(ErrorOf(got.dx, dx), 5e-4);
}

// dgate is made of the rounded n and stays in the gate's type; an FP32 gate shows it.
GDN_BACKEND_TEST(GatedRmsNormTraining, B10GateGradientFromTheRoundedNorm) {
  const Problem p = Make(5, {1, 16, 4, 128}, GDN_BF16, GDN_F32, GDN_F32);
  const Results got = RunBoth(Tested(0), p);
  ASSERT_EQ(got.dgate.dtype(), GDN_F32);
  std::vector<double> published, unrounded;
  for (int64_t row = 0; row < p.shape.rows(); ++row) {
    const double rstd = InverseRmsOf(p, row);
    for (int64_t i = 0; i < 128; ++i) {
      const double n = p.x.Get(p.shape, row, i) * rstd * p.Weight(i);
      const double rest = p.dy.Get(p.shape, row, i) * ActDerivative(p, p.gate.Get(p.shape, row, i));
      published.push_back(Rounded(GDN_BF16, n) * rest);
      unrounded.push_back(n * rest);
    }
  }
  EXPECT_LE(ErrorOf(got.dgate, published), 1e-4);
  EXPECT_GE(ErrorOf(got.dgate, unrounded), 1e-3);
}

// The one added to gamma is added in FP32: BF16 would lose these gammas altogether.
GDN_BACKEND_TEST(GatedRmsNormTraining, B12ZeroCentredGammaAddsItsOneInFp32) {
  Problem p = Make(7, {1, 4, 2, 64}, GDN_F32, GDN_F32, GDN_BF16);
  p.zero_centered = true;
  for (int64_t i = 0; i < 64; ++i) p.gamma.Set(i, 1e-3f * static_cast<float>(i % 5));
  const Results got = RunBoth(Tested(0), p);
  EXPECT_LE(ErrorOf(got.y, ExpectedY(p, false)), 1e-6);
}

GDN_BACKEND_TEST(GatedRmsNormTraining, B7StatisticsAreFp32) {
  Problem p = Make(8, {1, 2, 1, 8192}, GDN_BF16, GDN_BF16, GDN_F32);
  p.x.Fill(p.shape, [] { return 3.0f; });
  Results got = RunBoth(Tested(0), p);
  EXPECT_NEAR(got.rstd.Get(1), 1.0 / 3.0, 1e-6);
  // One huge FP16 element: its square exceeds FP16, not FP32.
  Problem huge = Make(9, {1, 1, 1, 128}, GDN_F16, GDN_F16, GDN_F32);
  huge.x.storage.Set(5, 65504.0f);
  got = RunBoth(Tested(0), huge);
  EXPECT_NEAR(got.rstd.Get(0), InverseRmsOf(huge, 0), 1e-6 * InverseRmsOf(huge, 0));
  for (int64_t i = 0; i < 128; ++i) {
    ASSERT_TRUE(std::isfinite(got.y.Get(i)) && std::isfinite(got.dx.Get(i)));
  }
}

// round(silu(gate) * up) by the separate op.
Tensor SiluMul(const Execution& execution, const Problem& p, const Tensor& up) {
  Tensor product(up.dtype(), p.shape.count());
  gdn_silu_mul_args args = {p.shape.rows(), p.shape.dim,    p.gate.data(), up.data(),  up.dtype(),
                            p.shape.dim,    product.data(), up.dtype(),    p.shape.dim};
  EXPECT_EQ(CallOp(execution, gdn_silu_mul, args, {In(p.gate.storage), In(up), Out(product)},
                   {args.gate, args.up, args.y}),
            GDN_OK)
      << gdn_last_error();
  return product;
}

// n by the separate op; gamma is FP32.
Tensor Norm(const Execution& execution, const Problem& p) {
  Tensor n(p.x_dtype, p.shape.count());
  gdn_rms_norm_args args = {p.shape.rows(),
                            p.shape.dim,
                            p.x.data(),
                            p.x_dtype,
                            p.shape.dim,
                            static_cast<const float*>(p.gamma.data()),
                            p.zero_centered ? 1 : 0,
                            p.eps,
                            n.data(),
                            p.x_dtype,
                            p.shape.dim};
  EXPECT_EQ(CallOp(execution, gdn_rms_norm, args, {In(p.x.storage), In(p.gamma), Out(n)},
                   {args.x, args.weight, args.y}),
            GDN_OK)
      << gdn_last_error();
  return n;
}

// The composition of the separate ops (norm, then gate) has the same bits.
GDN_BACKEND_TEST(GatedRmsNormTraining, B27T11BitEqualToTheComposition) {
  for (const gdn_dtype dtype : kDtypes) {
    for (const bool zero_centered : {false, true}) {
      for (const int64_t dim : {64, 128, 256, 1000}) {
        Problem p = Make(10, {1, 40, 3, dim}, dtype, dtype, GDN_F32);
        p.zero_centered = zero_centered;
        const Execution execution(Tested(0));
        const Results got = RunBoth(Tested(2), p);
        const Tensor y = SiluMul(execution, p, Norm(execution, p));
        EXPECT_EQ(got.y.bytes(), y.bytes()) << dtype << " dim " << dim;
        // The serving op with the published rounding point: the same bits again. On a GPU it adds
        // in that order where it is tuned.
        if (kOnCuda && (dtype == GDN_F32 || dim != 128)) continue;
        Tensor served(dtype, p.shape.count());
        gdn_gated_rms_norm_args serving = {p.shape.rows(),
                                           1,
                                           dim,
                                           p.x.data(),
                                           dtype,
                                           dim,
                                           dim,
                                           p.gate.data(),
                                           dtype,
                                           dim,
                                           dim,
                                           static_cast<const float*>(p.gamma.data()),
                                           zero_centered ? 1 : 0,
                                           GDN_GATE_SILU,
                                           1,
                                           p.eps,
                                           served.data(),
                                           dtype,
                                           dim,
                                           dim};
        ASSERT_EQ(CallOp(execution, gdn_gated_rms_norm, serving,
                         {In(p.x.storage), In(p.gate.storage), In(p.gamma), Out(served)},
                         {serving.x, serving.gate, serving.weight, serving.y}),
                  GDN_OK)
            << gdn_last_error();
        EXPECT_EQ(served.bytes(), y.bytes());
      }
    }
  }
}

// The backward of the composition: first the gate's, of an n that is taken as it is (rstd and gamma
// 1), then the norm's, behind a gate that is open (sigmoid of 1e4 is 1).
GDN_BACKEND_TEST(GatedRmsNormTraining, T11BackwardIsThatOfTheComposition) {
  for (const gdn_dtype dtype : {GDN_BF16, GDN_F16}) {
    for (const bool zero_centered : {false, true}) {
      Problem p = Make(14, {1, 70, 3, 128}, dtype, dtype, GDN_F32);
      p.zero_centered = zero_centered;
      Execution execution(Tested(0));
      const Results got = RunBoth(Tested(0), p);
      const Tensor n = Norm(execution, p);
      const Tensor dn = SiluMul(execution, p, p.dy.storage);
      Problem gate = p;
      gate.zero_centered = false;
      gate.x.storage = n;
      Problem norm = p;
      norm.activation = GDN_GATE_SIGMOID;
      norm.dy.storage = dn;
      norm.gate.Fill(norm.shape, [] { return 1e4f; });
      for (int64_t i = 0; i < 128; ++i) gate.gamma.Set(i, 1.0f);
      Results of_gate, of_norm;
      of_gate.rstd = Guarded(GDN_F32, p.shape.rows());
      for (int64_t row = 0; row < p.shape.rows(); ++row) of_gate.rstd.Set(row, 1.0f);
      of_norm.rstd = got.rstd;
      RunBackward(execution, gate, of_gate);
      RunBackward(execution, norm, of_norm);
      EXPECT_EQ(got.dgate.bytes(), of_gate.dgate.bytes()) << dtype;
      const UlpCounts counts = CountUlps(got.dx, of_norm.dx);
      EXPECT_EQ(counts.more, 0) << dtype;
      EXPECT_LE(counts.one, got.dx.size() / 100) << dtype;
      EXPECT_LE(ErrorOf(got.dgamma, of_norm.dgamma), 1e-6) << dtype;
    }
  }
}

GDN_BACKEND_TEST(GatedRmsNormTraining, B16TailsOfRowsAndZeroRows) {
  for (const int64_t rows : {1, 2, 3, 4, 5, 7, 8, 9, 15, 17, 592, 2049}) {
    for (const int64_t dim : {33, 64}) {
      const gdn_dtype x = dim == 64 ? GDN_BF16 : GDN_F32;
      const Problem p = Make(static_cast<uint32_t>(rows), {1, rows, 1, dim}, x, x, GDN_F32);
      const double bound = x == GDN_F32 ? 2e-6 : 5e-4;
      EXPECT_LE(ErrorOf(RunBoth(Tested(0), p).dgamma, RunBoth(kRef, p).dgamma), bound) << rows;
    }
  }
  for (const Backend& backend : {kRef, Tested(0)}) {
    for (const Shape& empty : {Shape{0, 3, 2, 16}, Shape{2, 0, 2, 16}}) {
      Execution execution(backend);
      Guarded dgamma(GDN_BF16, 16);
      gdn_gated_rms_norm_forward_args forward{};
      forward.in.batch = empty.batch;
      forward.in.seq = empty.seq;
      forward.in.heads = empty.heads;
      forward.in.dim = empty.dim;
      std::vector<float> amax = {-1.0f};
      forward.amax = amax.data();
      EXPECT_EQ(CallOp(execution, gdn_gated_rms_norm_forward, forward, {Out(amax)}, {forward.amax}),
                GDN_OK)
          << gdn_last_error();
      EXPECT_EQ(amax[0], 0.0f);
      gdn_gated_rms_norm_backward_args backward{};
      backward.in = forward.in;
      backward.in.gamma_dtype = GDN_BF16;
      backward.dgamma = dgamma.data();
      EXPECT_EQ(CallOp(execution, gdn_gated_rms_norm_backward, backward, {Out(dgamma)},
                       {backward.dgamma}),
                GDN_OK)
          << gdn_last_error();
      for (int64_t i = 0; i < 16; ++i) EXPECT_EQ(dgamma.Get(i), 0.0f);
      dgamma.ExpectGuards("dgamma");
    }
  }
}

// Recompute in a training step, and any number of threads: the same bits, dgamma's too.
GDN_BACKEND_TEST(GatedRmsNormTraining, B20B22RepeatsAndThreadsKeepEveryBit) {
  const Problem p = Make(11, {3, 501, 2, 64}, GDN_BF16, GDN_F32, GDN_F32);
  const Results first = RunBoth(Tested(0), p);
  for (const int32_t threads : {0, 1, 2, 3, 7}) {
    const Results again = RunBoth(Tested(threads), p);
    EXPECT_EQ(again.y.bytes(), first.y.bytes());
    EXPECT_EQ(again.rstd.bytes(), first.rstd.bytes());
    EXPECT_EQ(again.dx.bytes(), first.dx.bytes());
    EXPECT_EQ(again.dgate.bytes(), first.dgate.bytes());
    EXPECT_EQ(again.dgamma.bytes(), first.dgamma.bytes());
  }
}

GDN_BACKEND_TEST(GatedRmsNormTraining, X4ExtremeValues) {
  for (const gdn_gate_activation activation : {GDN_GATE_SILU, GDN_GATE_SIGMOID}) {
    Problem p = Make(12, {1, 5, 1, 40}, GDN_F32, GDN_F32, GDN_F32);
    p.activation = activation;
    const float gates[] = {-1e38f, -1e4f, -80.0f, -20.0f, -1e-6f, 0.0f, 1e-6f, 20.0f, 80.0f, 1e4f};
    int64_t next = 0;
    p.gate.Fill(p.shape, [&] { return gates[next++ % 10]; });
    for (int64_t i = 0; i < 40; ++i) p.x.storage.Set(40 + i, 0.0f);  // row 1
    const Results got = RunBoth(Tested(0), p);
    const Results expected = RunBoth(kRef, p);
    EXPECT_FLOAT_EQ(got.rstd.Get(1), 1e3f);
    for (int64_t i = 0; i < got.y.size(); ++i) {
      if (i >= 40 && i < 80) {
        EXPECT_EQ(got.y.Get(i), 0.0f);
      }
      ASSERT_TRUE(std::isfinite(got.dx.Get(i)) && std::isfinite(got.dgate.Get(i))) << i;
      // Below 1e-30 the activations of both are as good as zero.
      EXPECT_NEAR(got.y.Get(i), expected.y.Get(i), 2e-6 * std::abs(expected.y.Get(i)) + 1e-30);
      EXPECT_NEAR(got.dgate.Get(i), expected.dgate.Get(i),
                  4e-6 * std::abs(expected.dgate.Get(i)) + 1e-30);
    }
    p.eps = 0.0f;  // A row of zeros stays a row of zeros.
    EXPECT_EQ(RunBoth(Tested(0), p).rstd.Get(1), 0.0f);
    EXPECT_EQ(RunBoth(kRef, p).rstd.Get(1), 0.0f);
    EXPECT_EQ(RunBoth(Tested(0), p).y.Get(45), 0.0f);
  }
}

GDN_BACKEND_TEST(GatedRmsNormTraining, X4NanStaysInItsRow) {
  for (const Backend& backend : {kRef, Tested(0)}) {
    Problem p = Make(13, {1, 3, 1, 20}, GDN_BF16, GDN_BF16, GDN_F32);
    p.x.storage.Set(20 + 3, NAN);
    const Results got = RunBoth(backend, p);
    for (int64_t i = 0; i < 60; ++i) {
      EXPECT_EQ(std::isnan(got.y.Get(i)), i / 20 == 1) << i;
      EXPECT_EQ(std::isnan(got.dx.Get(i)), i / 20 == 1) << i;
    }
  }
}

}  // namespace
}  // namespace gdn::kernels
