// The chunked prefill of GDN2 on a GPU against REF, and the bits of one call against those of
// another.
#include "kernels/cuda/gdn2_chunk.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cuda/cuda_test_util.h"
#include "kernels/gdn2_test_util.h"
#include "kernels/rule_slots_test_util.h"

namespace gdn::kernels {
namespace {

constexpr double kBound = 2e-3;  // Y3, of output and state.
const Backend kCuda{"cuda", GDN_BACKEND_CUDA, 0};

cuda::Device ThisDevice() {
  cuda::Device device{};
  EXPECT_EQ(cuda::CurrentDevice("test", &device), GDN_OK) << gdn_last_error();
  return device;
}

// The op, which must choose the chunked kernels, or must not.
gdn_status Chunked(const gdn_exec* exec, const gdn2_args* args) {
  EXPECT_TRUE(cuda::CoversChunkedGdn2(ThisDevice(), *args));
  return gdn_gdn2_prefill(exec, args);
}
gdn_status ByTokens(const gdn_exec* exec, const gdn2_args* args) {
  EXPECT_FALSE(cuda::CoversChunkedGdn2(ThisDevice(), *args));
  return gdn_gdn2_prefill(exec, args);
}
template <cuda::Gdn2Split kSplit>
gdn_status ChunkedSplit(const gdn_exec* exec, const gdn2_args* args) {
  return cuda::LaunchChunkedGdn2(*exec, ThisDevice(), *args, kSplit);
}

RuleShape Shape(std::vector<int32_t> lengths, gdn_dtype dtype = GDN_BF16) {
  RuleShape shape;
  shape.lengths = std::move(lengths);
  shape.key_heads = 1;
  shape.key_dim = shape.value_dim = 128;
  shape.normalize = false;
  shape.dtype = dtype;
  shape.pad = 8;
  return shape;
}

Gdn2Problem Problem(const RuleShape& shape, bool own_gates, uint32_t seed) {
  Gdn2Problem p(shape, own_gates, seed);
  p.gate_dtype = shape.dtype;
  if (!shape.normalize) {  // As the layer's norm leaves them.
    for (Doubles* rows : {&p.q, &p.k}) {
      for (size_t first = 0; first < rows->size(); first += 128) {
        double squares = 0.0;
        for (size_t i = first; i < first + 128; ++i) squares += (*rows)[i] * (*rows)[i];
        for (size_t i = first; i < first + 128; ++i) (*rows)[i] /= std::sqrt(squares);
      }
    }
  }
  return p;
}

void ExpectClose(const RuleOutputs& got, const RuleOutputs& expected, const std::string& what,
                 double bound = kBound) {
  const double output = Error(got.o, expected.o);
  const double state = Error(got.state, expected.state);
  EXPECT_LE(output, bound) << what;
  EXPECT_LE(state, bound) << what;
  if (std::getenv("GDN_TEST_PRINT") != nullptr) {
    std::printf("  %s: output %.1e, state %.1e\n", what.c_str(), output, state);
  }
}
void ExpectSameBits(const RuleOutputs& a, const RuleOutputs& b, const std::string& what) {
  EXPECT_EQ(a.o, b.o) << what;
  EXPECT_EQ(a.state, b.state) << what;
}

// Both splits of a head give the same bits, close to REF's.
void ExpectLikeRef(const Gdn2Problem& p, const std::string& what, double bound = kBound) {
  const RuleOutputs got = p.Forward(kCuda, Chunked);
  ExpectClose(got, p.Forward(), what, bound);
  using cuda::Gdn2Split;
  ExpectSameBits(p.Forward(kCuda, ChunkedSplit<Gdn2Split::kWhole>), got, what + ", whole");
  ExpectSameBits(p.Forward(kCuda, ChunkedSplit<Gdn2Split::kHalves>), got, what + ", halves");
}

TEST(ChunkedGdn2, X1TypesHeadRatiosAndGateHeads) {
  uint32_t seed = 500;
  for (int64_t ratio = 1; ratio <= 4; ++ratio) {
    for (bool own_gates : {false, true}) {
      for (gdn_dtype dtype : {GDN_BF16, GDN_F16}) {
        for (gdn_dtype state : {GDN_F32, GDN_BF16}) {
          RuleShape shape = Shape({70, 0, 65}, dtype);
          shape.ratio = ratio;
          shape.key_heads = ratio == 2 ? 2 : 1;
          shape.normalize = ratio == 3;
          shape.scale = ratio == 4 ? 0.3f : 0.0f;
          Gdn2Problem p = Problem(shape, own_gates, seed++);
          p.state_dtype = state;
          p.gate_dtype = seed % 3 == 0 ? GDN_F32 : seed % 3 == 1 ? GDN_BF16 : GDN_F16;
          p.o_dtype = seed % 4 == 0 ? GDN_F32 : dtype;
          ExpectLikeRef(p, "ratio " + std::to_string(ratio) + " own gates " +
                               std::to_string(own_gates) + " types " + std::to_string(dtype) +
                               std::to_string(state) + std::to_string(p.gate_dtype) +
                               std::to_string(p.o_dtype));
        }
      }
    }
  }
}

TEST(ChunkedGdn2, X3LengthsAndPacking) {
  const std::vector<std::vector<int32_t>> cases = {
      {0},      {1},           {15},    {16},   {17},
      {63},     {64},          {65},    {128},  {129, 1},
      {200},    {15, 85, 100}, {63, 1}, {2000}, {0, 5, 0, 64, 0, 0, 7, 0},
      {64, 64}, {33, 31, 64}};
  uint32_t seed = 600;
  for (const auto& lengths : cases) {
    ExpectLikeRef(Problem(Shape(lengths), seed % 2 == 0, seed),
                  std::to_string(lengths.size()) + " from " + std::to_string(lengths[0]));
    ++seed;
  }
}

// Sets values to constants, or draws them; NaN: as they are.
struct GateCase {
  const char* name;
  float g_low, g_high;
  float zero_share;  // Of gates that are 1.
  float erase_low, erase_high;
  float write_low, write_high;
};

TEST(ChunkedGdn2, X4Gates) {
  const GateCase cases[] = {
      {"weak", -2e-3f, 0, 0, 0, 1, 0, 1},
      {"strong", -20, 0, 0, 0, 1, 0, 1},
      {"bounded decay", -5, 0, 0, 0, 1, 0, 1},
      {"the bound", -5, -5, 0, 0, 1, 0, 1},
      {"gates of 1", 0, 0, 0, 0, 1, 0, 1},
      {"gates of 1, erase to 2", 0, 0, 0, 0, 2, 0, 1},
      {"gates of 1, erase 2", 0, 0, 0, 2, 2, 0, 1},
      {"erase 2", -0.2f, 0, 0, 2, 2, 0, 1},
      {"erase 0", -0.2f, 0, 0, 0, 0, 0, 1},
      {"erase 0, gates of 1", 0, 0, 0, 0, 0, 0, 1},
      {"write 0", -0.2f, 0, 0, 0, 1, 0, 0},
      {"exp(-1000)", -1000, -1000, 0, 0, 2, 0, 1},
      {"some of exp(-1000)", -1000, -1000, 0.5f, 0, 2, 0, 1},
      {"most of 1", -1000, -1000, 0.97f, 0, 2, 0, 1},
      {"gates of 0", -INFINITY, -INFINITY, 0.5f, 0, 1, 0, 1},
  };
  uint32_t seed = 700;
  for (const GateCase& c : cases) {
    Gdn2Problem p = Problem(Shape({64, 111, 15, 192}), seed % 2 == 0, seed);
    Random random(++seed);
    for (double& g : p.g) {
      g = c.g_low == c.g_high ? c.g_low : random.Uniform(c.g_low, c.g_high);
      if (random.Uniform(0, 1) < c.zero_share) g = 0.0;
    }
    for (double& e : p.erase) e = random.Uniform(c.erase_low, c.erase_high);
    for (double& w : p.write) w = random.Uniform(c.write_low, c.write_high);
    ExpectLikeRef(p, c.name);
  }
}

// Keys that are nearly one and a state that never fades: the chunk's triangle is far from 1. Where
// a key is then almost reflected each time, FP16 operands leave more than the usual error, here as
// in the delta rule.
TEST(ChunkedGdn2, X4ParallelKeysAndFullStrength) {
  for (double strength : {1.0, 1.9}) {
    RuleProblem rule(Shape({130, 64}), 801);
    rule.q = Problem(rule.shape, true, 802).q;
    rule.k = Problem(rule.shape, true, 803).k;
    Random random(804);
    for (size_t i = 128; i < rule.k.size(); ++i) {
      rule.k[i] = rule.k[i % 128] + 0.02 * random.Uniform(-1, 1);
    }
    std::fill(rule.g.begin(), rule.g.end(), 0.0);
    std::fill(rule.beta.begin(), rule.beta.end(), strength);
    const std::string what = "parallel keys, strength " + std::to_string(strength);
    const double bound = strength > 1.0 ? 1e-2 : kBound;
    ExpectLikeRef(Gdn2Problem(rule), what, bound);
    ExpectClose(RunOnSlots(rule, kCuda), rule.Forward(), what + ", delta rule", bound);
  }
}

// Queries and keys of any size, zeros among them; with the norm, and without for the queries.
TEST(ChunkedGdn2, X4SizesOfQueriesAndKeys) {
  for (bool normalize : {true, false}) {
    for (gdn_dtype dtype : {GDN_BF16, GDN_F16}) {
      RuleShape shape = Shape({100}, dtype);
      shape.normalize = normalize;
      Gdn2Problem p = Problem(shape, false, 811);
      for (int64_t t = 0; t < 100; ++t) {
        const double size = t % 5 == 0 ? 0.0 : std::exp2(static_cast<double>(t % 21) - 10.0);
        for (int64_t i = 0; i < 128; ++i) {
          p.q[t * 128 + i] *= size;
          p.k[t * 128 + i] *= normalize ? size : std::fmin(size, 1.0);
        }
      }
      ExpectLikeRef(p, "norm " + std::to_string(normalize) + " type " + std::to_string(dtype));
    }
  }
}

// T18: erase = write = beta with one decay a head is the gated delta rule.
TEST(ChunkedGdn2, T18ScalarGatesAreTheGatedDeltaRule) {
  for (int64_t ratio : {1, 2}) {
    RuleShape shape = Shape({200, 1, 64});
    shape.ratio = ratio;
    RuleProblem rule(shape, 821);
    rule.q = Problem(shape, true, 822).q;
    rule.k = Problem(shape, true, 823).k;
    const RuleOutputs got = Gdn2Problem(rule).Forward(kCuda, Chunked);
    ExpectClose(got, rule.Forward(), "REF's delta rule");
    ExpectClose(got, RunOnSlots(rule, kCuda), "CUDA's delta rule");
  }
}

// KDA: a decay per channel, one beta.
TEST(ChunkedGdn2, ScalarBetaWithChannelDecayIsKda) {
  Gdn2Problem p = Problem(Shape({150}), true, 831);
  for (int64_t t = 0; t < p.tokens() * p.heads(); ++t) {
    const double beta = p.erase[t * 128];
    std::fill_n(p.erase.begin() + t * 128, 128, beta);
    std::fill_n(p.write.begin() + t * 128, 128, beta);
  }
  ExpectLikeRef(p, "KDA");
}

TEST(ChunkedGdn2, X9BitsDoNotDependOnNeighbours) {
  RuleShape shape = Shape({70, 1, 300, 0, 64, 5, 129});
  shape.ratio = 3;
  const Gdn2Problem p = Problem(shape, true, 841);
  const RuleOutputs all = p.Forward(kCuda, Chunked);
  const int64_t slot = p.heads() * p.head_size();
  for (int64_t i = 0; i < p.n(); ++i) {
    const RuleOutputs one = PartOf(p, i, 0, shape.lengths[i]).Forward(kCuda, Chunked);
    EXPECT_EQ(one.o, Floats(all.o.begin() + p.cu[i] * p.values(),
                            all.o.begin() + p.cu[i + 1] * p.values()))
        << i;
    EXPECT_EQ(one.state, Floats(all.state.begin() + i * slot, all.state.begin() + (i + 1) * slot))
        << i;
  }
}

// I11: any split of a prompt, steps included, is one prefill.
TEST(ChunkedGdn2, I11SplitsOfAPromptAgree) {
  const Gdn2Problem whole = Problem(Shape({230}), false, 851);
  const RuleOutputs expected = whole.Forward(kCuda, Chunked);
  const RuleOutputs ref = whole.Forward();
  Floats o;
  Doubles state = whole.state;
  const auto part = [&](int64_t begin, int64_t end, Gdn2Problem::Op op) {
    Gdn2Problem p = PartOf(whole, 0, begin, end);
    p.state = state;
    const RuleOutputs got = p.Forward(kCuda, op);
    o.insert(o.end(), got.o.begin(), got.o.end());
    state.assign(got.state.begin(), got.state.end());
  };
  part(0, 64, Chunked);
  part(64, 81, Chunked);
  part(81, 82, Chunked);
  part(82, 200, Chunked);
  for (int64_t t = 200; t < 230; ++t) part(t, t + 1, gdn_gdn2_step);
  ExpectClose({o, ToFloats(state), {}, {}, {}, {}}, expected, "parts");
  ExpectClose({o, ToFloats(state), {}, {}, {}, {}}, ref, "parts against REF");
}

// T23, X2, X3: slots in any order, forks, fresh ones, padding and empty sequences; every other slot
// keeps its bits.
TEST(ChunkedGdn2, T23SlotsForksPaddingAndEmptySequences) {
  for (gdn_dtype state : {GDN_F32, GDN_BF16}) {
    RuleShape shape = Shape({70, 64, 9, 0, 0, 130, 3});
    shape.ratio = 3;
    Gdn2Problem p = Problem(shape, false, 861);
    p.state_dtype = state;
    //                          in place, fork, padding, empty in place, empty fork, fresh, padding
    const std::vector<int64_t> read = {11, 1, -1, 3, 5, 7, 2};
    const std::vector<int64_t> write = {11, 9, 4, 3, 6, 8, -5};
    const std::vector<uint8_t> fresh = {0, 0, 0, 0, 0, 1, 0};
    constexpr int64_t kSlots = 13;
    const int64_t size = p.heads() * p.head_size();
    const int64_t stride = size + 6;
    const auto run = [&](const Backend& backend, Gdn2Problem::Op op) {
      const Rows q = p.In(p.q, p.keys()), k = p.In(p.k, p.keys()), v = p.In(p.v, p.values());
      const Floats g = ToFloats(p.g);
      const Tensor erase = p.GateTensor(p.erase), written = p.GateTensor(p.write);
      Tensor pool(state, kSlots * stride);  // Poisoned.
      for (int64_t i = 0; i < p.n(); ++i) {
        if (read[i] < 0 || fresh[i] != 0) continue;
        for (int64_t j = 0; j < size; ++j) {
          pool.Set(read[i] * stride + j, static_cast<float>(p.state[i * size + j]));
        }
      }
      const Tensor before = pool;
      Rows o(GDN_F32, p.all_tokens(), p.values(), shape.pad);
      Place at(backend);
      gdn2_args args = p.Args(at, q, k, v, g, erase, written);
      args.state = at.Out(pool);
      args.state_slot_stride = stride;
      args.read_index = at.In(read);
      args.write_index = at.In(write);
      args.fresh = at.In(fresh);
      args.o = o.Out(at);
      args.o_token_stride = o.stride();
      SetPrefillWorkspace(at, args);
      EXPECT_EQ(at.Call(op, args), GDN_OK) << gdn_last_error();
      RuleOutputs out;
      out.o = o.Take(p.tokens());
      for (int64_t slot = 0; slot < kSlots; ++slot) {
        const auto i = std::find(write.begin(), write.end(), slot) - write.begin();
        const bool changes = i < p.n() && read[i] >= 0 && (p.shape.lengths[i] > 0 || i == 4);
        const int64_t from = slot * stride + (changes ? size : 0);
        EXPECT_EQ(pool.Slice(from, (slot + 1) * stride), before.Slice(from, (slot + 1) * stride))
            << slot;
        for (int64_t j = 0; changes && j < size; ++j)
          out.state.push_back(pool.Get(slot * stride + j));
      }
      return out;
    };
    const RuleOutputs got = run(kCuda, Chunked);
    ExpectClose(got, run(kRef, gdn_gdn2_prefill), "slots");
    ExpectSameBits(run(kCuda, ChunkedSplit<cuda::Gdn2Split::kWhole>), got, "whole");
    for (int64_t i = p.cu[2] * p.values(); i < p.cu[3] * p.values(); ++i) ASSERT_EQ(got.o[i], 0.0f);
    for (int64_t i = p.cu[6] * p.values(); i < p.cu[7] * p.values(); ++i) ASSERT_EQ(got.o[i], 0.0f);
  }
}

// A captured graph serves other lengths, and its bits are those of every repeat, a thousand times
// beside a stream that copies memory.
TEST(ChunkedGdn2, T20ReplaysOfOneGraph) {
  RuleShape shape = Shape({130, 64, 5, 1});
  shape.ratio = 2;
  const Gdn2Problem p = Problem(shape, true, 871);
  const Rows q = p.In(p.q, p.keys()), k = p.In(p.k, p.keys()), v = p.In(p.v, p.values());
  const Floats g = ToFloats(p.g), state = ToFloats(p.state);
  const Tensor erase = p.GateTensor(p.erase), written = p.GateTensor(p.write);
  const std::vector<int64_t> read = {0, 1, 2, 3}, write = {4, 5, 6, 7};
  const size_t states = state.size();
  const auto outputs = static_cast<size_t>(p.tokens() * p.values());
  Place at(kCuda);
  gdn2_args args = p.Args(at, q, k, v, g, erase, written);
  DeviceBuffer pool(2 * states * sizeof(float));
  Must(cudaMemcpy(pool.get(), state.data(), states * sizeof(float), cudaMemcpyHostToDevice));
  const DeviceBuffer o(outputs * sizeof(float)), cu(p.cu), noise(64 << 20);
  args.cu_seqlens = cu.get<int32_t>();
  args.state = pool.get();
  args.state_slot_stride = p.heads() * p.head_size();
  args.read_index = at.In(read);
  args.write_index = at.In(write);
  args.o = o.get();
  args.o_token_stride = p.values();
  const Stream stream, other;
  gdn_exec exec = stream.Exec();
  size_t bytes = 0;
  ASSERT_EQ(gdn_gdn2_prefill_workspace(&exec, &args, &bytes), GDN_OK);
  const DeviceBuffer workspace(bytes);
  exec.workspace = workspace.get();
  exec.workspace_bytes = bytes;
  const CapturedGraph graph(stream,
                            [&] { ASSERT_EQ(Chunked(&exec, &args), GDN_OK) << gdn_last_error(); });
  const auto replay = [&] {
    graph.Launch();
    stream.Synchronize();
    RuleOutputs out;
    out.o.resize(outputs);
    out.state.resize(states);
    Must(cudaMemcpy(out.o.data(), o.get(), outputs * sizeof(float), cudaMemcpyDeviceToHost));
    Must(cudaMemcpy(out.state.data(), pool.get<float>() + states, states * sizeof(float),
                    cudaMemcpyDeviceToHost));
    return out;
  };
  const RuleOutputs first = replay();
  ExpectClose(first, p.Forward(), "a graph");
  int equal = 0;
  for (int i = 0; i < 1000; ++i) {
    Must(cudaMemcpyAsync(noise.get(), noise.get<char>() + (32 << 20), 32 << 20,
                         cudaMemcpyDeviceToDevice, other.get()));
    const RuleOutputs again = replay();
    equal += again.o == first.o && again.state == first.state;
  }
  EXPECT_EQ(equal, 1000);

  // The same tokens, cut elsewhere.
  Gdn2Problem cut = p;
  cut.shape.lengths = {3, 131, 0, 66};
  cut.cu = {0, 3, 134, 134, 200};
  Must(
      cudaMemcpy(cu.get(), cut.cu.data(), cut.cu.size() * sizeof(int32_t), cudaMemcpyHostToDevice));
  ExpectClose(replay(), cut.Forward(), "other lengths");
}

TEST(ChunkedGdn2, WhatIsNotCoveredGoesByTokens) {
  for (int which = 0; which < 3; ++which) {
    RuleShape shape = Shape({67});
    if (which == 0) shape.dtype = GDN_F32;
    if (which == 1) shape.pad = 1;
    if (which == 2) shape.value_dim = 64;
    const Gdn2Problem p = Problem(shape, false, 881);
    ExpectClose(p.Forward(kCuda, ByTokens), p.Forward(), "by tokens", 1e-5);
  }
}

TEST(ChunkedGdn2, RefusesASmallWorkspace) {
  const Gdn2Problem p = Problem(Shape({70}), false, 891);
  const auto refused = [](const gdn_exec* exec, const gdn2_args* args) {
    gdn_exec small = *exec;
    size_t bytes = 0;
    EXPECT_EQ(gdn_gdn2_prefill_workspace(exec, args, &bytes), GDN_OK);
    EXPECT_GT(bytes, 0u);
    small.workspace_bytes = bytes - 1;
    EXPECT_EQ(gdn_gdn2_prefill(&small, args), GDN_WORKSPACE_TOO_SMALL);
    // Fewer tokens and sequences never need more.
    gdn2_args less = *args;
    for (less.tokens = 0; less.tokens <= args->tokens; ++less.tokens) {
      size_t fewer = 0;
      EXPECT_EQ(gdn_gdn2_prefill_workspace(exec, &less, &fewer), GDN_OK);
      EXPECT_LE(fewer, bytes);
    }
    return GDN_OK;
  };
  const RuleOutputs got = p.Forward(kCuda, refused);
  EXPECT_TRUE(std::isnan(got.o[0])) << "o was written";
  EXPECT_EQ(got.state, ToFloats(p.state));
}

}  // namespace
}  // namespace gdn::kernels
