// GDN2's forward on slots.
#include "gdn/kernels/gdn2.h"

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/gdn2_test_util.h"
#include "kernels/refusal_test_util.h"

namespace gdn::kernels {
namespace {

// Of an FP32 result; REF rounds once, the others in every operation.
double Bound(const Backend& backend) { return backend.backend == GDN_BACKEND_REF ? 3e-7 : 1.5e-6; }

// Rounds the values to the type.
void RoundTo(gdn_dtype dtype, Doubles& values) {
  Tensor rounded(dtype, 1);
  for (double& value : values) {
    rounded.Set(0, static_cast<float>(value));
    value = rounded.Get(0);
  }
}

TEST(Gdn2, MatchesThePublishedRecurrence) {
  for (bool own_gates : {false, true}) {
    for (int64_t ratio = 1; ratio <= 4; ++ratio) {
      for (gdn_dtype dtype : {GDN_F32, GDN_BF16, GDN_F16}) {
        RuleShape shape;
        shape.lengths = {9, 0, 21, 1};
        shape.ratio = ratio;
        shape.key_dim = 7;
        shape.value_dim = 5;
        shape.normalize = ratio % 2 == 0;
        shape.scale = ratio == 3 ? 0.4f : 0.0f;
        shape.dtype = dtype;
        Gdn2Problem p(shape, own_gates, 71);
        p.o_dtype = dtype;
        p.state_dtype = dtype == GDN_BF16 ? GDN_BF16 : GDN_F32;
        p.gate_dtype = dtype;
        for (Doubles* in : {&p.q, &p.k, &p.v, &p.erase, &p.write}) RoundTo(dtype, *in);
        RoundTo(p.state_dtype, p.state);
        Doubles o, final_state;
        p.Loss(&o, &final_state);
        for (const Backend& backend : PlacesAndRef()) {
          const RuleOutputs got = p.Forward(backend);
          EXPECT_LE(Error(got.o, ToFloats(o)), RoundingBound(p.o_dtype));
          EXPECT_LE(Error(got.state, ToFloats(final_state)), RoundingBound(p.state_dtype));
        }
      }
    }
  }
}

// T18: erase = write = beta with one decay a head is the gated delta rule.
TEST(Gdn2, T18ScalarGatesAreTheGatedDeltaRule) {
  for (int64_t ratio : {1, 3}) {
    for (bool normalize : {false, true}) {
      RuleShape shape;
      shape.lengths = {30, 1, 5};
      shape.ratio = ratio;
      shape.normalize = normalize;
      const RuleProblem rule(shape, 73);
      const RuleOutputs expected = rule.Forward();
      for (const Backend& backend : PlacesAndRef()) {
        const RuleOutputs got = Gdn2Problem(rule).Forward(backend);
        EXPECT_LE(Error(got.o, expected.o), Bound(backend));
        EXPECT_LE(Error(got.state, expected.state), Bound(backend));
      }
    }
  }
}

// KDA: a decay per channel with a scalar beta, in the paper's form
// S <- S diag(a) (I - b k k^T) + b v k^T.
TEST(Gdn2, ScalarBetaWithChannelDecayIsKda) {
  RuleShape shape;
  shape.lengths = {25};
  shape.key_heads = 1;
  shape.ratio = 1;
  shape.normalize = false;
  shape.scale = 1.0f;
  Gdn2Problem p(shape, true, 75);
  const int64_t K = shape.key_dim, V = shape.value_dim;
  for (int64_t t = 0; t < p.tokens(); ++t) {
    const double beta = p.erase[t * K];
    std::fill_n(p.erase.begin() + t * K, K, beta);
    std::fill_n(p.write.begin() + t * V, V, beta);
  }
  Doubles S = p.state;  // [V][K]
  Floats expected;
  for (int64_t t = 0; t < p.tokens(); ++t) {
    const double* k = p.k.data() + t * K;
    const double beta = p.erase[t * K];
    for (int64_t v = 0; v < V; ++v) {
      double* row = S.data() + v * K;
      double along = 0.0, o = 0.0;
      for (int64_t i = 0; i < K; ++i) along += row[i] * std::exp(p.g[t * K + i]) * k[i];
      for (int64_t i = 0; i < K; ++i) {
        row[i] =
            row[i] * std::exp(p.g[t * K + i]) - beta * along * k[i] + beta * p.v[t * V + v] * k[i];
        o += row[i] * p.q[t * K + i];
      }
      expected.push_back(static_cast<float>(o));
    }
  }
  for (const Backend& backend : PlacesAndRef()) {
    const RuleOutputs got = p.Forward(backend);
    EXPECT_LE(Error(got.o, expected), Bound(backend));
    EXPECT_LE(Error(got.state, ToFloats(S)), Bound(backend));
  }
}

// Gates shared by a key head's value heads are those gates, replicated.
TEST(Gdn2, SharedGatesEqualReplicatedOnes) {
  RuleShape shape;
  shape.ratio = 3;
  const Gdn2Problem shared(shape, false, 77);
  Gdn2Problem own = shared;
  own.own_gates = true;
  const int64_t K = shape.key_dim;
  own.g.clear();
  own.erase.clear();
  for (int64_t t = 0; t < shared.tokens(); ++t) {
    for (int64_t hv = 0; hv < shared.heads(); ++hv) {
      for (int64_t i = 0; i < K; ++i) {
        own.g.push_back(shared.g[t * shared.gates() + hv / 3 * K + i]);
        own.erase.push_back(shared.erase[t * shared.gates() + hv / 3 * K + i]);
      }
    }
  }
  for (const Backend& backend : PlacesAndRef()) {
    EXPECT_EQ(own.Forward(backend).o, shared.Forward(backend).o);
    EXPECT_EQ(own.Forward(backend).state, shared.Forward(backend).state);
  }
}

struct Slots {
  std::vector<int64_t> read, write;
  std::vector<uint8_t> fresh;
};

// Runs p on a pool of `size` slots, poisoned but for the given states; returns o and the pool.
std::pair<Floats, Tensor> OnSlots(const Backend& backend, const Gdn2Problem& p, const Slots& slots,
                                  int64_t size, bool step) {
  const Rows q = p.In(p.q, p.keys()), k = p.In(p.k, p.keys()), v = p.In(p.v, p.values());
  const Floats g = ToFloats(p.g);
  const Tensor erase = p.GateTensor(p.erase), write = p.GateTensor(p.write);
  const int64_t slot_size = p.heads() * p.head_size();
  const int64_t stride = slot_size + 3;
  Tensor pool(GDN_F32, size * stride);
  for (int64_t i = 0; i < p.n(); ++i) {
    if (slots.read[i] < 0 || slots.fresh[i] != 0) continue;
    for (int64_t j = 0; j < slot_size; ++j) {
      pool.Set(slots.read[i] * stride + j, static_cast<float>(p.state[i * slot_size + j]));
    }
  }
  Rows o(GDN_F32, p.all_tokens(), p.values(), p.shape.pad);
  Place at(backend);
  gdn2_args args = p.Args(at, q, k, v, g, erase, write);
  if (step) args.cu_seqlens = nullptr;
  args.state = at.Out(pool);
  args.state_slot_stride = stride;
  args.read_index = at.In(slots.read);
  args.write_index = at.In(slots.write);
  args.fresh = at.In(slots.fresh);
  args.o = o.Out(at);
  args.o_token_stride = o.stride();
  if (!step) SetPrefillWorkspace(at, args);
  EXPECT_EQ(at.Call(step ? gdn_gdn2_step : gdn_gdn2_prefill, args), GDN_OK) << gdn_last_error();
  return {o.Take(p.tokens()), pool};
}

// T23, X2, X3: forks, fresh slots, padding rows and empty sequences; every other slot keeps its
// bits.
void ExpectSlots(const Backend& backend, bool step) {
  {
    RuleShape shape;
    shape.lengths = step ? std::vector<int32_t>(6, 1) : std::vector<int32_t>{4, 2, 3, 0, 0, 5};
    Gdn2Problem p(shape, false, 79);
    //                   in place, fork, padding, empty in place, empty fork, fresh
    const Slots slots{{7, 1, -1, 3, 5, 9}, {7, 2, 4, 3, 6, 9}, {0, 0, 0, 0, 0, 1}};
    const int64_t slot_size = p.heads() * p.head_size();
    const auto [o, pool] = OnSlots(backend, p, slots, 11, step);
    std::fill_n(p.state.begin() + 5 * slot_size, slot_size, 0.0);
    Doubles expected_o, expected_state;
    p.Loss(&expected_o, &expected_state);
    for (int64_t t = p.cu[2]; t < p.cu[3]; ++t) {
      std::fill_n(expected_o.begin() + t * p.values(), p.values(), 0.0);
    }
    EXPECT_LE(Error(o, ToFloats(expected_o)), Bound(backend));
    for (int64_t t = p.cu[2]; t < p.cu[3]; ++t) EXPECT_EQ(o[t * p.values()], 0.0f);
    const int64_t stride = slot_size + 3;
    Floats got, expected;
    for (int64_t slot = 0; slot < 11; ++slot) {
      const auto written = std::find(slots.write.begin(), slots.write.end(), slot);
      const auto read = std::find(slots.read.begin(), slots.read.end(), slot);
      const int64_t i = written - slots.write.begin();
      for (int64_t j = 0; j < stride; ++j) {
        const float value = pool.Get(slot * stride + j);
        if (j < slot_size && written != slots.write.end() && i != 2) {
          got.push_back(value);
          expected.push_back(static_cast<float>(expected_state[i * slot_size + j]));
        } else if (j < slot_size && read != slots.read.end()) {
          const int64_t source = read - slots.read.begin();
          ASSERT_EQ(value, static_cast<float>(p.state[source * slot_size + j])) << "fork's source";
        } else {
          ASSERT_TRUE(std::isnan(value)) << "slot " << slot;
        }
      }
    }
    EXPECT_LE(Error(got, expected), Bound(backend));
  }
}

TEST(Gdn2, T23SlotsForksPaddingAndEmptySequences) {
  for (const Backend& backend : PlacesAndRef()) {
    for (bool step : {false, true}) ExpectSlots(backend, step);
  }
}

TEST(Gdn2, X1EveryDimensionMatchesRef) {
  for (auto [key_dim, value_dim] : std::vector<std::pair<int64_t, int64_t>>{
           {1, 1}, {8, 31}, {15, 32}, {16, 33}, {17, 65}, {60, 100}, {128, 128}, {256, 40}}) {
    RuleShape shape;
    shape.lengths = {3, 18};
    shape.key_dim = key_dim;
    shape.value_dim = value_dim;
    const Gdn2Problem p(shape, value_dim % 2 == 0, 83);
    const RuleOutputs expected = p.Forward();
    const RuleOutputs one = p.Forward(PlacesUnderTest()[0]);
    EXPECT_LE(Error(one.o, expected.o), 2e-6) << key_dim << " " << value_dim;
    EXPECT_LE(Error(one.state, expected.state), 2e-6) << key_dim << " " << value_dim;
    for (const Backend& backend : RepeatsUnderTest()) {  // X9
      const RuleOutputs again = p.Forward(backend);
      EXPECT_EQ(again.o, one.o);
      EXPECT_EQ(again.state, one.state);
    }
  }
}

// I11: a prefill and steps after it are one prefill.
TEST(Gdn2, I11PrefillThenStepsEqualOnePrefill) {
  RuleShape shape;
  shape.lengths = {14};
  shape.trailing_tokens = 0;
  const Gdn2Problem whole(shape, true, 81);
  for (const Backend& backend : PlacesAndRef()) {
    const RuleOutputs expected = whole.Forward(backend);
    Gdn2Problem part = whole;
    part.cu = {0, 9};
    Floats o;
    for (int64_t begin : {0, 9, 10, 11, 12, 13}) {
      const int64_t end = begin == 0 ? 9 : begin + 1;
      auto cut = [&](const Doubles& all, int64_t width) {
        return Doubles(all.begin() + begin * width, all.begin() + end * width);
      };
      part.cu = {0, static_cast<int32_t>(end - begin)};
      part.q = cut(whole.q, whole.keys());
      part.k = cut(whole.k, whole.keys());
      part.v = cut(whole.v, whole.values());
      part.g = cut(whole.g, whole.gates());
      part.erase = cut(whole.erase, whole.gates());
      part.write = cut(whole.write, whole.values());
      const RuleOutputs got = part.Forward(backend);
      o.insert(o.end(), got.o.begin(), got.o.end());
      part.state.assign(got.state.begin(), got.state.end());
    }
    EXPECT_LE(Error(o, expected.o), 1e-6);
    EXPECT_LE(Error(ToFloats(part.state), expected.state), 1e-6);
  }
}

TEST(Gdn2, RefusesEveryDamagedArgument) {
  static const std::vector<int32_t> cu = {0, 1, 2}, starts_at_one = {1, 2, 2},
                                    decreases = {0, 2, 1};
  Tensor in(GDN_F32, 200), o(GDN_F32, 40), state(GDN_F32, 320);
  const std::vector<int64_t> slots = {0, 1};
  using Args = gdn2_args;
  Args good{};
  good.tokens = 2;
  good.sequences = 2;
  good.cu_seqlens = cu.data();
  good.key_heads = 2;
  good.value_heads = good.gate_heads = 4;
  good.key_dim = 8;
  good.value_dim = 5;
  good.q = good.k = good.v = good.erase = good.write = in.data();
  good.g = static_cast<const float*>(in.data());
  good.q_token_stride = good.k_token_stride = 16;
  good.v_token_stride = good.o_token_stride = 20;
  good.state = state.data();
  good.state_slot_stride = 160;
  good.read_index = good.write_index = slots.data();
  good.o = o.data();
  const auto bad = GDN_INVALID_ARGUMENT;
  const auto shape = GDN_UNSUPPORTED_SHAPE;
  std::vector<Misuse<Args>> cases = {
      {"sequences", bad, [](Args& a) { a.sequences = -1; }},
      {"key_heads", bad, [](Args& a) { a.key_heads = 0; }},
      {"value_heads", bad, [](Args& a) { a.value_heads = 5; }},
      {"value_heads", shape, [](Args& a) { a.value_heads = a.gate_heads = 18; }},
      {"gate_heads", bad, [](Args& a) { a.gate_heads = 1; }},
      {"key_dim", shape, [](Args& a) { a.key_dim = 257; }},
      {"value_dim", shape, [](Args& a) { a.value_dim = 513; }},
      {"qkv_dtype", bad, [](Args& a) { a.qkv_dtype = kBadDtype; }},
      {"gate_dtype", bad, [](Args& a) { a.gate_dtype = kBadDtype; }},
      {"o_dtype", bad, [](Args& a) { a.o_dtype = kBadDtype; }},
      {"state_dtype", bad, [](Args& a) { a.state_dtype = kBadDtype; }},
      {"state_dtype", GDN_UNSUPPORTED_TYPE, [](Args& a) { a.state_dtype = GDN_F16; }},
      {"q_token_stride", bad, [](Args& a) { a.q_token_stride = 15; }},
      {"k_token_stride", bad, [](Args& a) { a.k_token_stride = 15; }},
      {"v_token_stride", bad, [](Args& a) { a.v_token_stride = 19; }},
      {"o_token_stride", bad, [](Args& a) { a.o_token_stride = 19; }},
      {"state_slot_stride", bad, [](Args& a) { a.state_slot_stride = 159; }},
      {"scale", bad, [](Args& a) { a.scale = INFINITY; }},
      {"q must", bad, [](Args& a) { a.q = nullptr; }},
      {"k must", bad, [](Args& a) { a.k = nullptr; }},
      {"v must", bad, [](Args& a) { a.v = nullptr; }},
      {"g must", bad, [](Args& a) { a.g = nullptr; }},
      {"erase must", bad, [](Args& a) { a.erase = nullptr; }},
      {"write must", bad, [](Args& a) { a.write = nullptr; }},
      {"o must", bad, [](Args& a) { a.o = nullptr; }},
      {"state must", bad, [](Args& a) { a.state = nullptr; }},
      {"read_index", bad, [](Args& a) { a.read_index = nullptr; }},
      {"write_index", bad, [](Args& a) { a.write_index = nullptr; }}};
  for (auto* call : {gdn_gdn2_step, gdn_gdn2_prefill}) {
    o = Tensor(GDN_F32, 40);
    state = Tensor(GDN_F32, 320);
    good.o = o.data();
    good.state = state.data();
    ExpectRefusals<Args>(good, {&o, &state}, call, cases, CheckingPlaces());
    cases.push_back({"tokens", bad, [](Args& a) { a.tokens = -1; }});
    cases.push_back({"cu_seqlens", bad, [](Args& a) { a.cu_seqlens = nullptr; }});
    // On a device only the kernels read the offsets: their contents are the caller's.
    if (DeviceMemoryUnderTest() != nullptr) continue;
    cases.push_back({"end at tokens 1", bad, [](Args& a) { a.tokens = 1; }});
    cases.push_back({"cu_seqlens[0]", bad, [](Args& a) { a.cu_seqlens = starts_at_one.data(); }});
    cases.push_back({"cu_seqlens", bad, [](Args& a) { a.cu_seqlens = decreases.data(); }});
  }
}

}  // namespace
}  // namespace gdn::kernels
