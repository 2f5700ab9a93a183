// A problem of GDN2's gates with all its data, for the tests.
#ifndef KERNELS_GDN2_GATES_TEST_UTIL_H_
#define KERNELS_GDN2_GATES_TEST_UTIL_H_

#include <cmath>
#include <cstdint>

#include "gdn/kernels/gdn2_gates.h"
#include "gtest/gtest.h"
#include "kernels/delta_rule_gradient_test_util.h"
#include "kernels/gradient_test_util.h"

namespace gdn::kernels {

struct Gdn2Gates {
  Floats g, erase, write;
};
struct Gdn2GateGradients {
  Floats f, b, w, a_log, dt_bias;
};

// Projections and parameters of GDN2's gates, with gradients to come back.
struct Gdn2GatesProblem {
  int64_t tokens, heads, key_dim, width;
  gdn2_decay decay;
  float lower_bound = -5.0f;
  float erase_scale = 1.0f;
  bool with_a_log = true, with_dt_bias = true;
  bool want_d_a_log = true, want_d_dt_bias = true;
  gdn_dtype dtype = GDN_F32;
  int64_t f_pad = 3, w_pad = 1;  // Elements behind each row.
  Doubles f, b, w, a_log, dt_bias, d_g, d_erase, d_write;

  Gdn2GatesProblem(gdn2_decay kind, uint32_t seed, int64_t T = 5, int64_t G = 3, int64_t K = 4,
                   int64_t W = 7, gdn_dtype type = GDN_F32)
      : tokens(T), heads(G), key_dim(K), width(W), decay(kind), dtype(type) {
    Random random(seed);
    f = RandomDoubles(random, tokens * keys(), -3, 3);
    b = RandomDoubles(random, tokens * keys(), -3, 3);
    w = RandomDoubles(random, tokens * width, -3, 3);
    a_log = RandomDoubles(random, heads, -1.5f, 1.0f);
    dt_bias = RandomDoubles(random, keys(), -2, 1);
    d_g = RandomDoubles(random, tokens * keys(), -1, 1);
    d_erase = RandomDoubles(random, tokens * keys(), -1, 1);
    d_write = RandomDoubles(random, tokens * width, -1, 1);
  }
  int64_t keys() const { return heads * key_dim; }

  double G(int64_t i) const {
    const int64_t channel = i % keys();
    const double x = f[i] + (with_dt_bias ? dt_bias[channel] : 0.0);
    const double rate = with_a_log ? std::exp(a_log[channel / key_dim]) : 1.0;
    if (decay == GDN2_DECAY_BOUNDED) return double{lower_bound} / (1.0 + std::exp(-rate * x));
    return -rate * (x > 20.0 ? x : std::log1p(std::exp(x)));
  }
  double Erase(int64_t i) const { return double{erase_scale} / (1.0 + std::exp(-b[i])); }
  double Write(int64_t i) const { return 1.0 / (1.0 + std::exp(-w[i])); }
  double Loss() const {
    double loss = 0.0;
    for (int64_t i = 0; i < tokens * keys(); ++i) loss += d_g[i] * G(i) + d_erase[i] * Erase(i);
    for (int64_t i = 0; i < tokens * width; ++i) loss += d_write[i] * Write(i);
    return loss;
  }

  struct Inputs {
    Rows f, b, w;
    Floats a_log, dt_bias;
  };
  Inputs MakeInputs() const {
    return {Rows(dtype, tokens, keys(), f_pad, f), Rows(dtype, tokens, keys(), 0, b),
            Rows(dtype, tokens, width, w_pad, w), ToFloats(a_log), ToFloats(dt_bias)};
  }
  gdn2_gates_args Args(Place& at, const Inputs& in) const {
    gdn2_gates_args args{};
    args.tokens = tokens;
    args.gate_heads = heads;
    args.key_dim = key_dim;
    args.write_width = width;
    args.f = in.f.In(at);
    args.b = in.b.In(at);
    args.w = in.w.In(at);
    args.fbw_dtype = dtype;
    args.f_token_stride = in.f.stride();
    args.b_token_stride = in.b.stride();
    args.w_token_stride = in.w.stride();
    args.decay = decay;
    args.lower_bound = decay == GDN2_DECAY_BOUNDED ? lower_bound : 0.0f;
    args.a_log = with_a_log ? at.In(in.a_log) : nullptr;
    args.dt_bias = with_dt_bias ? at.In(in.dt_bias) : nullptr;
    args.erase_scale = erase_scale;
    return args;
  }

  Gdn2Gates Forward(const Backend& backend = kRef, gdn_dtype gate_dtype = GDN_F32,
                    decltype(&gdn_gdn2_gates) op = gdn_gdn2_gates) const {
    const Inputs in = MakeInputs();
    GuardedFloats g(tokens * keys());
    Rows erase(gate_dtype, tokens + 1, keys(), 0), write(gate_dtype, tokens + 1, width, 0);
    Place at(backend);
    gdn2_gates_args args = Args(at, in);
    args.g = g.Out(at);
    args.erase = erase.Out(at);
    args.write = write.Out(at);
    args.gate_dtype = gate_dtype;
    EXPECT_EQ(at.Call(op, args), GDN_OK) << gdn_last_error();
    return {g.Take("g"), erase.Take(tokens), write.Take(tokens)};
  }

  Gdn2GateGradients Backward(const Backend& backend = kRef, decltype(&gdn_gdn2_gates_backward) op =
                                                                gdn_gdn2_gates_backward) const {
    const Inputs in = MakeInputs();
    const Floats d_g_in = ToFloats(d_g), d_erase_in = ToFloats(d_erase);
    const Floats d_write_in = ToFloats(d_write);
    Rows d_f(dtype, tokens + 1, keys(), 0), d_b(dtype, tokens + 1, keys(), 0);
    Rows d_w(dtype, tokens + 1, width, 0);
    GuardedFloats d_a_log(heads), d_dt_bias(keys());
    Place at(backend);
    gdn2_gates_backward_args args{};
    args.forward = Args(at, in);
    args.d_g = at.In(d_g_in);
    args.d_erase = at.In(d_erase_in);
    args.d_write = at.In(d_write_in);
    args.d_f = d_f.Out(at);
    args.d_b = d_b.Out(at);
    args.d_w = d_w.Out(at);
    args.d_a_log = with_a_log && want_d_a_log ? d_a_log.Out(at) : nullptr;
    args.d_dt_bias = with_dt_bias && want_d_dt_bias ? d_dt_bias.Out(at) : nullptr;
    size_t bytes = 0;
    EXPECT_EQ(gdn_gdn2_gates_backward_workspace(at.exec(), &args, &bytes), GDN_OK);
    at.SetWorkspace(bytes);
    EXPECT_EQ(at.Call(op, args), GDN_OK) << gdn_last_error();
    return {d_f.Take(tokens), d_b.Take(tokens), d_w.Take(tokens), d_a_log.Take("d_a_log"),
            d_dt_bias.Take("d_dt_bias")};
  }
};

}  // namespace gdn::kernels

#endif  // KERNELS_GDN2_GATES_TEST_UTIL_H_
