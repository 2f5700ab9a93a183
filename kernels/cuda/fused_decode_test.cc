// The values of the fused decode step on a GPU against the FP64 oracle, shape by shape.
#include "gdn/kernels/fused_decode.h"

#include <cmath>
#include <string>
#include <vector>

#include "kernels/cuda/cuda_test_util.h"

namespace gdn::kernels {
namespace {

using FusedDecodeCuda = CudaTest;

void ExpectUntouched(const FusedErrors& errors) {
  EXPECT_EQ(errors.padding_not_zero, 0);
  EXPECT_EQ(errors.gaps_touched, 0);
  EXPECT_EQ(errors.slots_touched, 0);
  EXPECT_EQ(errors.conv_differs, 0);
  EXPECT_EQ(errors.pads_touched, 0);
}

// FP32 activations leave no rounding to differ in. Otherwise an output of the convolution may fall
// on the other side of a rounding boundary: one unit in the last place of one element.
void ExpectClose(const FusedShape& shape, const FusedErrors& errors) {
  const bool f32 = shape.dtype == GDN_F32;
  EXPECT_LE(errors.y, f32 ? 1e-5 : 2e-3);
  EXPECT_LE(errors.state, shape.state_dtype == GDN_BF16 ? 2e-3 : f32 ? 1e-5 : 5e-4);
}

void Check(const FusedShape& shape, int tiling = kAutoTiling) {
  SCOPED_TRACE(shape.name + ", tiling " + std::to_string(tiling));
  const FusedCall before(shape);
  const FusedErrors errors = Compare(before, CudaResult(before, tiling), RefResult(before));
  ExpectClose(shape, errors);
  ExpectUntouched(errors);
}

TEST_F(FusedDecodeCuda, TunedShapesMatchTheOracle) {
  for (gdn_dtype dtype : {GDN_BF16, GDN_F16}) {
    for (gdn_dtype state_dtype : {GDN_F32, GDN_BF16}) {
      for (int64_t ratio : {1, 2, 3, 4}) {
        for (int64_t tokens : {1, 2, 8}) {
          FusedShape s;
          s.name = "dtype " + std::to_string(dtype) + ", state " + std::to_string(state_dtype) +
                   ", ratio " + std::to_string(ratio) + ", tokens " + std::to_string(tokens);
          s.rows = 6;
          s.dtype = dtype;
          s.state_dtype = state_dtype;
          s.ratio = ratio;
          s.tokens = tokens;
          s.state_pad = 64;
          s.conv_pad = 10;
          s.seed = static_cast<uint32_t>(100 * ratio + 10 * tokens + dtype);
          Check(s);
        }
      }
    }
  }
}

TEST_F(FusedDecodeCuda, EveryTilingMatchesTheOracle) {
  for (int tiling = 0; tiling < cuda::kNumDecodeTilings; ++tiling) {
    for (gdn_dtype state_dtype : {GDN_F32, GDN_BF16}) {
      for (int64_t tokens : {1, 3}) {
        for (int64_t ratio = 1; ratio <= 8; ++ratio) {
          if (!cuda::DecodeTilingCovers(tiling, ratio, tokens)) continue;
          FusedShape s;
          s.name = "state " + std::to_string(state_dtype) + ", ratio " + std::to_string(ratio) +
                   ", tokens " + std::to_string(tokens);
          s.rows = 5;
          s.key_heads = 3;
          s.ratio = ratio;
          s.tokens = tokens;
          s.state_dtype = state_dtype;
          Check(s, tiling);
        }
      }
    }
  }
}

TEST_F(FusedDecodeCuda, OtherShapesMatchTheOracle) {
  struct Dims {
    int64_t key_dim, value_dim, conv_width, key_heads, ratio, tokens;
  };
  const Dims dims[] = {
      {64, 64, 4, 2, 1, 1},   {96, 192, 4, 2, 2, 1}, {256, 256, 4, 1, 4, 1}, {128, 128, 3, 2, 2, 1},
      {128, 256, 4, 2, 1, 3}, {60, 60, 4, 1, 4, 2},  {100, 100, 2, 3, 3, 1}, {256, 512, 8, 1, 2, 8},
      {1, 1, 2, 1, 1, 1},     {33, 7, 5, 2, 5, 4},   {128, 128, 4, 1, 8, 8},
  };
  for (gdn_dtype dtype : {GDN_F32, GDN_BF16, GDN_F16}) {
    for (gdn_dtype state_dtype : {GDN_F32, GDN_BF16}) {
      for (const Dims& d : dims) {
        FusedShape s;
        s.name = "dtype " + std::to_string(dtype) + ", state " + std::to_string(state_dtype) +
                 ", K " + std::to_string(d.key_dim) + ", V " + std::to_string(d.value_dim);
        s.rows = 5;
        s.key_dim = d.key_dim;
        s.value_dim = d.value_dim;
        s.conv_width = d.conv_width;
        s.key_heads = d.key_heads;
        s.ratio = d.ratio;
        s.tokens = d.tokens;
        s.dtype = dtype;
        s.state_dtype = state_dtype;
        s.state_pad = 3;
        s.conv_pad = 1;
        s.x_pad = 1;
        Check(s);
      }
    }
  }
}

TEST_F(FusedDecodeCuda, F32ActivationsOnTheTunedShape) {
  FusedShape s;
  s.name = "f32";
  s.rows = 7;
  s.dtype = GDN_F32;
  Check(s);
  s.tokens = 4;
  Check(s);
}

TEST_F(FusedDecodeCuda, OptionsMatchTheOracle) {
  for (int bits = 0; bits < 128; ++bits) {
    FusedShape s;
    s.name = "options " + std::to_string(bits);
    s.rows = 2;
    s.key_heads = 1;
    s.zero_centered = bits & 1;
    s.activation = (bits & 2) != 0 ? GDN_GATE_SIGMOID : GDN_GATE_SILU;
    s.round_o = (bits & 4) != 0;
    s.round_before_gate = (bits & 8) != 0;
    s.normalize = (bits & 16) == 0;
    s.beta_scale = (bits & 32) != 0 ? 2.0f : 1.0f;
    s.x_gain = s.normalize ? 1.0f : 0.2f;
    s.scale = (bits & 64) != 0 ? 0.1f : 0.0f;
    Check(s);
    Check(s, kGenericTiling);
  }
}

// Decay of exactly 1 and of 0, writes of strength 0 and 1: a at +-100, b at +-80.
TEST_F(FusedDecodeCuda, SaturatedGates) {
  for (float a : {-100.0f, 100.0f}) {
    for (float b : {-80.0f, 80.0f}) {
      for (int tiling : {kAutoTiling, kGenericTiling}) {
        FusedShape s;
        s.name = "a " + std::to_string(a) + ", b " + std::to_string(b);
        s.rows = 5;
        s.tokens = 2;
        FusedCall before(s);
        const gdn_fused_decode_args args = before.Args();
        for (int64_t line = 0; line < s.rows * s.tokens; ++line) {
          for (int64_t h = 0; h < s.value_heads(); ++h) {
            before.x.Set(line * s.x_stride() + args.a_offset + h, a);
            before.x.Set(line * s.x_stride() + args.b_offset + h, b);
          }
        }
        SCOPED_TRACE(s.name);
        const FusedErrors errors = Compare(before, CudaResult(before, tiling), RefResult(before));
        ExpectClose(s, errors);
        ExpectUntouched(errors);
      }
    }
  }
}

// Zero q, k, v or z, and everything at once: finite results, and the oracle's.
TEST_F(FusedDecodeCuda, ZeroVectors) {
  for (int zeroed = 0; zeroed < 5; ++zeroed) {
    for (int tiling : {kAutoTiling, kGenericTiling}) {
      FusedShape s;
      s.name = "zeroed " + std::to_string(zeroed);
      s.special_rows = false;
      FusedCall before(s);
      const gdn_fused_decode_args a = before.Args();
      const int64_t begins[] = {a.q_offset, a.k_offset, a.v_offset, a.z_offset, 0};
      const int64_t ends[] = {a.k_offset, a.v_offset, a.z_offset, a.b_offset, a.b_offset};
      for (int64_t line = 0; line < s.rows; ++line) {
        for (int64_t i = begins[zeroed]; i < ends[zeroed]; ++i) {
          before.x.Set(line * s.x_stride() + i, 0.0f);
        }
      }
      for (int64_t row = 0; row < s.rows; ++row) {
        for (int64_t j = 0; j < 3; ++j) {
          for (int64_t c = begins[zeroed]; c < std::min(ends[zeroed], s.channels()); ++c) {
            before.conv_state.Set(before.read[row] * s.conv_stride() + j * s.channels() + c, 0.0f);
          }
        }
        if (zeroed < 4) continue;
        for (int64_t i = 0; i < s.values() * s.key_dim; ++i) {
          before.state.Set(before.read[row] * s.state_stride() + i, 0.0f);
        }
      }
      SCOPED_TRACE(s.name);
      const FusedErrors errors = Compare(before, CudaResult(before, tiling), RefResult(before));
      ExpectClose(s, errors);
      ExpectUntouched(errors);
    }
  }
}

// o outgrows FP16 in an FP32 state; the norm sees it unrounded and stays finite.
TEST_F(FusedDecodeCuda, LargeReadoutInF16) {
  FusedShape s;
  s.special_rows = false;
  s.dtype = GDN_F16;
  FusedCall before(s);
  for (int64_t i = 0; i < before.state.size(); ++i) {
    before.state.Set(i, 1e6f * before.state.Get(i));
  }
  const FusedErrors errors = Compare(before, CudaResult(before), RefResult(before));
  ExpectClose(s, errors);
  ExpectUntouched(errors);
}

// Stepping T tokens in one launch and one by one: only the state's rounding between steps differs.
TEST_F(FusedDecodeCuda, ManyTokensEqualSingleSteps) {
  FusedShape s;
  s.rows = 4;
  s.tokens = 8;
  FusedCall together(s);
  FusedCall single = together;
  for (int tiling : {kAutoTiling, kGenericTiling}) {
    const FusedCall once = CudaResult(together, tiling);
    DeviceCall device(single);
    device.args.tokens = 1;
    device.args.x_token_stride = s.tokens * s.x_stride();
    device.args.y_token_stride = s.tokens * s.y_stride();
    for (int64_t t = 0; t < s.tokens; ++t) {
      ASSERT_EQ(RunOnDevice(device, tiling), GDN_OK) << gdn_last_error();
      device.args.x = static_cast<const uint16_t*>(device.args.x) + s.x_stride();
      device.args.y = static_cast<uint16_t*>(device.args.y) + s.y_stride();
      device.args.fresh = nullptr;
      // A fork reads its new slot from the second step on.
      std::vector<int64_t> read = together.read;
      for (int64_t i = 0; i < s.rows; ++i) {
        if (!together.Padding(i)) read[i] = together.write[i];
      }
      device.read.Upload(read.data());
    }
    FusedCall stepped = together;
    device.Download(stepped);
    EXPECT_TRUE(once.y.bytes() == stepped.y.bytes());
    EXPECT_TRUE(once.state.bytes() == stepped.state.bytes());
    EXPECT_TRUE(once.conv_state.bytes() == stepped.conv_state.bytes());
  }
}

}  // namespace
}  // namespace gdn::kernels
