// The values of the fused prefill on a GPU against REF, which steps through the fused step's
// formulas.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "kernels/cuda/fused_prefill_test_util.h"

namespace gdn::kernels {
namespace {

using FusedPrefill = CudaTest;

TEST_F(FusedPrefill, MatchesRef) {
  const std::vector<int32_t> lengths = {70, 0, 1, 64, 2, 130, 0, 3, 65, 17};
  uint32_t seed = 1;
  for (int64_t ratio : {1, 2, 3, 4, 6}) {
    for (gdn_dtype dtype : {GDN_BF16, GDN_F16}) {
      for (gdn_dtype state : {GDN_F32, GDN_BF16}) {
        FusedShape shape = TunedShape(ratio % 2 == 0 ? 1 : 3, ratio);
        shape.dtype = dtype;
        shape.state_dtype = state;
        shape.seed = seed++;
        shape.beta_scale = seed % 2 == 0 ? 2.0f : 1.0f;
        shape.scale = seed % 4 == 1 ? 1.0f : 0.0f;
        shape.activation = seed % 3 == 0 ? GDN_GATE_SIGMOID : GDN_GATE_SILU;
        shape.round_o = shape.round_before_gate = seed % 3 == 1 ? 1 : 0;
        shape.zero_centered = seed % 5 == 0 ? 1 : 0;
        SCOPED_TRACE("ratio " + std::to_string(ratio) + ", type " + std::to_string(dtype) +
                     ", state " + std::to_string(state));
        ExpectTunedLikeRef(PrefillCall(shape, lengths));
      }
    }
  }
}

TEST_F(FusedPrefill, Gates) {
  struct Case {
    const char* name;
    float decay;      // exp(a_log).
    float dt_bias;    // With a in [-2, 2].
    float low, high;  // Of a and b.
  };
  for (const Case& c :
       {Case{"weak", 1.0f, -8.0f, -2.0f, 2.0f}, Case{"1", 1.0f, -40.0f, -2.0f, 2.0f},
        Case{"1, beta to 2", 1.0f, -40.0f, 0.0f, 20.0f}, Case{"1e-12", 27.6f, 0.5f, -0.1f, 0.1f},
        Case{"from 1 to 0", 100.0f, 0.0f, -20.0f, 20.0f}}) {
    SCOPED_TRACE(c.name);
    FusedShape shape = TunedShape(1, 2);
    shape.beta_scale = 2.0f;
    shape.a_low = c.low;
    shape.a_high = c.high;
    PrefillCall call(shape, {64, 111, 192, 500});
    std::fill(call.a_log.begin(), call.a_log.end(), std::log(c.decay));
    std::fill(call.dt_bias.begin(), call.dt_bias.end(), c.dt_bias);
    ExpectTunedLikeRef(call);
  }
}

// SiLU keeps its relative precision where it is nearly zero: q and k are brought to unit norm after
// it.
TEST_F(FusedPrefill, StronglyNegativeActivations) {
  for (const float center : {-3.0f, -5.0f, -8.0f}) {
    SCOPED_TRACE(center);
    PrefillCall call(TunedShape(), {70, 200});
    for (size_t i = 0; i < call.conv_weight.size(); ++i) call.conv_weight[i] = i % 4 == 3;
    Random random(7);
    const FusedShape& shape = call.shape;
    for (int64_t line = 0; line < call.tokens(); ++line) {
      for (int64_t i = 0; i < shape.channels(); ++i) {
        call.x.Set(line * shape.x_stride() + i, center + 0.5f * random.Normal());
      }
    }
    ExpectTunedLikeRef(call);
  }
}

TEST_F(FusedPrefill, LinesBehindTheLastSequenceChangeNothing) {
  PrefillCall call(TunedShape(), {5, 90});
  const FusedShape& shape = call.shape;
  for (int64_t i = call.tokens() * shape.x_stride(); i < call.x.size(); ++i) {
    call.x.Set(i, std::numeric_limits<float>::quiet_NaN());
  }
  ExpectTunedLikeRef(call);
  call.spare_tokens = PrefillCall::kTrailing;
  ExpectTunedLikeRef(call);
}

// More sequences and heads than blocks, which change from one state to the next: with all kinds of
// rows, and with states that begin at multiples of 16 bytes and such that do not.
TEST_F(FusedPrefill, ABlockTakesManyStates) {
  std::vector<int32_t> lengths;
  for (int i = 0; i < 4; ++i) {
    for (int32_t length : {70, 0, 1, 64, 2, 130, 64, 3, 65, 200}) lengths.push_back(length);
  }
  uint32_t seed = 50;
  for (gdn_dtype state : {GDN_F32, GDN_BF16}) {
    for (int64_t pad : {8, 2}) {
      SCOPED_TRACE("state " + std::to_string(state) + ", pad " + std::to_string(pad));
      FusedShape shape = TunedShape(1, 6);
      shape.state_dtype = state;
      shape.state_pad = pad;
      shape.seed = seed++;
      ExpectTunedLikeRef(PrefillCall(shape, lengths));
    }
  }
}

// Some thirty units a block, most of one chunk. No REF, which the case above has.
TEST_F(FusedPrefill, ABlockTakesMoreUnitsThanItKnowsAtOnce) {
  std::vector<int32_t> lengths;
  for (int i = 0; i < 128; ++i) lengths.push_back(i % 7 == 0 ? 65 : 1 + i % 64);
  FusedShape shape = TunedShape(8, 2);
  shape.seed = 60;
  const PrefillCall before(shape, lengths);
  const PrefillCall in_turn = Result(before, kInTurn);
  for (const cuda::PrefillPlan& plan : {kWalkConvolves, kStream}) {
    SCOPED_TRACE(NameOf(plan));
    for (int repeat = 0; repeat < 5; ++repeat) ExpectSameBits(Result(before, plan), in_turn);
  }
}

// Fresh sequences without tokens, whose states are written elsewhere.
TEST_F(FusedPrefill, EmptySequencesClearTheStatesThatTheyWrite) {
  FusedShape shape = TunedShape();
  shape.seed = 61;
  PrefillCall call(shape, {0, 5, 0, 0, 70, 0, 64});
  int64_t unused = 0;
  const auto is_used = [&](int64_t slot) {
    return std::count(call.read.begin(), call.read.end(), slot) +
               std::count(call.write.begin(), call.write.end(), slot) !=
           0;
  };
  while (is_used(unused)) ++unused;
  for (const int64_t i : {0, 2, 5}) {
    call.read[i] = unused;
    call.fresh[i] = 1;
  }
  ExpectTunedLikeRef(call);
}

// Weights of the norm that are zero, tiny, negative, and gates that saturate.
TEST_F(FusedPrefill, WeightsAndGatesAtTheirExtremes) {
  for (const bool zero_centered : {false, true}) {
    FusedShape shape = TunedShape();
    shape.zero_centered = zero_centered;
    shape.seed = 62;
    PrefillCall call(shape, {70, 130});
    const float zero = zero_centered ? -1.0f : 0.0f;
    for (int64_t j = 0; j < shape.value_dim; ++j) {
      if (j % 4 == 0) call.norm_weight[j] = zero;
      if (j % 4 == 1) call.norm_weight[j] = zero - 2.0f;
      if (j % 4 == 2 && !zero_centered) call.norm_weight[j] = 1e-30f;
    }
    const int64_t z = call.PrefillArgs().layer.z_offset;
    for (int64_t t = 0; t < call.tokens(); ++t) {
      for (int64_t j = 0; j < shape.values(); j += 3) {
        call.x.Set(t * shape.x_stride() + z + j, j % 2 == 0 ? -120.0f : 120.0f);
      }
    }
    SCOPED_TRACE(zero_centered);
    ExpectTunedLikeRef(call);
  }
}

TEST_F(FusedPrefill, NoTokensLeaveTheStates) {
  FusedShape shape = TunedShape();
  shape.special_rows = false;
  ExpectTunedLikeRef(PrefillCall(shape, {0, 0, 0}));
}

TEST_F(FusedPrefill, LengthsAndPacking) {
  uint32_t seed = 100;
  for (const std::vector<int32_t>& lengths : {std::vector<int32_t>{1},
                                              {63},
                                              {64},
                                              {65},
                                              {256, 256},
                                              {64, 111, 192},
                                              {15},
                                              {15, 85, 200, 900, 800},
                                              {2048},
                                              {1025},
                                              {0, 5, 0, 64, 0, 0, 7, 0},
                                              {9999},
                                              {65530}}) {
    SCOPED_TRACE("first length " + std::to_string(lengths[0]) + " of " +
                 std::to_string(lengths.size()));
    FusedShape shape = TunedShape(1, lengths[0] > 2048 ? 1 : 2);
    shape.seed = seed++;
    shape.special_rows = lengths[0] != 0;  // A fresh and empty one would compare what nobody wrote.
    ExpectTunedLikeRef(PrefillCall(shape, lengths));
  }
}

TEST_F(FusedPrefill, OtherShapesTakeTheSeparateOps) {
  const std::vector<int32_t> lengths = {9, 0, 70, 4, 1};
  FusedShape odd = TunedShape();
  odd.key_dim = 60;
  odd.value_dim = 100;
  odd.conv_width = 3;
  ExpectLikeRef(PrefillCall(odd, lengths));
  for (const auto& [key_dim, value_dim] : {std::pair{64, 64}, {96, 192}, {256, 256}}) {
    SCOPED_TRACE(key_dim);
    FusedShape other = TunedShape();
    other.key_dim = key_dim;
    other.value_dim = value_dim;
    ExpectLikeRef(PrefillCall(other, lengths));
  }
  FusedShape wide = TunedShape();
  wide.dtype = GDN_F32;
  ExpectLikeRef(PrefillCall(wide, lengths), 1e-5, 1e-5);
  FusedShape unaligned = TunedShape();
  unaligned.x_pad = 7;
  ExpectLikeRef(PrefillCall(unaligned, lengths));
  FusedShape plain = TunedShape();
  plain.normalize = 0;
  plain.x_gain = 0.3f;
  ExpectLikeRef(PrefillCall(plain, lengths));
}

// z|v|b|a|k|q in a line.
TEST_F(FusedPrefill, ColumnsInAnotherOrder) {
  PrefillCall call(TunedShape(), {70, 0, 1, 64, 200});
  call.ReverseColumns();
  ExpectTunedLikeRef(call);
}

// g of exactly 0 for half of the tokens: softplus(a + dt_bias) is 0 in FP32.
TEST_F(FusedPrefill, HalfOfTheTokensDecayNothing) {
  FusedShape shape = TunedShape();
  shape.beta_scale = 2.0f;
  PrefillCall call(shape, {64, 111, 192, 500});
  Random random(9);
  const int64_t a = call.Args().a_offset;
  for (int64_t line = 0; line < call.tokens(); ++line) {
    if (random.Uniform(0.0f, 1.0f) < 0.5f) continue;
    for (int64_t h = 0; h < shape.value_heads(); ++h) {
      call.x.Set(line * shape.x_stride() + a + h, -200.0f);
    }
  }
  ExpectTunedLikeRef(call);
}

// More sequences than a dimension of a grid has blocks for their heads. All but the last are empty
// and padding, which leaves what that one gives alone.
TEST_F(FusedPrefill, MoreSequencesThanAGridDimension) {
  constexpr int64_t kSequences = 40000;
  const PrefillCall one(TunedShape(1, 2), {70});
  ExpectTunedLikeRef(one);
  PrefillCall call = one;
  call.shape.rows = kSequences;
  MakeLastOf(kSequences, call);
  const PrefillCall alone = Result(one);
  for (const cuda::PrefillPlan& plan : {kAuto, kInTurn, kWalkConvolves, kStream, kWideStream}) {
    SCOPED_TRACE(NameOf(plan));
    ExpectSameBits(Result(call, plan), alone);
  }
}

constexpr int32_t kSplitTokens = 200;

// One sequence in two calls, the second of which goes on from both states of the first.
PrefillCall InTwoCalls(const PrefillCall& before, int32_t cut) {
  PrefillCall call = PartResult(before, 0, 0, cut);
  call.read = call.write;
  return PartResult(call, 0, cut, kSplitTokens - cut);
}

// The same token by token, by the fused step.
PrefillCall Stepped(const PrefillCall& before) {
  PrefillCall call = before;
  const DeviceCall device(call);
  gdn_fused_decode_args args = device.args;
  const Stream stream;
  const gdn_exec exec = stream.Exec();
  const int64_t element = SizeOf(call.shape.dtype);
  for (int32_t t = 0; t < kSplitTokens; ++t) {
    EXPECT_EQ(gdn_fused_decode(&exec, &args), GDN_OK) << gdn_last_error();
    args.x = static_cast<const char*>(args.x) + call.shape.x_stride() * element;
    args.y = static_cast<char*>(args.y) + call.shape.y_stride() * element;
  }
  stream.Synchronize();
  device.Download(call);
  return call;
}

void ExpectClose(const PrefillCall& before, const PrefillCall& got, const PrefillCall& whole,
                 double bound) {
  EXPECT_LE(OutputError(got, whole), bound);
  const FusedErrors errors = Compare(before, got, whole);
  EXPECT_LE(errors.state, bound);
  EXPECT_EQ(errors.slots_touched + errors.conv_differs + errors.pads_touched, 0);
  ExpectRestOfOutputUntouched(before, got);
  if (std::getenv("GDN_TEST_PRINT") != nullptr) {
    std::printf("  y %.2e, state %.2e\n", OutputError(got, whole), errors.state);
  }
}

// However a prompt is divided into calls, and whether it is stepped through.
TEST_F(FusedPrefill, SplitsAndSteppingAgreeWithTheWhole) {
  struct Case {
    gdn_dtype dtype, state;
    double bound;
  };
  for (const Case& c : {Case{GDN_BF16, GDN_F32, 1e-2}, Case{GDN_BF16, GDN_BF16, 1e-2},
                        Case{GDN_F16, GDN_F32, 1e-2}, Case{GDN_F32, GDN_F32, 1e-5}}) {
    SCOPED_TRACE("type " + std::to_string(c.dtype) + ", state " + std::to_string(c.state));
    FusedShape shape = TunedShape(1, 2);
    shape.dtype = c.dtype;
    shape.state_dtype = c.state;
    const PrefillCall before(shape, {kSplitTokens});
    const PrefillCall whole = Result(before);
    for (int32_t cut : {1, 63, 64, 65, 100, 199}) {
      SCOPED_TRACE(cut);
      ExpectClose(before, InTwoCalls(before, cut), whole, c.bound);
    }
    SCOPED_TRACE("stepped");
    ExpectClose(before, Stepped(before), whole, c.bound);
  }
}

TEST_F(FusedPrefill, RejectsWhatItCannotRun) {
  PrefillCall call(TunedShape(), {4});
  const gdn_fused_prefill_args args = call.PrefillArgs();
  const Stream stream;
  const gdn_exec exec = stream.Exec();
  EXPECT_EQ(gdn_fused_prefill(&exec, &args), GDN_WORKSPACE_TOO_SMALL);
  gdn_fused_prefill_args bad = args;
  bad.tokens = -1;
  EXPECT_EQ(gdn_fused_prefill(&exec, &bad), GDN_INVALID_ARGUMENT);
  bad = args;
  bad.cu_seqlens = nullptr;
  EXPECT_EQ(gdn_fused_prefill(&exec, &bad), GDN_INVALID_ARGUMENT);
  gdn_exec cpu{};
  cpu.backend = GDN_BACKEND_CPU;
  EXPECT_EQ(gdn_fused_prefill(&cpu, &args), GDN_BACKEND_UNAVAILABLE);
}

}  // namespace
}  // namespace gdn::kernels
