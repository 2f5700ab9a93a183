// Bitwise properties of the fused prefill on a GPU: plans, neighbours, prefixes, repeats, graphs.
#include <cstdint>
#include <string>
#include <vector>

#include "kernels/cuda/fused_prefill_test_util.h"

namespace gdn::kernels {
namespace {

using FusedPrefillBits = CudaTest;

TEST_F(FusedPrefillBits, ASequenceAloneAndAmongOthers) {
  Random random(3);
  std::vector<int32_t> lengths(128);
  for (int32_t& length : lengths) length = static_cast<int32_t>(random.Integer(150));
  for (gdn_dtype state : {GDN_F32, GDN_BF16}) {
    SCOPED_TRACE("state " + std::to_string(state));
    FusedShape shape = TunedShape(1);
    shape.state_dtype = state;
    shape.special_rows = false;
    const PrefillCall before(shape, lengths);
    const PrefillCall together = Result(before);
    // More units than blocks.
    for (const cuda::PrefillPlan& plan : {kInTurn, kWalkConvolves, kStream, kWideStream}) {
      ExpectSameBits(Result(before, plan), together);
    }
    for (int64_t i : {5, 77, 127}) {
      SCOPED_TRACE(i);
      const PrefillCall alone = PartResult(before, i, 0, lengths[i]);
      const int64_t begin = before.cu_seqlens[i] * shape.y_stride();
      const int64_t end = before.cu_seqlens[i + 1] * shape.y_stride();
      EXPECT_EQ(alone.y.Slice(begin, end), together.y.Slice(begin, end));
      const int64_t slot = before.write[i];
      EXPECT_EQ(StateOf(alone, slot), StateOf(together, slot));
      EXPECT_EQ(ConvStateOf(alone, slot), ConvStateOf(together, slot));
    }
  }
}

// The call with slots for the states after every so many tokens, of which one is not wanted.
PrefillCall WithCheckpoints(const PrefillCall& before, int64_t every) {
  PrefillCall call = before;
  const FusedShape& shape = call.shape;
  call.checkpoint_every = every;
  std::vector<bool> used(shape.slots(), false);
  for (int64_t i = 0; i < shape.rows; ++i) {
    if (!call.Padding(i)) used[call.read[i]] = used[call.write[i]] = true;
  }
  int64_t next = 0;
  for (int64_t i = 0; i < shape.rows; ++i) {
    call.checkpoint_begin.push_back(static_cast<int64_t>(call.checkpoint_slots.size()));
    for (int64_t j = 0; j < call.Length(i) / every; ++j) {
      while (next < shape.slots() && used[next]) ++next;
      EXPECT_LT(next, shape.slots());
      call.checkpoint_slots.push_back(i == 5 && j == 1 ? -1 : next++);
    }
  }
  return call;
}

TEST_F(FusedPrefillBits, CheckpointsAreTheStatesAfterPrefixes) {
  struct Case {
    int64_t every;
    gdn_dtype dtype, state;
  };
  for (const Case& c : {Case{64, GDN_BF16, GDN_F32}, Case{128, GDN_BF16, GDN_F32},
                        Case{64, GDN_BF16, GDN_BF16}, Case{64, GDN_F16, GDN_F32}}) {
    SCOPED_TRACE("every " + std::to_string(c.every) + ", type " + std::to_string(c.dtype) +
                 ", state " + std::to_string(c.state));
    FusedShape shape = TunedShape(2, 6);  // Some blocks take two states.
    shape.dtype = c.dtype;
    shape.state_dtype = c.state;
    shape.spare_slots = 12;
    // Row 3 is padding.
    const PrefillCall unmarked(shape, {200, 64, 63, 0, 0, 330, 128});
    const PrefillCall plain = Result(unmarked);
    const PrefillCall before = WithCheckpoints(unmarked, c.every);
    PrefillCall got = Result(before);
    EXPECT_TRUE(got.y.bytes() == plain.y.bytes());
    for (const cuda::PrefillPlan& plan : {kInTurn, kWalkConvolves, kStream, kWideStream}) {
      ExpectSameBits(Result(before, plan), got);
    }
    // Each is what the prefix alone leaves; with them put back, nothing else differs.
    for (int64_t i = 0; i < before.shape.rows; ++i) {
      for (int64_t j = 0; j < before.Length(i) / c.every; ++j) {
        const int64_t slot = before.checkpoint_slots[before.checkpoint_begin[i] + j];
        if (slot < 0) continue;
        const PrefillCall prefix = PartResult(before, i, 0, (j + 1) * c.every);
        const int64_t from = before.write[i];
        EXPECT_EQ(StateOf(got, slot), StateOf(prefix, from)) << i << ", " << j;
        EXPECT_EQ(ConvStateOf(got, slot), ConvStateOf(prefix, from)) << i << ", " << j;
        for (int64_t e = 0; e < shape.values() * shape.key_dim; ++e) {
          const int64_t at = slot * shape.state_stride() + e;
          got.state.Set(at, plain.state.Get(at));
        }
        for (int64_t e = 0; e < 3 * shape.channels(); ++e) {
          const int64_t at = slot * shape.conv_stride() + e;
          got.conv_state.Set(at, plain.conv_state.Get(at));
        }
      }
    }
    const FusedErrors errors = Compare(before, got, plain);
    EXPECT_EQ(errors.slots_touched + errors.conv_differs + errors.pads_touched, 0);
    EXPECT_EQ(errors.state, 0.0);
  }
}

TEST_F(FusedPrefillBits, OnlyTheTunedKernelsHaveCheckpoints) {
  FusedShape odd = TunedShape();
  odd.value_dim = 64;
  PrefillCall call(odd, {70});
  call.checkpoint_every = 64;
  call.checkpoint_begin = {0};
  call.checkpoint_slots = {-1};
  const gdn_fused_prefill_args args = call.PrefillArgs();
  const Stream stream;
  const PrefillWorkspace workspace(stream.Exec(), args);
  EXPECT_EQ(gdn_fused_prefill(&workspace.exec(), &args), GDN_UNSUPPORTED_SHAPE);
}

// Blocks of the way in beside the walk that the library takes for a call on this device.
int StreamBlocks(PrefillCall call) {
  cuda::Device device;
  EXPECT_EQ(cuda::CurrentDevice("test", &device), GDN_OK) << gdn_last_error();
  return cuda::PlanPrefill(device, call.PrefillArgs()).stream_blocks;
}

// The library's own choice for a long prompt of a large layer, whose chunks go through the L2 many
// times.
TEST_F(FusedPrefillBits, ALongPromptStreams) {
  FusedShape shape = TunedShape(16, 2);
  shape.spare_slots = 0;
  const PrefillCall before(shape, {8192});
  ASSERT_GT(StreamBlocks(before), 0);
  const PrefillCall in_turn = Result(before, kInTurn);
  // The walk's first launch waits for its code to be loaded, and all chunks are there by then.
  for (int i = 0; i < 3; ++i) ExpectSameBits(Result(before, kAuto), in_turn);
}

// With fresh poison in all that a call writes before it is read.
void ExpectSameBitsAgainAndAgain(const PrefillCall& before, const cuda::PrefillPlan& plan) {
  constexpr int kRepeats = 1000;
  const PrefillCall first = Result(before, kInTurn);
  PrefillCall call = before;
  const DevicePrefill device(call);
  const DeviceBuffer state(before.state);
  const DeviceBuffer conv_state(before.conv_state);
  const Stream stream;
  const PrefillWorkspace workspace(stream.Exec(), device.prefill);
  const auto restore = [&](const DeviceBuffer& to, const DeviceBuffer& from) {
    Must(cudaMemcpyAsync(to.get(), from.get(), from.bytes(), cudaMemcpyDeviceToDevice,
                         stream.get()));
  };
  for (int i = 0; i < kRepeats && !::testing::Test::HasFailure(); ++i) {
    workspace.Poison();
    restore(device.state, state);
    restore(device.conv_state, conv_state);
    Must(cudaMemsetAsync(device.y.get(), 0xff, device.y.bytes(), stream.get()));
    Enqueue(workspace.exec(), device.prefill, plan);
    stream.Synchronize();
    device.Download(call);
    ExpectSameBits(call, first);
  }
}

TEST_F(FusedPrefillBits, AThousandRepeats) {
  for (gdn_dtype state : {GDN_F32, GDN_BF16}) {
    FusedShape shape = TunedShape();
    shape.state_dtype = state;
    shape.special_rows = false;
    shape.spare_slots = 0;
    const PrefillCall before(shape, {200, 64, 500, 1, 33});
    ExpectSameBitsAgainAndAgain(before, kInTurn);
    ExpectSameBitsAgainAndAgain(before, kWalkConvolves);
    ExpectSameBitsAgainAndAgain(before, state == GDN_F32 ? kStream : kWideStream);
  }
}

TEST_F(FusedPrefillBits, AThousandRepeatsOfAPromptThatStreams) {
  FusedShape shape = TunedShape(16, 1);
  shape.state_dtype = GDN_BF16;
  shape.spare_slots = 0;
  const PrefillCall before(shape, {2400});  // Few, of which much would be downloaded.
  ASSERT_GT(StreamBlocks(before), 0);
  ExpectSameBitsAgainAndAgain(before, kAuto);
}

// One long sequence leaves multiprocessors to the way in, in pairs; neither a short one nor many
// do. Where most of them walk, the walk convolves v. Needs no GPU.
TEST(FusedPrefillPlan, StreamsWhereTheWalkLeavesRoom) {
  const auto plan = [](int64_t key_heads, int64_t value_heads, int64_t rows, int64_t tokens) {
    gdn_fused_prefill_args args{};
    args.tokens = tokens;
    args.layer.rows = rows;
    args.layer.key_heads = key_heads;
    args.layer.value_heads = value_heads;
    return cuda::PlanPrefill({90, 132}, args);
  };
  const auto streams = [&](auto... shape) {
    const cuda::PrefillPlan p = plan(shape...);
    EXPECT_FALSE(p.stream_blocks > 0 && p.walk_convolves);
    return p.stream_blocks;
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
  EXPECT_FALSE(plan(16, 32, 1, 1024).walk_convolves);
  EXPECT_TRUE(plan(16, 48, 1, 131072).walk_convolves);
  EXPECT_TRUE(plan(16, 32, 8, 65536).walk_convolves);
}

TEST_F(FusedPrefillBits, AReplayedGraphServesOtherLengths) {
  FusedShape shape = TunedShape();
  shape.special_rows = false;
  const PrefillCall before(shape, {100, 28, 72});
  PrefillCall call = before;
  DevicePrefill device(call);
  const Stream stream;
  const PrefillWorkspace workspace(stream.Exec(), device.prefill);
  for (const cuda::PrefillPlan& plan : {kAuto, kWalkConvolves, kStream, kWideStream}) {
    SCOPED_TRACE(NameOf(plan));
    const CapturedGraph graph(stream, [&] { Enqueue(workspace.exec(), device.prefill, plan); });
    for (const std::vector<int32_t>& lengths : {std::vector<int32_t>{100, 28, 72}, {0, 200, 0}}) {
      PrefillCall other = before;
      for (size_t i = 0; i < lengths.size(); ++i) {
        other.cu_seqlens[i + 1] = other.cu_seqlens[i] + lengths[i];
      }
      device.Upload(other);
      graph.Launch();
      stream.Synchronize();
      PrefillCall replayed = other;
      device.Download(replayed);
      ExpectSameBits(replayed, Result(other));
    }
  }
}

}  // namespace
}  // namespace gdn::kernels
