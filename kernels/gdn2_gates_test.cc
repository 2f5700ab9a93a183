#include "gdn/kernels/gdn2_gates.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/gdn2_gates_test_util.h"
#include "kernels/refusal_test_util.h"

namespace gdn::kernels {
namespace {

using Problem = Gdn2GatesProblem;

const int kUnknownDecay = 2;
const std::vector<gdn2_decay> kDecays = {GDN2_DECAY_SOFTPLUS, GDN2_DECAY_BOUNDED};

TEST(Gdn2Gates, EveryValueInEveryType) {
  for (gdn2_decay decay : kDecays) {
    for (gdn_dtype dtype : {GDN_F32, GDN_BF16, GDN_F16}) {
      Problem p(decay, 101);
      p.erase_scale = decay == GDN2_DECAY_BOUNDED ? 2.0f : 1.0f;
      Doubles g, erase, write;
      for (int64_t i = 0; i < p.tokens * p.keys(); ++i) {
        g.push_back(p.G(i));
        erase.push_back(p.Erase(i));
      }
      for (int64_t i = 0; i < p.tokens * p.width; ++i) write.push_back(p.Write(i));
      for (const Backend& backend : PlacesAndRef()) {
        const Gdn2Gates got = p.Forward(backend, dtype);
        EXPECT_LE(Error(got.g, ToFloats(g)), 1e-6);
        EXPECT_LE(Error(got.erase, ToFloats(erase)), RoundingBound(dtype));
        EXPECT_LE(Error(got.write, ToFloats(write)), RoundingBound(dtype));
        // T25: signs and ranges.
        for (float value : got.g) {
          EXPECT_LE(value, 0.0f);
          if (decay == GDN2_DECAY_BOUNDED) {
            EXPECT_GE(value, p.lower_bound);
          }
        }
        for (float value : got.write) EXPECT_TRUE(value >= 0.0f && value <= 1.0f);
      }
    }
  }
}

TEST(Gdn2Gates, FiniteDifferencesOfEveryGradient) {
  for (gdn2_decay decay : kDecays) {
    for (float scale : {1.0f, 2.0f}) {
      Problem p(decay, 103);
      p.erase_scale = scale;
      p.lower_bound = scale == 1.0f ? -5.0f : -0.3f;
      p.f[0] = 25.0;  // beyond softplus' threshold
      auto loss = [&] { return p.Loss(); };
      const Doubles f = FiniteDifferences(p.f, loss), b = FiniteDifferences(p.b, loss);
      const Doubles w = FiniteDifferences(p.w, loss), a_log = FiniteDifferences(p.a_log, loss);
      const Doubles dt_bias = FiniteDifferences(p.dt_bias, loss);
      for (const Backend& backend : PlacesAndRef()) {
        const double bound = backend.backend == GDN_BACKEND_REF ? 2e-7 : 1e-6;
        const Gdn2GateGradients got = p.Backward(backend);
        ExpectGradient("d_f", got.f, f, bound);
        ExpectGradient("d_b", got.b, b, bound);
        ExpectGradient("d_w", got.w, w, bound);
        ExpectGradient("d_a_log", got.a_log, a_log, bound);
        ExpectGradient("d_dt_bias", got.dt_bias, dt_bias, bound);
      }
    }
  }
}

// G6: the bounded decay needs no A_log.
TEST(Gdn2Gates, G6BoundedDecayWithoutParameters) {
  Problem p(GDN2_DECAY_BOUNDED, 105);
  p.with_a_log = p.with_dt_bias = false;
  for (const Backend& backend : PlacesAndRef()) {
    const Gdn2Gates gates = p.Forward(backend);
    for (int64_t i = 0; i < p.tokens * p.keys(); ++i) {
      EXPECT_NEAR(gates.g[i], -5.0 / (1.0 + std::exp(-p.f[i])), 1e-6);
    }
    const Gdn2GateGradients got = p.Backward(backend);
    ExpectGradient("d_f", got.f, FiniteDifferences(p.f, [&] { return p.Loss(); }), 1e-6);
    for (float value : got.a_log) EXPECT_TRUE(std::isnan(value)) << "not asked for";
  }
}

// T19: above 20 value and derivative are those of torch's threshold form, exactly. One channel and
// one token, so that the parameters' gradients are no sums.
TEST(Gdn2Gates, T19SlopeAboveTheThresholdIsExactlyOne) {
  for (float x : {20.0001f, 21.0f, 30.0f, 1e4f}) {
    Problem p(GDN2_DECAY_SOFTPLUS, 107, 1, 5, 1, 3);
    std::fill(p.f.begin(), p.f.end(), x);
    std::fill(p.dt_bias.begin(), p.dt_bias.end(), 0.0);
    std::fill(p.a_log.begin(), p.a_log.end(), 0.0);
    for (const Backend& backend : PlacesAndRef()) {
      SCOPED_TRACE(backend.name + " " + std::to_string(x));
      for (float g : p.Forward(backend).g) EXPECT_EQ(g, -x);
      const Gdn2GateGradients got = p.Backward(backend);
      for (size_t i = 0; i < p.f.size(); ++i) {
        const auto d_g = static_cast<float>(p.d_g[i]);
        EXPECT_EQ(got.f[i], -d_g);
        EXPECT_EQ(got.dt_bias[i], -d_g);
        EXPECT_EQ(got.a_log[i], -d_g * x);
      }
    }
  }
}

// X4: saturated gates give finite values and gradients.
TEST(Gdn2Gates, X4SaturatedGatesStayFinite) {
  for (gdn2_decay decay : kDecays) {
    Problem p(decay, 109);
    for (size_t i = 0; i < p.f.size(); ++i) {
      p.f[i] = i % 2 == 0 ? 1e4 : -1e4;
      p.b[i] = i % 3 == 0 ? 1e4 : -1e4;
    }
    for (const Backend& backend : PlacesAndRef()) {
      const Gdn2Gates gates = p.Forward(backend);
      const Gdn2GateGradients got = p.Backward(backend);
      for (const Floats* values : {&gates.g, &gates.erase, &got.f, &got.b, &got.w, &got.a_log}) {
        for (float value : *values) EXPECT_TRUE(std::isfinite(value)) << backend.name;
      }
    }
  }
}

// Odd extents, and such as CUDA covers by vectors, with the bits of the same rows one element off.
TEST(Gdn2Gates, LongSequencesMatchRefWithAnyThreads) {
  std::vector<Problem> problems;
  for (gdn2_decay decay : kDecays) {
    for (gdn_dtype dtype : {GDN_F32, GDN_BF16, GDN_F16}) {
      problems.emplace_back(decay, 111, 200, 3, 37, 65, dtype);
      problems.emplace_back(decay, 113, 193, 3, 100, 132, dtype);
      problems.back().f_pad = 4;
      problems.back().w_pad = 0;
    }
  }
  for (const Problem& p : problems) {
    const Gdn2GateGradients expected = p.Backward();
    const Gdn2GateGradients got = p.Backward(PlacesUnderTest()[0]);
    EXPECT_LE(Error(got.f, expected.f), 2.0 * RoundingBound(p.dtype));
    EXPECT_LE(Error(got.b, expected.b), 2.0 * RoundingBound(p.dtype));
    EXPECT_LE(Error(got.w, expected.w), 2.0 * RoundingBound(p.dtype));
    EXPECT_LE(Error(got.a_log, expected.a_log), 4e-6);
    EXPECT_LE(Error(got.dt_bias, expected.dt_bias), 4e-6);
    Problem shifted = p;
    shifted.f_pad += 1;
    std::vector<Gdn2GateGradients> repeats = {shifted.Backward(PlacesUnderTest()[0])};
    for (const Backend& backend : RepeatsUnderTest()) repeats.push_back(p.Backward(backend));
    for (const Gdn2GateGradients& again : repeats) {
      EXPECT_EQ(again.f, got.f);
      EXPECT_EQ(again.b, got.b);
      EXPECT_EQ(again.w, got.w);
      EXPECT_EQ(again.a_log, got.a_log);
      EXPECT_EQ(again.dt_bias, got.dt_bias);
    }
  }
}

// Sums that nobody asked for are not written, and change nothing else.
TEST(Gdn2Gates, EitherSumMayBeLeftOut) {
  for (gdn2_decay decay : kDecays) {
    Problem p(decay, 115, 70, 2, 12, 8);
    for (const Backend& backend : PlacesAndRef()) {
      const Gdn2GateGradients all = p.Backward(backend);
      for (int wanted = 0; wanted < 3; ++wanted) {
        Problem part = p;
        part.want_d_a_log = wanted == 1;
        part.want_d_dt_bias = wanted == 2;
        const Gdn2GateGradients got = part.Backward(backend);
        EXPECT_EQ(got.f, all.f) << backend.name;
        EXPECT_EQ(got.w, all.w) << backend.name;
        const auto expect = [&](const Floats& sums, const Floats& same, bool written) {
          for (size_t i = 0; i < sums.size(); ++i) {
            EXPECT_TRUE(written ? sums[i] == same[i] : std::isnan(sums[i])) << backend.name;
          }
        };
        expect(got.a_log, all.a_log, wanted == 1);
        expect(got.dt_bias, all.dt_bias, wanted == 2);
      }
    }
  }
}

TEST(Gdn2Gates, SumsWithoutTokensAreZeros) {
  for (gdn2_decay decay : kDecays) {
    const Problem p(decay, 117, 0, 3, 5, 7);
    for (const Backend& backend : PlacesAndRef()) {
      const Gdn2GateGradients got = p.Backward(backend);
      EXPECT_EQ(got.a_log, Floats(3, 0.0f)) << backend.name;
      EXPECT_EQ(got.dt_bias, Floats(15, 0.0f)) << backend.name;
    }
  }
}

// Only CUDA needs one; the query reads no pointer.
TEST(Gdn2Gates, RefusesATooSmallWorkspace) {
  const Problem p(GDN2_DECAY_SOFTPLUS, 119, 70, 2, 12, 8);
  const auto with_a_byte_less = [](const gdn_exec* given, const gdn2_gates_backward_args* args) {
    gdn2_gates_backward_args extents{};
    extents.forward.tokens = args->forward.tokens;
    extents.forward.gate_heads = args->forward.gate_heads;
    extents.forward.key_dim = args->forward.key_dim;
    extents.forward.write_width = args->forward.write_width;
    extents.forward.fbw_dtype = args->forward.fbw_dtype;
    size_t bytes = 0;
    EXPECT_EQ(gdn_gdn2_gates_backward_workspace(given, &extents, &bytes), GDN_OK);
    EXPECT_EQ(bytes > 0, given->backend == GDN_BACKEND_CUDA);
    if (bytes > 0) {
      gdn_exec exec = *given;
      exec.workspace_bytes = bytes - 1;
      EXPECT_EQ(gdn_gdn2_gates_backward(&exec, args), GDN_WORKSPACE_TOO_SMALL);
      EXPECT_NE(std::string(gdn_last_error()).find("workspace"), std::string::npos);
    }
    return gdn_gdn2_gates_backward(given, args);
  };
  for (const Backend& backend : PlacesAndRef()) p.Backward(backend, with_a_byte_less);
}

// More blocks than a grid has: refused before anything is read.
TEST(Gdn2Gates, CudaRefusesMoreTokensThanAGridHasBlocks) {
  Problem p(GDN2_DECAY_SOFTPLUS, 121, 1, 2, 12, 8);
  const auto huge = [](const gdn_exec* given, const gdn2_gates_backward_args* args) {
    gdn2_gates_backward_args many = *args;
    many.forward.tokens = int64_t{1} << 38;
    gdn_exec exec = *given;
    EXPECT_EQ(gdn_gdn2_gates_backward_workspace(given, &many, &exec.workspace_bytes), GDN_OK);
    EXPECT_EQ(gdn_gdn2_gates_backward(&exec, &many), GDN_UNSUPPORTED_SHAPE);
    EXPECT_NE(std::string(gdn_last_error()).find("tokens"), std::string::npos);
    return gdn_gdn2_gates_backward(given, args);
  };
  for (const Backend& backend : PlacesUnderTest()) {
    if (OnDevice(backend)) p.Backward(backend, huge);
  }
}

TEST(Gdn2Gates, RefusesEveryDamagedArgument) {
  Tensor in(GDN_F32, 40), out(GDN_F32, 60);
  using Args = gdn2_gates_args;
  Args good{};
  good.tokens = 2;
  good.gate_heads = 2;
  good.key_dim = 5;
  good.write_width = 10;
  good.f = good.b = good.w = in.data();
  good.f_token_stride = good.b_token_stride = good.w_token_stride = 10;
  good.a_log = static_cast<const float*>(in.data());
  good.erase_scale = 1.0f;
  good.g = static_cast<float*>(out.data());
  good.erase = good.g + 20;
  good.write = good.g + 40;
  const auto bad = GDN_INVALID_ARGUMENT;
  const auto bounded = [](Args& a, float bound) {
    a.decay = GDN2_DECAY_BOUNDED;
    a.lower_bound = bound;
  };
  std::vector<Misuse<Args>> inputs = {
      {"tokens", bad, [](Args& a) { a.tokens = -1; }},
      {"gate_heads", bad, [](Args& a) { a.gate_heads = 0; }},
      {"key_dim", bad, [](Args& a) { a.key_dim = 0; }},
      {"key_dim", GDN_UNSUPPORTED_SHAPE, [](Args& a) { a.key_dim = 257; }},
      {"write_width", bad, [](Args& a) { a.write_width = 0; }},
      {"fbw_dtype", bad, [](Args& a) { a.fbw_dtype = kBadDtype; }},
      {"f_token_stride", bad, [](Args& a) { a.f_token_stride = 9; }},
      {"b_token_stride", bad, [](Args& a) { a.b_token_stride = 9; }},
      {"w_token_stride", bad, [](Args& a) { a.w_token_stride = 9; }},
      {"decay", bad, [](Args& a) { std::memcpy(&a.decay, &kUnknownDecay, sizeof(int)); }},
      {"lower_bound", bad, [=](Args& a) { bounded(a, -5.1f); }},
      {"lower_bound", bad, [=](Args& a) { bounded(a, 0.0f); }},
      {"lower_bound", bad, [=](Args& a) { bounded(a, NAN); }},
      {"a_log must", bad, [](Args& a) { a.a_log = nullptr; }},
      {"erase_scale", bad, [](Args& a) { a.erase_scale = NAN; }},
      {"f must", bad, [](Args& a) { a.f = nullptr; }},
      {"b must", bad, [](Args& a) { a.b = nullptr; }},
      {"w must", bad, [](Args& a) { a.w = nullptr; }}};
  std::vector<Misuse<Args>> cases = inputs;
  cases.push_back({"gate_dtype", bad, [](Args& a) { a.gate_dtype = kBadDtype; }});
  cases.push_back({"g must", bad, [](Args& a) { a.g = nullptr; }});
  cases.push_back({"erase must", bad, [](Args& a) { a.erase = nullptr; }});
  cases.push_back({"write must", bad, [](Args& a) { a.write = nullptr; }});
  cases.push_back({"overlap", bad, [](Args& a) { a.w = a.write; }});
  ExpectRefusals<Args>(good, {&out}, gdn_gdn2_gates, cases, CheckingPlaces());

  using Backward = gdn2_gates_backward_args;
  Backward backward{};
  backward.forward = good;
  backward.d_g = backward.d_erase = backward.d_write = static_cast<const float*>(in.data());
  out = Tensor(GDN_F32, 60);
  backward.d_f = out.data();
  backward.d_b = static_cast<float*>(out.data()) + 20;
  backward.d_w = static_cast<float*>(out.data()) + 40;
  std::vector<Misuse<Backward>> backward_cases = {
      {"d_g must", bad, [](Backward& a) { a.d_g = nullptr; }},
      {"d_erase must", bad, [](Backward& a) { a.d_erase = nullptr; }},
      {"d_write must", bad, [](Backward& a) { a.d_write = nullptr; }},
      {"d_f must", bad, [](Backward& a) { a.d_f = nullptr; }},
      {"d_b must", bad, [](Backward& a) { a.d_b = nullptr; }},
      {"d_w must", bad, [](Backward& a) { a.d_w = nullptr; }},
      {"overlap", bad, [](Backward& a) { a.d_f = const_cast<void*>(a.forward.f); }}};
  for (const auto& input : inputs) {
    backward_cases.push_back(
        {input.name, input.status, [&](Backward& a) { input.damage(a.forward); }});
  }
  backward_cases.push_back(
      {"gate_heads", GDN_UNSUPPORTED_SHAPE, [](Backward& a) { a.forward.gate_heads = 65537; }});
  ExpectRefusals<Backward>(backward, {&out}, gdn_gdn2_gates_backward, backward_cases,
                           CheckingPlaces());
}

}  // namespace
}  // namespace gdn::kernels
