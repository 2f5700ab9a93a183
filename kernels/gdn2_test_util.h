// A GDN2 problem with all its data, for the tests.
#ifndef KERNELS_GDN2_TEST_UTIL_H_
#define KERNELS_GDN2_TEST_UTIL_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "gdn/kernels/gdn2.h"
#include "gdn/kernels/gdn2_backward.h"
#include "gtest/gtest.h"
#include "kernels/delta_rule_gradient_test_util.h"
#include "kernels/gradient_test_util.h"

namespace gdn::kernels {

inline void SetPrefillWorkspace(Place& at, const gdn2_args& args) {
  size_t bytes = 0;
  EXPECT_EQ(gdn_gdn2_prefill_workspace(at.exec(), &args, &bytes), GDN_OK) << gdn_last_error();
  at.SetWorkspace(bytes);
}

struct Gdn2Gradients {
  Floats q, k, v, g, erase, write, state;
};

// The shape, the data and the layout of RuleProblem, but for the gates.
struct Gdn2Problem {
  RuleShape shape;
  bool own_gates;  // each value head has its own, else they are the key head's
  std::vector<int32_t> cu = {0};
  Doubles q, k, v, g, erase, write, state, d_o, d_final;  // dense
  gdn_dtype state_dtype = GDN_F32;
  gdn_dtype o_dtype = GDN_F32;
  gdn_dtype gate_dtype = GDN_F32;

  Gdn2Problem(const RuleShape& s, bool own, uint32_t seed) : shape(s), own_gates(own) {
    const RuleProblem rule(s, seed);
    cu = rule.cu;
    q = rule.q;
    k = rule.k;
    v = rule.v;
    state = rule.state;
    d_o = rule.d_o;
    d_final = rule.d_final;
    Random random(seed + 1000);
    g = RandomDoubles(random, tokens() * gates(), -1.5f, -0.01f);
    for (double& value : g) value = random.Uniform(0, 1) < s.masked ? 0.0 : value;
    erase = RandomDoubles(random, tokens() * gates(), 0.05f, 1.0f);
    write = RandomDoubles(random, tokens() * values(), 0.05f, 1.0f);
  }
  // The delta rule's problem in GDN2's terms: its scalars on every channel.
  explicit Gdn2Problem(const RuleProblem& rule) : Gdn2Problem(rule.shape, true, 1) {
    q = rule.q;
    k = rule.k;
    v = rule.v;
    state = rule.state;
    d_o = rule.d_o;
    d_final = rule.d_final;
    for (int64_t i = 0; i < tokens() * gates(); ++i) {
      g[i] = rule.g[i / shape.key_dim];
      erase[i] = rule.beta[i / shape.key_dim];
    }
    for (int64_t i = 0; i < tokens() * values(); ++i) write[i] = rule.beta[i / shape.value_dim];
  }

  int64_t n() const { return static_cast<int64_t>(shape.lengths.size()); }
  int64_t tokens() const { return cu.back(); }
  int64_t all_tokens() const { return tokens() + shape.trailing_tokens; }
  int64_t heads() const { return shape.key_heads * shape.ratio; }
  int64_t gate_heads() const { return own_gates ? heads() : shape.key_heads; }
  int64_t keys() const { return shape.key_heads * shape.key_dim; }
  int64_t gates() const { return gate_heads() * shape.key_dim; }
  int64_t values() const { return heads() * shape.value_dim; }
  int64_t head_size() const { return shape.key_dim * shape.value_dim; }
  int64_t states() const { return n() * heads() * head_size(); }
  Rows In(const Doubles& dense, int64_t width) const {
    return {shape.dtype, all_tokens(), width, shape.pad, dense};
  }

  Tensor GateTensor(const Doubles& values) const {
    Tensor tensor(gate_dtype, static_cast<int64_t>(values.size()));
    for (int64_t i = 0; i < tensor.size(); ++i) tensor.Set(i, static_cast<float>(values[i]));
    return tensor;
  }

  // The recurrence as published, on [K][V] states: sum(d_o * o) + sum(d_final * final state).
  double Loss(Doubles* o_out = nullptr, Doubles* state_out = nullptr) const {
    double loss = 0.0;
    if (o_out != nullptr) o_out->assign(static_cast<size_t>(tokens() * values()), 0.0);
    for (int64_t i = 0; i < n(); ++i) {
      for (int64_t hv = 0; hv < heads(); ++hv) loss += Head(i, hv, o_out, state_out);
    }
    return loss;
  }

  gdn2_args Args(Place& at, const Rows& q_in, const Rows& k_in, const Rows& v_in,
                 const Floats& g_in, const Tensor& erase_in, const Tensor& write_in) const {
    gdn2_args args{};
    args.tokens = all_tokens();
    args.sequences = n();
    args.cu_seqlens = at.In(cu);
    args.key_heads = shape.key_heads;
    args.value_heads = heads();
    args.gate_heads = gate_heads();
    args.key_dim = shape.key_dim;
    args.value_dim = shape.value_dim;
    args.q = q_in.In(at);
    args.k = k_in.In(at);
    args.v = v_in.In(at);
    args.qkv_dtype = shape.dtype;
    args.q_token_stride = q_in.stride();
    args.k_token_stride = k_in.stride();
    args.v_token_stride = v_in.stride();
    args.g = at.In(g_in);
    args.erase = at.In(erase_in);
    args.write = at.In(write_in);
    args.gate_dtype = gate_dtype;
    args.scale = shape.scale;
    args.use_qk_l2norm = shape.normalize;
    args.state_dtype = state_dtype;
    args.o_dtype = o_dtype;
    return args;
  }

  // Outputs and dense final states.
  using Op = gdn_status (*)(const gdn_exec*, const gdn2_args*);
  RuleOutputs Forward(const Backend& backend = kRef, Op prefill = gdn_gdn2_prefill) const {
    const Rows q_in = In(q, keys()), k_in = In(k, keys()), v_in = In(v, values());
    const Floats g_in = ToFloats(g);
    const Tensor erase_in = GateTensor(erase), write_in = GateTensor(write);
    Tensor pool(state_dtype, states());
    for (int64_t i = 0; i < states(); ++i) pool.Set(i, static_cast<float>(state[i]));
    std::vector<int64_t> slots;
    for (int64_t i = 0; i < n(); ++i) slots.push_back(i);
    Rows o(o_dtype, all_tokens(), values(), shape.pad);
    Place at(backend);
    gdn2_args args = Args(at, q_in, k_in, v_in, g_in, erase_in, write_in);
    args.state = at.Out(pool);
    args.state_slot_stride = heads() * head_size();
    args.read_index = args.write_index = at.In(slots);
    args.o = o.Out(at);
    args.o_token_stride = o.stride();
    SetPrefillWorkspace(at, args);
    EXPECT_EQ(at.Call(prefill, args), GDN_OK) << gdn_last_error();
    RuleOutputs out;
    out.o = o.Take(tokens());
    for (int64_t i = 0; i < states(); ++i) out.state.push_back(pool.Get(i));
    return out;
  }

  // With shape.normalize from q_hat, k_hat and rstd formed here in FP64.
  Gdn2Gradients Backward(const Backend& backend = kRef,
                         decltype(&gdn_gdn2_backward) op = gdn_gdn2_backward) const {
    Doubles q_hat = q, k_hat = k;
    Floats q_rstd, k_rstd;
    if (shape.normalize) {
      Normalise(q_hat, q_rstd);
      Normalise(k_hat, k_rstd);
    }
    const Rows q_in = In(q_hat, keys()), k_in = In(k_hat, keys()), v_in = In(v, values());
    const Rows d_o_in = In(d_o, values());
    const Floats g_in = ToFloats(g);
    const Tensor erase_in = GateTensor(erase), write_in = GateTensor(write);
    const Floats state_in = ToFloats(state), d_final_in = ToFloats(d_final);
    Rows d_q(shape.d_dtype, all_tokens(), keys(), shape.pad);
    Rows d_k(shape.d_dtype, all_tokens(), keys(), shape.pad);
    Rows d_v(shape.d_dtype, all_tokens(), values(), shape.pad);
    GuardedFloats d_g(tokens() * gates()), d_erase(tokens() * gates());
    GuardedFloats d_write(tokens() * values()), d_state(states());
    Place at(backend);
    gdn2_backward_args args{};
    args.tokens = all_tokens();
    args.sequences = n();
    args.cu_seqlens = at.In(cu);
    args.key_heads = shape.key_heads;
    args.value_heads = heads();
    args.gate_heads = gate_heads();
    args.key_dim = shape.key_dim;
    args.value_dim = shape.value_dim;
    args.q = q_in.In(at);
    args.k = k_in.In(at);
    args.q_rstd = shape.normalize ? at.In(q_rstd) : nullptr;
    args.k_rstd = shape.normalize ? at.In(k_rstd) : nullptr;
    args.v = v_in.In(at);
    args.qkv_dtype = args.d_o_dtype = shape.dtype;
    args.q_token_stride = q_in.stride();
    args.k_token_stride = k_in.stride();
    args.v_token_stride = v_in.stride();
    args.g = at.In(g_in);
    args.erase = at.In(erase_in);
    args.write = at.In(write_in);
    args.gate_dtype = gate_dtype;
    args.scale = shape.scale;
    args.use_qk_l2norm = shape.normalize;
    args.initial_state = shape.states ? at.In(state_in) : nullptr;
    args.d_o = d_o_in.In(at);
    args.d_o_token_stride = d_o_in.stride();
    args.d_final_state = shape.states ? at.In(d_final_in) : nullptr;
    args.d_q = d_q.Out(at);
    args.d_k = d_k.Out(at);
    args.d_v = d_v.Out(at);
    args.d_qkv_dtype = shape.d_dtype;
    args.d_q_token_stride = d_q.stride();
    args.d_k_token_stride = d_k.stride();
    args.d_v_token_stride = d_v.stride();
    args.d_g = d_g.Out(at);
    args.d_erase = d_erase.Out(at);
    args.d_write = d_write.Out(at);
    args.d_initial_state = d_state.Out(at);
    size_t bytes = 0;
    EXPECT_EQ(gdn_gdn2_backward_workspace(at.exec(), &args, &bytes), GDN_OK);
    at.SetWorkspace(bytes);
    EXPECT_EQ(at.Call(op, args), GDN_OK) << gdn_last_error();
    return {d_q.Take(tokens()),     d_k.Take(tokens()),      d_v.Take(tokens()),
            d_g.Take("d_g"),        d_erase.Take("d_erase"), d_write.Take("d_write"),
            d_state.Take("d_state")};
  }

 private:
  void Normalise(Doubles& x, Floats& rstd) const {
    const auto K = static_cast<size_t>(shape.key_dim);
    for (size_t row = 0; row < x.size() / K; ++row) {
      double sum = 0.0;
      for (size_t i = 0; i < K; ++i) sum += x[row * K + i] * x[row * K + i];
      const double factor = 1.0 / std::sqrt(sum + 1e-6);
      for (size_t i = 0; i < K; ++i) x[row * K + i] *= factor;
      rstd.push_back(static_cast<float>(factor));
    }
  }

  double Head(int64_t i, int64_t hv, Doubles* o_out, Doubles* state_out) const {
    const int64_t K = shape.key_dim, V = shape.value_dim;
    const double scale = shape.scale != 0 ? double{shape.scale} : std::pow(double(K), -0.5);
    const int64_t slot = (i * heads() + hv) * head_size();
    Doubles S(static_cast<size_t>(head_size()));
    for (int64_t a = 0; a < K; ++a) {
      for (int64_t b = 0; b < V; ++b) S[a * V + b] = state[slot + b * K + a];
    }
    double loss = 0.0;
    for (int64_t t = cu[i]; t < cu[i + 1]; ++t) {
      const double* q_row = q.data() + t * keys() + hv / shape.ratio * K;
      const double* k_row = k.data() + t * keys() + hv / shape.ratio * K;
      const int64_t gate = t * gates() + hv / (heads() / gate_heads()) * K;
      double q_norm = 1.0, k_norm = 1.0;
      if (shape.normalize) {
        double qq = 1e-6, kk = 1e-6;
        for (int64_t a = 0; a < K; ++a) qq += q_row[a] * q_row[a], kk += k_row[a] * k_row[a];
        q_norm = std::sqrt(qq), k_norm = std::sqrt(kk);
      }
      for (int64_t b = 0; b < V; ++b) {
        const int64_t at = t * values() + hv * V + b;
        double v_new = write[at] * v[at];
        for (int64_t a = 0; a < K; ++a) {
          S[a * V + b] *= std::exp(g[gate + a]);
          v_new -= erase[gate + a] * k_row[a] / k_norm * S[a * V + b];
        }
        double o = 0.0;
        for (int64_t a = 0; a < K; ++a) {
          S[a * V + b] += k_row[a] / k_norm * v_new;
          o += scale * q_row[a] / q_norm * S[a * V + b];
        }
        if (o_out != nullptr) (*o_out)[at] = o;
        loss += d_o[at] * o;
      }
    }
    for (int64_t a = 0; a < K; ++a) {
      for (int64_t b = 0; b < V; ++b) loss += d_final[slot + b * K + a] * S[a * V + b];
    }
    if (state_out != nullptr) {
      state_out->resize(static_cast<size_t>(states()));
      for (int64_t a = 0; a < K; ++a) {
        for (int64_t b = 0; b < V; ++b) (*state_out)[slot + b * K + a] = S[a * V + b];
      }
    }
    return loss;
  }
};

// Tokens [begin, end) of a sequence, alone.
inline Gdn2Problem PartOf(const Gdn2Problem& p, int64_t sequence, int64_t begin, int64_t end) {
  Gdn2Problem one = p;
  one.shape.lengths = {static_cast<int32_t>(end - begin)};
  one.cu = {0, static_cast<int32_t>(end - begin)};
  const auto cut = [&](const Doubles& all, int64_t width) {
    return Doubles(all.begin() + (p.cu[sequence] + begin) * width,
                   all.begin() + (p.cu[sequence] + end) * width);
  };
  one.q = cut(p.q, p.keys());
  one.k = cut(p.k, p.keys());
  one.v = cut(p.v, p.values());
  one.g = cut(p.g, p.gates());
  one.erase = cut(p.erase, p.gates());
  one.write = cut(p.write, p.values());
  const int64_t slot = p.heads() * p.head_size();
  one.state.assign(p.state.begin() + sequence * slot, p.state.begin() + (sequence + 1) * slot);
  return one;
}

}  // namespace gdn::kernels

#endif  // KERNELS_GDN2_TEST_UTIL_H_
