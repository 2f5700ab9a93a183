// A delta-rule call with all its buffers, for the tests.
#ifndef KERNELS_DELTA_RULE_TEST_UTIL_H_
#define KERNELS_DELTA_RULE_TEST_UTIL_H_

#include <algorithm>
#include <cstdint>
#include <vector>

#include "gdn/kernels/delta_rule.h"
#include "gtest/gtest.h"
#include "kernels/recurrence_test_util.h"

namespace gdn::kernels {

struct DeltaShape {
  std::vector<int32_t> lengths = {1};  // tokens of each sequence; a step has one each
  int64_t key_heads = 2;
  int64_t ratio = 2;
  int64_t key_dim = 128;
  int64_t value_dim = 128;
  gdn_dtype qkv = GDN_F32;
  gdn_dtype state = GDN_F32;
  gdn_dtype o = GDN_F32;
  bool normalize = true;
  float scale = 0.0f;
  float mean_decay = 0.1f;  // g is uniform in [-2 mean_decay, 0]
  float max_beta = 1.0f;
  int64_t trailing_tokens = 0;
  int64_t stride_pad = 0;  // elements added to every token stride and to the slot stride
};

// Buffers by value: a copy of a DeltaCall is an independent call.
struct DeltaCall {
  DeltaShape shape;
  std::vector<int32_t> cu_seqlens;
  Tensor q, k, v, o, state;
  std::vector<float> g, beta;
  std::vector<int64_t> read, write;
  std::vector<uint8_t> fresh;
  int64_t slots = 0;

  int64_t value_heads() const { return shape.key_heads * shape.ratio; }
  int64_t tokens() const { return cu_seqlens.back(); }
  int64_t head_size() const { return shape.key_dim * shape.value_dim; }
  int64_t slot_stride() const { return value_heads() * head_size() + shape.stride_pad; }
  int64_t key_stride() const { return shape.key_heads * shape.key_dim + shape.stride_pad; }
  int64_t value_stride() const { return value_heads() * shape.value_dim + shape.stride_pad; }

  // Slots 1, 3, 5, ... are the sequences', in shuffled order; those between are canaries.
  DeltaCall(const DeltaShape& s, uint32_t seed) : shape(s) {
    Random random(seed);
    cu_seqlens.push_back(0);
    for (int32_t length : s.lengths) cu_seqlens.push_back(cu_seqlens.back() + length);
    const auto n = static_cast<int64_t>(s.lengths.size());
    const int64_t all = tokens() + s.trailing_tokens;
    q = Tensor(s.qkv, all * key_stride());
    k = Tensor(s.qkv, all * key_stride());
    v = Tensor(s.qkv, all * value_stride());
    o = Tensor(s.o, all * value_stride());
    for (int64_t t = 0; t < all; ++t) {
      for (int64_t i = 0; i < s.key_heads * s.key_dim; ++i) {
        // Not centred, as after SiLU: neighbouring keys are far from orthogonal.
        const float size = s.normalize ? 1.0f : 1.0f / std::sqrt(static_cast<float>(s.key_dim));
        q.Set(t * key_stride() + i, size * (random.Normal() + 0.3f));
        k.Set(t * key_stride() + i, size * 0.9f * (random.Normal() + 0.3f));
      }
      for (int64_t i = 0; i < value_heads() * s.value_dim; ++i) {
        v.Set(t * value_stride() + i, random.Normal());
      }
    }
    for (int64_t i = 0; i < all * value_heads(); ++i) {
      g.push_back(-random.Uniform(0.0f, 2.0f * s.mean_decay));
      beta.push_back(random.Uniform(0.0f, s.max_beta));
    }
    slots = 2 * n + 1;
    state = Tensor(s.state, slots * slot_stride());
    for (int64_t i = 0; i < n; ++i) read.push_back(2 * i + 1);
    for (int64_t i = n - 1; i > 0; --i) {
      std::swap(read[i], read[random.Integer(static_cast<uint32_t>(i + 1))]);
    }
    for (int64_t slot : read) {
      for (int64_t i = 0; i < value_heads() * head_size(); ++i) {
        state.Set(slot * slot_stride() + i, 0.2f * random.Normal());
      }
    }
    write = read;
    fresh.assign(static_cast<size_t>(n), 0);
  }

  gdn_delta_rule_args Args() {
    gdn_delta_rule_args args{};
    args.sequences = static_cast<int64_t>(read.size());
    args.cu_seqlens = cu_seqlens.data();
    args.key_heads = shape.key_heads;
    args.value_heads = value_heads();
    args.key_dim = shape.key_dim;
    args.value_dim = shape.value_dim;
    args.q = q.data();
    args.k = k.data();
    args.v = v.data();
    args.qkv_dtype = shape.qkv;
    args.q_token_stride = args.k_token_stride = key_stride();
    args.v_token_stride = args.o_token_stride = value_stride();
    args.g = g.data();
    args.beta = beta.data();
    args.scale = shape.scale;
    args.use_qk_l2norm = shape.normalize;
    args.state = state.data();
    args.state_dtype = shape.state;
    args.state_slot_stride = slot_stride();
    args.read_index = read.data();
    args.write_index = write.data();
    args.fresh = fresh.data();
    args.o = o.data();
    args.o_dtype = shape.o;
    return args;
  }

  // Tokens [begin, end) of sequence i alone, as a call of one sequence; state and outputs stay
  // here.
  gdn_delta_rule_args ArgsOf(int64_t i, int32_t begin, int32_t end, std::vector<int32_t>* cu) {
    gdn_delta_rule_args args = Args();
    const int64_t t = cu_seqlens[i] + begin;
    *cu = {0, end - begin};
    args.sequences = 1;
    args.cu_seqlens = cu->data();
    args.q = Advance(q, t * key_stride());
    args.k = Advance(k, t * key_stride());
    args.v = Advance(v, t * value_stride());
    args.o = Advance(o, t * value_stride());
    args.g = g.data() + t * value_heads();
    args.beta = beta.data() + t * value_heads();
    args.read_index = read.data() + i;
    args.write_index = write.data() + i;
    args.fresh = fresh.data() + i;
    return args;
  }

  static void* Advance(Tensor& tensor, int64_t elements) {
    return static_cast<uint8_t*>(tensor.data()) + elements * SizeOf(tensor.dtype());
  }
};

enum class DeltaOp { kStep, kPrefill };

inline gdn_status RunDelta(DeltaOp op, Execution& execution, const gdn_delta_rule_args& args) {
  size_t bytes = 0;
  const bool step = op == DeltaOp::kStep;
  const gdn_status status = step
                                ? gdn_delta_rule_step_workspace(execution.exec(), &args, &bytes)
                                : gdn_delta_rule_prefill_workspace(execution.exec(), &args, &bytes);
  if (status != GDN_OK) return status;
  execution.SetWorkspace(bytes);
  return step ? gdn_delta_rule_step(execution.exec(), &args)
              : gdn_delta_rule_prefill(execution.exec(), &args);
}

inline DeltaCall RunDelta(DeltaOp op, const Backend& backend, DeltaCall call) {
  Execution execution(backend);
  const gdn_delta_rule_args args = call.Args();
  EXPECT_EQ(RunDelta(op, execution, args), GDN_OK) << gdn_last_error();
  return call;
}

inline double OutputError(const DeltaCall& got, const DeltaCall& expected) {
  RelativeL2 error;
  for (int64_t t = 0; t < got.tokens(); ++t) {
    for (int64_t i = 0; i < got.value_heads() * got.shape.value_dim; ++i) {
      error.Add(got.o.Get(t * got.value_stride() + i), expected.o.Get(t * got.value_stride() + i));
    }
  }
  return error.value();
}

// Over the written slots.
inline double StateError(const DeltaCall& got, const DeltaCall& expected) {
  RelativeL2 error;
  for (int64_t slot : got.write) {
    for (int64_t i = 0; slot >= 0 && i < got.value_heads() * got.head_size(); ++i) {
      const int64_t at = slot * got.slot_stride() + i;
      error.Add(got.state.Get(at), expected.state.Get(at));
    }
  }
  return error.value();
}

// Slots that no sequence writes, the padding behind each slot and the outputs behind the last token
// and between rows are what they were.
inline void ExpectRestUntouched(const DeltaCall& after, const DeltaCall& before) {
  for (int64_t slot = 0; slot < after.slots; ++slot) {
    const bool written =
        std::find(after.write.begin(), after.write.end(), slot) != after.write.end();
    const int64_t begin =
        slot * after.slot_stride() + (written ? after.value_heads() * after.head_size() : 0);
    const int64_t end = (slot + 1) * after.slot_stride();
    EXPECT_EQ(after.state.Slice(begin, end), before.state.Slice(begin, end)) << "slot " << slot;
  }
  const int64_t row = after.value_heads() * after.shape.value_dim;
  for (int64_t t = 0; t < after.tokens() + after.shape.trailing_tokens; ++t) {
    const int64_t begin = t * after.value_stride() + (t < after.tokens() ? row : 0);
    const int64_t end = (t + 1) * after.value_stride();
    EXPECT_EQ(after.o.Slice(begin, end), before.o.Slice(begin, end)) << "token " << t;
  }
}

}  // namespace gdn::kernels

#endif  // KERNELS_DELTA_RULE_TEST_UTIL_H_
