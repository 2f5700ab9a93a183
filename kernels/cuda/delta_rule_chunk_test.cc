// The chunked prefill on a GPU against REF, and the bits of one against those of another.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <string>
#include <vector>

#include "gdn/kernels/delta_rule.h"
#include "kernels/cuda/cuda_test_util.h"
#include "kernels/cuda/delta_rule_chunk.h"
#include "kernels/delta_rule_test_util.h"

namespace gdn::kernels {
namespace {

using ChunkedPrefill = CudaTest;

constexpr double kBound = 2e-3;  // Y3, of output and state.

// A DeltaCall's buffers on the device.
struct OnDevice {
  explicit OnDevice(DeltaCall& call)
      : args(call.Args()),
        cu_seqlens(call.cu_seqlens),
        q(call.q),
        k(call.k),
        v(call.v),
        o(call.o),
        state(call.state),
        g(call.g),
        beta(call.beta),
        read(call.read),
        write(call.write),
        fresh(call.fresh) {
    args.cu_seqlens = cu_seqlens.get<int32_t>();
    args.q = q.get();
    args.k = k.get();
    args.v = v.get();
    args.o = o.get();
    args.state = state.get();
    args.g = g.get<float>();
    args.beta = beta.get<float>();
    args.read_index = read.get<int64_t>();
    args.write_index = write.get<int64_t>();
    args.fresh = fresh.get<uint8_t>();
  }
  void Download(DeltaCall& call) const {
    o.Download(call.o.data());
    state.Download(call.state.data());
  }

  gdn_delta_rule_args args;
  DeviceBuffer cu_seqlens, q, k, v, o, state, g, beta, read, write, fresh;
};

void Launch(const gdn_delta_rule_args& args, cuda::ChunkedSplit split = cuda::ChunkedSplit::kAuto) {
  const Stream stream;
  const gdn_exec exec = stream.Exec();
  cuda::Device device;
  ASSERT_EQ(cuda::CurrentDevice("test", &device), GDN_OK) << gdn_last_error();
  ASSERT_TRUE(cuda::CoversChunked(device, args));
  if (split == cuda::ChunkedSplit::kAuto) {
    ASSERT_EQ(gdn_delta_rule_prefill(&exec, &args), GDN_OK) << gdn_last_error();
  } else {
    ASSERT_EQ(cuda::LaunchChunked(exec, device, args, split), GDN_OK) << gdn_last_error();
  }
  stream.Synchronize();
}

DeltaCall Result(const DeltaCall& before, cuda::ChunkedSplit split = cuda::ChunkedSplit::kAuto) {
  DeltaCall call = before;
  const OnDevice device(call);
  Launch(device.args, split);
  device.Download(call);
  return call;
}

void ExpectSameBits(const DeltaCall& a, const DeltaCall& b) {
  EXPECT_TRUE(a.o.bytes() == b.o.bytes());
  EXPECT_TRUE(a.state.bytes() == b.state.bytes());
}

// Both splits of a head give the same bits, close to REF's, and touch nothing else.
void ExpectLikeRef(const DeltaCall& before) {
  const DeltaCall whole = Result(before, cuda::ChunkedSplit::kWhole);
  ExpectSameBits(Result(before, cuda::ChunkedSplit::kHalves), whole);
  const DeltaCall ref = RunDelta(DeltaOp::kPrefill, kRef, before);
  const double output = OutputError(whole, ref);
  const double state = StateError(whole, ref);
  EXPECT_LE(output, kBound);
  EXPECT_LE(state, kBound);
  ::testing::Test::RecordProperty("output", std::to_string(output));
  if (std::getenv("GDN_TEST_PRINT") != nullptr) {
    std::printf("  output %.2e, state %.2e\n", output, state);
  }
  ExpectRestUntouched(whole, before);
}

DeltaShape Shape(std::vector<int32_t> lengths) {
  DeltaShape shape;
  shape.lengths = std::move(lengths);
  shape.qkv = GDN_BF16;
  shape.o = GDN_F32;
  return shape;
}

TEST_F(ChunkedPrefill, TypesAndHeadRatios) {
  uint32_t seed = 1;
  for (int64_t ratio : {1, 2, 3, 4, 8}) {
    for (gdn_dtype qkv : {GDN_BF16, GDN_F16}) {
      for (gdn_dtype state : {GDN_F32, GDN_BF16}) {
        for (gdn_dtype o : {GDN_F32, GDN_BF16, GDN_F16}) {
          SCOPED_TRACE("ratio " + std::to_string(ratio) + ", types " + std::to_string(qkv) +
                       std::to_string(state) + std::to_string(o));
          DeltaShape shape = Shape({70, 129});
          shape.ratio = ratio;
          shape.qkv = qkv;
          shape.state = state;
          shape.o = o;
          shape.stride_pad = 8;
          shape.trailing_tokens = 3;
          ExpectLikeRef(DeltaCall(shape, seed++));
        }
      }
    }
  }
}

TEST_F(ChunkedPrefill, LengthsAndPacking) {
  const std::vector<std::vector<int32_t>> cases = {{1},
                                                   {63},
                                                   {64},
                                                   {65},
                                                   {128},
                                                   {256},
                                                   {256, 256},
                                                   {64, 111, 192},
                                                   {64, 128, 512},
                                                   {15},
                                                   {256, 244, 500},
                                                   {15, 85, 200, 900, 800},
                                                   {192, 64},
                                                   {2048},
                                                   {1025},
                                                   {0, 5, 0, 64, 0, 0, 7, 0}};
  uint32_t seed = 100;
  for (const auto& lengths : cases) {
    SCOPED_TRACE("first length " + std::to_string(lengths[0]) + " of " +
                 std::to_string(lengths.size()));
    DeltaShape shape = Shape(lengths);
    shape.key_heads = 1;
    shape.ratio = 2;
    ExpectLikeRef(DeltaCall(shape, seed++));
  }
}

TEST_F(ChunkedPrefill, Gates) {
  struct Case {
    const char* name;
    float g;  // NaN: uniform in [-2 mean, 0].
    float mean;
    float zero_share;  // Of tokens whose gate is 1.
    float low_beta, high_beta;
  };
  const float nan = std::nanf("");
  for (const Case& c :
       {Case{"weak", nan, 1e-3f, 0.0f, 0.0f, 1.0f}, Case{"strong", nan, 10.0f, 0.0f, 0.0f, 1.0f},
        Case{"some closed", nan, 0.1f, 0.5f, 0.0f, 1.0f},
        Case{"gates of 1", 0.0f, 0.0f, 1.0f, 0.0f, 1.0f},
        Case{"gates of 1, beta to 2", 0.0f, 0.0f, 1.0f, 0.0f, 2.0f},
        Case{"gates of 1, beta from 1", 0.0f, 0.0f, 1.0f, 1.0f, 2.0f},
        Case{"gates of 1e-12", std::log(1e-12f), 0.0f, 0.0f, 0.0f, 2.0f},
        Case{"some of 1e-12", std::log(1e-12f), 0.0f, 0.5f, 0.0f, 2.0f},
        Case{"exp(-1000)", -1000.0f, 0.0f, 0.3f, 0.0f, 2.0f},
        Case{"gates of 0", -INFINITY, 0.0f, 0.3f, 0.0f, 1.0f}}) {
    SCOPED_TRACE(c.name);
    DeltaShape shape = Shape({64, 111, 192, 500});
    shape.mean_decay = c.mean;
    DeltaCall call(shape, 7);
    Random random(8);
    for (size_t i = 0; i < call.g.size(); ++i) {
      if (!std::isnan(c.g)) call.g[i] = c.g;
      if (random.Uniform(0.0f, 1.0f) < c.zero_share) call.g[i] = 0.0f;
      call.beta[i] = random.Uniform(c.low_beta, c.high_beta);
    }
    ExpectLikeRef(call);
  }
}

TEST_F(ChunkedPrefill, ScaleNormAndExtremeInputs) {
  for (float scale : {1.0f, 0.1f}) {
    DeltaShape shape = Shape({130});
    shape.scale = scale;
    ExpectLikeRef(DeltaCall(shape, 20));
  }
  DeltaShape plain = Shape({130, 64});
  plain.normalize = false;
  ExpectLikeRef(DeltaCall(plain, 21));
  plain.qkv = GDN_F16;
  ExpectLikeRef(DeltaCall(plain, 22));
  // Keys and queries of zeros, and of any size.
  for (gdn_dtype type : {GDN_BF16, GDN_F16}) {
    DeltaShape shape = Shape({100});
    shape.qkv = type;
    DeltaCall call(shape, 23);
    for (int64_t t = 0; t < 100; ++t) {
      const float size = t % 5 == 0 ? 0.0f : std::exp2(static_cast<float>(t % 21) - 10.0f);
      for (int64_t i = 0; i < shape.key_heads * shape.key_dim; ++i) {
        call.k.Set(t * call.key_stride() + i, size * call.k.Get(t * call.key_stride() + i));
        call.q.Set(t * call.key_stride() + i, size * call.q.Get(t * call.key_stride() + i));
      }
    }
    ExpectLikeRef(call);
  }
}

TEST_F(ChunkedPrefill, Long) {
  for (int32_t length : {9999, 65530}) {
    for (float gate : {0.9f, 0.99f, 0.9995f}) {
      if (length > 10000 && gate < 0.9995f) continue;
      DeltaShape shape = Shape({length});
      shape.key_heads = 1;
      shape.ratio = 1;
      DeltaCall call(shape, 30);
      std::fill(call.g.begin(), call.g.end(), std::log(gate));
      ExpectLikeRef(call);
    }
  }
}

TEST_F(ChunkedPrefill, SlotsForksAndPadding) {
  for (gdn_dtype state : {GDN_F32, GDN_BF16}) {
    DeltaShape shape = Shape({70, 0, 3, 64, 0, 130, 9, 0});
    shape.key_heads = 1;
    shape.ratio = 3;
    shape.state = state;
    shape.stride_pad = 96;
    DeltaCall call(shape, 40);
    call.fresh[0] = 1;
    call.write[2] = 0;  // A fork into what was a canary.
    call.read[3] = -1;
    call.write[3] = -1;
    call.write[4] = 2;   // An empty sequence forks.
    call.write[5] = -7;  // Padding too, though it could be read.
    call.fresh[7] = 1;
    call.write[7] = 4;  // Fresh and empty: zeros.
    ExpectLikeRef(call);
    // A fresh sequence reads nothing.
    DeltaCall poisoned = call;
    for (int64_t i = 0; i < call.slot_stride(); ++i) {
      poisoned.state.Set(poisoned.read[0] * call.slot_stride() + i, std::nanf(""));
    }
    EXPECT_TRUE(Result(poisoned).o.bytes() == Result(call).o.bytes());
  }
}

TEST_F(ChunkedPrefill, AloneAndAmongOthersAreTheSameBits) {
  DeltaShape shape = Shape({});
  Random random(50);
  for (int i = 0; i < 128; ++i) {
    shape.lengths.push_back(static_cast<int32_t>(random.Integer(200)));
  }
  shape.lengths[77] = 333;
  shape.key_heads = 1;
  DeltaCall all(shape, 51);
  const DeltaCall together = Result(all);
  for (int64_t i : {0, 77, 127}) {
    DeltaCall call = all;
    OnDevice device(call);
    const std::vector<int32_t> cu = {0, call.cu_seqlens[i + 1] - call.cu_seqlens[i]};
    const DeviceBuffer cu_device(cu);
    const int64_t t = call.cu_seqlens[i];
    const auto at = [&](const DeviceBuffer& buffer, int64_t bytes) {
      return buffer.get<char>() + t * bytes;
    };
    device.args.sequences = 1;
    device.args.cu_seqlens = cu_device.get<int32_t>();
    device.args.q = at(device.q, call.key_stride() * 2);
    device.args.k = at(device.k, call.key_stride() * 2);
    device.args.v = at(device.v, call.value_stride() * 2);
    device.args.o = at(device.o, call.value_stride() * 4);
    device.args.g = reinterpret_cast<const float*>(at(device.g, call.value_heads() * 4));
    device.args.beta = reinterpret_cast<const float*>(at(device.beta, call.value_heads() * 4));
    device.args.read_index += i;
    device.args.write_index += i;
    device.args.fresh += i;
    Launch(device.args);
    device.Download(call);
    EXPECT_EQ(call.o.Slice(t * call.value_stride(), (t + cu[1]) * call.value_stride()),
              together.o.Slice(t * call.value_stride(), (t + cu[1]) * call.value_stride()));
    const int64_t slot = call.write[i] * call.slot_stride();
    EXPECT_EQ(call.state.Slice(slot, slot + call.slot_stride()),
              together.state.Slice(slot, slot + call.slot_stride()));
  }
}

TEST_F(ChunkedPrefill, SplitsAgreeWithTheWhole) {
  DeltaShape shape = Shape({200});
  shape.key_heads = 1;
  const DeltaCall before(shape, 60);
  const DeltaCall whole = Result(before);
  for (int32_t split : {1, 63, 64, 65, 100, 199}) {
    DeltaCall call = before;
    for (const auto& [begin, end] : {std::pair{0, split}, std::pair{split, 200}}) {
      std::vector<int32_t> cu;
      DeltaCall part = call;
      OnDevice device(part);
      cu = {0, end - begin};
      const DeviceBuffer cu_device(cu);
      device.args.cu_seqlens = cu_device.get<int32_t>();
      device.args.q = device.q.get<char>() + begin * call.key_stride() * 2;
      device.args.k = device.k.get<char>() + begin * call.key_stride() * 2;
      device.args.v = device.v.get<char>() + begin * call.value_stride() * 2;
      device.args.o = device.o.get<char>() + begin * call.value_stride() * 4;
      device.args.g += begin * call.value_heads();
      device.args.beta += begin * call.value_heads();
      Launch(device.args);
      device.Download(call);
    }
    EXPECT_LE(OutputError(call, whole), 2e-3) << split;
    EXPECT_LE(StateError(call, whole), 2e-3) << split;
  }
}

TEST_F(ChunkedPrefill, RepeatsAreTheSameBits) {
  DeltaShape shape = Shape({300, 64, 1, 700});
  const DeltaCall before(shape, 70);
  for (const auto split : {cuda::ChunkedSplit::kWhole, cuda::ChunkedSplit::kHalves}) {
    DeltaCall first = before;
    DeltaCall call = before;
    OnDevice device(call);
    for (int i = 0; i < 500; ++i) {
      device.state.Upload(before.state.data());
      Launch(device.args, split);
      device.Download(i == 0 ? first : call);
      if (i > 0) ExpectSameBits(call, first);
      if (HasFailure()) return;
    }
  }
}

TEST_F(ChunkedPrefill, ManySequencesAndAReplayedGraph) {
  // More sequences than a grid has rows; all but the last are empty and padding.
  constexpr int kSequences = 40000;
  DeltaShape shape = Shape({70});
  shape.key_heads = 1;
  shape.ratio = 2;
  DeltaCall one(shape, 80);
  DeltaCall call = one;
  MakeLastOf(kSequences, call);
  const DeltaCall got = Result(call);
  ExpectSameBits(got, Result(one));

  const OnDevice device(one);
  const Stream stream;
  const gdn_exec exec = stream.Exec();
  const CapturedGraph graph(stream, [&] {
    ASSERT_EQ(gdn_delta_rule_prefill(&exec, &device.args), GDN_OK) << gdn_last_error();
  });
  graph.Launch();
  stream.Synchronize();
  DeltaCall replayed = one;
  device.Download(replayed);
  ExpectSameBits(replayed, got);
}

}  // namespace
}  // namespace gdn::kernels
