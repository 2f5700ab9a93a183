// What one request may not do to another, and which flags reach the rule in a prefill and in a
// step.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "gdn/kernels/qk_norm_route.h"
#include "gtest/gtest.h"
#include "kernels/gdn2_test_util.h"
#include "kernels/rule_slots_test_util.h"

namespace gdn::kernels {
namespace {

// Results of a packed call: a value for each token, or for each sequence, `width` of them.
struct Result {
  const Floats* values;
  int64_t width;
  bool per_sequence;
};

// Sequence 1 of three changed; the others' results keep their bits, its own hold the NaN. Returns
// whether they do.
bool OnlyTheSecondChanged(const std::vector<int32_t>& cu, const std::vector<Result>& before,
                          const std::vector<Result>& after) {
  bool reached = false;
  for (size_t i = 0; i < before.size(); ++i) {
    const int64_t begin = (before[i].per_sequence ? 1 : cu[1]) * before[i].width;
    const int64_t end = (before[i].per_sequence ? 2 : cu[2]) * before[i].width;
    const Floats &a = *before[i].values, &b = *after[i].values;
    EXPECT_TRUE(std::equal(a.begin(), a.begin() + begin, b.begin())) << "before it, result " << i;
    EXPECT_TRUE(std::equal(a.begin() + end, a.end(), b.begin() + end)) << "behind it, result " << i;
    for (const float value : a) EXPECT_TRUE(std::isfinite(value)) << "result " << i;
    for (int64_t j = begin; j < end; ++j) reached = reached || !std::isfinite(b[j]);
  }
  return reached;
}

// Small ones in FP32, and in BF16 heads of 128 on a GPU, which takes them by chunks; the sequences'
// ends lie within chunks.
std::vector<RuleShape> Shapes(bool one_token_each) {
  std::vector<RuleShape> all(2);
  all[0].lengths = {5, 9, 4};
  all[1].lengths = {70, 65, 30};
  all[1].key_heads = 1;
  all[1].key_dim = all[1].value_dim = DeviceMemoryUnderTest() != nullptr ? 128 : 12;
  all[1].dtype = all[1].d_dtype = GDN_BF16;
  all[1].pad = 8;
  for (RuleShape& shape : all) {
    if (one_token_each) shape.lengths = {1, 1, 1};
  }
  return all;
}

// REF is not held again beside a GPU.
std::vector<Backend> Backends() {
  return DeviceMemoryUnderTest() != nullptr ? PlacesUnderTest() : PlacesAndRef();
}

constexpr double kBad[] = {std::numeric_limits<double>::quiet_NaN(),
                           std::numeric_limits<double>::infinity()};

// Calls `run` on the problem with a NaN, then an infinity, at the first and the last token of
// sequence 1 of each tensor, and whether it must show in that sequence's results: a log decay above
// 0 breaks the contract, and chunked kernels take it as 0. `fields`: the tensors and their values
// for each token, 0 for a state.
template <typename Problem, typename Run>
void ExpectContained(const Problem& p,
                     const std::vector<std::pair<Doubles Problem::*, int64_t>>& fields, Run run) {
  for (size_t field = 0; field < fields.size(); ++field) {
    const auto [values, width] = fields[field];
    const int64_t per_sequence = p.states() / p.n();
    const int64_t first = width == 0 ? per_sequence : p.cu[1] * width;
    const int64_t last = (width == 0 ? 2 * per_sequence : p.cu[2] * width) - 1;
    for (const int64_t at : {first, last}) {
      for (const double bad : kBad) {
        SCOPED_TRACE("field " + std::to_string(field) + " element " + std::to_string(at) + " " +
                     std::to_string(bad));
        Problem other = p;
        (other.*values)[at] = bad;
        run(other, !(values == &Problem::g && std::isinf(bad)));
      }
    }
  }
}

using RuleFields = std::vector<std::pair<Doubles RuleProblem::*, int64_t>>;
RuleFields RuleInputs(const RuleProblem& p) {
  return {{&RuleProblem::q, p.keys()},     {&RuleProblem::k, p.keys()},
          {&RuleProblem::v, p.values()},   {&RuleProblem::g, p.heads()},
          {&RuleProblem::beta, p.heads()}, {&RuleProblem::state, 0}};
}

TEST(RuleRequests, X4NanStaysInItsRequestForward) {
  for (const RuleShape& shape : Shapes(false)) {
    const RuleProblem p(shape, 941);
    const auto results = [&](const RuleOutputs& out) -> std::vector<Result> {
      const int64_t keys = p.keys(), heads = shape.key_heads;
      return {{&out.o, p.values(), false}, {&out.state, p.states() / p.n(), true},
              {&out.q_hat, keys, false},   {&out.k_hat, keys, false},
              {&out.q_rstd, heads, false}, {&out.k_rstd, heads, false}};
    };
    for (const Backend& backend : Backends()) {
      const RuleOutputs before = p.Forward(backend);
      ExpectContained<RuleProblem>(p, RuleInputs(p), [&](const RuleProblem& bad, bool shows) {
        const RuleOutputs after = bad.Forward(backend);
        EXPECT_TRUE(OnlyTheSecondChanged(p.cu, results(before), results(after)) || !shows)
            << backend.name << ": lost";
      });
    }
  }
}

TEST(RuleRequests, X4NanStaysInItsRequestBackward) {
  for (const RuleShape& shape : Shapes(false)) {
    const RuleProblem p(shape, 943);
    const auto results = [&](const RuleGradients& d) -> std::vector<Result> {
      return {{&d.q, p.keys(), false},     {&d.k, p.keys(), false},
              {&d.v, p.values(), false},   {&d.g, p.heads(), false},
              {&d.beta, p.heads(), false}, {&d.state, p.states() / p.n(), true}};
    };
    RuleFields fields = RuleInputs(p);
    fields.push_back({&RuleProblem::d_o, p.values()});
    fields.push_back({&RuleProblem::d_final, 0});
    for (const Backend& backend : Backends()) {
      const RuleGradients before = p.Backward(backend);
      ExpectContained<RuleProblem>(p, fields, [&](const RuleProblem& bad, bool shows) {
        const RuleGradients after = bad.Backward(backend);
        EXPECT_TRUE(OnlyTheSecondChanged(p.cu, results(before), results(after)) || !shows)
            << backend.name << ": lost";
      });
    }
  }
}

using Gdn2Fields = std::vector<std::pair<Doubles Gdn2Problem::*, int64_t>>;
Gdn2Fields Gdn2Inputs(const Gdn2Problem& p) {
  return {{&Gdn2Problem::q, p.keys()},      {&Gdn2Problem::k, p.keys()},
          {&Gdn2Problem::v, p.values()},    {&Gdn2Problem::g, p.gates()},
          {&Gdn2Problem::erase, p.gates()}, {&Gdn2Problem::write, p.values()},
          {&Gdn2Problem::state, 0}};
}

TEST(RuleRequests, X4NanStaysInItsRequestOfGdn2) {
  for (const bool step : {false, true}) {
    for (const RuleShape& shape : Shapes(step)) {
      const Gdn2Problem p(shape, shape.dtype == GDN_F32, 945);
      const auto op = step ? gdn_gdn2_step : gdn_gdn2_prefill;
      const auto results = [&](const RuleOutputs& out) -> std::vector<Result> {
        return {{&out.o, p.values(), false}, {&out.state, p.states() / p.n(), true}};
      };
      for (const Backend& backend : Backends()) {
        const RuleOutputs before = p.Forward(backend, op);
        ExpectContained<Gdn2Problem>(p, Gdn2Inputs(p), [&](const Gdn2Problem& bad, bool shows) {
          const RuleOutputs after = bad.Forward(backend, op);
          EXPECT_TRUE(OnlyTheSecondChanged(p.cu, results(before), results(after)) || !shows)
              << backend.name << ": lost";
        });
      }
    }
  }
}

TEST(RuleRequests, X4NanStaysInItsRequestOfGdn2sBackward) {
  for (const RuleShape& shape : Shapes(false)) {
    const Gdn2Problem p(shape, shape.dtype == GDN_F32, 947);
    const auto results = [&](const Gdn2Gradients& d) -> std::vector<Result> {
      return {{&d.q, p.keys(), false},
              {&d.k, p.keys(), false},
              {&d.v, p.values(), false},
              {&d.g, p.gates(), false},
              {&d.erase, p.gates(), false},
              {&d.write, p.values(), false},
              {&d.state, p.states() / p.n(), true}};
    };
    Gdn2Fields fields = Gdn2Inputs(p);
    fields.push_back({&Gdn2Problem::d_o, p.values()});
    fields.push_back({&Gdn2Problem::d_final, 0});
    for (const Backend& backend : Backends()) {
      const Gdn2Gradients before = p.Backward(backend);
      ExpectContained<Gdn2Problem>(p, fields, [&](const Gdn2Problem& bad, bool shows) {
        const Gdn2Gradients after = bad.Backward(backend);
        EXPECT_TRUE(OnlyTheSecondChanged(p.cu, results(before), results(after)) || !shows)
            << backend.name << ": lost";
      });
    }
  }
}

// q and k of a layer as its route leaves them on a back end.
gdn_qk_norm_route Prepare(const Backend& backend, gdn_rule_variant variant, int32_t use,
                          int64_t key_dim, Doubles& x) {
  Floats rows = ToFloats(x);
  gdn_qk_norm_route route{-1, -1, -1};
  Place at(backend);
  gdn_qk_norm_prepare_args args{};
  args.variant = variant;
  args.use_qk_l2norm = use;
  args.tokens = static_cast<int64_t>(rows.size()) / key_dim;
  args.vectors = 1;
  args.key_dim = args.token_stride = key_dim;
  args.qk = at.Out(rows.data(), rows.size());
  args.dtype = GDN_F32;
  static gdn_qk_norm_route* result;
  result = &route;
  const auto prepare = +[](const gdn_exec* exec, const gdn_qk_norm_prepare_args* given) {
    return gdn_qk_norm_prepare(exec, given, result);
  };
  EXPECT_EQ(at.Call(prepare, args), GDN_OK) << gdn_last_error();
  x.assign(rows.begin(), rows.end());
  return route;
}

void NormaliseExactly(Doubles& x, int64_t key_dim) {
  for (auto row = x.begin(); row != x.end(); row += key_dim) {
    double sum = 1e-6;
    std::for_each(row, row + key_dim, [&](double e) { sum += e * e; });
    std::for_each(row, row + key_dim, [&](double& e) { e /= std::sqrt(sum); });
  }
}

// Calls the op of one variant, decode or prefill, with shape.normalize as its flag.
RuleOutputs RunVariant(const RuleProblem& p, const Backend& backend, gdn_rule_variant variant,
                       bool decode) {
  if (variant == GDN_RULE_GDN) {
    return RunOnSlots(p, backend, decode ? gdn_delta_rule_step : gdn_delta_rule_prefill);
  }
  return Gdn2Problem(p).Forward(backend, decode ? gdn_gdn2_step : gdn_gdn2_prefill);
}

// X8: the layer's option, through the route, in both variants, decoding and in a prefill: q and k
// are normalised once with it, and not at all without. The scale's default is K^-1/2.
TEST(RuleRequests, X8FlagsOfDecodeAndPrefill) {
  for (const bool decode : {true, false}) {
    RuleShape shape;
    shape.lengths = decode ? std::vector<int32_t>(6, 1) : std::vector<int32_t>{4, 0, 7};
    shape.key_dim = 16;
    shape.normalize = false;
    RuleProblem raw(shape, 949);
    for (double& value : raw.q) value *= 3.0;
    RuleProblem exact = raw;
    NormaliseExactly(exact.q, shape.key_dim);
    NormaliseExactly(exact.k, shape.key_dim);
    for (const gdn_rule_variant variant : {GDN_RULE_GDN, GDN_RULE_GDN2}) {
      for (const int32_t use : {0, 1}) {
        const RuleOutputs expected = RunVariant(use != 0 ? exact : raw, kRef, variant, decode);
        for (const Backend& backend : PlacesAndRef()) {
          SCOPED_TRACE(backend.name + " variant " + std::to_string(variant) + " use " +
                       std::to_string(use) + " decode " + std::to_string(decode));
          RuleProblem p = raw;
          Prepare(backend, variant, use, shape.key_dim, p.q);
          const gdn_qk_norm_route route = Prepare(backend, variant, use, shape.key_dim, p.k);
          const bool in_kernel = variant == GDN_RULE_GDN && use != 0;
          EXPECT_EQ(route.use_qk_l2norm_in_kernel, in_kernel ? 1 : 0);
          EXPECT_EQ(route.normalize_in_caller, use != 0 && !in_kernel ? 1 : 0);
          p.shape.normalize = route.use_qk_l2norm_in_kernel != 0;
          const RuleOutputs got = RunVariant(p, backend, variant, decode);
          EXPECT_LE(Error(got.o, expected.o), 2e-6);
          EXPECT_LE(Error(got.state, expected.state), 2e-6);
          // Powers of two, so that not a bit moves.
          p.shape.scale = 0.25f;
          EXPECT_EQ(RunVariant(p, backend, variant, decode).o, got.o);
          p.shape.scale = 0.5f;
          const RuleOutputs twice = RunVariant(p, backend, variant, decode);
          for (size_t i = 0; i < got.o.size(); ++i) ASSERT_EQ(twice.o[i], 2.0f * got.o[i]);
        }
      }
    }
  }
}

}  // namespace
}  // namespace gdn::kernels
