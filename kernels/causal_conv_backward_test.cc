#include "gdn/kernels/causal_conv_backward.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/gradient_test_util.h"
#include "kernels/op_call_test_util.h"
#include "kernels/refusal_test_util.h"

namespace gdn::kernels {
namespace {

GDN_BACKEND_SUITE(CausalConvBackward);

struct Shape {
  std::vector<int32_t> lengths = {3, 0, 7, 1};
  int64_t channels = 5;
  int32_t width = 4;
  bool silu = true;
  bool states = true;  // a carried state comes in and a gradient of the final one
  bool bias = true;
  gdn_dtype x = GDN_F32;
  gdn_dtype d_y = GDN_F32;
  gdn_dtype d_x = GDN_F32;
  int64_t pad = 3;
  int64_t trailing_tokens = 2;
};

struct Gradients {
  Tensor d_x;
  Floats d_weight, d_bias, d_state;
};

struct Problem {
  Shape shape;
  std::vector<int32_t> cu = {0};
  Doubles x, weight, bias, state, d_y, d_final;  // dense

  Problem(const Shape& s, uint32_t seed) : shape(s) {
    Random random(seed);
    for (int32_t length : s.lengths) cu.push_back(cu.back() + length);
    x = RandomDoubles(random, cu.back() * s.channels, -2, 2);
    // Not centred: the error is measured against the sums, which must not cancel.
    d_y = RandomDoubles(random, cu.back() * s.channels, -0.3f, 1);
    weight = RandomDoubles(random, s.channels * s.width, -1, 1);
    bias = RandomDoubles(random, s.channels, -1, 1);
    state = RandomDoubles(random, n() * history(), -2, 2);
    d_final = RandomDoubles(random, n() * history(), -1, 1);
    if (!s.states) std::fill(state.begin(), state.end(), 0.0);
    if (!s.states) std::fill(d_final.begin(), d_final.end(), 0.0);
    if (!s.bias) std::fill(bias.begin(), bias.end(), 0.0);
  }
  int64_t n() const { return static_cast<int64_t>(shape.lengths.size()); }
  int64_t history() const { return (shape.width - 1) * shape.channels; }
  int64_t stride() const { return shape.channels + shape.pad; }

  // sum(d_y * y) + sum(d_final * final state), from the definition.
  double Loss() const {
    double loss = 0.0;
    const int64_t C = shape.channels;
    const int32_t W = shape.width;
    for (int64_t i = 0; i < n(); ++i) {
      for (int64_t c = 0; c < C; ++c) {
        Doubles column;
        for (int32_t j = 0; j + 1 < W; ++j) column.push_back(state[i * history() + j * C + c]);
        for (int64_t t = cu[i]; t < cu[i + 1]; ++t) column.push_back(x[t * C + c]);
        for (int64_t t = cu[i]; t < cu[i + 1]; ++t) {
          double p = bias[c];
          for (int32_t j = 0; j < W; ++j) p += weight[c * W + j] * column[t - cu[i] + j];
          loss += d_y[t * C + c] * (shape.silu ? p / (1.0 + std::exp(-p)) : p);
        }
        for (int32_t j = 0; j + 1 < W; ++j) {
          loss += d_final[i * history() + j * C + c] * column[column.size() - (W - 1) + j];
        }
      }
    }
    return loss;
  }

  Tensor Strided(const Doubles& dense, gdn_dtype dtype) const {
    Tensor tensor(dtype, (cu.back() + shape.trailing_tokens) * stride());
    for (int64_t t = 0; t < cu.back(); ++t) {
      for (int64_t c = 0; c < shape.channels; ++c) {
        tensor.Set(t * stride() + c, static_cast<float>(dense[t * shape.channels + c]));
      }
    }
    return tensor;
  }

  Gradients Run(const Backend& backend) const {
    const int64_t C = shape.channels;
    const Tensor x_in = Strided(x, shape.x);
    const Tensor d_y_in = Strided(d_y, shape.d_y);
    Tensor state_in(shape.x, n() * history());
    for (int64_t i = 0; i < n() * history(); ++i) state_in.Set(i, static_cast<float>(state[i]));
    const Floats weight_in = ToFloats(weight);
    const Floats bias_in = ToFloats(bias);
    const Floats d_final_in = ToFloats(d_final);
    GuardedFloats d_weight(C * shape.width), d_bias(C), d_state(n() * history());
    Gradients out;
    out.d_x = Tensor(shape.d_x, (cu.back() + shape.trailing_tokens) * stride());
    gdn_causal_conv_backward_args args{};
    args.sequences = n();
    args.cu_seqlens = cu.data();
    args.channels = C;
    args.width = shape.width;
    args.silu = shape.silu;
    args.x = x_in.data();
    args.x_dtype = shape.x;
    args.x_token_stride = args.d_y_token_stride = args.d_x_token_stride = stride();
    args.weight = weight_in.data();
    args.bias = shape.bias ? bias_in.data() : nullptr;
    args.initial_state = shape.states ? state_in.data() : nullptr;
    args.d_y = d_y_in.data();
    args.d_y_dtype = shape.d_y;
    args.d_final_state = shape.states ? d_final_in.data() : nullptr;
    args.d_x = out.d_x.data();
    args.d_x_dtype = shape.d_x;
    args.d_weight = d_weight.data();
    args.d_bias = shape.bias ? d_bias.data() : nullptr;
    args.d_initial_state = shape.states ? d_state.data() : nullptr;
    Execution execution(backend);
    size_t bytes = 0;
    EXPECT_EQ(gdn_causal_conv_backward_workspace(execution.exec(), &args, &bytes), GDN_OK);
    execution.SetWorkspace(bytes);
    EXPECT_EQ(
        CallOp(
            execution, gdn_causal_conv_backward, args,
            {In(cu), In(x_in), In(weight_in), In(bias_in), In(state_in), In(d_y_in), In(d_final_in),
             Out(out.d_x), Out(d_weight.values()), Out(d_bias.values()), Out(d_state.values())},
            {args.cu_seqlens, args.x, args.weight, args.bias, args.initial_state, args.d_y,
             args.d_final_state, args.d_x, args.d_weight, args.d_bias, args.d_initial_state}),
        GDN_OK)
        << gdn_last_error();
    out.d_weight = d_weight.Take("d_weight");
    out.d_bias = d_bias.Take("d_bias");
    out.d_state = d_state.Take("d_initial_state");
    // Between the rows and behind the last token.
    const Tensor poison(shape.d_x, stride());
    for (int64_t t = 0; t < cu.back() + shape.trailing_tokens; ++t) {
      const int64_t kept = t < cu.back() ? C : 0;
      EXPECT_EQ(out.d_x.Slice(t * stride() + kept, (t + 1) * stride()),
                poison.Slice(kept, stride()));
    }
    return out;
  }

  Floats Dense(const Tensor& d_x) const {
    Floats dense;
    for (int64_t t = 0; t < cu.back(); ++t) {
      for (int64_t c = 0; c < shape.channels; ++c) dense.push_back(d_x.Get(t * stride() + c));
    }
    return dense;
  }
};

GDN_BACKEND_TEST(CausalConvBackward, FiniteDifferencesOfEveryGradient) {
  for (int32_t width = 2; width <= 8; ++width) {
    for (bool silu : {true, false}) {
      Shape shape;
      shape.lengths = {3, 0, 7, 1, width - 1, width, 11};
      shape.width = width;
      shape.silu = silu;
      Problem problem(shape, 100 + static_cast<uint32_t>(width));
      auto loss = [&] { return problem.Loss(); };
      const Doubles d_x = FiniteDifferences(problem.x, loss);
      const Doubles d_weight = FiniteDifferences(problem.weight, loss);
      const Doubles d_bias = FiniteDifferences(problem.bias, loss);
      const Doubles d_state = FiniteDifferences(problem.state, loss);
      for (const Backend& backend : TestedBackendsAndRef()) {
        const double bound = backend.backend == GDN_BACKEND_REF ? 2e-7 : 1e-6;
        const Gradients got = problem.Run(backend);
        ExpectGradient("d_x", problem.Dense(got.d_x), d_x, bound);
        ExpectGradient("d_weight", got.d_weight, d_weight, bound);
        ExpectGradient("d_bias", got.d_bias, d_bias, bound);
        ExpectGradient("d_initial_state", got.d_state, d_state, bound);
      }
    }
  }
}

GDN_BACKEND_TEST(CausalConvBackward, EveryTypeAndNumberOfChannelsMatchesRef) {
  for (int64_t channels : {1, 7, 16, 33, 127, 128, 129, 300}) {
    for (gdn_dtype x : {GDN_F32, GDN_BF16, GDN_F16}) {
      for (gdn_dtype d_x : {GDN_F32, GDN_BF16, GDN_F16}) {
        for (bool plain : {false, true}) {
          Shape shape;
          shape.lengths = {70, 1, 0, 2, 129};
          shape.channels = channels;
          shape.x = shape.d_y = x;
          shape.d_x = d_x;
          shape.states = shape.bias = !plain;
          const Problem problem(shape, 7);
          const Gradients expected = problem.Run(kRef);
          for (const Backend& backend : TestedBackends()) {
            const Gradients got = problem.Run(backend);
            EXPECT_LE(Error(problem.Dense(got.d_x), problem.Dense(expected.d_x)),
                      2.0 * RoundingBound(d_x));
            EXPECT_LE(Error(got.d_weight, expected.d_weight), 2e-6);
            if (plain) continue;
            EXPECT_LE(Error(got.d_bias, expected.d_bias), 2e-6);
            EXPECT_LE(Error(got.d_state, expected.d_state), 2e-6);
          }
        }
      }
    }
  }
}

// T21, U4: neither the gradient of one sequence nor that of its carried state moves by a bit with
// the data of its neighbours.
GDN_BACKEND_TEST(CausalConvBackward, T21BoundaryIsolationIsExact) {
  Shape shape;
  shape.lengths = {5, 6, 1, 4};
  const Problem problem(shape, 9);
  Problem changed = problem;  // all that belongs to sequence 1
  for (int64_t i = 5 * shape.channels; i < 11 * shape.channels; ++i) {
    changed.x[i] = 1e3;
    changed.d_y[i] = -1e3;
  }
  for (int64_t i = problem.history(); i < 2 * problem.history(); ++i) {
    changed.state[i] = 1e3;
    changed.d_final[i] = -1e3;
  }
  for (const Backend& backend : TestedBackendsAndRef()) {
    const Gradients before = problem.Run(backend);
    const Gradients after = changed.Run(backend);
    const int64_t begin = 5 * problem.stride();
    const int64_t end = 11 * problem.stride();
    const int64_t all = 16 * problem.stride();
    EXPECT_EQ(after.d_x.Slice(0, begin), before.d_x.Slice(0, begin));
    EXPECT_EQ(after.d_x.Slice(end, all), before.d_x.Slice(end, all));
    EXPECT_NE(after.d_x.Slice(begin, end), before.d_x.Slice(begin, end));
    for (const float value : before.d_state) ASSERT_TRUE(std::isfinite(value));
    for (int64_t sequence = 0; sequence < problem.n(); ++sequence) {
      const auto first = before.d_state.begin() + sequence * problem.history();
      const bool same = std::equal(first, first + problem.history(),
                                   after.d_state.begin() + sequence * problem.history());
      EXPECT_EQ(same, sequence != 1) << backend.name << " sequence " << sequence;
    }
  }
}

// Two calls with the state's gradient carried between them are one call over both parts.
GDN_BACKEND_TEST(CausalConvBackward, EverySplitGivesTheSameGradient) {
  Shape shape;
  shape.lengths = {9};
  const Problem whole(shape, 11);
  const Gradients expected = whole.Run(kRef);
  for (const Backend& backend : TestedBackendsAndRef()) {
    for (int32_t split = 1; split < 9; ++split) {
      Problem head = whole, tail = whole;
      const int64_t cut = split * shape.channels;
      head.cu = {0, split};
      tail.cu = {0, 9 - split};
      tail.x.erase(tail.x.begin(), tail.x.begin() + cut);
      tail.d_y.erase(tail.d_y.begin(), tail.d_y.begin() + cut);
      Doubles column = whole.state;
      column.insert(column.end(), whole.x.begin(), whole.x.begin() + cut);
      tail.state.assign(column.end() - whole.history(), column.end());
      const Gradients second = tail.Run(backend);
      head.d_final.assign(second.d_state.begin(), second.d_state.end());
      const Gradients first = head.Run(backend);
      Floats d_x = head.Dense(first.d_x);
      const Floats rest = tail.Dense(second.d_x);
      d_x.insert(d_x.end(), rest.begin(), rest.end());
      EXPECT_LE(Error(d_x, whole.Dense(expected.d_x)), 1e-6) << split;
      EXPECT_LE(Error(first.d_state, expected.d_state), 1e-6) << split;
      Floats d_weight = first.d_weight;
      for (size_t i = 0; i < d_weight.size(); ++i) d_weight[i] += second.d_weight[i];
      EXPECT_LE(Error(d_weight, expected.d_weight), 1e-6) << split;
    }
  }
}

GDN_BACKEND_TEST(CausalConvBackward, RepeatsAndThreadsGiveTheSameBits) {
  Shape shape;
  shape.lengths = {100, 33, 64};
  shape.channels = 700;
  shape.d_x = GDN_BF16;
  const Problem problem(shape, 13);
  const Gradients first = problem.Run(Tested());
  for (int32_t threads : {1, 2, 5}) {
    const Gradients again = problem.Run(Tested(threads));
    EXPECT_EQ(again.d_x.bytes(), first.d_x.bytes());
    EXPECT_EQ(again.d_weight, first.d_weight);
    EXPECT_EQ(again.d_bias, first.d_bias);
    EXPECT_EQ(again.d_state, first.d_state);
  }
}

GDN_BACKEND_TEST(CausalConvBackward, RefusesEveryDamagedArgument) {
  Tensor in(GDN_F32, 60), d_x(GDN_F32, 20), d_weight(GDN_F32, 40);
  const std::vector<int32_t> cu = {0, 1, 2};
  static const std::vector<int32_t> starts_at_one = {1, 2, 2}, decreases = {0, 2, 1};
  using Args = gdn_causal_conv_backward_args;
  Args good{};
  good.sequences = 2;
  good.cu_seqlens = cu.data();
  good.channels = 10;
  good.width = 4;
  good.x = good.d_y = in.data();
  good.x_token_stride = good.d_y_token_stride = good.d_x_token_stride = 10;
  good.weight = static_cast<const float*>(in.data());
  good.d_x = d_x.data();
  good.d_weight = static_cast<float*>(d_weight.data());
  const auto bad = GDN_INVALID_ARGUMENT;
  std::vector<Misuse<Args>> cases = {
      {"sequences", bad, [](Args& a) { a.sequences = -1; }},
      {"cu_seqlens", bad, [](Args& a) { a.cu_seqlens = nullptr; }},
      {"channels", bad, [](Args& a) { a.channels = 0; }},
      {"width", bad, [](Args& a) { a.width = 0; }},
      {"width", GDN_UNSUPPORTED_SHAPE, [](Args& a) { a.width = 9; }},
      {"x_dtype", bad, [](Args& a) { a.x_dtype = kBadDtype; }},
      {"d_y_dtype", bad, [](Args& a) { a.d_y_dtype = kBadDtype; }},
      {"d_x_dtype", bad, [](Args& a) { a.d_x_dtype = kBadDtype; }},
      {"x_token_stride", bad, [](Args& a) { a.x_token_stride = 9; }},
      {"d_y_token_stride", bad, [](Args& a) { a.d_y_token_stride = 9; }},
      {"d_x_token_stride", bad, [](Args& a) { a.d_x_token_stride = 9; }},
      {"x must", bad, [](Args& a) { a.x = nullptr; }},
      {"weight must", bad, [](Args& a) { a.weight = nullptr; }},
      {"d_y must", bad, [](Args& a) { a.d_y = nullptr; }},
      {"d_x must", bad, [](Args& a) { a.d_x = nullptr; }},
      {"d_weight must", bad, [](Args& a) { a.d_weight = nullptr; }},
      {"overlap", bad, [](Args& a) { a.x = a.d_x; }},
      {"overlap", bad, [](Args& a) { a.d_y = a.d_x; }}};
  if (!kOnCuda) {  // A GPU's lie in its memory.
    cases.push_back({"cu_seqlens[0]", bad, [](Args& a) { a.cu_seqlens = starts_at_one.data(); }});
    cases.push_back({"cu_seqlens", bad, [](Args& a) { a.cu_seqlens = decreases.data(); }});
  }
  ExpectRefusals<Args>(good, {&d_x, &d_weight}, gdn_causal_conv_backward, cases,
                       CheckingBackends());
  Execution execution(Tested());
  size_t bytes = 0;
  ASSERT_EQ(gdn_causal_conv_backward_workspace(execution.exec(), &good, &bytes), GDN_OK);
  EXPECT_EQ(bytes > 0, kOnCuda);
  if (bytes > 0) {
    EXPECT_EQ(gdn_causal_conv_backward(execution.exec(), &good), GDN_WORKSPACE_TOO_SMALL);
  }
  EXPECT_EQ(gdn_causal_conv_backward_workspace(execution.exec(), &good, nullptr), bad);
}

GDN_BACKEND_TEST(CausalConvBackward, NoTokensGiveZerosAndPassTheStateOn) {
  Shape shape;
  shape.lengths = {0, 0};
  const Problem problem(shape, 17);
  for (const Backend& backend : TestedBackendsAndRef()) {
    const Gradients got = problem.Run(backend);
    EXPECT_EQ(got.d_weight, Floats(got.d_weight.size(), 0.0f));
    EXPECT_EQ(got.d_bias, Floats(got.d_bias.size(), 0.0f));
    EXPECT_EQ(got.d_state, ToFloats(problem.d_final));
  }
}

}  // namespace
}  // namespace gdn::kernels
