// Gated RMSNorm for training: every layout of x, gate and dy has the bits of the dense one.
#ifndef GDN_TEST_CUDA
#include <sys/mman.h>
#endif

#include "kernels/gated_rms_norm_training_test_util.h"

namespace gdn::kernels {
namespace {

GDN_BACKEND_SUITE(GatedRmsNormLayout);

// The values of `from` in another layout.
View Relaid(const View& from, const Shape& shape, Layout layout) {
  View to(from.storage.dtype(), shape, layout);
  for (int64_t row = 0; row < shape.rows(); ++row) {
    for (int64_t i = 0; i < shape.dim; ++i) {
      to.storage.Set(to.At(shape, row, i), from.Get(shape, row, i));
    }
  }
  return to;
}

void ExpectSameBits(const Results& got, const Results& expected) {
  EXPECT_EQ(got.y.bytes(), expected.y.bytes());
  EXPECT_EQ(got.rstd.bytes(), expected.rstd.bytes());
  EXPECT_EQ(got.dx.bytes(), expected.dx.bytes());
  EXPECT_EQ(got.dgate.bytes(), expected.dgate.bytes());
  EXPECT_EQ(got.dgamma.bytes(), expected.dgamma.bytes());
}

GDN_BACKEND_TEST(GatedRmsNormLayout, B13B14EveryLayoutHasTheBitsOfTheDenseOne) {
  const Shape shapes[] = {{1, 37, 16, 32}, {3, 5, 1, 64},   {2, 3, 7, 128}, {2, 2, 3, 256},
                          {1, 1, 1, 50},   {2, 19, 3, 128}, {1, 3, 2, 520}};
  uint32_t seed = 1;
  for (const Shape& shape : shapes) {
    for (const gdn_dtype dtype : kDtypes) {
      for (const bool zero_centered : {false, true}) {
        Problem dense;
        dense.shape = shape;
        dense.x_dtype = dtype;
        dense.gate_dtype = seed % 2 ? dtype : GDN_F32;
        dense.zero_centered = zero_centered;
        Random random(seed++);
        dense.Fill(random);
        for (const Backend& backend : {kRef, Tested(0)}) {
          const Results expected = RunBoth(backend, dense);
          for (const Layout layout : kLayouts) {
            SCOPED_TRACE(testing::Message() << backend.name << " dim " << shape.dim << " type "
                                            << dtype << " layout " << static_cast<int>(layout));
            Problem p = dense;
            p.gate = Relaid(dense.gate, shape, layout);
            ExpectSameBits(RunBoth(backend, p), expected);
            p.x = Relaid(dense.x, shape, layout);
            p.dy = Relaid(dense.dy, shape, layout);
            ExpectSameBits(RunBoth(backend, p), expected);
            p.guard = kOddGuard;
            ExpectSameBits(RunBoth(backend, p), expected);
          }
        }
      }
    }
  }
}

// A stride of 0 reads one element for many: of the gate, of x and of dy. The gradients keep their
// full size.
GDN_BACKEND_TEST(GatedRmsNormLayout, B15BroadcastInputsHaveAGradientPerElement) {
  uint32_t seed = 40;
  for (const int64_t dim : {32, 50, 64, 128, 256, 1024}) {
    for (const gdn_dtype dtype : kDtypes) {
      for (const Layout layout : kGateLayouts) {
        for (const int which : {1, 2, 4, 7}) {  // gate, x, dy, all
          Problem p;
          p.shape = {2, 5, 3, dim};
          p.x_dtype = dtype;
          p.gate_dtype = seed % 2 ? dtype : GDN_F32;
          if (which & 1) p.gate_layout = layout;
          if (which & 2) p.x_layout = layout;
          if (which & 4) p.dy_layout = layout;
          Random random(seed++);
          p.Fill(random);
          Problem dense = p;
          dense.gate = Relaid(p.gate, p.shape, Layout::kDense);
          dense.x = Relaid(p.x, p.shape, Layout::kDense);
          dense.dy = Relaid(p.dy, p.shape, Layout::kDense);
          for (const Backend& backend : {kRef, Tested(0)}) {
            if (backend.backend == GDN_BACKEND_REF && dim > 64) continue;
            SCOPED_TRACE(testing::Message()
                         << backend.name << " dim " << dim << " type " << dtype << " layout "
                         << static_cast<int>(layout) << " of " << which);
            const Results got = RunBoth(backend, p);
            ExpectSameBits(got, RunBoth(backend, dense));
            for (int64_t i = 0; i < got.dgate.size(); ++i) {
              ASSERT_TRUE(std::isfinite(got.dgate.Get(i)) && std::isfinite(got.dx.Get(i)));
            }
          }
        }
      }
    }
  }
}

// The gate as columns of a projection that holds x too: inputs may overlap.
GDN_BACKEND_TEST(GatedRmsNormLayout, X5GateInsideTheBufferOfX) {
  Problem p;
  p.shape = {1, 37, 16, 128};
  p.gate_dtype = p.x_dtype = GDN_BF16;
  Random random(41);
  p.Fill(random);
  const Results expected = RunBoth(Tested(0), p);
  Problem shared = p;
  const int64_t width = 2 * 16 * 128 + 1056;
  View both;
  both.storage = Tensor(GDN_BF16, 37 * width);
  both.strides = {0, width, 128, 1};
  View gate = both;
  both.offset = 3;
  gate.offset = 3 + 16 * 128 + 16;
  for (int64_t row = 0; row < p.shape.rows(); ++row) {
    for (int64_t i = 0; i < 128; ++i) {
      both.storage.Set(both.At(p.shape, row, i), p.x.Get(p.shape, row, i));
      both.storage.Set(gate.At(p.shape, row, i), p.gate.Get(p.shape, row, i));
    }
  }
  shared.x = both;
  shared.gate.strides = gate.strides;
  Results got;
  Execution execution(Tested(0));
  gdn_gated_rms_norm_forward_args forward = ForwardArgs(shared, got);
  forward.in.gate = static_cast<const uint16_t*>(shared.x.storage.data()) + gate.offset;
  ASSERT_EQ(Forward(execution, shared, got, forward), GDN_OK) << gdn_last_error();
  EXPECT_EQ(got.y.bytes(), expected.y.bytes());
}

GDN_BACKEND_TEST(GatedRmsNormLayout, X5EveryAlignmentOfAnElement) {
  Problem p;
  p.shape = {1, 3, 1, 64};
  Random random(42);
  p.Fill(random);
  const Results expected = RunBoth(Tested(0), p);
  for (int64_t offset = 0; offset <= 9; ++offset) {
    Problem moved = p;
    for (View* view : {&moved.x, &moved.gate, &moved.dy}) {
      View shifted = *view;
      shifted.storage = Tensor(GDN_BF16, offset + view->storage.size());
      shifted.offset = offset;
      for (int64_t i = 0; i < view->storage.size(); ++i) {
        shifted.storage.Set(offset + i, view->storage.Get(i));
      }
      *view = shifted;
    }
    ExpectSameBits(RunBoth(Tested(0), moved), expected);
  }
}

// Inputs of 1e-5, which FP16 holds below its normal numbers, leave the statistic to eps; wide rows
// span many vectors.
GDN_BACKEND_TEST(GatedRmsNormLayout, T6SmallInputsAndWideRows) {
  for (const auto& [shape, scale] :
       {std::pair{Shape{1, 97, 16, 128}, 1e-5f}, std::pair{Shape{1, 3, 1, 8192}, 1.0f},
        std::pair{Shape{1, 3, 2, 1200}, 1.0f}}) {
    for (const gdn_dtype dtype : kDtypes) {
      Problem p;
      p.shape = shape;
      p.x_dtype = p.gate_dtype = dtype;
      p.zero_centered = true;
      p.gate_layout = Layout::kBatchFirstSlice;
      Random random(43);
      p.Fill(random, scale);
      const Results got = RunBoth(Tested(3), p);
      const Results expected = RunBoth(kRef, p);
      const double bound = dtype == GDN_F32 ? 2e-6 : 1e-3;
      EXPECT_LE(ErrorOf(got.y, expected.y), bound);
      EXPECT_LE(ErrorOf(got.dx, expected.dx), bound);
      EXPECT_LE(ErrorOf(got.dgate, expected.dgate), bound);
      EXPECT_LE(ErrorOf(got.dgamma, expected.dgamma), bound);
    }
  }
}

#ifndef GDN_TEST_CUDA  // There, whole tensors beyond 2^31 elements fit.
// Rows further apart than 2^31 elements, in address space that is reserved and hardly touched.
GDN_BACKEND_TEST(GatedRmsNormLayout, X6OffsetsAreSixtyFourBits) {
  constexpr int64_t kStride = (int64_t{1} << 32) + 40;
  constexpr size_t kBytes = (kStride + 64) * sizeof(uint16_t);
  void* const memory = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  ASSERT_NE(memory, MAP_FAILED) << "no address space for " << kBytes << " bytes";
  Problem p;
  p.shape = {2, 1, 1, 64};
  Random random(44);
  p.Fill(random);
  for (int64_t row = 0; row < 2; ++row) {
    for (int64_t i = 0; i < 64; ++i) {
      Store(memory, GDN_BF16, row * kStride + i, p.x.Get(p.shape, row, i));
    }
  }
  for (const Backend& backend : {kRef, Tested(0)}) {
    const Execution execution(backend);
    Results expected, got;
    RunForward(execution, p, expected);
    gdn_gated_rms_norm_forward_args args = ForwardArgs(p, got);
    args.in.x = memory;
    args.in.x_strides.batch = kStride;
    ASSERT_EQ(gdn_gated_rms_norm_forward(execution.exec(), &args), GDN_OK) << gdn_last_error();
    EXPECT_EQ(got.y.bytes(), expected.y.bytes());
  }
  munmap(memory, kBytes);
}
#endif

}  // namespace
}  // namespace gdn::kernels
