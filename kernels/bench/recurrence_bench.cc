// Roofline benchmarks of the recurrence family on the CPU back end, one or two threads. GB/s counts
// the bytes an op must move, GFLOP/s the floating-point operations the token-by-token rule needs;
// Copy and Fma measure what this machine gives for either.
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "benchmark/benchmark.h"
#include "gdn/kernels/causal_conv.h"
#include "gdn/kernels/cpu_pool.h"
#include "gdn/kernels/delta_rule.h"
#include "gdn/kernels/gates.h"
#include "gdn/kernels/l2_norm.h"

namespace {

using benchmark::Counter;

Counter PerSecond(double amount) { return Counter(amount, Counter::kIsIterationInvariantRate); }

// One pool at a time, kept between benchmarks of the same thread count.
gdn_cpu_pool* PoolOf(int64_t threads) {
  static std::unique_ptr<gdn_cpu_pool, decltype(&gdn_cpu_pool_destroy)> pool(nullptr,
                                                                             gdn_cpu_pool_destroy);
  if (threads <= 1) return nullptr;
  if (gdn_cpu_pool_threads(pool.get()) != threads) {
    pool.reset();
    pool.reset(gdn_cpu_pool_create(static_cast<int32_t>(threads), 100));
  }
  return pool.get();
}

std::vector<float> Values(int64_t size, float low, float high) {
  std::vector<float> values(static_cast<size_t>(size));
  uint32_t state = 12345;
  for (float& value : values) {
    state = state * 1664525u + 1013904223u;
    value = low + (high - low) * static_cast<float>(state >> 8) * 0x1p-24f;
  }
  return values;
}

// range(0): MiB read, and as many written; range(1): threads.
void BM_Copy(benchmark::State& state) {
  const int64_t bytes = state.range(0) << 20;
  std::vector<char> src(static_cast<size_t>(bytes), 1);
  std::vector<char> dst(static_cast<size_t>(bytes), 2);
  for (auto _ : state) {
    gdn::cpu::ParallelFor(
        PoolOf(state.range(1)), bytes, 1 << 16, [&](int64_t begin, int64_t end, int32_t) {
          std::memcpy(dst.data() + begin, src.data() + begin, static_cast<size_t>(end - begin));
        });
    benchmark::ClobberMemory();
  }
  state.counters["GB/s"] = PerSecond(2e-9 * static_cast<double>(bytes));
}

// In-place read-modify-write of floats, the traffic pattern of the state.
void BM_ScaleInPlace(benchmark::State& state) {
  const int64_t bytes = state.range(0) << 20;
  std::vector<float> data(static_cast<size_t>(bytes / 4), 1.0f);
  for (auto _ : state) {
    gdn::cpu::ParallelFor(PoolOf(state.range(1)), bytes / 4, 1 << 14,
                          [&](int64_t begin, int64_t end, int32_t) {
                            float* p = data.data();
                            for (int64_t i = begin; i < end; ++i) p[i] *= 0.999f;
                          });
    benchmark::ClobberMemory();
  }
  state.counters["GB/s"] = PerSecond(2e-9 * static_cast<double>(bytes));
}

// Peak of one core with 256-bit vectors: independent multiply-adds in registers.
#if defined(__x86_64__) && defined(__GNUC__)
using Float8 = float __attribute__((vector_size(32)));
// The instruction is spelt out: the compiler would move or merge a plain product.
__attribute__((target("avx2,fma"))) void FmaLoop(int64_t rounds, Float8 x) {
  Float8 a[12] = {};
  for (int64_t r = 0; r < rounds; ++r) {
#pragma GCC unroll 12
    for (int i = 0; i < 12; ++i) asm volatile("vfmadd213ps %1, %1, %0" : "+x"(a[i]) : "x"(x));
  }
}
void BM_Fma(benchmark::State& state) {
  for (auto _ : state) FmaLoop(10000, Float8{} + 0.5f);
  state.counters["GFLOP/s"] = PerSecond(1e-9 * 10000 * 12 * 16);
}
BENCHMARK(BM_Fma);
#endif

struct Delta {
  int64_t n, length, key_heads, heads, key_dim, value_dim;
  gdn_dtype state_dtype;
  std::vector<float> q, k, v, g, beta, o;
  std::unique_ptr<void, decltype(&std::free)> state{nullptr, &std::free};
  std::vector<int32_t> cu;
  std::vector<int64_t> slots;
  gdn_delta_rule_args args{};
  gdn_exec exec{};
  std::vector<char> workspace;

  Delta(int64_t n_, int64_t length_, int64_t h, int64_t hv, int64_t K, int64_t V, gdn_dtype dtype,
        int64_t threads)
      : n(n_),
        length(length_),
        key_heads(h),
        heads(hv),
        key_dim(K),
        value_dim(V),
        state_dtype(dtype) {
    const int64_t tokens = n * length;
    q = Values(tokens * h * K, -1, 1);
    k = Values(tokens * h * K, -1, 1);
    v = Values(tokens * hv * V, -1, 1);
    g = Values(tokens * hv, -0.1f, 0);
    beta = Values(tokens * hv, 0, 1);
    o.resize(static_cast<size_t>(tokens * hv * V));
    // On cache lines, as a pool of slots is.
    const auto state_bytes = static_cast<size_t>(StateBytes() / 2.0);
    state.reset(std::aligned_alloc(64, (state_bytes + 63) / 64 * 64));
    std::memset(state.get(), 0, state_bytes);
    for (int64_t i = 0; i <= n; ++i) cu.push_back(static_cast<int32_t>(i * length));
    for (int64_t i = 0; i < n; ++i) slots.push_back(i);
    args.sequences = n;
    args.cu_seqlens = cu.data();
    args.key_heads = h;
    args.value_heads = hv;
    args.key_dim = K;
    args.value_dim = V;
    args.q = q.data();
    args.k = k.data();
    args.v = v.data();
    args.q_token_stride = args.k_token_stride = h * K;
    args.v_token_stride = args.o_token_stride = hv * V;
    args.g = g.data();
    args.beta = beta.data();
    args.use_qk_l2norm = 1;
    args.state = state.get();
    args.state_dtype = dtype;
    args.state_slot_stride = hv * V * K;
    args.read_index = args.write_index = slots.data();
    args.o = o.data();
    exec.backend = GDN_BACKEND_CPU;
    exec.pool = PoolOf(threads);
    size_t bytes = 0;
    gdn_delta_rule_prefill_workspace(&exec, &args, &bytes);
    workspace.resize(bytes + 64);
    exec.workspace =
        workspace.data() + (64 - reinterpret_cast<uintptr_t>(workspace.data()) % 64) % 64;
    exec.workspace_bytes = bytes;
  }
  double StateBytes() const {
    return 2.0 * static_cast<double>(n * heads * key_dim * value_dim) *
           (state_dtype == GDN_F32 ? 4.0 : 2.0);
  }
  // S k, S q and the rank-one update.
  double Flops() const {
    return 6.0 * static_cast<double>(n * length * heads * key_dim * value_dim);
  }
};

// range: rows, state type, threads. H 16, HV 32, K = V = 128.
void BM_DeltaRuleStep(benchmark::State& state) {
  Delta d(state.range(0), 1, 16, 32, 128, 128, static_cast<gdn_dtype>(state.range(1)),
          state.range(2));
  for (auto _ : state) {
    if (gdn_delta_rule_step(&d.exec, &d.args) != GDN_OK) state.SkipWithError(gdn_last_error());
  }
  state.counters["GB/s"] = PerSecond(1e-9 * d.StateBytes());
  state.counters["GFLOP/s"] = PerSecond(1e-9 * d.Flops());
}

// range: sequences, tokens, HV/H, state type, threads. H 2.
void BM_DeltaRulePrefill(benchmark::State& state) {
  Delta d(state.range(0), state.range(1), 2, 2 * state.range(2), 128, 128,
          static_cast<gdn_dtype>(state.range(3)), state.range(4));
  for (auto _ : state) {
    if (gdn_delta_rule_prefill(&d.exec, &d.args) != GDN_OK) state.SkipWithError(gdn_last_error());
  }
  state.counters["GFLOP/s"] = PerSecond(1e-9 * d.Flops());
  state.counters["head_tokens/s"] = PerSecond(static_cast<double>(d.n * d.length * d.heads));
}

// range: sequences, tokens, type, threads. C = 8192, W = 4.
void BM_CausalConv(benchmark::State& state) {
  constexpr int64_t kChannels = 8192;
  const int64_t n = state.range(0);
  const int64_t tokens = n * state.range(1);
  const auto dtype = static_cast<gdn_dtype>(state.range(2));
  const int64_t size = dtype == GDN_F32 ? 4 : 2;
  std::vector<char> x(static_cast<size_t>(tokens * kChannels * size), 0x3c);
  std::vector<char> y(x.size());
  std::vector<char> conv_state(static_cast<size_t>(n * 3 * kChannels * size), 0x3c);
  const std::vector<float> weight = Values(kChannels * 4, -1, 1);
  std::vector<int32_t> cu;
  std::vector<int64_t> slots;
  for (int64_t i = 0; i <= n; ++i) cu.push_back(static_cast<int32_t>(i * state.range(1)));
  for (int64_t i = 0; i < n; ++i) slots.push_back(i);
  gdn_causal_conv_args args{};
  args.sequences = n;
  args.cu_seqlens = cu.data();
  args.channels = kChannels;
  args.width = 4;
  args.silu = 1;
  args.x = x.data();
  args.x_dtype = args.y_dtype = dtype;
  args.x_token_stride = args.y_token_stride = kChannels;
  args.weight = weight.data();
  args.y = y.data();
  args.state = conv_state.data();
  args.state_slot_stride = 3 * kChannels;
  args.read_index = args.write_index = slots.data();
  gdn_exec exec{GDN_BACKEND_CPU, PoolOf(state.range(3)), nullptr, 0};
  for (auto _ : state) {
    if (gdn_causal_conv(&exec, &args) != GDN_OK) state.SkipWithError(gdn_last_error());
  }
  const double bytes = static_cast<double>(size * kChannels * (2 * tokens + 6 * n));
  state.counters["GB/s"] = PerSecond(1e-9 * bytes);
  state.counters["GFLOP/s"] = PerSecond(1e-9 * 8.0 * static_cast<double>(tokens * kChannels));
}

// range: tokens, threads. HV = 32.
void BM_Gates(benchmark::State& state) {
  const int64_t size = state.range(0) * 32;
  const std::vector<float> a = Values(size, -6, 6);
  const std::vector<float> b = Values(size, -6, 6);
  const std::vector<float> a_log = Values(32, 0, 2);
  const std::vector<float> dt_bias = Values(32, -6, 0);
  std::vector<float> g(a.size());
  std::vector<float> beta(a.size());
  const gdn_gates_args args{state.range(0), 32,   a.data(), b.data(),
                            GDN_F32,        32,   32,       a_log.data(),
                            dt_bias.data(), 1.0f, g.data(), beta.data()};
  const gdn_exec exec{GDN_BACKEND_CPU, PoolOf(state.range(1)), nullptr, 0};
  for (auto _ : state) {
    if (gdn_gates(&exec, &args) != GDN_OK) state.SkipWithError(gdn_last_error());
  }
  state.counters["GB/s"] = PerSecond(16e-9 * static_cast<double>(size));
}

// range: rows of 128, threads.
void BM_L2Norm(benchmark::State& state) {
  const int64_t size = state.range(0) * 128;
  const std::vector<float> x = Values(size, -1, 1);
  std::vector<float> y(x.size());
  gdn_l2_norm_args args{};
  args.rows = state.range(0);
  args.dim = args.x_row_stride = args.y_row_stride = 128;
  args.x = x.data();
  args.y = y.data();
  args.eps = 1e-6f;
  args.scale = 1.0f;
  const gdn_exec exec{GDN_BACKEND_CPU, PoolOf(state.range(1)), nullptr, 0};
  for (auto _ : state) {
    if (gdn_l2_norm(&exec, &args) != GDN_OK) state.SkipWithError(gdn_last_error());
  }
  state.counters["GB/s"] = PerSecond(8e-9 * static_cast<double>(size));
}

BENCHMARK(BM_Copy)->ArgsProduct({{1, 256}, {1, 2}})->UseRealTime();
BENCHMARK(BM_ScaleInPlace)->ArgsProduct({{1, 8, 256}, {1, 2}})->UseRealTime();
BENCHMARK(BM_DeltaRuleStep)->ArgsProduct({{1, 4, 16, 128}, {0, 1}, {1, 2}})->UseRealTime();
BENCHMARK(BM_DeltaRulePrefill)
    ->ArgsProduct({{1}, {4, 8, 9, 16, 32, 64, 128, 1024}, {1, 2}, {0}, {1}})
    ->Args({4, 1024, 2, 0, 2})
    ->Args({1, 1024, 2, 1, 1})
    ->UseRealTime();
BENCHMARK(BM_CausalConv)
    ->ArgsProduct({{1, 64}, {1}, {0, 1}, {1, 2}})
    ->ArgsProduct({{1}, {1024}, {0, 1, 2}, {1, 2}})
    ->UseRealTime();
BENCHMARK(BM_Gates)->ArgsProduct({{1, 64, 4096}, {1, 2}})->UseRealTime();
BENCHMARK(BM_L2Norm)->ArgsProduct({{32, 65536}, {1, 2}})->UseRealTime();

}  // namespace

BENCHMARK_MAIN();
