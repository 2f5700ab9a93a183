// The chunked backward on a GPU, and the forward that goes with it, against REF and against the
// token-by-token kernels; the bits of one call against those of another.
#include "kernels/cuda/delta_rule_backward_chunk.h"

#include <cuda_runtime_api.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cuda/cuda_test_util.h"
#include "kernels/delta_rule_gradient_test_util.h"

namespace gdn::kernels {
namespace {

using Args = gdn_delta_rule_backward_args;
const Backend kCuda{"cuda", GDN_BACKEND_CUDA, 0};
const char* const kNames[] = {"d_q", "d_k", "d_v", "d_g", "d_beta", "d_state"};

std::vector<const Floats*> All(const RuleGradients& g) {
  return {&g.q, &g.k, &g.v, &g.g, &g.beta, &g.state};
}

cuda::Device ThisDevice() {
  cuda::Device device{};
  EXPECT_EQ(cuda::CurrentDevice("test", &device), GDN_OK) << gdn_last_error();
  return device;
}

// The op, which must choose the chunked kernels, or must not.
gdn_status Chunked(const gdn_exec* exec, const Args* args) {
  EXPECT_TRUE(cuda::CoversChunkedBackward(ThisDevice(), *args));
  return gdn_delta_rule_backward(exec, args);
}
gdn_status TokenByToken(const gdn_exec* exec, const Args* args) {
  EXPECT_FALSE(cuda::CoversChunkedBackward(ThisDevice(), *args));
  return gdn_delta_rule_backward(exec, args);
}
template <cuda::BackwardSplit kSplit>
gdn_status ChunkedSplit(const gdn_exec* exec, const Args* args) {
  return cuda::LaunchChunkedBackward(*exec, ThisDevice(), *args, kSplit);
}

RuleShape Shape(std::vector<int32_t> lengths, gdn_dtype dtype = GDN_BF16) {
  RuleShape shape;
  shape.lengths = std::move(lengths);
  shape.key_heads = 1;
  shape.key_dim = shape.value_dim = 128;
  shape.dtype = shape.d_dtype = dtype;
  shape.pad = 8;
  return shape;
}

RuleProblem Problem(const RuleShape& shape, uint32_t seed) {
  RuleProblem p(shape, seed);
  if (!shape.normalize) {  // |k| stays below 1, or the recurrence grows
    for (double& value : p.k) value = static_cast<float>(value / std::sqrt(double(shape.key_dim)));
  }
  return p;
}

// T15. The operands are rounded to the type of q, k and v.
double Bound(gdn_dtype dtype, size_t gradient) {
  const bool gate = gradient == 3 || gradient == 4;
  if (dtype == GDN_F16) return gate ? 3e-3 : 1e-3;
  return gate ? 2e-2 : 8e-3;
}

void ExpectClose(const RuleGradients& got, const RuleGradients& expected, gdn_dtype dtype,
                 const std::string& what) {
  std::string line;
  for (size_t i = 0; i < 6; ++i) {
    const double error = Error(*All(got)[i], *All(expected)[i]);
    EXPECT_LE(error, Bound(dtype, i)) << what << " " << kNames[i];
    char text[40];
    std::snprintf(text, sizeof(text), " %s %.1e", kNames[i], error);
    line += text;
  }
  if (std::getenv("GDN_TEST_PRINT") != nullptr)
    std::printf("  %s:%s\n", what.c_str(), line.c_str());
}

void ExpectSameBits(const RuleGradients& a, const RuleGradients& b, const char* what) {
  for (size_t i = 0; i < 6; ++i) EXPECT_EQ(*All(a)[i], *All(b)[i]) << what << " " << kNames[i];
}

// Both splits of a head give the same bits, close to REF's.
void ExpectLikeRef(const RuleProblem& p, const std::string& what) {
  const RuleGradients got = p.Backward(kCuda, Chunked);
  ExpectClose(got, p.Backward(), p.shape.dtype, what);
  using cuda::BackwardSplit;
  ExpectSameBits(p.Backward(kCuda, ChunkedSplit<BackwardSplit::kWhole>), got, "whole");
  ExpectSameBits(p.Backward(kCuda, ChunkedSplit<BackwardSplit::kHalves>), got, "halves");
}

void ExpectTypesRatiosAndNorm(int64_t dim) {
  uint32_t seed = 200;
  for (int64_t ratio = 1; ratio <= 4; ++ratio) {
    for (gdn_dtype dtype : {GDN_BF16, GDN_F16}) {
      for (bool normalize : {true, false}) {
        RuleShape shape = Shape({70, 0, 65}, dtype);
        shape.key_dim = shape.value_dim = dim;
        shape.ratio = ratio;
        shape.key_heads = ratio == 2 ? 2 : 1;
        shape.normalize = normalize;
        shape.states = ratio % 2 == 0;
        shape.scale = ratio == 3 ? 0.3f : 0.0f;
        ExpectLikeRef(Problem(shape, seed++), "ratio " + std::to_string(ratio) + " type " +
                                                  std::to_string(dtype) + " norm " +
                                                  std::to_string(normalize));
      }
    }
  }
}

TEST(ChunkedBackward, T15TypesRatiosAndNorm) { ExpectTypesRatiosAndNorm(128); }
TEST(ChunkedBackward, T15HeadsOf64) { ExpectTypesRatiosAndNorm(64); }

// T14's packed lengths are among them.
TEST(ChunkedBackward, X3LengthsAndPacking) {
  const std::vector<std::vector<int32_t>> cases = {
      {1},   {63},          {64},           {65},
      {128}, {129, 1},      {15, 85, 100},  {0, 5, 0, 64, 0, 0, 7, 0},
      {300}, {15, 85, 200}, {256, 244, 500}};
  uint32_t seed = 300;
  for (const auto& lengths : cases) {
    ExpectLikeRef(Problem(Shape(lengths), seed++),
                  std::to_string(lengths.size()) + " from " + std::to_string(lengths[0]));
  }
}

// Keys that are nearly one, strengths near 1 and no decay: the chunk's triangle is far from 1.
TEST(ChunkedBackward, X4ParallelKeysAndFullStrength) {
  RuleShape shape = Shape({130});
  shape.masked = 1.0f;
  RuleProblem p(shape, 401);
  Random random(402);
  for (size_t i = 0; i < p.k.size(); ++i) {
    p.k[i] = static_cast<float>(p.k[i % 128] + 0.2 * random.Uniform(-1, 1));
  }
  for (double& beta : p.beta) beta = random.Uniform(0.9f, 1.0f);
  ExpectLikeRef(p, "parallel keys");
}

// X4: a token that forgets everything, or writes nothing, and rows of zeros.
TEST(ChunkedBackward, X4ExtremeGatesAndZeroRows) {
  RuleProblem p(Shape({100, 40}), 403);
  std::fill(p.q.begin(), p.q.begin() + p.keys(), 0.0);
  std::fill(p.k.begin(), p.k.begin() + p.keys(), 0.0);
  const std::vector<int64_t> forgetting = {1, 33, 64, 90, 100};
  for (int64_t t : forgetting) p.g[t * p.heads()] = t == 33 ? -1e30 : -1000.0;
  for (int64_t t = 50; t < 60; ++t) p.beta[t * p.heads() + 1] = 0.0;
  const RuleGradients got = p.Backward(kCuda, Chunked);
  for (const Floats* values : All(got)) {
    for (float value : *values) ASSERT_TRUE(std::isfinite(value));
  }
  for (int64_t t : forgetting) EXPECT_EQ(got.g[t * p.heads()], 0.0f) << t;
  for (int64_t i = 50 * p.values() + 128; i < 50 * p.values() + 256; ++i) {
    EXPECT_EQ(got.v[i], 0.0f);
  }
  ExpectClose(got, p.Backward(), GDN_BF16, "extreme gates");
}

// Long sequences against the token-by-token kernels, which take what is not aligned.
TEST(ChunkedBackward, T17LongSequencesMatchTheRecurrence) {
  for (gdn_dtype dtype : {GDN_BF16, GDN_F16}) {
    RuleShape shape = Shape({2000, 513, 64}, dtype);
    shape.key_heads = 2;
    RuleProblem aligned(shape, 405);
    for (double& g : aligned.g) g *= 0.1;
    RuleProblem other = aligned;
    other.shape.pad = 2;
    ExpectClose(aligned.Backward(kCuda, Chunked), other.Backward(kCuda, TokenByToken), dtype,
                "long");
  }
}

// K4, X9: a sequence's gradients are the same bits alone and among others.
TEST(ChunkedBackward, X9NeighboursDoNotMatter) {
  RuleProblem p(Shape({70, 65, 30}), 407);
  RuleProblem alone = p;
  alone.shape.lengths = {65};
  alone.cu = {0, 65};
  const auto cut = [](Doubles& values, int64_t begin, int64_t end) {
    values = Doubles(values.begin() + begin, values.begin() + end);
  };
  for (Doubles* x : {&alone.q, &alone.k}) cut(*x, 70 * p.keys(), 135 * p.keys());
  for (Doubles* x : {&alone.v, &alone.d_o}) cut(*x, 70 * p.values(), 135 * p.values());
  for (Doubles* x : {&alone.g, &alone.beta}) cut(*x, 70 * p.heads(), 135 * p.heads());
  const int64_t size = p.states() / 3;
  for (Doubles* x : {&alone.state, &alone.d_final}) cut(*x, size, 2 * size);
  const RuleGradients among = p.Backward(kCuda, Chunked);
  const RuleGradients got = alone.Backward(kCuda, Chunked);
  const auto part = [](const Floats& all, int64_t begin, int64_t end) {
    return Floats(all.begin() + begin, all.begin() + end);
  };
  EXPECT_EQ(got.q, part(among.q, 70 * p.keys(), 135 * p.keys()));
  EXPECT_EQ(got.k, part(among.k, 70 * p.keys(), 135 * p.keys()));
  EXPECT_EQ(got.v, part(among.v, 70 * p.values(), 135 * p.values()));
  EXPECT_EQ(got.g, part(among.g, 70 * p.heads(), 135 * p.heads()));
  EXPECT_EQ(got.beta, part(among.beta, 70 * p.heads(), 135 * p.heads()));
  EXPECT_EQ(got.state, part(among.state, size, 2 * size));
}

// What a call wrote, rows and all.
std::vector<std::vector<uint8_t>> Outputs(const Args& a) {
  const auto tokens = static_cast<size_t>(a.tokens);
  const auto element = static_cast<size_t>(SizeOf(a.d_qkv_dtype));
  const auto heads = static_cast<size_t>(a.value_heads);
  const auto download = [](const void* device, size_t bytes) {
    std::vector<uint8_t> host(bytes);
    Must(cudaMemcpy(host.data(), device, bytes, cudaMemcpyDeviceToHost));
    return host;
  };
  const size_t used = tokens - 1;  // One token trails.
  return {download(a.d_q, tokens * static_cast<size_t>(a.d_q_token_stride) * element),
          download(a.d_k, tokens * static_cast<size_t>(a.d_k_token_stride) * element),
          download(a.d_v, tokens * static_cast<size_t>(a.d_v_token_stride) * element),
          download(a.d_g, used * heads * sizeof(float)),
          download(a.d_beta, used * heads * sizeof(float)),
          download(a.d_initial_state,
                   static_cast<size_t>(a.sequences) * heads * 128 * 128 * sizeof(float))};
}

// T20: the same bits a thousand times beside a stream that keeps the memory busy.
gdn_status Repeatedly(const gdn_exec* exec, const Args* args) {
  constexpr int kRepeats = 1000;
  constexpr size_t kBusyBytes = size_t{64} << 20;
  const DeviceBuffer busy(2 * kBusyBytes);
  const Stream side;
  std::vector<std::vector<uint8_t>> first;
  for (int i = 0; i < kRepeats; ++i) {
    Must(cudaMemcpyAsync(busy.get<char>() + kBusyBytes, busy.get(), kBusyBytes,
                         cudaMemcpyDeviceToDevice, side.get()));
    const gdn_status status = gdn_delta_rule_backward(exec, args);
    if (status != GDN_OK) return status;
    const auto outputs = Outputs(*args);
    if (i == 0) first = outputs;
    EXPECT_TRUE(outputs == first) << "repeat " << i;
  }
  side.Synchronize();
  return GDN_OK;
}

TEST(ChunkedBackward, T20AThousandRepeatsAreBitEqual) {
  const RuleProblem p(Shape({70, 0, 129}), 409);
  for (float value : p.Backward(kCuda, Repeatedly).k) ASSERT_TRUE(std::isfinite(value));
}

// Damaged arguments are refused with the name of what is wrong, before anything runs.
gdn_status Refusals(const gdn_exec* exec, const Args* good) {
  struct Case {
    const char* name;
    gdn_status status;
    void (*damage)(Args&);
  };
  const Case cases[] = {
      {"tokens", GDN_INVALID_ARGUMENT, [](Args& a) { a.tokens = -1; }},
      {"cu_seqlens", GDN_INVALID_ARGUMENT, [](Args& a) { a.cu_seqlens = nullptr; }},
      {"value_heads", GDN_INVALID_ARGUMENT, [](Args& a) { a.key_heads = 3; }},
      {"key_dim", GDN_UNSUPPORTED_SHAPE, [](Args& a) { a.key_dim = 257; }},
      {"q_token_stride", GDN_INVALID_ARGUMENT, [](Args& a) { a.q_token_stride = 127; }},
      {"scale", GDN_INVALID_ARGUMENT, [](Args& a) { a.scale = NAN; }},
      {"k must", GDN_INVALID_ARGUMENT, [](Args& a) { a.k = nullptr; }},
      {"k_rstd must", GDN_INVALID_ARGUMENT, [](Args& a) { a.k_rstd = nullptr; }},
      {"d_beta must", GDN_INVALID_ARGUMENT, [](Args& a) { a.d_beta = nullptr; }},
      {"overlap", GDN_INVALID_ARGUMENT, [](Args& a) { a.d_q = a.d_k; }},
  };
  for (const Case& refused : cases) {
    Args args = *good;
    refused.damage(args);
    EXPECT_EQ(gdn_delta_rule_backward(exec, &args), refused.status) << refused.name;
    EXPECT_NE(std::string(gdn_last_error()).find(refused.name), std::string::npos)
        << refused.name << ": " << gdn_last_error();
  }
  gdn_exec small = *exec;
  small.workspace_bytes -= 1;
  EXPECT_EQ(gdn_delta_rule_backward(&small, good), GDN_WORKSPACE_TOO_SMALL);
  return GDN_OK;
}

TEST(ChunkedBackward, RefusesEveryDamagedArgument) {
  const RuleGradients untouched = Problem(Shape({5}), 415).Backward(kCuda, Refusals);
  for (const Floats* values : All(untouched)) {
    for (float value : *values) ASSERT_TRUE(std::isnan(value));
  }
}

// Everything but aligned heads of 64 or 128 in 16 bits goes token by token.
TEST(ChunkedBackward, OtherCallsAreNotCovered) {
  RuleShape shape = Shape({5, 66});
  const auto expect = [](const RuleShape& other) {
    const RuleProblem p = Problem(other, 411);
    const RuleGradients got = p.Backward(kCuda, TokenByToken);
    const RuleGradients expected = p.Backward();
    for (size_t i = 0; i < 6; ++i) {
      EXPECT_LE(Error(*All(got)[i], *All(expected)[i]),
                i < 3 ? 2.0 * RoundingBound(other.d_dtype) : 4e-6)
          << kNames[i];
    }
  };
  shape.d_dtype = GDN_F32;
  expect(shape);
  shape = Shape({5, 66}, GDN_F32);
  expect(shape);
  shape = Shape({5, 66});
  shape.key_dim = 64;
  expect(shape);
  shape = Shape({5, 66});
  shape.value_dim = 64;
  expect(shape);
}

// Y3, T13: the forward on the chunked prefill.
TEST(ChunkedForward, Y3MatchesRef) {
  for (gdn_dtype dtype : {GDN_BF16, GDN_F16}) {
    for (bool normalize : {true, false}) {
      RuleShape shape = Shape({70, 0, 129}, dtype);
      shape.normalize = normalize;
      const RuleProblem p = Problem(shape, 413);
      const RuleOutputs got = p.Forward(kCuda);
      const RuleOutputs expected = p.Forward();
      const double output = Error(got.o, expected.o), state = Error(got.state, expected.state);
      EXPECT_LE(output, 2e-3);
      EXPECT_LE(state, 2e-3);
      if (std::getenv("GDN_TEST_PRINT") != nullptr) {
        std::printf("  type %d norm %d: output %.1e, state %.1e\n", dtype, normalize, output,
                    state);
      }
      if (!normalize) continue;
      EXPECT_LE(Error(got.q_hat, expected.q_hat), RoundingBound(dtype));
      EXPECT_LE(Error(got.k_hat, expected.k_hat), RoundingBound(dtype));
      EXPECT_LE(Error(got.q_rstd, expected.q_rstd), 1e-6);
    }
  }
}

}  // namespace
}  // namespace gdn::kernels
