// A seeded call of the fused decode step on host memory, for the tests of every back end.
#ifndef KERNELS_FUSED_DECODE_TEST_UTIL_H_
#define KERNELS_FUSED_DECODE_TEST_UTIL_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <string>
#include <vector>

#include "gdn/kernels/fused_decode.h"
#include "kernels/recurrence_test_util.h"

namespace gdn::kernels {

struct FusedShape {
  std::string name;
  int64_t rows = 3;
  int64_t tokens = 1;
  int64_t key_heads = 2;
  int64_t ratio = 2;
  int64_t key_dim = 128;
  int64_t value_dim = 128;
  int64_t conv_width = 4;
  gdn_dtype dtype = GDN_BF16;
  gdn_dtype state_dtype = GDN_F32;
  // Rows whose index, modulo 5, is 1 fork (read != write), 2 are fresh, 3 are padding.
  bool special_rows = true;
  int64_t spare_slots = 3;
  int64_t state_pad = 0;  // Elements between slots.
  int64_t conv_pad = 0;
  int64_t x_pad = 6;
  int64_t y_pad = 4;
  float beta_scale = 1.0f;
  float scale = 0.0f;
  int32_t normalize = 1;
  int32_t zero_centered = 0;
  gdn_gate_activation activation = GDN_GATE_SILU;
  int32_t round_o = 0;
  int32_t round_before_gate = 0;
  float a_low = -2.0f;  // Range of a and b.
  float a_high = 2.0f;
  float x_gain = 1.0f;  // Standard deviation of q, k, v, z.
  uint32_t seed = 1;

  int64_t value_heads() const { return key_heads * ratio; }
  int64_t channels() const { return 2 * key_heads * key_dim + value_heads() * value_dim; }
  int64_t values() const { return value_heads() * value_dim; }
  int64_t x_stride() const { return channels() + values() + 2 * value_heads() + x_pad; }
  int64_t y_stride() const { return values() + y_pad; }
  int64_t state_stride() const { return values() * key_dim + state_pad; }
  int64_t conv_stride() const { return (conv_width - 1) * channels() + conv_pad; }
  int64_t slots() const { return 2 * rows + spare_slots; }
};

// Everything that is not an input is poisoned: y, the gaps between slots, slots nobody reads.
struct FusedCall {
  explicit FusedCall(const FusedShape& s)
      : shape(s),
        x(s.dtype, s.rows * s.tokens * s.x_stride()),
        conv_weight(s.channels() * s.conv_width),
        a_log(s.value_heads()),
        dt_bias(s.value_heads()),
        norm_weight(s.value_dim),
        state(s.state_dtype, s.slots() * s.state_stride()),
        conv_state(s.dtype, s.slots() * s.conv_stride()),
        read(s.rows),
        write(s.rows),
        fresh(s.rows, 0),
        y(s.dtype, s.rows * s.tokens * s.y_stride()) {
    Random random(s.seed);
    for (int64_t line = 0; line < s.rows * s.tokens; ++line) {
      for (int64_t i = 0; i < s.channels() + s.values(); ++i) {
        x.Set(line * s.x_stride() + i, s.x_gain * random.Normal());
      }
      for (int64_t i = 0; i < 2 * s.value_heads(); ++i) {
        x.Set(line * s.x_stride() + s.channels() + s.values() + i,
              random.Uniform(s.a_low, s.a_high));
      }
    }
    for (float& w : conv_weight) w = 0.5f * random.Normal();
    for (float& v : a_log) v = std::log(random.Uniform(1.0f, 16.0f));
    for (float& v : dt_bias) v = random.Uniform(-6.0f, -2.0f);
    for (float& w : norm_weight) w = random.Uniform(-1.0f, 1.0f) + (s.zero_centered ? 0.0f : 1.0f);
    std::vector<int64_t> order(s.slots());
    std::iota(order.begin(), order.end(), 0);
    for (int64_t i = s.slots() - 1; i > 0; --i) {
      std::swap(order[i], order[random.Integer(static_cast<uint32_t>(i + 1))]);
    }
    for (int64_t i = 0; i < s.rows; ++i) {
      read[i] = write[i] = order[2 * i];
      if (!s.special_rows) continue;
      if (i % 5 == 1) write[i] = order[2 * i + 1];
      if (i % 5 == 2) fresh[i] = 1;
      if (i % 5 == 3) (i % 2 == 0 ? read : write)[i] = -1 - i;
    }
    for (int64_t i = 0; i < s.rows; ++i) {
      if (Padding(i) || fresh[i] != 0) continue;
      for (int64_t j = 0; j < s.values() * s.key_dim; ++j) {
        state.Set(read[i] * s.state_stride() + j, 0.3f * random.Normal());
      }
      for (int64_t j = 0; j < (s.conv_width - 1) * s.channels(); ++j) {
        conv_state.Set(read[i] * s.conv_stride() + j, s.x_gain * random.Normal());
      }
    }
  }

  bool Padding(int64_t row) const { return read[row] < 0 || write[row] < 0; }

  gdn_fused_decode_args Args() {
    const FusedShape& s = shape;
    gdn_fused_decode_args args{};
    args.rows = s.rows;
    args.tokens = s.tokens;
    args.key_heads = s.key_heads;
    args.value_heads = s.value_heads();
    args.key_dim = s.key_dim;
    args.value_dim = s.value_dim;
    args.conv_width = s.conv_width;
    args.x = x.data();
    args.dtype = s.dtype;
    args.x_token_stride = s.x_stride();
    args.q_offset = 0;
    args.k_offset = s.key_heads * s.key_dim;
    args.v_offset = 2 * s.key_heads * s.key_dim;
    args.z_offset = s.channels();
    args.b_offset = s.channels() + s.values();
    args.a_offset = args.b_offset + s.value_heads();
    args.conv_weight = conv_weight.data();
    args.a_log = a_log.data();
    args.dt_bias = dt_bias.data();
    args.beta_scale = s.beta_scale;
    args.scale = s.scale;
    args.use_qk_l2norm = s.normalize;
    args.norm_weight = norm_weight.data();
    args.zero_centered = s.zero_centered;
    args.activation = s.activation;
    args.round_o = s.round_o;
    args.round_before_gate = s.round_before_gate;
    args.eps = 1e-6f;
    args.state = state.data();
    args.state_dtype = s.state_dtype;
    args.state_slot_stride = s.state_stride();
    args.conv_state = conv_state.data();
    args.conv_slot_stride = s.conv_stride();
    args.read_index = read.data();
    args.write_index = write.data();
    args.fresh = fresh.data();
    args.y = y.data();
    args.y_token_stride = s.y_stride();
    return args;
  }

  FusedShape shape;
  Tensor x;
  std::vector<float> conv_weight;
  std::vector<float> a_log;
  std::vector<float> dt_bias;
  std::vector<float> norm_weight;
  Tensor state;
  Tensor conv_state;
  std::vector<int64_t> read;
  std::vector<int64_t> write;
  std::vector<uint8_t> fresh;
  Tensor y;
};

// Relative L2 errors of a call's results, and whether everything that should keep its bits did.
struct FusedErrors {
  double y = 0.0;
  double state = 0.0;
  int64_t padding_not_zero = 0;  // Elements of the output rows of padding rows.
  int64_t gaps_touched = 0;      // Elements of y between the lines.
  int64_t slots_touched = 0;     // Slots nobody writes whose bits changed, of either pool.
  int64_t conv_differs = 0;      // Bytes of written convolution slots, which are copies of inputs.
  int64_t pads_touched = 0;      // Pads between slots whose bits changed.
};

inline FusedErrors Compare(const FusedCall& before, const FusedCall& got,
                           const FusedCall& expected) {
  const FusedShape& s = before.shape;
  FusedErrors errors;
  RelativeL2 y_error;
  RelativeL2 state_error;
  const int64_t lines = s.rows * s.tokens;
  for (int64_t line = 0; line < lines; ++line) {
    for (int64_t i = 0; i < s.values(); ++i) {
      const int64_t at = line * s.y_stride() + i;
      y_error.Add(got.y.Get(at), expected.y.Get(at));
      if (before.Padding(line / s.tokens) &&
          got.y.Slice(at, at + 1) != std::vector<uint8_t>(SizeOf(s.dtype), 0)) {
        ++errors.padding_not_zero;
      }
    }
    const int64_t end = (line + 1) * s.y_stride();
    if (got.y.Slice(end - s.y_pad, end) != before.y.Slice(end - s.y_pad, end)) {
      ++errors.gaps_touched;
    }
  }
  std::vector<bool> written(s.slots(), false);
  for (int64_t i = 0; i < s.rows; ++i) {
    if (!before.Padding(i)) written[before.write[i]] = true;
  }
  const int64_t state_size = s.values() * s.key_dim;
  const int64_t conv_size = (s.conv_width - 1) * s.channels();
  for (int64_t slot = 0; slot < s.slots(); ++slot) {
    const int64_t state0 = slot * s.state_stride();
    const int64_t conv0 = slot * s.conv_stride();
    const auto same = [&](const Tensor& a, const Tensor& b, int64_t begin, int64_t end) {
      return a.Slice(begin, end) == b.Slice(begin, end);
    };
    if (!same(got.state, before.state, state0 + state_size, state0 + s.state_stride()) ||
        !same(got.conv_state, before.conv_state, conv0 + conv_size, conv0 + s.conv_stride())) {
      ++errors.pads_touched;
    }
    if (!written[slot]) {
      if (!same(got.state, before.state, state0, state0 + state_size) ||
          !same(got.conv_state, before.conv_state, conv0, conv0 + conv_size)) {
        ++errors.slots_touched;
      }
      continue;
    }
    for (int64_t i = 0; i < state_size; ++i) {
      state_error.Add(got.state.Get(state0 + i), expected.state.Get(state0 + i));
    }
    if (!same(got.conv_state, expected.conv_state, conv0, conv0 + conv_size)) {
      ++errors.conv_differs;
    }
  }
  errors.y = y_error.value();
  errors.state = state_error.value();
  return errors;
}

}  // namespace gdn::kernels

#endif  // KERNELS_FUSED_DECODE_TEST_UTIL_H_
