// The served ops of the delta rule on the data of a training problem.
#ifndef KERNELS_RULE_SLOTS_TEST_UTIL_H_
#define KERNELS_RULE_SLOTS_TEST_UTIL_H_

#include <cstdint>
#include <vector>

#include "gdn/kernels/delta_rule.h"
#include "gtest/gtest.h"
#include "kernels/delta_rule_gradient_test_util.h"

namespace gdn::kernels {

// Prefill or step, in place on FP32 slots in order; a step takes one token of each sequence. o is
// FP32.
inline RuleOutputs RunOnSlots(const RuleProblem& p, const Backend& backend,
                              decltype(&gdn_delta_rule_prefill) op = gdn_delta_rule_prefill) {
  const RuleShape& shape = p.shape;
  const Rows q = p.In(p.q, p.keys()), k = p.In(p.k, p.keys()), v = p.In(p.v, p.values());
  const Floats g = ToFloats(p.g), beta = ToFloats(p.beta);
  Floats state = ToFloats(p.state);
  std::vector<int64_t> slots;
  for (int64_t i = 0; i < p.n(); ++i) slots.push_back(i);
  Rows o(GDN_F32, p.all_tokens(), p.values(), shape.pad);
  Place at(backend);
  gdn_delta_rule_args args{};
  args.sequences = p.n();
  args.cu_seqlens = at.In(p.cu);
  args.key_heads = shape.key_heads;
  args.value_heads = p.heads();
  args.key_dim = shape.key_dim;
  args.value_dim = shape.value_dim;
  args.q = q.In(at);
  args.k = k.In(at);
  args.v = v.In(at);
  args.qkv_dtype = shape.dtype;
  args.q_token_stride = q.stride();
  args.k_token_stride = k.stride();
  args.v_token_stride = v.stride();
  args.g = at.In(g);
  args.beta = at.In(beta);
  args.scale = shape.scale;
  args.use_qk_l2norm = shape.normalize;
  args.state = at.Out(state.data(), state.size());
  args.state_slot_stride = p.heads() * shape.key_dim * shape.value_dim;
  args.read_index = args.write_index = at.In(slots);
  args.o = o.Out(at);
  args.o_token_stride = o.stride();
  size_t prefill = 0, step = 0;  // Both fit, whichever runs.
  EXPECT_EQ(gdn_delta_rule_prefill_workspace(at.exec(), &args, &prefill), GDN_OK);
  EXPECT_EQ(gdn_delta_rule_step_workspace(at.exec(), &args, &step), GDN_OK);
  at.SetWorkspace(prefill > step ? prefill : step);
  EXPECT_EQ(at.Call(op, args), GDN_OK) << gdn_last_error();
  return {o.Take(p.tokens()), state, {}, {}, {}, {}};
}

// A sequence's tokens [begin, end), alone, from the given state.
inline RuleProblem PartOf(const RuleProblem& p, int64_t sequence, int64_t begin, int64_t end,
                          const Doubles& state) {
  RuleProblem part = p;
  part.shape.lengths = {static_cast<int32_t>(end - begin)};
  part.cu = {0, part.shape.lengths[0]};
  const auto cut = [&](Doubles RuleProblem::*field, int64_t width) {
    const auto first = (p.*field).begin() + (p.cu[sequence] + begin) * width;
    (part.*field).assign(first, first + (end - begin) * width);
  };
  for (auto field : {&RuleProblem::q, &RuleProblem::k}) cut(field, p.keys());
  for (auto field : {&RuleProblem::v, &RuleProblem::d_o}) cut(field, p.values());
  for (auto field : {&RuleProblem::g, &RuleProblem::beta}) cut(field, p.heads());
  part.state = state;
  part.d_final.resize(state.size());
  return part;
}

}  // namespace gdn::kernels

#endif  // KERNELS_RULE_SLOTS_TEST_UTIL_H_
