// The rule's and GDN2's ops on a GPU: the same finite bits again and again beside work that takes
// turns on the device's memory and on its multiprocessors, and the same bits whatever the strides.
#include <cuda_runtime_api.h>

#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

#include "gdn/kernels/l2_norm.h"
#include "gtest/gtest.h"
#include "kernels/cuda/cuda_test_util.h"
#include "kernels/gdn2_gates_test_util.h"
#include "kernels/gdn2_test_util.h"
#include "kernels/rule_slots_test_util.h"

namespace gdn::kernels {
namespace {

const Backend kCuda{"cuda", GDN_BACKEND_CUDA, 0};

// What a call writes, on the device.
struct Output {
  void* data;
  int64_t bytes;
};
int64_t TokensOf(const int32_t* cu_seqlens, int64_t sequences) {
  int32_t tokens = 0;
  Must(cudaMemcpy(&tokens, cu_seqlens + sequences, sizeof(tokens), cudaMemcpyDeviceToHost));
  return tokens;
}
std::vector<Output> OutputsOf(const gdn_delta_rule_args& a) {
  const int64_t tokens =
      a.cu_seqlens != nullptr ? TokensOf(a.cu_seqlens, a.sequences) : a.sequences;
  return {{a.o, tokens * a.o_token_stride * SizeOf(a.o_dtype)},
          {a.state, a.sequences * a.state_slot_stride * SizeOf(a.state_dtype)}};
}
std::vector<Output> OutputsOf(const gdn2_args& a) {
  return {{a.o, a.tokens * a.o_token_stride * SizeOf(a.o_dtype)},
          {a.state, a.sequences * a.state_slot_stride * SizeOf(a.state_dtype)}};
}
std::vector<Output> OutputsOf(const gdn_delta_rule_forward_args& a) {
  const int64_t tokens = TokensOf(a.cu_seqlens, a.sequences);
  const int64_t keys = tokens * a.key_heads * a.key_dim * SizeOf(a.qkv_dtype);
  const int64_t state = a.sequences * a.value_heads * a.value_dim * a.key_dim * 4;
  return {{a.o, tokens * a.o_token_stride * SizeOf(a.o_dtype)},
          {a.final_state, state},
          {a.q_hat, keys},
          {a.k_hat, keys},
          {a.q_rstd, tokens * a.key_heads * 4},
          {a.k_rstd, tokens * a.key_heads * 4}};
}
template <typename Args>
std::vector<Output> GradientsOf(const Args& a) {
  const int64_t element = SizeOf(a.d_qkv_dtype);
  return {{a.d_q, a.tokens * a.d_q_token_stride * element},
          {a.d_k, a.tokens * a.d_k_token_stride * element},
          {a.d_v, a.tokens * a.d_v_token_stride * element},
          {a.d_initial_state, a.sequences * a.value_heads * a.value_dim * a.key_dim * 4}};
}
std::vector<Output> OutputsOf(const gdn_delta_rule_backward_args& a) {
  std::vector<Output> all = GradientsOf(a);
  const int64_t gates = TokensOf(a.cu_seqlens, a.sequences) * a.value_heads * 4;
  all.push_back({a.d_g, gates});
  all.push_back({a.d_beta, gates});
  return all;
}
std::vector<Output> OutputsOf(const gdn2_backward_args& a) {
  std::vector<Output> all = GradientsOf(a);
  const int64_t tokens = TokensOf(a.cu_seqlens, a.sequences);
  all.push_back({a.d_g, tokens * a.gate_heads * a.key_dim * 4});
  all.push_back({a.d_erase, tokens * a.gate_heads * a.key_dim * 4});
  all.push_back({a.d_write, tokens * a.value_heads * a.value_dim * 4});
  return all;
}
std::vector<Output> OutputsOf(const gdn2_gates_args& a) {
  const int64_t keys = a.tokens * a.gate_heads * a.key_dim;
  return {{a.g, keys * 4},
          {a.erase, keys * SizeOf(a.gate_dtype)},
          {a.write, a.tokens * a.write_width * SizeOf(a.gate_dtype)}};
}
std::vector<Output> OutputsOf(const gdn2_gates_backward_args& a) {
  const int64_t element = SizeOf(a.forward.fbw_dtype);
  const int64_t channels = a.forward.gate_heads * a.forward.key_dim;
  return {{a.d_f, a.forward.tokens * channels * element},
          {a.d_b, a.forward.tokens * channels * element},
          {a.d_w, a.forward.tokens * a.forward.write_width * element},
          {a.d_a_log, a.forward.gate_heads * 4},
          {a.d_dt_bias, channels * 4}};
}

// Work for another stream: a copy, then norms of rows on every multiprocessor.
class Contention {
 public:
  Contention() : memory_(2 * kBytes) { Must(cudaMemset(memory_.get(), 0x3c, 2 * kBytes)); }
  void Enqueue() const {
    Must(cudaMemcpyAsync(memory_.get<char>() + kBytes, memory_.get(), kBytes,
                         cudaMemcpyDeviceToDevice, stream_.get()));
    gdn_l2_norm_args norm{};
    norm.dim = norm.x_row_stride = norm.y_row_stride = 128;
    norm.rows = static_cast<int64_t>(kBytes) / 256;
    norm.x = memory_.get<char>() + kBytes;
    norm.y = memory_.get<char>() + kBytes;
    norm.x_dtype = norm.y_dtype = GDN_BF16;
    norm.eps = 1e-6f;
    norm.scale = 1.0f;
    const gdn_exec exec = stream_.Exec();
    EXPECT_EQ(gdn_l2_norm(&exec, &norm), GDN_OK) << gdn_last_error();
  }
  void Synchronize() const { stream_.Synchronize(); }

 private:
  static constexpr size_t kBytes = size_t{32} << 20;
  DeviceBuffer memory_;
  Stream stream_;
};

// Calls the op again and again on its own stream. Before each call all that it writes is what it
// was at first: poison, or the states that a call in place starts from.
template <auto kOp, int kRounds, typename Args>
gdn_status Repeatedly(const gdn_exec* given, const Args* args) {
  constexpr int kCallsPerRound = 25;
  const Contention contention;
  const Stream stream;
  gdn_exec exec = *given;
  exec.stream = stream.Exec().stream;
  const std::vector<Output> outputs = OutputsOf(*args);
  std::vector<DeviceBuffer> start;
  for (const Output& output : outputs) {
    start.emplace_back(static_cast<size_t>(output.bytes));
    Must(cudaMemcpy(start.back().get(), output.data, start.back().bytes(),
                    cudaMemcpyDeviceToDevice));
  }
  Must(cudaDeviceSynchronize());
  const auto call = [&] {
    for (size_t i = 0; i < outputs.size(); ++i) {
      Must(cudaMemcpyAsync(outputs[i].data, start[i].get(), start[i].bytes(),
                           cudaMemcpyDeviceToDevice, stream.get()));
    }
    return kOp(&exec, args);
  };
  const auto bytes = [&] {
    stream.Synchronize();
    std::vector<std::vector<uint8_t>> all;
    for (const Output& output : outputs) {
      all.emplace_back(static_cast<size_t>(output.bytes));
      Must(cudaMemcpy(all.back().data(), output.data, all.back().size(), cudaMemcpyDeviceToHost));
    }
    return all;
  };
  if (const gdn_status status = call(); status != GDN_OK) return status;
  const auto first = bytes();
  for (int round = 0; round < kRounds; ++round) {
    for (int i = 0; i < kCallsPerRound; ++i) {
      contention.Enqueue();
      if (const gdn_status status = call(); status != GDN_OK) return status;
    }
    EXPECT_TRUE(bytes() == first) << "round " << round;
  }
  contention.Synchronize();
  return GDN_OK;
}

// NaNs of one pattern are equal bytes: the bits must be numbers too, and REF's numbers.
template <typename... Pairs>
void ExpectFiniteAndClose(double bound, const Pairs&... pairs) {
  int index = 0;
  const auto expect = [&](const std::pair<const Floats&, const Floats&>& pair) {
    for (float value : pair.first) ASSERT_TRUE(std::isfinite(value)) << "result " << index;
    EXPECT_LE(Error(pair.first, pair.second), bound) << "result " << index;
    ++index;
  };
  (expect(pairs), ...);
}
using Both = std::pair<const Floats&, const Floats&>;

RuleShape Shape(std::vector<int32_t> lengths, int64_t key_dim, int64_t value_dim, gdn_dtype dtype) {
  RuleShape shape;
  shape.lengths = std::move(lengths);
  shape.key_dim = key_dim;
  shape.value_dim = value_dim;
  shape.dtype = shape.d_dtype = dtype;
  shape.pad = 8;
  return shape;
}
// FP32, and so by tokens; and what goes by chunks.
RuleShape ByTokens() { return Shape({70, 0, 5, 129}, 60, 20, GDN_F32); }
RuleShape ByChunks() { return Shape({70, 0, 129}, 128, 128, GDN_BF16); }

constexpr int kThousand = 40;  // Rounds.
constexpr int kSlow = 8;       // Of a call that takes milliseconds.
constexpr double kExact = 1e-5;
constexpr double kRounded = 1e-2;

TEST(RuleBitsCuda, T20ForwardByTokensAndByChunks) {
  for (const auto& [shape, bound] : {std::pair{ByTokens(), kExact}, {ByChunks(), kRounded}}) {
    const RuleProblem p(shape, 901);
    const RuleOutputs got = p.Forward(kCuda, Repeatedly<gdn_delta_rule_forward, kThousand>);
    const RuleOutputs ref = p.Forward();
    ExpectFiniteAndClose(bound, Both{got.o, ref.o}, Both{got.state, ref.state},
                         Both{got.q_hat, ref.q_hat}, Both{got.k_hat, ref.k_hat},
                         Both{got.q_rstd, ref.q_rstd}, Both{got.k_rstd, ref.k_rstd});
  }
}

TEST(RuleBitsCuda, T20Step) {
  for (const RuleShape& s : {ByTokens(), ByChunks()}) {
    RuleShape shape = s;
    shape.lengths.assign(33, 1);
    const RuleProblem p(shape, 903);
    const RuleOutputs got = RunOnSlots(p, kCuda, Repeatedly<gdn_delta_rule_step, kThousand>);
    const RuleOutputs ref = RunOnSlots(p, kRef, gdn_delta_rule_step);
    ExpectFiniteAndClose(kExact, Both{got.o, ref.o}, Both{got.state, ref.state});
  }
}

TEST(RuleBitsCuda, T20BackwardByTokens) {
  const RuleProblem p(ByTokens(), 905);
  const RuleGradients got = p.Backward(kCuda, Repeatedly<gdn_delta_rule_backward, kSlow>);
  const RuleGradients ref = p.Backward();
  ExpectFiniteAndClose(kExact, Both{got.q, ref.q}, Both{got.k, ref.k}, Both{got.v, ref.v},
                       Both{got.g, ref.g}, Both{got.beta, ref.beta}, Both{got.state, ref.state});
}

TEST(RuleBitsCuda, T20Gdn2StepAndPrefillByTokens) {
  for (const RuleShape& s : {ByTokens(), ByChunks()}) {
    RuleShape shape = s;
    shape.lengths.assign(33, 1);
    const Gdn2Problem p(shape, true, 907);
    const RuleOutputs got = p.Forward(kCuda, Repeatedly<gdn_gdn2_step, kThousand>);
    const RuleOutputs ref = p.Forward(kRef, gdn_gdn2_step);
    ExpectFiniteAndClose(kExact, Both{got.o, ref.o}, Both{got.state, ref.state});
  }
  const Gdn2Problem p(ByTokens(), false, 908);
  const RuleOutputs got = p.Forward(kCuda, Repeatedly<gdn_gdn2_prefill, kThousand>);
  const RuleOutputs ref = p.Forward();
  ExpectFiniteAndClose(kExact, Both{got.o, ref.o}, Both{got.state, ref.state});
}

TEST(RuleBitsCuda, T20Gdn2Backward) {
  for (const RuleShape& shape : {ByTokens(), ByChunks()}) {
    const bool wide = shape.dtype == GDN_F32;
    const Gdn2Problem p(shape, wide, 909);
    const Gdn2Gradients got = p.Backward(kCuda, Repeatedly<gdn_gdn2_backward, kSlow>);
    const Gdn2Gradients ref = p.Backward();
    ExpectFiniteAndClose(wide ? kExact : kRounded, Both{got.q, ref.q}, Both{got.k, ref.k},
                         Both{got.v, ref.v}, Both{got.g, ref.g}, Both{got.erase, ref.erase},
                         Both{got.write, ref.write}, Both{got.state, ref.state});
  }
}

TEST(RuleBitsCuda, T20Gdn2Gates) {
  for (const gdn2_decay decay : {GDN2_DECAY_SOFTPLUS, GDN2_DECAY_BOUNDED}) {
    for (const gdn_dtype dtype : {GDN_F32, GDN_BF16}) {
      Gdn2GatesProblem p(decay, 911, 301, 4, 128, 512, dtype);
      if (decay == GDN2_DECAY_SOFTPLUS) p.f_pad = p.w_pad = 4;  // By vectors.
      const double bound = dtype == GDN_F32 ? kExact : kRounded;
      const Gdn2Gates got = p.Forward(kCuda, dtype, Repeatedly<gdn_gdn2_gates, kThousand>);
      const Gdn2Gates ref = p.Forward(kRef, dtype);
      ExpectFiniteAndClose(bound, Both{got.g, ref.g}, Both{got.erase, ref.erase},
                           Both{got.write, ref.write});
      const Gdn2GateGradients back =
          p.Backward(kCuda, Repeatedly<gdn_gdn2_gates_backward, kThousand>);
      const Gdn2GateGradients expected = p.Backward();
      ExpectFiniteAndClose(bound, Both{back.f, expected.f}, Both{back.b, expected.b},
                           Both{back.w, expected.w}, Both{back.a_log, expected.a_log},
                           Both{back.dt_bias, expected.dt_bias});
    }
  }
}

}  // namespace
}  // namespace gdn::kernels
