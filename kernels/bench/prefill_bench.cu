// The prefill of one layer on a GPU, from the projection to the normed output: convolution, gates,
// chunked delta rule, gated norm, each alone and all together.
//
// Times are medians over replays of a CUDA graph, per layer. Launches rotate over as many layers
// (projections, states, outputs) as exceed four times the L2; what lies between the ops is shared,
// as the layers of a model share it. `rule` is gdn_delta_rule_prefill alone, `whole` and `halves`
// that with one and two blocks a head, `separate` conv, gates, rule and norm in a row, `layer`
// gdn_fused_prefill. TFLOP/s count the matrix products that the fused op executes, of its walk over
// the walk's time and all of them over the layer's; `% peak` is their share of the tensor cores' at
// the device's highest clock.
//
// usage: prefill_bench [--cases=1x1024,16x2048,...] [--heads=16:32,...] [--replays=20]
//                      [--fused-only] [--streams=N] [--host]
// --streams: the layer with the way in on N multiprocessors beside the walk, or, 0, before it.
// --host: instead, how long a call keeps the host, of 1,000 put on an idle stream in tens: of
// gdn_fused_prefill, plan and launches included, the median, the mean and the 99th percentile; the
// medians of its parts; and that of the launch of an empty kernel, below which no launch gets.
#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <numeric>
#include <string>
#include <vector>

#include "gdn/kernels/causal_conv.h"
#include "gdn/kernels/delta_rule.h"
#include "gdn/kernels/fused_prefill.h"
#include "gdn/kernels/gated_rms_norm.h"
#include "gdn/kernels/gates.h"
#include "kernels/bench/cuda_bench.h"
#include "kernels/cuda/delta_rule_chunk.h"
#include "kernels/cuda/fused_prefill.h"

namespace {

using gdn::bench::Buffer;
using gdn::bench::GraphTimer;
using gdn::bench::Must;
using gdn::bench::Pairs;
using gdn::bench::ParseOptions;

constexpr int64_t kDim = 128;
constexpr int64_t kWidth = 4;
constexpr int64_t kChunk = 64;
// Of the walk, a chunk and value head: S k, S q, U k^T; T R, P U.
constexpr double kWalkFlops = 2.0 * kChunk * (3 * kDim * kDim + 2 * kChunk * kDim);
// Of the way in, a chunk and key head: K K^T, Q K^T; and a chunk and value head: T from its
// diagonal, in products of 16 rows, 16 steps and 8 columns, of which eight begin blocks of 16, 12
// merge them, and 24 and 12 merge those of 32.
constexpr double kGramFlops = 2.0 * 2.0 * kChunk * kChunk * kDim;
constexpr double kInverseFlops = (8 + 12 + 24 + 12) * 2.0 * 16 * 16 * 8;

struct Case {
  int64_t sequences;
  int64_t length;
};

struct Options {
  std::vector<Case> cases = {{1, 1024},  {1, 8192}, {1, 32768}, {1, 131072},
                             {16, 2048}, {8, 8192}, {64, 256},  {128, 512}};
  std::vector<std::pair<int64_t, int64_t>> heads = {{16, 32}};
  int replays = 20;
  bool fused_only = false;  // Without the separate ops.
  int streams = -1;         // As the library chooses.
  bool host = false;
};

__global__ void Empty() {}

class Bench {
 public:
  explicit Bench(const Options& options) : options_(options) {
    cudaDeviceProp properties;
    Must(cudaGetDeviceProperties(&properties, 0), "device");
    l2_bytes_ = properties.l2CacheSize;
    int khz = 0;
    Must(cudaDeviceGetAttribute(&khz, cudaDevAttrClockRate, 0), "clock");
    // 2048 multiply-adds of 16-bit operands a clock and multiprocessor.
    peak_ = 1e-9 * khz * 4096 * properties.multiProcessorCount;
    std::printf("%s, %d multiprocessors, tensor peak %.0f TFLOP/s at %.0f MHz\n", properties.name,
                properties.multiProcessorCount, peak_, khz * 1e-3);
  }

  void Run() {
    if (options_.host) {
      std::printf("\n%-7s %-9s | %8s %8s %8s | %8s %8s | %8s\n", "H:HV", "case", "call us", "mean",
                  "p99", "way in", "walk", "empty");
    } else {
      std::printf("\n%-7s %-9s |", "H:HV", "case");
      if (!options_.fused_only) {
        std::printf(" %8s %8s %8s %8s %8s %8s | %8s |", "conv", "gates", "whole", "halves", "rule",
                    "norm", "separate");
      }
      std::printf(" %8s %8s %7s %6s | %8s %7s %6s\n", "way in", "walk", "TFLOP/s", "% peak",
                  "layer ms", "TFLOP/s", "% peak");
    }
    for (const auto& [key_heads, value_heads] : options_.heads) {
      for (const Case& c : options_.cases) Layer(key_heads, value_heads, c);
    }
  }

 private:
  // Median milliseconds of one of `launches` launches in a graph.
  double Time(int launches, const std::function<void(int)>& launch) {
    return 1e-3 * timer_.MicrosecondsEach(options_.replays, launches, launch);
  }

  struct HostTime {
    double median, mean, p99;
  };
  // Microseconds of single calls, while the stream has room for what they launch.
  HostTime TimeHost(const std::function<void(int)>& call) {
    constexpr int kBatches = 100;
    constexpr int kBatch = 10;
    using Clock = std::chrono::steady_clock;
    std::vector<double> times;
    for (int batch = -1; batch < kBatches; ++batch) {  // The first warms up.
      for (int i = 0; i < kBatch; ++i) {
        const Clock::time_point begin = Clock::now();
        call(i);
        const std::chrono::duration<double, std::micro> time = Clock::now() - begin;
        if (batch >= 0) times.push_back(time.count());
      }
      Must(cudaStreamSynchronize(stream_), "calls");
    }
    const double sum = std::accumulate(times.begin(), times.end(), 0.0);
    std::sort(times.begin(), times.end());
    return {times[times.size() / 2], sum / static_cast<double>(times.size()),
            times[times.size() * 99 / 100]};
  }

  void Layer(int64_t key_heads, int64_t value_heads, const Case& c) {
    const int64_t tokens = c.sequences * c.length;
    const int64_t keys = key_heads * kDim;
    const int64_t values = value_heads * kDim;
    const int64_t channels = 2 * keys + values;
    const int64_t line = (channels + values + 2 * value_heads + 7) / 8 * 8;
    const int64_t state_size = c.sequences * values * kDim;
    const int64_t bytes = tokens * (line + values) * 2 + state_size * 4;
    const int64_t layers = std::max<int64_t>(1, std::min<int64_t>(64, 4 * l2_bytes_ / bytes + 1));
    const Buffer<uint16_t> x(layers * tokens * line, -1.0f, 1.0f);
    const Buffer<uint16_t> y(layers * tokens * values);
    const Buffer<float> state(layers * state_size, -0.1f, 0.1f);
    const Buffer<uint16_t> conv_state(layers * c.sequences * (kWidth - 1) * channels, -1.0f, 1.0f);
    const Buffer<uint16_t> conv_out(tokens * channels);
    const Buffer<float> g(tokens * value_heads);
    const Buffer<float> beta(tokens * value_heads);
    const Buffer<float> o(tokens * values);
    const Buffer<float> weight(channels * kWidth, -0.5f, 0.5f);
    const Buffer<float> a_log(value_heads, 0.0f, 2.0f);
    const Buffer<float> dt_bias(value_heads, -4.0f, -1.0f);
    const Buffer<float> norm_weight(kDim, 0.5f, 1.5f);
    std::vector<int32_t> cu(static_cast<size_t>(c.sequences) + 1);
    std::vector<int64_t> slot(static_cast<size_t>(c.sequences));
    for (int64_t i = 0; i <= c.sequences; ++i) {
      cu[static_cast<size_t>(i)] = static_cast<int32_t>(i * c.length);
    }
    for (int64_t i = 0; i < c.sequences; ++i) slot[static_cast<size_t>(i)] = i;
    const Buffer<int32_t> cu_seqlens(cu);
    const Buffer<int64_t> index(slot);
    Must(cudaDeviceSynchronize(), "inputs");

    gdn_exec exec{};
    exec.backend = GDN_BACKEND_CUDA;
    exec.stream = stream_;
    gdn_causal_conv_args conv{};
    conv.sequences = c.sequences;
    conv.cu_seqlens = cu_seqlens.get();
    conv.channels = channels;
    conv.width = kWidth;
    conv.silu = 1;
    conv.x_dtype = conv.y_dtype = GDN_BF16;
    conv.x_token_stride = line;
    conv.weight = weight.get();
    conv.y = conv_out.get();
    conv.y_token_stride = channels;
    conv.state_slot_stride = (kWidth - 1) * channels;
    conv.read_index = conv.write_index = index.get();
    gdn_gates_args gates{};
    gates.tokens = tokens;
    gates.value_heads = value_heads;
    gates.dtype = GDN_BF16;
    gates.a_token_stride = gates.b_token_stride = line;
    gates.a_log = a_log.get();
    gates.dt_bias = dt_bias.get();
    gates.beta_scale = 1.0f;
    gates.g = g.get();
    gates.beta = beta.get();
    gdn_delta_rule_args rule{};
    rule.sequences = c.sequences;
    rule.cu_seqlens = cu_seqlens.get();
    rule.key_heads = key_heads;
    rule.value_heads = value_heads;
    rule.key_dim = rule.value_dim = kDim;
    rule.q = conv_out.get();
    rule.k = conv_out.get() + keys;
    rule.v = conv_out.get() + 2 * keys;
    rule.qkv_dtype = GDN_BF16;
    rule.q_token_stride = rule.k_token_stride = rule.v_token_stride = channels;
    rule.g = g.get();
    rule.beta = beta.get();
    rule.use_qk_l2norm = 1;
    rule.state_dtype = GDN_F32;
    rule.state_slot_stride = values * kDim;
    rule.read_index = rule.write_index = index.get();
    rule.o = o.get();
    rule.o_dtype = GDN_F32;
    rule.o_token_stride = values;
    gdn_gated_rms_norm_args norm{};
    norm.tokens = tokens;
    norm.heads = value_heads;
    norm.dim = kDim;
    norm.x = o.get();
    norm.x_dtype = GDN_F32;
    norm.x_token_stride = values;
    norm.x_head_stride = norm.gate_head_stride = norm.y_head_stride = kDim;
    norm.gate_dtype = norm.y_dtype = GDN_BF16;
    norm.gate_token_stride = line;
    norm.weight = norm_weight.get();
    norm.eps = 1e-6f;
    norm.y_token_stride = values;

    gdn::cuda::Device device;
    Must(gdn::cuda::CurrentDevice("prefill_bench", &device));
    const auto run_conv = [&](int i) {
      const int64_t layer = i % layers;
      conv.x = x.get() + layer * tokens * line;
      conv.state = conv_state.get() + layer * c.sequences * (kWidth - 1) * channels;
      Must(gdn_causal_conv(&exec, &conv));
    };
    const auto run_gates = [&](int i) {
      const uint16_t* const row = x.get() + i % layers * tokens * line + channels + values;
      gates.b = row;
      gates.a = row + value_heads;
      Must(gdn_gates(&exec, &gates));
    };
    const auto run_rule = [&](int i, gdn::cuda::ChunkedSplit split) {
      rule.state = state.get() + i % layers * state_size;
      Must(gdn::cuda::LaunchChunked(exec, device, rule, split));
    };
    const auto run_norm = [&](int i) {
      norm.gate = x.get() + i % layers * tokens * line + channels;
      norm.y = y.get() + i % layers * tokens * values;
      Must(gdn_gated_rms_norm(&exec, &norm));
    };
    using Split = gdn::cuda::ChunkedSplit;
    const int launches = static_cast<int>(layers);
    const auto time_separate = [&](const std::function<void(int)>& launch) {
      return options_.fused_only || options_.host ? 0.0 : Time(launches, launch);
    };
    const double conv_ms = time_separate(run_conv);
    const double gates_ms = time_separate(run_gates);
    const double whole_ms = time_separate([&](int i) { run_rule(i, Split::kWhole); });
    const double halves_ms = time_separate([&](int i) { run_rule(i, Split::kHalves); });
    const double rule_ms = time_separate([&](int i) { run_rule(i, Split::kAuto); });
    const double norm_ms = time_separate(run_norm);
    const double layer_ms = time_separate([&](int i) {
      run_conv(i);
      run_gates(i);
      run_rule(i, Split::kAuto);
      run_norm(i);
    });

    gdn_fused_prefill_args fused{};
    fused.tokens = tokens;
    fused.cu_seqlens = cu_seqlens.get();
    gdn_fused_decode_args& l = fused.layer;
    l.rows = c.sequences;
    l.key_heads = key_heads;
    l.value_heads = value_heads;
    l.key_dim = l.value_dim = kDim;
    l.conv_width = kWidth;
    l.dtype = GDN_BF16;
    l.x_token_stride = line;
    l.k_offset = keys;
    l.v_offset = 2 * keys;
    l.z_offset = channels;
    l.b_offset = channels + values;
    l.a_offset = l.b_offset + value_heads;
    l.conv_weight = weight.get();
    l.a_log = a_log.get();
    l.dt_bias = dt_bias.get();
    l.beta_scale = 1.0f;
    l.use_qk_l2norm = 1;
    l.norm_weight = norm_weight.get();
    l.eps = 1e-6f;
    l.state_dtype = GDN_F32;
    l.state_slot_stride = values * kDim;
    l.conv_slot_stride = (kWidth - 1) * channels;
    l.read_index = l.write_index = index.get();
    l.y_token_stride = values;
    size_t workspace_bytes = 0;
    Must(gdn_fused_prefill_workspace(&exec, &fused, &workspace_bytes));
    const Buffer<uint8_t> workspace(static_cast<int64_t>(workspace_bytes));
    exec.workspace = workspace.get();
    exec.workspace_bytes = workspace_bytes;
    gdn::cuda::PreparedChunks chunks_at;
    gdn::cuda::FusedPrefillChunks(fused, workspace.get(), &chunks_at);
    const auto run_fused = [&](int i) {
      const int64_t layer = i % layers;
      l.x = x.get() + layer * tokens * line;
      l.y = y.get() + layer * tokens * values;
      l.state = state.get() + layer * state_size;
      l.conv_state = conv_state.get() + layer * c.sequences * (kWidth - 1) * channels;
      if (options_.streams < 0) {
        Must(gdn_fused_prefill(&exec, &fused));
      } else {
        const gdn::cuda::PrefillPlan plan = {options_.streams, false};
        Must(gdn::cuda::LaunchWayIn(exec, fused, chunks_at, plan));
        Must(gdn::cuda::LaunchWalk(exec, device, fused, chunks_at, plan));
      }
    };
    std::printf("%2lld:%-4lld %3lldx%-5lld", static_cast<long long>(key_heads),
                static_cast<long long>(value_heads), static_cast<long long>(c.sequences),
                static_cast<long long>(c.length));
    // The fused op's parts, one after the other, on the chunks that it has just left.
    gdn::cuda::PrefillPlan in_turn = gdn::cuda::PlanPrefill(device, fused);
    in_turn.stream_blocks = 0;
    const auto run_in = [&](int i) {
      l.x = x.get() + i % layers * tokens * line;
      Must(gdn::cuda::LaunchWayIn(exec, fused, chunks_at, in_turn));
    };
    const auto run_walk = [&](int i) {
      const int64_t layer = i % layers;
      l.x = x.get() + layer * tokens * line;
      l.y = y.get() + layer * tokens * values;
      l.state = state.get() + layer * state_size;
      l.conv_state = conv_state.get() + layer * c.sequences * (kWidth - 1) * channels;
      Must(gdn::cuda::LaunchWalk(exec, device, fused, chunks_at, in_turn));
    };
    if (options_.host) {
      const HostTime call = TimeHost(run_fused);
      const HostTime in = TimeHost(run_in);
      const HostTime walk = TimeHost(run_walk);
      const HostTime empty = TimeHost([&](int) { Empty<<<1, 32, 0, stream_>>>(); });
      std::printf(" | %8.2f %8.2f %8.2f | %8.2f %8.2f | %8.2f\n", call.median, call.mean, call.p99,
                  in.median, walk.median, empty.median);
      std::fflush(stdout);
      return;
    }
    const double fused_ms = Time(launches, run_fused);
    const double in_ms = Time(launches, run_in);
    const double walk_ms = Time(launches, run_walk);
    const double chunks = static_cast<double>(c.sequences * ((c.length + kChunk - 1) / kChunk));
    const double walk_flops = chunks * static_cast<double>(value_heads) * kWalkFlops;
    const double flops = walk_flops + chunks * (static_cast<double>(key_heads) * kGramFlops +
                                                static_cast<double>(value_heads) * kInverseFlops);
    const double walk_rate = walk_flops / walk_ms * 1e-9;
    const double rate = flops / fused_ms * 1e-9;
    std::printf(" |");
    if (!options_.fused_only) {
      std::printf(" %8.4f %8.4f %8.4f %8.4f %8.4f %8.4f | %8.4f |", conv_ms, gates_ms, whole_ms,
                  halves_ms, rule_ms, norm_ms, layer_ms);
    }
    std::printf(" %8.4f %8.4f %7.1f %6.1f | %8.4f %7.1f %6.1f\n", in_ms, walk_ms, walk_rate,
                100.0 * walk_rate / peak_, fused_ms, rate, 100.0 * rate / peak_);
    std::fflush(stdout);
  }

  const Options options_;
  const GraphTimer timer_;
  cudaStream_t const stream_ = timer_.stream();
  int64_t l2_bytes_ = 0;
  double peak_ = 0.0;
};

Options Parse(int argc, char** argv) {
  Options options;
  ParseOptions(
      argc, argv,
      {{"--cases",
        [&](const std::string& value) {
          options.cases.clear();
          for (const auto& [sequences, length] : Pairs(value, 'x')) {
            options.cases.push_back({sequences, length});
          }
        }},
       {"--heads", [&](const std::string& value) { options.heads = Pairs(value, ':'); }},
       {"--replays", [&](const std::string& value) { options.replays = std::stoi(value); }},
       {"--streams", [&](const std::string& value) { options.streams = std::stoi(value); }},
       {"--host", [&](const std::string&) { options.host = true; }},
       {"--fused-only", [&](const std::string&) { options.fused_only = true; }}});
  return options;
}

}  // namespace

int main(int argc, char** argv) {
  Bench(Parse(argc, argv)).Run();
  return 0;
}
