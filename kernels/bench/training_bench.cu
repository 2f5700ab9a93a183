// The gated delta rule's training forward and backward on a GPU.
//
// Times are medians over replays of a CUDA graph. `backward` runs on what `forward` saved; tensors
// together exceed the L2 many times; `whole` and `halves` are the backward with either split of its
// walks over the chunks, of which it takes the faster. Milliseconds. Saved bytes are those of
// gdn_delta_rule_saved_bytes. After the times the backward is repeated, and its outputs compared
// bit by bit.
//
// With --routes: the norm of q and k in the kernel against the caller's, with the bytes saved.
// With --gdn2 the same of GDN2, whose gates are BF16 and belong to the value heads; its forward
// with gates of the key heads too. --forward leaves out GDN2's backward.
//
// usage: training_bench [--cases=8x4096,1x32768,...] [--heads=16:32,...] [--replays=20]
//        [--repeats=20] [--gdn2 [--forward]] [--routes]
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gdn/kernels/delta_rule_backward.h"
#include "gdn/kernels/delta_rule_forward.h"
#include "gdn/kernels/delta_rule_saved.h"
#include "gdn/kernels/gdn2.h"
#include "gdn/kernels/gdn2_backward.h"
#include "gdn/kernels/l2_norm.h"
#include "gdn/kernels/l2_norm_backward.h"
#include "kernels/bench/cuda_bench.h"
#include "kernels/cuda/delta_rule_backward_chunk.h"

namespace {

using gdn::bench::Buffer;
using gdn::bench::GraphTimer;
using gdn::bench::Must;
using gdn::bench::Pairs;
using gdn::bench::ParseOptions;

constexpr int64_t kDim = 128;

struct Options {
  std::vector<std::pair<int64_t, int64_t>> cases = {{8, 4096}, {1, 32768}, {16, 2048}};
  std::vector<std::pair<int64_t, int64_t>> heads = {{16, 32}};
  int replays = 20;
  int repeats = 20;
  bool gdn2 = false;
  bool forward = false;
  bool routes = false;
};

// A call of the rule's forward, and of the backward on what it saves. With `norm` the kernel
// normalises q and k; without, they arrive normalised.
struct RuleCall {
  RuleCall(cudaStream_t stream, int64_t H, int64_t HV, int64_t sequences, int64_t length, bool norm)
      : tokens(sequences * length),
        keys(H * kDim),
        values(HV * kDim),
        q(tokens * keys, -1.0f, 1.0f),
        k(tokens * keys, -1.0f, 1.0f),
        v(tokens * values, -1.0f, 1.0f),
        d_o(tokens * values, -1.0f, 1.0f),
        g(tokens * HV, -0.2f, 0.0f),
        beta(tokens * HV, 0.0f, 1.0f),
        q_hat(tokens * keys, -0.1f, 0.1f),
        k_hat(tokens * keys, -0.1f, 0.1f),
        o(tokens * values),
        q_rstd(tokens * H),
        k_rstd(tokens * H),
        d_q(tokens * keys),
        d_k(tokens * keys),
        d_v(tokens * values),
        d_g(tokens * HV),
        d_beta(tokens * HV),
        d_state(sequences * values * kDim),
        cu_seqlens(sequences + 1) {
    std::vector<int32_t> cu;
    for (int64_t i = 0; i <= sequences; ++i) cu.push_back(static_cast<int32_t>(i * length));
    Must(cudaMemcpy(cu_seqlens.get(), cu.data(), cu.size() * sizeof(int32_t),
                    cudaMemcpyHostToDevice),
         "upload");
    Must(cudaDeviceSynchronize(), "inputs");

    exec.backend = GDN_BACKEND_CUDA;
    exec.stream = stream;
    forward.sequences = sequences;
    forward.cu_seqlens = cu_seqlens.get();
    forward.key_heads = H;
    forward.value_heads = HV;
    forward.key_dim = forward.value_dim = kDim;
    forward.q = norm ? q.get() : q_hat.get();
    forward.k = norm ? k.get() : k_hat.get();
    forward.v = v.get();
    forward.qkv_dtype = forward.o_dtype = GDN_BF16;
    forward.q_token_stride = forward.k_token_stride = keys;
    forward.v_token_stride = forward.o_token_stride = values;
    forward.g = g.get();
    forward.beta = beta.get();
    forward.use_qk_l2norm = norm ? 1 : 0;
    forward.o = o.get();
    if (norm) {
      forward.q_hat = q_hat.get();
      forward.k_hat = k_hat.get();
      forward.q_rstd = q_rstd.get();
      forward.k_rstd = k_rstd.get();
    }
    backward.tokens = tokens;
    backward.sequences = sequences;
    backward.cu_seqlens = cu_seqlens.get();
    backward.key_heads = H;
    backward.value_heads = HV;
    backward.key_dim = backward.value_dim = kDim;
    backward.q = q_hat.get();
    backward.k = k_hat.get();
    if (norm) {
      backward.q_rstd = q_rstd.get();
      backward.k_rstd = k_rstd.get();
    }
    backward.v = v.get();
    backward.qkv_dtype = backward.d_o_dtype = backward.d_qkv_dtype = GDN_BF16;
    backward.q_token_stride = backward.k_token_stride = keys;
    backward.d_q_token_stride = backward.d_k_token_stride = keys;
    backward.v_token_stride = backward.d_o_token_stride = backward.d_v_token_stride = values;
    backward.g = g.get();
    backward.beta = beta.get();
    backward.use_qk_l2norm = norm ? 1 : 0;
    backward.d_o = d_o.get();
    backward.d_q = d_q.get();
    backward.d_k = d_k.get();
    backward.d_v = d_v.get();
    backward.d_g = d_g.get();
    backward.d_beta = d_beta.get();
    backward.d_initial_state = d_state.get();

    Must(gdn_delta_rule_forward_workspace(&exec, &forward, &forward_bytes));
    Must(gdn_delta_rule_backward_workspace(&exec, &backward, &backward_bytes));
    exec.workspace_bytes = forward_bytes > backward_bytes ? forward_bytes : backward_bytes;
    workspace = std::make_unique<Buffer<uint8_t>>(static_cast<int64_t>(exec.workspace_bytes));
    exec.workspace = workspace->get();
  }
  void Forward() const { Must(gdn_delta_rule_forward(&exec, &forward)); }
  void Backward() const { Must(gdn_delta_rule_backward(&exec, &backward)); }

  const int64_t tokens;
  const int64_t keys;
  const int64_t values;
  const Buffer<uint16_t> q, k, v, d_o;
  const Buffer<float> g, beta;
  const Buffer<uint16_t> q_hat, k_hat, o;
  const Buffer<float> q_rstd, k_rstd;
  const Buffer<uint16_t> d_q, d_k, d_v;
  const Buffer<float> d_g, d_beta, d_state;
  const Buffer<int32_t> cu_seqlens;
  gdn_exec exec{};
  gdn_delta_rule_forward_args forward{};
  gdn_delta_rule_backward_args backward{};
  size_t forward_bytes = 0;
  size_t backward_bytes = 0;
  std::unique_ptr<Buffer<uint8_t>> workspace;
};

class Bench {
 public:
  explicit Bench(const Options& options) : options_(options) {
    cudaDeviceProp properties;
    Must(cudaGetDeviceProperties(&properties, 0), "device");
    std::printf("%s, BF16, K = V = %lld, norm of q and k in the kernel\n", properties.name,
                static_cast<long long>(kDim));
    if (options.gdn2 || options.routes) return;
    std::printf("%-7s %-9s | %9s %9s %6s %9s %9s | %10s %10s %10s | %s\n", "H:HV", "case",
                "forward", "backward", "ratio", "whole", "halves", "saved MiB", "fwd wk MiB",
                "bwd wk MiB", "repeats");
  }

  void Run() {
    for (const auto& [key_heads, value_heads] : options_.heads) {
      for (const auto& [sequences, length] : options_.cases) {
        if (options_.routes) {
          Routes(key_heads, value_heads, sequences, length);
        } else if (options_.gdn2) {
          Gdn2Case(key_heads, value_heads, sequences, length);
        } else {
          Case(key_heads, value_heads, sequences, length);
        }
      }
    }
  }

 private:
  void Case(int64_t H, int64_t HV, int64_t sequences, int64_t length) {
    const RuleCall call(timer_.stream(), H, HV, sequences, length, true);
    const double forward_us = timer_.Microseconds(options_.replays, [&] { call.Forward(); });
    const double backward_us = timer_.Microseconds(options_.replays, [&] { call.Backward(); });

    gdn::cuda::Device device;
    Must(gdn::cuda::CurrentDevice("training_bench", &device));
    const auto split_us = [&](gdn::cuda::BackwardSplit split) {
      return timer_.Microseconds(options_.replays, [&] {
        Must(gdn::cuda::LaunchChunkedBackward(call.exec, device, call.backward, split));
      });
    };
    const double whole_us = split_us(gdn::cuda::BackwardSplit::kWhole);
    const double halves_us = split_us(gdn::cuda::BackwardSplit::kHalves);

    int equal = 0;
    const auto first = std::make_pair(call.d_k.Download(), call.d_g.Download());
    for (int i = 0; i < options_.repeats; ++i) {
      call.Backward();
      Must(cudaStreamSynchronize(timer_.stream()), "repeat");
      const auto again = std::make_pair(call.d_k.Download(), call.d_g.Download());
      const auto same = [](const auto& a, const auto& b) {
        return std::memcmp(a.data(), b.data(), a.size() * sizeof(a[0])) == 0;
      };
      equal += same(again.first, first.first) && same(again.second, first.second) ? 1 : 0;
    }

    const int64_t saved = SavedBytes(H, HV, sequences, length, GDN_SAVED_KERNEL_NORM, false);
    std::printf(
        "%2lld:%-4lld %3lldx%-5lld | %9.4f %9.4f %6.2f %9.4f %9.4f | %10.1f %10.1f %10.1f | %d of "
        "%d\n",
        static_cast<long long>(H), static_cast<long long>(HV), static_cast<long long>(sequences),
        static_cast<long long>(length), 1e-3 * forward_us, 1e-3 * backward_us,
        backward_us / forward_us, 1e-3 * whole_us, 1e-3 * halves_us,
        static_cast<double>(saved) / (1 << 20), static_cast<double>(call.forward_bytes) / (1 << 20),
        static_cast<double>(call.backward_bytes) / (1 << 20), equal, options_.repeats);
    std::fflush(stdout);
  }

  static int64_t SavedBytes(int64_t H, int64_t HV, int64_t sequences, int64_t length,
                            gdn_saved_route route, bool replicated) {
    gdn_delta_rule_saved_args saved{};
    saved.tokens = sequences * length;
    saved.sequences = sequences;
    saved.key_heads = H;
    saved.value_heads = HV;
    saved.key_dim = saved.value_dim = kDim;
    saved.dtype = GDN_BF16;
    saved.route = route;
    saved.replicated_heads = replicated ? 1 : 0;
    gdn_delta_rule_saved_bytes_result bytes{};
    Must(gdn_delta_rule_saved_bytes(&saved, &bytes));
    return bytes.total;
  }

  // The norm of q and k in the kernel; by the caller; and by a caller that gives each value head
  // its own copy of them, whose copying, and summing of gradients, is not even counted.
  void Routes(int64_t H, int64_t HV, int64_t sequences, int64_t length) {
    RoutesOf("in the kernel", H, HV, H, sequences, length, GDN_SAVED_KERNEL_NORM);
    RoutesOf("by the caller", H, HV, H, sequences, length, GDN_SAVED_CALLER_NORM);
    RoutesOf("by the caller, heads copied", H, HV, HV, sequences, length, GDN_SAVED_CALLER_NORM);
  }
  void RoutesOf(const char* name, int64_t H, int64_t HV, int64_t heads, int64_t sequences,
                int64_t length, gdn_saved_route route) {
    const bool in_kernel = route == GDN_SAVED_KERNEL_NORM;
    const RuleCall call(timer_.stream(), heads, HV, sequences, length, in_kernel);
    gdn_l2_norm_args norm{};
    norm.rows = call.tokens * H;
    norm.dim = norm.x_row_stride = norm.y_row_stride = kDim;
    norm.x_dtype = norm.y_dtype = GDN_BF16;
    norm.eps = 1e-6f;
    norm.scale = 1.0f;
    gdn_l2_norm_backward_args gradient{};
    gradient.rows = norm.rows;
    gradient.dim = gradient.y_row_stride = gradient.dy_row_stride = gradient.dx_row_stride = kDim;
    gradient.y_dtype = gradient.dy_dtype = gradient.dx_dtype = GDN_BF16;
    gradient.scale = 1.0f;
    const auto normalise = [&](const Buffer<uint16_t>& x, const Buffer<uint16_t>& y,
                               const Buffer<float>& rstd) {
      norm.x = x.get();
      norm.y = y.get();
      norm.rstd = rstd.get();
      Must(gdn_l2_norm(&call.exec, &norm));
    };
    const auto through_norm = [&](const Buffer<uint16_t>& y, const Buffer<float>& rstd,
                                  const Buffer<uint16_t>& d) {
      gradient.y = y.get();
      gradient.rstd = rstd.get();
      gradient.dy = gradient.dx = d.get();
      Must(gdn_l2_norm_backward(&call.exec, &gradient));
    };
    const double forward_us = timer_.Microseconds(options_.replays, [&] {
      if (!in_kernel) {
        normalise(call.q, call.q_hat, call.q_rstd);
        normalise(call.k, call.k_hat, call.k_rstd);
      }
      call.Forward();
    });
    const double backward_us = timer_.Microseconds(options_.replays, [&] {
      call.Backward();
      if (in_kernel) return;
      through_norm(call.q_hat, call.q_rstd, call.d_q);
      through_norm(call.k_hat, call.k_rstd, call.d_k);
    });
    const int64_t saved = SavedBytes(H, HV, sequences, length, route, heads != H);
    std::printf(
        "%2lld:%-4lld %3lldx%-6lld norm %-28s | forward %8.3f backward %8.3f ms | saved %8.1f "
        "MiB, workspace %7.1f and %7.1f\n",
        static_cast<long long>(H), static_cast<long long>(HV), static_cast<long long>(sequences),
        static_cast<long long>(length), name, 1e-3 * forward_us, 1e-3 * backward_us,
        static_cast<double>(saved) / (1 << 20), static_cast<double>(call.forward_bytes) / (1 << 20),
        static_cast<double>(call.backward_bytes) / (1 << 20));
    std::fflush(stdout);
  }

  void Gdn2Case(int64_t H, int64_t HV, int64_t sequences, int64_t length) {
    const int64_t tokens = sequences * length;
    const int64_t keys = H * kDim;
    const int64_t values = HV * kDim;
    const Buffer<uint16_t> q(tokens * keys, -0.1f, 0.1f), k(tokens * keys, -0.1f, 0.1f);
    const Buffer<uint16_t> v(tokens * values, -1.0f, 1.0f), d_o(tokens * values, -1.0f, 1.0f);
    const Buffer<float> g(tokens * values, -0.2f, 0.0f);
    const Buffer<uint16_t> erase(tokens * values, 0.0f, 1.0f), write(tokens * values, 0.0f, 1.0f);
    const Buffer<uint16_t> o(tokens * values);
    const Buffer<uint16_t> d_q(tokens * keys), d_k(tokens * keys), d_v(tokens * values);
    const Buffer<float> d_g(tokens * values), d_erase(tokens * values), d_write(tokens * values);
    const Buffer<float> state(sequences * values * kDim, 0.0f, 0.1f);
    const Buffer<int64_t> slots(sequences);
    std::vector<int32_t> cu;
    std::vector<int64_t> slot;
    for (int64_t i = 0; i <= sequences; ++i) cu.push_back(static_cast<int32_t>(i * length));
    for (int64_t i = 0; i < sequences; ++i) slot.push_back(i);
    const Buffer<int32_t> cu_seqlens(static_cast<int64_t>(cu.size()));
    Must(cudaMemcpy(cu_seqlens.get(), cu.data(), cu.size() * sizeof(cu[0]), cudaMemcpyHostToDevice),
         "upload");
    Must(
        cudaMemcpy(slots.get(), slot.data(), slot.size() * sizeof(slot[0]), cudaMemcpyHostToDevice),
        "upload");
    Must(cudaDeviceSynchronize(), "inputs");

    gdn_exec exec{};
    exec.backend = GDN_BACKEND_CUDA;
    exec.stream = timer_.stream();
    gdn2_args forward{};
    forward.tokens = tokens;
    forward.sequences = sequences;
    forward.cu_seqlens = cu_seqlens.get();
    forward.key_heads = H;
    forward.value_heads = forward.gate_heads = HV;
    forward.key_dim = forward.value_dim = kDim;
    forward.q = q.get();
    forward.k = k.get();
    forward.v = v.get();
    forward.qkv_dtype = forward.gate_dtype = forward.o_dtype = GDN_BF16;
    forward.q_token_stride = forward.k_token_stride = keys;
    forward.v_token_stride = forward.o_token_stride = values;
    forward.g = g.get();
    forward.erase = erase.get();
    forward.write = write.get();
    forward.state = state.get();
    forward.state_dtype = GDN_F32;
    forward.state_slot_stride = values * kDim;
    forward.read_index = forward.write_index = slots.get();
    forward.o = o.get();
    gdn2_backward_args backward{};
    backward.tokens = tokens;
    backward.sequences = sequences;
    backward.cu_seqlens = cu_seqlens.get();
    backward.key_heads = H;
    backward.value_heads = backward.gate_heads = HV;
    backward.key_dim = backward.value_dim = kDim;
    backward.q = q.get();
    backward.k = k.get();
    backward.v = v.get();
    backward.qkv_dtype = backward.d_o_dtype = backward.d_qkv_dtype = GDN_BF16;
    backward.gate_dtype = GDN_BF16;
    backward.q_token_stride = backward.k_token_stride = keys;
    backward.d_q_token_stride = backward.d_k_token_stride = keys;
    backward.v_token_stride = backward.d_o_token_stride = backward.d_v_token_stride = values;
    backward.g = g.get();
    backward.erase = erase.get();
    backward.write = write.get();
    backward.d_o = d_o.get();
    backward.d_q = d_q.get();
    backward.d_k = d_k.get();
    backward.d_v = d_v.get();
    backward.d_g = d_g.get();
    backward.d_erase = d_erase.get();
    backward.d_write = d_write.get();
    size_t forward_bytes = 0;
    size_t backward_bytes = 0;
    Must(gdn_gdn2_prefill_workspace(&exec, &forward, &forward_bytes));
    Must(gdn_gdn2_backward_workspace(&exec, &backward, &backward_bytes));
    const size_t bytes = std::max(forward_bytes, backward_bytes);
    const Buffer<uint8_t> workspace(static_cast<int64_t>(bytes));
    exec.workspace = workspace.get();
    exec.workspace_bytes = bytes;
    const double forward_us =
        timer_.Microseconds(options_.replays, [&] { Must(gdn_gdn2_prefill(&exec, &forward)); });
    forward.gate_heads = H;
    const double key_gates_us =
        timer_.Microseconds(options_.replays, [&] { Must(gdn_gdn2_prefill(&exec, &forward)); });
    std::printf(
        "GDN2, %lld:%lld, %lldx%lld: prefill %.3f ms (gates of the key heads: %.3f), workspace "
        "%.1f MiB\n",
        static_cast<long long>(H), static_cast<long long>(HV), static_cast<long long>(sequences),
        static_cast<long long>(length), 1e-3 * forward_us, 1e-3 * key_gates_us,
        static_cast<double>(forward_bytes) / (1 << 20));
    if (!options_.forward) {
      const auto call = [&] { Must(gdn_gdn2_backward(&exec, &backward)); };
      const double backward_us = timer_.Microseconds(options_.replays, call);
      const double unsummed_us = timer_.Microseconds(options_.replays, call, "KeyGradientKernel");
      std::printf("  backward %.3f ms (without the sums over heads %.3f), workspace %.1f MiB\n",
                  1e-3 * backward_us, 1e-3 * unsummed_us,
                  static_cast<double>(backward_bytes) / (1 << 20));
    }
    std::fflush(stdout);
  }

  const Options options_;
  const GraphTimer timer_;
};

Options Parse(int argc, char** argv) {
  Options options;
  ParseOptions(
      argc, argv,
      {{"--cases", [&](const std::string& value) { options.cases = Pairs(value, 'x'); }},
       {"--heads", [&](const std::string& value) { options.heads = Pairs(value, ':'); }},
       {"--replays", [&](const std::string& value) { options.replays = std::stoi(value); }},
       {"--repeats", [&](const std::string& value) { options.repeats = std::stoi(value); }},
       {"--gdn2", [&](const std::string&) { options.gdn2 = true; }},
       {"--forward", [&](const std::string&) { options.forward = true; }},
       {"--routes", [&](const std::string&) { options.routes = true; }}});
  return options;
}

}  // namespace

int main(int argc, char** argv) {
  Bench(Parse(argc, argv)).Run();
  return 0;
}
