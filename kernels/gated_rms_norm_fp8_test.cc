// Gated RMSNorm for training: FP8 E4M3 output, its scales and the amax.
#include <algorithm>

#include "kernels/common/fp8.h"
#include "kernels/gated_rms_norm_training_test_util.h"

namespace gdn::kernels {
namespace {

GDN_BACKEND_SUITE(GatedRmsNormFp8);

struct Fp8Results {
  std::vector<uint8_t> y;  // between two guards
  size_t guard;
  Guarded rstd, scale_inv, amax;
  uint8_t Y(int64_t i) const { return y[guard + static_cast<size_t>(i)]; }
};

Fp8Results RunFp8(const Backend& backend, const Problem& p, gdn_fp8_scaling fp8, float scale) {
  Fp8Results r;
  r.guard = p.guard == kAlignedGuard ? 16 : 3;
  r.y.assign(static_cast<size_t>(p.shape.count()) + 2 * r.guard, 0xab);
  r.rstd = Guarded(GDN_F32, p.shape.rows());
  r.scale_inv = Guarded(GDN_F32, fp8 == GDN_FP8_ROW ? p.shape.rows() : 1);
  r.amax = Guarded(GDN_F32, 1);
  gdn_gated_rms_norm_forward_args args{};
  args.in = p.Input();
  args.eps = p.eps;
  args.y = r.y.data() + r.guard;
  args.rstd = static_cast<float*>(r.rstd.data());
  args.fp8 = fp8;
  const std::vector<float> scales = {scale};
  args.fp8_scale = scales.data();
  args.fp8_scale_inv = static_cast<float*>(r.scale_inv.data());
  args.amax = static_cast<float*>(r.amax.data());
  const Execution execution(backend);
  Results unused;
  EXPECT_EQ(Forward(execution, p, unused, args,
                    {In(scales), Out(r.y), Out(r.rstd), Out(r.scale_inv), Out(r.amax)}),
            GDN_OK)
      << gdn_last_error();
  for (size_t i = 0; i < r.guard; ++i) {
    EXPECT_TRUE(r.y[i] == 0xab && r.y[r.y.size() - 1 - i] == 0xab);
  }
  r.rstd.ExpectGuards("rstd");
  r.scale_inv.ExpectGuards("fp8_scale_inv");
  r.amax.ExpectGuards("amax");
  return r;
}

Problem Make(uint32_t seed, gdn_dtype x, int64_t dim = 128, int64_t guard = kAlignedGuard) {
  Problem p;
  p.shape = {2, 37, 3, dim};
  p.x_dtype = p.gate_dtype = x;
  p.guard = guard;
  p.gate_layout = guard == kAlignedGuard ? Layout::kAlignedSlice : Layout::kBatchFirstSlice;
  Random random(seed);
  p.Fill(random);
  return p;
}

float LargestOf(const Guarded& y, int64_t begin, int64_t end) {
  float largest = 0.0f;
  for (int64_t i = begin; i < end; ++i) largest = std::max(largest, std::fabs(y.Get(i)));
  return largest;
}

// y8 is the quantised unquantised result: the rounding to the type of x comes first.
GDN_BACKEND_TEST(GatedRmsNormFp8, Q3RowScaleQuantisesTheRoundedResult) {
  for (const auto& [x, guard] :
       {std::pair{GDN_F32, kAlignedGuard}, std::pair{GDN_F32, kOddGuard},
        std::pair{GDN_BF16, kAlignedGuard}, std::pair{GDN_BF16, kOddGuard},
        std::pair{GDN_F16, kAlignedGuard}, std::pair{GDN_F16, kOddGuard}}) {
    for (const Backend& backend : {kRef, Tested(0), Tested(3)}) {
      const Problem p = Make(61, x, 128, guard);
      const Results plain = RunBoth(backend, p);
      const Fp8Results got = RunFp8(backend, p, GDN_FP8_ROW, 0.0f);
      int64_t differ = 0;
      RelativeL2 error;
      for (int64_t row = 0; row < p.shape.rows(); ++row) {
        const float amax = LargestOf(plain.y, row * 128, (row + 1) * 128);
        EXPECT_FLOAT_EQ(got.scale_inv.Get(row), amax / 448.0f);
        for (int64_t i = row * 128; i < (row + 1) * 128; ++i) {
          differ += got.Y(i) != F32ToE4m3(plain.y.Get(i) * (448.0f / amax));
          error.Add(E4m3ToF32(got.Y(i)) * got.scale_inv.Get(row), plain.y.Get(i));
        }
      }
      // REF scales in FP64, where a near tie of FP32 may fall the other way.
      EXPECT_LE(differ, backend.backend == GDN_BACKEND_REF ? plain.y.size() / 1000 : 0)
          << backend.name << x;
      EXPECT_LE(error.value(), 0.04);
      EXPECT_EQ(got.amax.Get(0), LargestOf(plain.y, 0, plain.y.size()));
      EXPECT_EQ(got.rstd.bytes(), plain.rstd.bytes());  // Q4: the statistics stay those of FP32
    }
  }
}

GDN_BACKEND_TEST(GatedRmsNormFp8, StaticScaleSaturatesAndReportsItsInverse) {
  for (const int64_t dim : {32, 50, 128, 256}) {
    for (const float scale : {0.75f, 16.0f, 3000.0f}) {
      for (const Backend& backend : {kRef, Tested(3)}) {
        const Problem p = Make(62, GDN_BF16, dim, scale < 1.0f ? kOddGuard : kAlignedGuard);
        const Results plain = RunBoth(backend, p);
        const Fp8Results got = RunFp8(backend, p, GDN_FP8_STATIC, scale);
        int64_t differ = 0;
        for (int64_t i = 0; i < plain.y.size(); ++i) {
          differ += got.Y(i) != F32ToE4m3(plain.y.Get(i) * scale);
        }
        EXPECT_EQ(differ, 0) << backend.name << " dim " << dim << " scale " << scale;
        EXPECT_FLOAT_EQ(got.scale_inv.Get(0), 1.0f / scale);
        // amax is that of y, before the scale.
        EXPECT_EQ(got.amax.Get(0), LargestOf(plain.y, 0, plain.y.size()));
      }
    }
  }
}

// Every type of x and gate, gamma and activation, at any alignment, by both kinds of scale.
GDN_BACKEND_TEST(GatedRmsNormFp8, B18Q3EveryModeQuantisesTheRoundedResult) {
  uint32_t seed = 66;
  for (const gdn_dtype x : kDtypes) {
    for (const gdn_dtype gate : {x, GDN_F32}) {
      for (const int64_t guard : {kAlignedGuard, kOddGuard}) {
        for (int mode = 0; mode < 8; ++mode) {
          Problem p = Make(seed, x, 128, guard);
          p.shape.seq = 3;
          p.gate_dtype = gate;
          p.zero_centered = mode & 1;
          p.activation = mode & 2 ? GDN_GATE_SIGMOID : GDN_GATE_SILU;
          Random random(seed++);
          p.Fill(random);
          const gdn_fp8_scaling fp8 = mode & 4 ? GDN_FP8_STATIC : GDN_FP8_ROW;
          constexpr float kScale = 24.0f;
          for (const Backend& backend : {kRef, Tested(0)}) {
            const Results plain = RunBoth(backend, p);
            const Fp8Results got = RunFp8(backend, p, fp8, kScale);
            SCOPED_TRACE(testing::Message() << backend.name << " types " << x << gate << " guard "
                                            << guard << " mode " << mode);
            // REF scales in FP64, where a near tie of FP32 may fall the other way.
            const float slack = backend.backend == GDN_BACKEND_REF ? 0x1p-21f : 0.0f;
            for (int64_t row = 0; row < p.shape.rows(); ++row) {
              const float amax = LargestOf(plain.y, row * 128, (row + 1) * 128);
              const float scale = fp8 == GDN_FP8_ROW ? 448.0f / amax : kScale;
              EXPECT_FLOAT_EQ(got.scale_inv.Get(fp8 == GDN_FP8_ROW ? row : 0),
                              fp8 == GDN_FP8_ROW ? amax / 448.0f : 1.0f / kScale);
              for (int64_t i = row * 128; i < (row + 1) * 128; ++i) {
                const float scaled = plain.y.Get(i) * scale;
                ASSERT_TRUE(got.Y(i) == F32ToE4m3(scaled - slack * scaled) ||
                            got.Y(i) == F32ToE4m3(scaled + slack * scaled))
                    << i;
              }
            }
            EXPECT_EQ(got.amax.Get(0), LargestOf(plain.y, 0, plain.y.size()));
            EXPECT_EQ(got.rstd.bytes(), plain.rstd.bytes());
          }
        }
      }
    }
  }
}

GDN_BACKEND_TEST(GatedRmsNormFp8, RowsOfZerosAndTinyRowsHaveFiniteScales) {
  for (const Backend& backend : {kRef, Tested(0)}) {
    Problem p = Make(63, GDN_BF16);
    p.x.Fill(p.shape, [] { return 0.0f; });
    p.x.storage.Set(128 + 5, 1e-36f);
    p.eps = 1.0f;
    const Fp8Results got = RunFp8(backend, p, GDN_FP8_ROW, 0.0f);
    for (int64_t row = 0; row < 2; ++row) {
      EXPECT_TRUE(std::isnormal(got.scale_inv.Get(row))) << row;
      for (int64_t i = 0; i < 128; ++i) EXPECT_NE(got.Y(row * 128 + i) & 0x7f, 0x7f);
    }
    for (int64_t i = 0; i < 128; ++i) EXPECT_EQ(got.Y(i) & 0x7f, 0);
  }
}

GDN_BACKEND_TEST(GatedRmsNormFp8, NanIsVisibleInItsRowAndInTheAmax) {
  for (const Backend& backend : {kRef, Tested(0), Tested(3)}) {
    Problem p = Make(64, GDN_BF16);
    p.x.storage.Set(128 + 5, NAN);
    const Fp8Results got = RunFp8(backend, p, GDN_FP8_ROW, 0.0f);
    EXPECT_TRUE(std::isnan(got.scale_inv.Get(1)));
    EXPECT_TRUE(std::isnan(got.amax.Get(0)));
    EXPECT_FALSE(std::isnan(got.scale_inv.Get(0)));
    for (int64_t i = 0; i < 128; ++i) {
      EXPECT_EQ(got.Y(128 + i) & 0x7f, 0x7f);
      EXPECT_NE(got.Y(i) & 0x7f, 0x7f);
    }
  }
}

// amax without FP8: the largest y as stored.
GDN_BACKEND_TEST(GatedRmsNormFp8, AmaxOfAnUnquantisedResult) {
  const Problem p = Make(65, GDN_F16, 48);
  for (const Backend& backend : {kRef, Tested(0), Tested(3)}) {
    Results r;
    std::vector<float> amax = {1e30f};  // overwritten, not accumulated
    const Execution execution(backend);
    gdn_gated_rms_norm_forward_args args = ForwardArgs(p, r);
    args.amax = amax.data();
    args.rstd = nullptr;
    ASSERT_EQ(Forward(execution, p, r, args, {Out(amax)}), GDN_OK) << gdn_last_error();
    EXPECT_EQ(amax[0], LargestOf(r.y, 0, r.y.size()));
  }
}

}  // namespace
}  // namespace gdn::kernels
