// The separate ops on a GPU against REF, and the fused step against the chain of them.
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "gdn/kernels/l2_norm.h"
#include "gdn/kernels/rms_norm.h"
#include "kernels/cuda/ops_test_util.h"

namespace gdn::kernels {
namespace {

using OpsCuda = CudaTest;
constexpr gdn_exec kRefExec{};

Tensor RandomTensor(gdn_dtype dtype, int64_t size, float gain, uint32_t seed) {
  Tensor tensor(dtype, size);
  Random random(seed);
  for (int64_t i = 0; i < size; ++i) tensor.Set(i, gain * random.Normal());
  return tensor;
}

double Difference(const Tensor& got, const Tensor& expected) {
  RelativeL2 error;
  for (int64_t i = 0; i < got.size(); ++i) error.Add(got.Get(i), expected.Get(i));
  return error.value();
}

// Of lines of `line` elements and `pad` between them, which nobody writes.
double LineDifference(const Tensor& got, const Tensor& expected, int64_t line, int64_t pad) {
  RelativeL2 error;
  for (int64_t i = 0; i < got.size(); ++i) {
    if (i % (line + pad) < line) {
      error.Add(got.Get(i), expected.Get(i));
    } else {
      EXPECT_TRUE(std::isnan(got.Get(i))) << i;
    }
  }
  return error.value();
}

Tensor Downloaded(const DeviceBuffer& buffer, gdn_dtype dtype) {
  Tensor tensor(dtype, static_cast<int64_t>(buffer.bytes()) / SizeOf(dtype));
  buffer.Download(tensor.data());
  return tensor;
}

// Each op of the chain on the GPU; REF gets the very inputs that the GPU op got, so nothing but the
// op's own arithmetic differs. `pad` elements are between the lines of what is handed on. The call
// after the GPU's, and after REF's.
void ExpectEachOpLikeRef(const FusedCall& before, int64_t pad, FusedCall* chain, FusedCall* ref) {
  const FusedShape& s = before.shape;
  const bool f32 = s.dtype == GDN_F32;
  *chain = *ref = before;
  const gdn_fused_decode_args r = ref->Args();
  const DeviceCall device(*chain);
  const gdn_fused_decode_args& a = device.args;
  const Stream stream;
  const gdn_exec exec = stream.Exec();
  HostBetween host(s, pad);
  const DeviceBetween between(host);
  HostBetween got = host;
  EnqueueOps(exec, a, between.get());
  stream.Synchronize();
  between.Download(got);
  device.Download(*chain);

  const gdn_causal_conv_args conv = ConvArgs(r, host.get());
  ASSERT_EQ(gdn_causal_conv(&kRefExec, &conv), GDN_OK);
  EXPECT_LE(LineDifference(got.qkv, host.qkv, s.channels(), pad), f32 ? 2e-6 : 3e-4);
  const gdn_gates_args gates = GatesArgs(r, host.get());
  ASSERT_EQ(gdn_gates(&kRefExec, &gates), GDN_OK);
  EXPECT_LE(Difference(got.g, host.g), 1e-6);
  EXPECT_LE(Difference(got.beta, host.beta), 1e-6);
  StepBetween given = got.get();
  given.o = host.o.data();
  const gdn_delta_rule_args rule = RuleArgs(r, given);
  ASSERT_EQ(gdn_delta_rule_step(&kRefExec, &rule), GDN_OK);
  EXPECT_LE(LineDifference(got.o, host.o, s.values(), pad), f32 ? 1e-5 : 1e-3);
  const gdn_gated_rms_norm_args norm = NormArgs(r, got.get());
  ASSERT_EQ(gdn_gated_rms_norm(&kRefExec, &norm), GDN_OK);
  const FusedErrors errors = Compare(before, *chain, *ref);
  EXPECT_LE(errors.y, f32 ? 1e-5 : 1e-3);
  EXPECT_LE(errors.state, s.state_dtype == GDN_F32 ? 1e-5 : 1e-3);
  EXPECT_EQ(errors.gaps_touched + errors.slots_touched + errors.conv_differs + errors.pads_touched,
            0);
}

void ExpectEachOpLikeRef(const FusedCall& before, int64_t pad = 0) {
  FusedCall chain = before;
  FusedCall ref = before;
  ExpectEachOpLikeRef(before, pad, &chain, &ref);
}

// And the fused step against the chain.
TEST_F(OpsCuda, EachOpOfTheStepMatchesRefAndTheFusedStepTheChain) {
  struct Dims {
    int64_t key_dim, value_dim, ratio;
  };
  for (gdn_dtype dtype : {GDN_F32, GDN_BF16, GDN_F16}) {
    for (gdn_dtype state_dtype : {GDN_F32, GDN_BF16}) {
      for (const Dims& d : {Dims{128, 128, 2}, Dims{60, 100, 3}, Dims{256, 512, 1}}) {
        FusedShape s;
        s.rows = 7;
        s.key_dim = d.key_dim;
        s.value_dim = d.value_dim;
        s.ratio = d.ratio;
        s.dtype = dtype;
        s.state_dtype = state_dtype;
        s.state_pad = 8;
        s.conv_pad = 2;
        s.round_o = s.round_before_gate = 1;
        s.y_pad = 0;
        SCOPED_TRACE("dtype " + std::to_string(dtype) + ", state " + std::to_string(state_dtype) +
                     ", K " + std::to_string(d.key_dim));
        const FusedCall before(s);
        FusedCall chain = before;
        FusedCall ref = before;
        ExpectEachOpLikeRef(before, 0, &chain, &ref);

        // The same rounded inputs all along: both run the same convolution.
        const FusedErrors fused = Compare(before, CudaResult(before), chain);
        EXPECT_LE(fused.y, dtype == GDN_F32 ? 1e-5 : 2e-3);
        EXPECT_LE(fused.state, state_dtype == GDN_F32 ? 1e-5 : 1e-3);
        EXPECT_EQ(fused.padding_not_zero + fused.slots_touched + fused.conv_differs, 0);
        // And against the FP64 rule fed those inputs.
        const FusedErrors oracle = Compare(before, CudaResult(before), ref);
        EXPECT_LE(oracle.state, state_dtype == GDN_F32 ? 1e-5 : 1e-3);
      }
    }
  }
}

// Every buffer's lines and slots 1 to 8 elements apart.
TEST_F(OpsCuda, EachOpAtOddStrides) {
  for (gdn_dtype dtype : {GDN_F32, GDN_BF16, GDN_F16}) {
    for (int64_t pad = 1; pad <= 8; ++pad) {
      SCOPED_TRACE("dtype " + std::to_string(dtype) + ", pad " + std::to_string(pad));
      FusedShape s;
      s.rows = 7;
      s.dtype = dtype;
      s.round_o = s.round_before_gate = 1;
      s.x_pad = s.y_pad = s.state_pad = s.conv_pad = pad;
      ExpectEachOpLikeRef(FusedCall(s), pad);
    }
  }
}

// Queries, keys and both of zeros, up to the carried inputs of the convolution.
TEST_F(OpsCuda, EachOpOfZeroQueriesAndKeys) {
  for (int zeroed = 1; zeroed < 4; ++zeroed) {
    SCOPED_TRACE(zeroed);
    FusedShape s;
    s.rows = 7;
    s.round_o = s.round_before_gate = 1;
    FusedCall before(s);
    const gdn_fused_decode_args a = before.Args();
    const int64_t begin = zeroed & 1 ? a.q_offset : a.k_offset;
    const int64_t end = zeroed & 2 ? a.v_offset : a.k_offset;
    for (int64_t i = begin; i < end; ++i) {
      for (int64_t row = 0; row < s.rows; ++row) {
        before.x.Set(row * s.x_stride() + i, 0.0f);
        if (before.Padding(row)) continue;
        for (int64_t j = 0; j < s.conv_width - 1; ++j) {
          before.conv_state.Set(before.read[row] * s.conv_stride() + j * s.channels() + i, 0.0f);
        }
      }
    }
    ExpectEachOpLikeRef(before);
  }
}

// g = -1000, whose exponential is 0, for every other head.
TEST_F(OpsCuda, EachOpWithoutMemory) {
  FusedShape s;
  s.rows = 7;
  s.round_o = s.round_before_gate = 1;
  FusedCall before(s);
  for (int64_t h = 0; h < s.value_heads(); h += 2) {
    before.a_log[h] = std::log(50.0f);
    before.dt_bias[h] = 0.0f;
    for (int64_t row = 0; row < s.rows; ++row) {
      before.x.Set(row * s.x_stride() + before.Args().a_offset + h, 20.0f);
    }
  }
  ExpectEachOpLikeRef(before);
}

// Packed sequences of all lengths, with checks at their boundaries, equal REF.
TEST_F(OpsCuda, PackedConvolutionAndPrefillMatchRef) {
  const std::vector<int32_t> cu_seqlens = {0, 0, 1, 6, 6, 69, 70, 133};
  constexpr int64_t kSequences = 7;
  const int64_t tokens = cu_seqlens.back();
  for (gdn_dtype dtype : {GDN_F32, GDN_BF16}) {
    FusedShape s;
    s.rows = kSequences;
    s.dtype = dtype;
    s.key_dim = 64;
    s.value_dim = 40;
    FusedCall ref(s);
    const FusedCall before = ref;
    FusedCall got = ref;
    const DeviceCall device(got);
    const Stream stream;
    const gdn_exec exec = stream.Exec();
    const DeviceBuffer cu(cu_seqlens);
    const Tensor x = RandomTensor(dtype, tokens * s.channels(), 1.0f, 3);
    Tensor y(dtype, tokens * s.channels());
    const DeviceBuffer x_device(x);
    const DeviceBuffer y_device(y);
    gdn_causal_conv_args conv =
        ConvArgs(device.args, {y_device.get(), nullptr, nullptr, nullptr, 0});
    conv.cu_seqlens = cu.get<int32_t>();
    conv.x = x_device.get();
    conv.x_token_stride = s.channels();
    ASSERT_EQ(gdn_causal_conv(&exec, &conv), GDN_OK) << gdn_last_error();
    gdn_causal_conv_args ref_conv = ConvArgs(ref.Args(), {y.data(), nullptr, nullptr, nullptr, 0});
    ref_conv.cu_seqlens = cu_seqlens.data();
    ref_conv.x = x.data();
    ref_conv.x_token_stride = s.channels();
    ASSERT_EQ(gdn_causal_conv(&kRefExec, &ref_conv), GDN_OK) << gdn_last_error();
    stream.Synchronize();
    Tensor y_got = Downloaded(y_device, dtype);
    EXPECT_LE(Difference(y_got, y), dtype == GDN_F32 ? 2e-6 : 3e-4);

    Tensor g(GDN_F32, tokens * s.value_heads());
    Tensor beta(GDN_F32, tokens * s.value_heads());
    Random random(5);
    for (int64_t i = 0; i < g.size(); ++i) {
      g.Set(i, -random.Uniform(0.0f, 2.0f));
      beta.Set(i, random.Uniform(0.0f, 2.0f));
    }
    Tensor o(dtype, tokens * s.values());
    const DeviceBuffer g_device(g);
    const DeviceBuffer beta_device(beta);
    const DeviceBuffer o_device(o);
    gdn_delta_rule_args rule = RuleArgs(device.args, {y_device.get(), g_device.get<float>(),
                                                      beta_device.get<float>(), o_device.get(), 0});
    rule.cu_seqlens = cu.get<int32_t>();
    ASSERT_EQ(gdn_delta_rule_prefill(&exec, &rule), GDN_OK) << gdn_last_error();
    gdn_delta_rule_args ref_rule =
        RuleArgs(ref.Args(), {y_got.data(), static_cast<float*>(g.data()),
                              static_cast<float*>(beta.data()), o.data(), 0});
    ref_rule.cu_seqlens = cu_seqlens.data();
    ASSERT_EQ(gdn_delta_rule_prefill(&kRefExec, &ref_rule), GDN_OK) << gdn_last_error();
    stream.Synchronize();
    EXPECT_LE(Difference(Downloaded(o_device, dtype), o), dtype == GDN_F32 ? 1e-5 : 1e-3);
    device.Download(got);
    const FusedErrors errors = Compare(before, got, ref);
    EXPECT_LE(errors.state, 1e-5);
    EXPECT_EQ(errors.slots_touched + errors.conv_differs + errors.pads_touched, 0);
  }
}

TEST_F(OpsCuda, GatesAtTheExtremes) {
  const std::vector<float> values = {-100.0f, -20.0f, -1e-3f, 0.0f,  1e-3f, 5.0f,
                                     19.99f,  20.0f,  20.01f, 60.0f, 100.0f};
  const int64_t heads = 3;
  const int64_t tokens = static_cast<int64_t>(values.size());
  Tensor a(GDN_F32, tokens * heads);
  for (int64_t i = 0; i < a.size(); ++i) a.Set(i, values[i / heads]);
  const std::vector<float> a_log = {-3.0f, 0.0f, 2.7f};
  const std::vector<float> dt_bias = {0.0f, 0.0f, 0.0f};
  gdn_gates_args args{};
  args.tokens = tokens;
  args.value_heads = heads;
  args.a_token_stride = args.b_token_stride = heads;
  args.beta_scale = 2.0f;
  Tensor g(GDN_F32, tokens * heads);
  Tensor beta(GDN_F32, tokens * heads);
  const DeviceBuffer a_device(a);
  const DeviceBuffer a_log_device(a_log);
  const DeviceBuffer dt_bias_device(dt_bias);
  const DeviceBuffer g_device(g);
  const DeviceBuffer beta_device(beta);
  gdn_gates_args on_device = args;
  on_device.a = on_device.b = a_device.get();
  on_device.a_log = a_log_device.get<float>();
  on_device.dt_bias = dt_bias_device.get<float>();
  on_device.g = g_device.get<float>();
  on_device.beta = beta_device.get<float>();
  const Stream stream;
  const gdn_exec exec = stream.Exec();
  ASSERT_EQ(gdn_gates(&exec, &on_device), GDN_OK) << gdn_last_error();
  stream.Synchronize();
  args.a = args.b = a.data();
  args.a_log = a_log.data();
  args.dt_bias = dt_bias.data();
  args.g = static_cast<float*>(g.data());
  args.beta = static_cast<float*>(beta.data());
  ASSERT_EQ(gdn_gates(&kRefExec, &args), GDN_OK);
  const Tensor g_got = Downloaded(g_device, GDN_F32);
  const Tensor beta_got = Downloaded(beta_device, GDN_F32);
  for (int64_t i = 0; i < g.size(); ++i) {
    EXPECT_NEAR(g_got.Get(i), g.Get(i), 1e-6 * std::fabs(g.Get(i)) + 1e-38) << values[i / heads];
    EXPECT_NEAR(beta_got.Get(i), beta.Get(i), 1e-6 * beta.Get(i) + 1e-38) << values[i / heads];
  }
}

// In groups as heads of tokens: with vectors where everything is aligned, and without.
TEST_F(OpsCuda, GroupsOfRowsMatchRef) {
  constexpr int64_t kRows = 11, kGroup = 3, kGroups = 4;
  for (const auto& [dim, gap] : {std::pair{int64_t{128}, int64_t{64}}, {128, 3}, {100, 8}}) {
    SCOPED_TRACE("dim " + std::to_string(dim) + ", gap " + std::to_string(gap));
    const int64_t stride = kGroup * dim + gap;
    Tensor x = RandomTensor(GDN_BF16, kGroups * stride, 2.0f, 13);
    const Tensor before = x;
    const DeviceBuffer device(x);
    const Stream stream;
    const gdn_exec exec = stream.Exec();
    gdn_l2_norm_args args{};
    args.rows = kRows;
    args.dim = args.x_row_stride = args.y_row_stride = dim;
    args.x = args.y = device.get();
    args.x_dtype = args.y_dtype = GDN_BF16;
    args.eps = 1e-6f;
    args.scale = 1.0f;
    args.group_rows = kGroup;
    args.x_group_stride = args.y_group_stride = stride;
    ASSERT_EQ(gdn_l2_norm(&exec, &args), GDN_OK) << gdn_last_error();
    args.x = args.y = x.data();
    ASSERT_EQ(gdn_l2_norm(&kRefExec, &args), GDN_OK) << gdn_last_error();
    stream.Synchronize();
    const Tensor got = Downloaded(device, GDN_BF16);
    EXPECT_LE(Difference(got, x), 1e-3);
    // Between the groups, and behind the last one's two rows.
    for (int64_t i = 0; i < x.size(); ++i) {
      if (i % stride < (i / stride == kGroups - 1 ? 2 : kGroup) * dim) continue;
      ASSERT_EQ(got.Get(i), before.Get(i)) << i;
    }
  }
}

TEST_F(OpsCuda, NormsMatchRef) {
  for (gdn_dtype dtype : {GDN_F32, GDN_BF16, GDN_F16}) {
    for (int64_t dim : {1, 31, 128, 1000, 4096}) {
      const int64_t rows = 9;
      const int64_t stride = dim + 5;
      SCOPED_TRACE("dtype " + std::to_string(dtype) + ", dim " + std::to_string(dim));
      Tensor x = RandomTensor(dtype, rows * stride, 2.0f, 11);
      for (int64_t i = 0; i < dim; ++i) x.Set(3 * stride + i, 0.0f);
      const Tensor weight = RandomTensor(GDN_F32, dim, 1.0f, 12);
      const DeviceBuffer weight_device(weight);
      const Stream stream;
      const gdn_exec exec = stream.Exec();
      const double bound = dtype == GDN_F32 ? 2e-6 : 1e-3;

      gdn_l2_norm_args l2{};
      l2.rows = rows;
      l2.dim = dim;
      l2.x_dtype = l2.y_dtype = dtype;
      l2.x_row_stride = l2.y_row_stride = stride;
      l2.eps = 1e-6f;
      l2.scale = 0.5f;
      Tensor in_place = x;
      const DeviceBuffer l2_device(in_place);
      const DeviceBuffer rstd_device(rows * sizeof(float));
      gdn_l2_norm_args l2_on_device = l2;
      l2_on_device.x = l2_device.get();
      l2_on_device.y = l2_device.get();
      l2_on_device.rstd = rstd_device.get<float>();
      ASSERT_EQ(gdn_l2_norm(&exec, &l2_on_device), GDN_OK) << gdn_last_error();
      Tensor rstd(GDN_F32, rows);
      l2.x = l2.y = in_place.data();
      l2.rstd = static_cast<float*>(rstd.data());
      ASSERT_EQ(gdn_l2_norm(&kRefExec, &l2), GDN_OK) << gdn_last_error();
      stream.Synchronize();
      EXPECT_LE(Difference(Downloaded(l2_device, dtype), in_place), bound);
      EXPECT_LE(Difference(Downloaded(rstd_device, GDN_F32), rstd), 1e-6);

      gdn_rms_norm_args rms{};
      rms.rows = rows;
      rms.dim = dim;
      rms.x_dtype = dtype;
      rms.x_row_stride = stride;
      rms.zero_centered = dim == 128;
      rms.eps = 1e-6f;
      rms.y_dtype = GDN_BF16;
      rms.y_row_stride = dim;
      Tensor y(GDN_BF16, rows * dim);
      const DeviceBuffer x_device(x);
      const DeviceBuffer y_device(y);
      gdn_rms_norm_args rms_on_device = rms;
      rms_on_device.x = x_device.get();
      rms_on_device.weight = weight_device.get<float>();
      rms_on_device.y = y_device.get();
      ASSERT_EQ(gdn_rms_norm(&exec, &rms_on_device), GDN_OK) << gdn_last_error();
      rms.x = x.data();
      rms.weight = static_cast<const float*>(weight.data());
      rms.y = y.data();
      ASSERT_EQ(gdn_rms_norm(&kRefExec, &rms), GDN_OK) << gdn_last_error();
      stream.Synchronize();
      EXPECT_LE(Difference(Downloaded(y_device, GDN_BF16), y), 1e-3);
    }
  }
}

}  // namespace
}  // namespace gdn::kernels
