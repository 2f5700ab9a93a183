// The fused prefill on a GPU against REF, which steps through the fused step's formulas.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "gdn/kernels/fused_prefill.h"
#include "kernels/cuda/cuda_test_util.h"
#include "kernels/cuda/fused_prefill.h"

namespace gdn::kernels {
namespace {

using FusedPrefill = CudaTest;

// A fused call whose rows are sequences, with lines for all their tokens and a few behind them.
struct PrefillCall : FusedCall {
  static constexpr int64_t kTrailing = 3;

  PrefillCall(FusedShape s, const std::vector<int32_t>& lengths)
      : FusedCall(WithRows(std::move(s), lengths)), cu_seqlens(1, 0) {
    for (int32_t length : lengths) cu_seqlens.push_back(cu_seqlens.back() + length);
    const int64_t lines = tokens() + kTrailing;
    x = Tensor(shape.dtype, lines * shape.x_stride());
    Random random(shape.seed + 1);
    for (int64_t line = 0; line < lines; ++line) {
      const int64_t wide = shape.channels() + shape.values();
      for (int64_t i = 0; i < wide; ++i) {
        x.Set(line * shape.x_stride() + i, shape.x_gain * random.Normal());
      }
      for (int64_t i = wide; i < wide + 2 * shape.value_heads(); ++i) {
        x.Set(line * shape.x_stride() + i, random.Uniform(shape.a_low, shape.a_high));
      }
    }
    y = Tensor(shape.dtype, lines * shape.y_stride());
  }
  static FusedShape WithRows(FusedShape s, const std::vector<int32_t>& lengths) {
    s.rows = static_cast<int64_t>(lengths.size());
    return s;
  }
  int64_t tokens() const { return cu_seqlens.back(); }
  gdn_fused_prefill_args PrefillArgs() {
    gdn_fused_prefill_args args{};
    args.tokens = tokens() + spare_tokens;
    args.cu_seqlens = cu_seqlens.data();
    args.layer = Args();
    args.checkpoint_every = checkpoint_every;
    args.checkpoint_begin = checkpoint_begin.data();
    args.checkpoint_slots = checkpoint_slots.data();
    return args;
  }

  std::vector<int32_t> cu_seqlens;
  int64_t spare_tokens = 0;
  int64_t checkpoint_every = 0;
  std::vector<int64_t> checkpoint_begin;
  std::vector<int64_t> checkpoint_slots;
};

// Of a call that the tuned kernels cover.
FusedShape Shape(int64_t key_heads = 2, int64_t ratio = 2) {
  FusedShape shape;
  shape.key_heads = key_heads;
  shape.ratio = ratio;
  shape.x_pad = 8 + (8 - 2 * shape.value_heads() % 8) % 8;
  shape.y_pad = 8;
  shape.state_pad = 8;
  shape.conv_pad = 8;
  return shape;
}

// Ways to divide a call; Auto is the library's own.
constexpr cuda::PrefillPlan kAuto = {-1};
constexpr cuda::PrefillPlan kInTurn = {0};
constexpr cuda::PrefillPlan kStream = {2};
constexpr cuda::PrefillPlan kWideStream = {41};  // Not in pairs.

// exec has the workspace.
void Enqueue(const gdn_exec& exec, const gdn_fused_prefill_args& args,
             const cuda::PrefillPlan& plan) {
  if (plan.stream_blocks < 0) {
    ASSERT_EQ(gdn_fused_prefill(&exec, &args), GDN_OK) << gdn_last_error();
    return;
  }
  cuda::Device device;
  ASSERT_EQ(cuda::CurrentDevice("test", &device), GDN_OK) << gdn_last_error();
  ASSERT_TRUE(cuda::CoversFusedPrefill(device, args));
  cuda::PreparedChunks chunks;
  cuda::FusedPrefillChunks(args, exec.workspace, &chunks);
  ASSERT_EQ(cuda::LaunchWayIn(exec, args, chunks, plan), GDN_OK) << gdn_last_error();
  ASSERT_EQ(cuda::LaunchWalk(exec, device, args, chunks, plan), GDN_OK) << gdn_last_error();
}

void Launch(const gdn_fused_prefill_args& args, const cuda::PrefillPlan& plan) {
  const Stream stream;
  gdn_exec exec = stream.Exec();
  size_t bytes = 0;
  ASSERT_EQ(gdn_fused_prefill_workspace(&exec, &args, &bytes), GDN_OK) << gdn_last_error();
  const DeviceBuffer workspace(std::vector<uint8_t>(bytes, 0xff));  // NaNs
  exec.workspace = workspace.get();
  exec.workspace_bytes = bytes;
  Enqueue(exec, args, plan);
  stream.Synchronize();
}

PrefillCall Result(const PrefillCall& before, const cuda::PrefillPlan& plan = kAuto) {
  PrefillCall call = before;
  const DeviceCall device(call);
  const DeviceBuffer cu(call.cu_seqlens);
  const DeviceBuffer begin(call.checkpoint_begin);
  const DeviceBuffer slots(call.checkpoint_slots);
  gdn_fused_prefill_args args = call.PrefillArgs();
  args.cu_seqlens = cu.get<int32_t>();
  args.layer = device.args;
  args.checkpoint_begin = begin.get<int64_t>();
  args.checkpoint_slots = slots.get<int64_t>();
  Launch(args, plan);
  device.Download(call);
  return call;
}

void ExpectLikeRef(const PrefillCall& before, double y_bound = 5e-3, double state_bound = 3e-3) {
  const PrefillCall got = Result(before);
  PrefillCall ref = before;
  const gdn_exec exec{};
  const gdn_fused_prefill_args args = ref.PrefillArgs();
  ASSERT_EQ(gdn_fused_prefill(&exec, &args), GDN_OK) << gdn_last_error();
  const FusedErrors errors = Compare(before, got, ref);
  EXPECT_LE(errors.state, state_bound);
  EXPECT_EQ(errors.slots_touched + errors.conv_differs + errors.pads_touched, 0);
  RelativeL2 y;
  const FusedShape& s = before.shape;
  for (int64_t i = 0; i < s.rows; ++i) {
    for (int64_t t = before.cu_seqlens[i]; t < before.cu_seqlens[i + 1]; ++t) {
      for (int64_t j = 0; j < s.values(); ++j) {
        const int64_t at = t * s.y_stride() + j;
        y.Add(got.y.Get(at), ref.y.Get(at));
        if (before.Padding(i)) {
          ASSERT_EQ(got.y.Get(at), 0.0f);
        }
      }
      const int64_t gap = t * s.y_stride() + s.values();
      ASSERT_EQ(got.y.Slice(gap, gap + s.y_pad), before.y.Slice(gap, gap + s.y_pad));
    }
  }
  EXPECT_LE(y.value(), y_bound);
  EXPECT_EQ(got.y.Slice(before.tokens() * s.y_stride(), got.y.size()),
            before.y.Slice(before.tokens() * s.y_stride(), got.y.size()));
  if (std::getenv("GDN_TEST_PRINT") != nullptr) {
    std::printf("  y %.2e, state %.2e\n", y.value(), errors.state);
  }
}

// A call that the tuned kernels cover: with any plan the same bits, close to REF's.
void ExpectTunedLikeRef(const PrefillCall& before) {
  const PrefillCall in_turn = Result(before, kInTurn);
  for (const cuda::PrefillPlan& plan : {kAuto, kStream, kWideStream}) {
    SCOPED_TRACE("stream " + std::to_string(plan.stream_blocks));
    ExpectSameBits(Result(before, plan), in_turn);
  }
  ExpectLikeRef(before);
}

TEST_F(FusedPrefill, MatchesRef) {
  const std::vector<int32_t> lengths = {70, 0, 1, 64, 2, 130, 0, 3, 65, 17};
  uint32_t seed = 1;
  for (int64_t ratio : {1, 2, 3, 4, 6}) {
    for (gdn_dtype dtype : {GDN_BF16, GDN_F16}) {
      for (gdn_dtype state : {GDN_F32, GDN_BF16}) {
        FusedShape shape = Shape(ratio % 2 == 0 ? 1 : 3, ratio);
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
    FusedShape shape = Shape(1, 2);
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
    PrefillCall call(Shape(), {70, 200});
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
  PrefillCall call(Shape(), {5, 90});
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
      FusedShape shape = Shape(1, 6);
      shape.state_dtype = state;
      shape.state_pad = pad;
      shape.seed = seed++;
      ExpectTunedLikeRef(PrefillCall(shape, lengths));
    }
  }
}

TEST_F(FusedPrefill, NoTokensLeaveTheStates) {
  FusedShape shape = Shape();
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
                                              {9999}}) {
    SCOPED_TRACE("first length " + std::to_string(lengths[0]) + " of " +
                 std::to_string(lengths.size()));
    FusedShape shape = Shape(1, lengths[0] > 2048 ? 1 : 2);
    shape.seed = seed++;
    shape.special_rows = lengths[0] != 0;  // A fresh and empty one would compare what nobody wrote.
    ExpectTunedLikeRef(PrefillCall(shape, lengths));
  }
}

TEST_F(FusedPrefill, OtherShapesTakeTheSeparateOps) {
  const std::vector<int32_t> lengths = {9, 0, 70, 4, 1};
  FusedShape odd = Shape();
  odd.key_dim = 60;
  odd.value_dim = 100;
  odd.conv_width = 3;
  ExpectLikeRef(PrefillCall(odd, lengths));
  FusedShape wide = Shape();
  wide.dtype = GDN_F32;
  ExpectLikeRef(PrefillCall(wide, lengths), 1e-5, 1e-5);
  FusedShape unaligned = Shape();
  unaligned.x_pad = 7;
  ExpectLikeRef(PrefillCall(unaligned, lengths));
  FusedShape plain = Shape();
  plain.normalize = 0;
  plain.x_gain = 0.3f;
  ExpectLikeRef(PrefillCall(plain, lengths));
}

TEST_F(FusedPrefill, ASequenceAloneAndAmongOthersIsTheSameBits) {
  Random random(3);
  std::vector<int32_t> lengths(128);
  for (int32_t& length : lengths) length = static_cast<int32_t>(random.Integer(150));
  FusedShape shape = Shape(1);
  shape.special_rows = false;
  const PrefillCall before(shape, lengths);
  const PrefillCall together = Result(before);
  // More units than blocks.
  for (const cuda::PrefillPlan& plan : {kInTurn, kStream, kWideStream}) {
    ExpectSameBits(Result(before, plan), together);
  }
  for (int64_t i : {5, 77, 127}) {
    PrefillCall call = before;
    const DeviceCall device(call);
    const int64_t first = call.cu_seqlens[i];
    const std::vector<int32_t> cu = {0, lengths[i]};
    const DeviceBuffer cu_device(cu);
    gdn_fused_prefill_args args = call.PrefillArgs();
    args.tokens = lengths[i];
    args.cu_seqlens = cu_device.get<int32_t>();
    args.layer = device.args;
    args.layer.rows = 1;
    args.layer.x = device.x.get<char>() + first * shape.x_stride() * 2;
    args.layer.y = device.y.get<char>() + first * shape.y_stride() * 2;
    args.layer.read_index += i;
    args.layer.write_index += i;
    args.layer.fresh += i;
    Launch(args, kAuto);
    device.Download(call);
    const int64_t begin = first * shape.y_stride();
    const int64_t end = (first + lengths[i]) * shape.y_stride();
    EXPECT_EQ(call.y.Slice(begin, end), together.y.Slice(begin, end));
    const int64_t slot = call.write[i] * shape.state_stride();
    EXPECT_EQ(call.state.Slice(slot, slot + shape.state_stride()),
              together.state.Slice(slot, slot + shape.state_stride()));
  }
}

// The first `length` tokens of sequence i alone.
PrefillCall PrefixResult(const PrefillCall& before, int64_t i, int64_t length) {
  const FusedShape& shape = before.shape;
  PrefillCall call = before;
  const DeviceCall device(call);
  const int64_t first = call.cu_seqlens[i];
  const DeviceBuffer cu(std::vector<int32_t>{0, static_cast<int32_t>(length)});
  gdn_fused_prefill_args args = call.PrefillArgs();
  args.tokens = length;
  args.cu_seqlens = cu.get<int32_t>();
  args.layer = device.args;
  args.layer.rows = 1;
  args.layer.x = device.x.get<char>() + first * shape.x_stride() * 2;
  args.layer.y = device.y.get<char>() + first * shape.y_stride() * 2;
  args.layer.read_index += i;
  args.layer.write_index += i;
  args.layer.fresh += i;
  args.checkpoint_every = 0;
  Launch(args, kAuto);
  device.Download(call);
  return call;
}

TEST_F(FusedPrefill, CheckpointsAreTheStatesAfterPrefixes) {
  for (int64_t every : {64, 128}) {
    FusedShape shape = Shape(2, 6);  // Some blocks take two states.
    shape.spare_slots = 12;
    PrefillCall before(shape, {200, 64, 63, 0, 0, 330, 128});  // Row 3 is padding.
    const PrefillCall plain = Result(before);
    before.checkpoint_every = every;
    std::vector<bool> used(shape.slots() + 2 * before.shape.rows, false);
    for (int64_t i = 0; i < before.shape.rows; ++i) {
      if (!before.Padding(i)) used[before.read[i]] = used[before.write[i]] = true;
    }
    int64_t next = 0;
    for (int64_t i = 0; i < before.shape.rows; ++i) {
      before.checkpoint_begin.push_back(static_cast<int64_t>(before.checkpoint_slots.size()));
      const int64_t length = before.cu_seqlens[i + 1] - before.cu_seqlens[i];
      for (int64_t j = 0; j < length / every; ++j) {
        while (used[next]) ++next;
        ASSERT_LT(next, before.shape.slots());
        // One of them is not wanted.
        before.checkpoint_slots.push_back(i == 5 && j == 1 ? -1 : next++);
      }
    }
    PrefillCall got = Result(before);
    EXPECT_TRUE(got.y.bytes() == plain.y.bytes());
    for (const cuda::PrefillPlan& plan : {kInTurn, kStream, kWideStream}) {
      ExpectSameBits(Result(before, plan), got);
    }
    // Each is what the prefix alone leaves; with them put back, nothing else differs.
    const int64_t state = shape.values() * shape.key_dim;
    const int64_t conv = 3 * shape.channels();
    for (int64_t i = 0; i < before.shape.rows; ++i) {
      const int64_t length = before.cu_seqlens[i + 1] - before.cu_seqlens[i];
      for (int64_t j = 0; j < length / every; ++j) {
        const int64_t slot = before.checkpoint_slots[before.checkpoint_begin[i] + j];
        if (slot < 0) continue;
        const PrefillCall prefix = PrefixResult(before, i, (j + 1) * every);
        const int64_t from = before.write[i];
        const int64_t stride = shape.state_stride();
        const int64_t conv_stride = shape.conv_stride();
        EXPECT_EQ(got.state.Slice(slot * stride, slot * stride + state),
                  prefix.state.Slice(from * stride, from * stride + state))
            << i << ", " << j;
        EXPECT_EQ(got.conv_state.Slice(slot * conv_stride, slot * conv_stride + conv),
                  prefix.conv_state.Slice(from * conv_stride, from * conv_stride + conv))
            << i << ", " << j;
        for (int64_t e = 0; e < state; ++e) {
          got.state.Set(slot * stride + e, plain.state.Get(slot * stride + e));
        }
        for (int64_t e = 0; e < conv; ++e) {
          got.conv_state.Set(slot * conv_stride + e, plain.conv_state.Get(slot * conv_stride + e));
        }
      }
    }
    const FusedErrors errors = Compare(before, got, plain);
    EXPECT_EQ(errors.slots_touched + errors.conv_differs + errors.pads_touched, 0);
    EXPECT_EQ(errors.state, 0.0);
  }
  // Only the tuned kernels have them.
  FusedShape odd = Shape();
  odd.value_dim = 64;
  PrefillCall call(odd, {70});
  call.checkpoint_every = 64;
  call.checkpoint_begin = {0};
  call.checkpoint_slots = {-1};
  const gdn_fused_prefill_args args = call.PrefillArgs();
  const Stream stream;
  gdn_exec exec = stream.Exec();
  size_t bytes = 0;
  ASSERT_EQ(gdn_fused_prefill_workspace(&exec, &args, &bytes), GDN_OK) << gdn_last_error();
  const DeviceBuffer workspace(bytes);
  exec.workspace = workspace.get();
  exec.workspace_bytes = bytes;
  EXPECT_EQ(gdn_fused_prefill(&exec, &args), GDN_UNSUPPORTED_SHAPE);
}

TEST_F(FusedPrefill, RepeatsAreTheSameBits) {
  const PrefillCall before(Shape(), {200, 64, 500, 1, 33});
  const PrefillCall first = Result(before);
  for (const cuda::PrefillPlan& plan : {kInTurn, kStream, kWideStream}) {
    for (int i = 0; i < 250; ++i) {
      ExpectSameBits(Result(before, plan), first);
      if (HasFailure()) return;
    }
  }
}

// One long sequence leaves multiprocessors to the way in, in pairs; neither a short one nor many
// do. Needs no GPU.
TEST(FusedPrefillPlan, StreamsWhereTheWalkLeavesRoom) {
  const auto streams = [](int64_t key_heads, int64_t value_heads, int64_t rows, int64_t tokens) {
    gdn_fused_prefill_args args{};
    args.tokens = tokens;
    args.layer.rows = rows;
    args.layer.key_heads = key_heads;
    args.layer.value_heads = value_heads;
    return cuda::PlanPrefill({90, 132}, args).stream_blocks;
  };
  for (const int64_t tokens : {2048, 8192, 131072}) {
    EXPECT_EQ(streams(16, 32, 1, tokens), 68);  // What the walk's 64 blocks leave.
    EXPECT_EQ(streams(16, 16, 1, 2 * tokens), 64);
  }
  EXPECT_EQ(streams(8, 16, 2, 16384), 68);
  EXPECT_EQ(streams(16, 32, 1, 1024), 0);
  EXPECT_EQ(streams(16, 48, 1, 131072), 0);
  EXPECT_EQ(streams(16, 32, 8, 65536), 0);
  EXPECT_EQ(streams(16, 32, 128, 65536), 0);
}

TEST_F(FusedPrefill, AReplayedGraphServesOtherLengths) {
  FusedShape shape = Shape();
  shape.special_rows = false;
  const PrefillCall before(shape, {100, 28, 72});
  PrefillCall call = before;
  DeviceCall device(call);
  DeviceBuffer cu(before.cu_seqlens);
  gdn_fused_prefill_args args = call.PrefillArgs();
  args.cu_seqlens = cu.get<int32_t>();
  args.layer = device.args;
  const Stream stream;
  gdn_exec exec = stream.Exec();
  size_t bytes = 0;
  ASSERT_EQ(gdn_fused_prefill_workspace(&exec, &args, &bytes), GDN_OK);
  const DeviceBuffer workspace(bytes);
  exec.workspace = workspace.get();
  exec.workspace_bytes = bytes;
  for (const cuda::PrefillPlan& plan : {kAuto, kStream, kWideStream}) {
    SCOPED_TRACE("stream " + std::to_string(plan.stream_blocks));
    const CapturedGraph graph(stream, [&] { Enqueue(exec, args, plan); });
    for (const std::vector<int32_t>& lengths : {std::vector<int32_t>{100, 28, 72}, {0, 200, 0}}) {
      PrefillCall other = before;
      for (size_t i = 0; i < lengths.size(); ++i) {
        other.cu_seqlens[i + 1] = other.cu_seqlens[i] + lengths[i];
      }
      device.Upload(other);
      cu.Upload(other.cu_seqlens.data());
      graph.Launch();
      stream.Synchronize();
      PrefillCall replayed = other;
      device.Download(replayed);
      ExpectSameBits(replayed, Result(other));
    }
  }
}

TEST_F(FusedPrefill, RejectsWhatItCannotRun) {
  PrefillCall call(Shape(), {4});
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
