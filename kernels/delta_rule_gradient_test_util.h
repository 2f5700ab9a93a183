// A problem of the delta rule's training ops with all its data, for the tests.
#ifndef KERNELS_DELTA_RULE_GRADIENT_TEST_UTIL_H_
#define KERNELS_DELTA_RULE_GRADIENT_TEST_UTIL_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "gdn/kernels/delta_rule_backward.h"
#include "gdn/kernels/delta_rule_forward.h"
#include "gtest/gtest.h"
#include "kernels/gradient_test_util.h"
#include "kernels/place_test_util.h"

namespace gdn::kernels {

struct RuleShape {
  std::vector<int32_t> lengths = {3, 0, 5, 1};
  int64_t key_heads = 2;
  int64_t ratio = 2;
  int64_t key_dim = 5;
  int64_t value_dim = 3;
  bool normalize = true;
  bool states = true;       // an initial state comes in and a gradient of the final one
  bool final_state = true;  // is wanted
  float scale = 0.0f;
  float masked = 0.3f;        // the share of gates that are exactly 0
  gdn_dtype dtype = GDN_F32;  // q, k, v, d_o
  gdn_dtype d_dtype = GDN_F32;
  int64_t pad = 2;  // added to every token stride
  int64_t trailing_tokens = 1;
};

// Dense tensors with canaries between their rows, before the first and behind the last.
class Rows {
 public:
  Rows(gdn_dtype dtype, int64_t rows, int64_t width, int64_t pad)
      : guard_(static_cast<int64_t>(kGuardBytes) / SizeOf(dtype)),
        tensor_(dtype, rows * (width + pad) + 2 * guard_),
        width_(width),
        stride_(width + pad) {}
  Rows(gdn_dtype dtype, int64_t rows, int64_t width, int64_t pad, const Doubles& dense)
      : Rows(dtype, rows, width, pad) {
    for (size_t i = 0; i < dense.size(); ++i) {
      const auto at = static_cast<int64_t>(i);
      tensor_.Set(guard_ + at / width * stride_ + at % width, static_cast<float>(dense[i]));
    }
  }
  int64_t stride() const { return stride_; }
  const void* In(Place& place) const {
    return static_cast<const char*>(place.In(tensor_)) + kGuardBytes;
  }
  void* Out(Place& place) { return static_cast<char*>(place.Out(tensor_)) + kGuardBytes; }
  // The first `rows` rows; complains where anything else is no longer poisoned.
  Floats Take(int64_t rows) const {
    Floats dense;
    for (int64_t i = 0; i < tensor_.size(); ++i) {
      const int64_t at = i - guard_;
      if (at >= 0 && at / stride_ < rows && at % stride_ < width_) {
        dense.push_back(tensor_.Get(i));
      } else if (!std::isnan(tensor_.Get(i))) {
        ADD_FAILURE() << "written outside the rows, element " << at;
      }
    }
    return dense;
  }

 private:
  int64_t guard_;
  Tensor tensor_;
  int64_t width_, stride_;
};

struct RuleGradients {
  Floats q, k, v, g, beta, state;
};
struct RuleOutputs {
  Floats o, state, q_hat, k_hat, q_rstd, k_rstd;
};

struct RuleProblem {
  RuleShape shape;
  std::vector<int32_t> cu = {0};
  Doubles q, k, v, g, beta, state, d_o, d_final;  // dense

  RuleProblem(const RuleShape& s, uint32_t seed) : shape(s) {
    Random random(seed);
    for (int32_t length : s.lengths) cu.push_back(cu.back() + length);
    q = RandomDoubles(random, tokens() * keys(), -1, 1.5f);
    k = RandomDoubles(random, tokens() * keys(), -1, 1.5f);
    if (!s.normalize) {
      for (double& value : k) value = static_cast<float>(value * 0.5);
    }
    v = RandomDoubles(random, tokens() * values(), -1, 1);
    g = RandomDoubles(random, tokens() * heads(), -1.5f, -0.01f);
    for (double& value : g) value = random.Uniform(0, 1) < s.masked ? 0.0 : value;
    beta = RandomDoubles(random, tokens() * heads(), 0.05f, 1.0f);
    state = RandomDoubles(random, states(), -1, 1);
    d_o = RandomDoubles(random, tokens() * values(), -1, 1);
    d_final = RandomDoubles(random, states(), -1, 1);
    if (!s.states) std::fill(state.begin(), state.end(), 0.0);
    if (!s.states) std::fill(d_final.begin(), d_final.end(), 0.0);
  }
  int64_t n() const { return static_cast<int64_t>(shape.lengths.size()); }
  int64_t tokens() const { return cu.back(); }
  int64_t heads() const { return shape.key_heads * shape.ratio; }
  int64_t keys() const { return shape.key_heads * shape.key_dim; }
  int64_t values() const { return heads() * shape.value_dim; }
  int64_t states() const { return n() * heads() * shape.value_dim * shape.key_dim; }
  int64_t all_tokens() const { return tokens() + shape.trailing_tokens; }
  Rows In(const Doubles& dense, int64_t width) const {
    return {shape.dtype, all_tokens(), width, shape.pad, dense};
  }

  RuleOutputs Forward(const Backend& backend = kRef,
                      decltype(&gdn_delta_rule_forward) op = gdn_delta_rule_forward) const {
    const Rows q_in = In(q, keys()), k_in = In(k, keys()), v_in = In(v, values());
    const Floats g_in = ToFloats(g), beta_in = ToFloats(beta), state_in = ToFloats(state);
    Rows o(GDN_F32, all_tokens(), values(), shape.pad);
    Rows q_hat(shape.dtype, all_tokens(), keys(), 0), k_hat(shape.dtype, all_tokens(), keys(), 0);
    GuardedFloats q_rstd(tokens() * shape.key_heads), k_rstd(tokens() * shape.key_heads);
    GuardedFloats state_out(states());
    Place at(backend);
    gdn_delta_rule_forward_args args{};
    args.sequences = n();
    args.cu_seqlens = at.In(cu);
    args.key_heads = shape.key_heads;
    args.value_heads = heads();
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
    args.beta = at.In(beta_in);
    args.scale = shape.scale;
    args.use_qk_l2norm = shape.normalize;
    args.initial_state = shape.states ? at.In(state_in) : nullptr;
    args.o = o.Out(at);
    args.o_dtype = GDN_F32;
    args.o_token_stride = o.stride();
    args.final_state = shape.final_state ? state_out.Out(at) : nullptr;
    if (shape.normalize) {
      args.q_hat = q_hat.Out(at);
      args.k_hat = k_hat.Out(at);
      args.q_rstd = q_rstd.Out(at);
      args.k_rstd = k_rstd.Out(at);
    }
    size_t bytes = 0;
    EXPECT_EQ(gdn_delta_rule_forward_workspace(at.exec(), &args, &bytes), GDN_OK);
    at.SetWorkspace(bytes);
    EXPECT_EQ(at.Call(op, args), GDN_OK) << gdn_last_error();
    return {o.Take(tokens()),     state_out.Take("final_state"), q_hat.Take(tokens()),
            k_hat.Take(tokens()), q_rstd.Take("q_rstd"),         k_rstd.Take("k_rstd")};
  }

  // From the forward's own saved tensors.
  RuleGradients Backward(const Backend& backend = kRef,
                         decltype(&gdn_delta_rule_backward) op = gdn_delta_rule_backward) const {
    const RuleOutputs saved = Forward();
    const auto doubles = [](const Floats& values) { return Doubles(values.begin(), values.end()); };
    const Rows q_in = In(shape.normalize ? doubles(saved.q_hat) : q, keys());
    const Rows k_in = In(shape.normalize ? doubles(saved.k_hat) : k, keys());
    const Rows v_in = In(v, values()), d_o_in = In(d_o, values());
    const Floats g_in = ToFloats(g), beta_in = ToFloats(beta), state_in = ToFloats(state);
    const Floats d_final_in = ToFloats(d_final);
    Rows d_q(shape.d_dtype, all_tokens(), keys(), shape.pad);
    Rows d_k(shape.d_dtype, all_tokens(), keys(), shape.pad);
    Rows d_v(shape.d_dtype, all_tokens(), values(), shape.pad);
    GuardedFloats d_g(tokens() * heads()), d_beta(tokens() * heads()), d_state(states());
    Place at(backend);
    gdn_delta_rule_backward_args args{};
    args.tokens = all_tokens();
    args.sequences = n();
    args.cu_seqlens = at.In(cu);
    args.key_heads = shape.key_heads;
    args.value_heads = heads();
    args.key_dim = shape.key_dim;
    args.value_dim = shape.value_dim;
    args.q = q_in.In(at);
    args.k = k_in.In(at);
    args.q_rstd = shape.normalize ? at.In(saved.q_rstd) : nullptr;
    args.k_rstd = shape.normalize ? at.In(saved.k_rstd) : nullptr;
    args.v = v_in.In(at);
    args.qkv_dtype = args.d_o_dtype = shape.dtype;
    args.q_token_stride = q_in.stride();
    args.k_token_stride = k_in.stride();
    args.v_token_stride = v_in.stride();
    args.g = at.In(g_in);
    args.beta = at.In(beta_in);
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
    args.d_beta = d_beta.Out(at);
    args.d_initial_state = d_state.Out(at);
    size_t bytes = 0;
    EXPECT_EQ(gdn_delta_rule_backward_workspace(at.exec(), &args, &bytes), GDN_OK);
    at.SetWorkspace(bytes);
    EXPECT_EQ(at.Call(op, args), GDN_OK) << gdn_last_error();
    return {d_q.Take(tokens()), d_k.Take(tokens()),    d_v.Take(tokens()),
            d_g.Take("d_g"),    d_beta.Take("d_beta"), d_state.Take("d_initial_state")};
  }
};

}  // namespace gdn::kernels

#endif  // KERNELS_DELTA_RULE_GRADIENT_TEST_UTIL_H_
