// The dense ops on the shapes of the demo model. Counters: GFLOP/s of the product, GB/s of the
// bytes that must move (weights for few rows).
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include <benchmark/benchmark.h>

#include "gdn/kernels/cpu_pool.h"
#include "gdn/kernels/gated_rms_norm.h"
#include "gdn/kernels/matmul.h"
#include "gdn/kernels/rms_norm.h"
#include "gdn/kernels/sampling.h"
#include "gdn/kernels/silu_mul.h"
#include "kernels/common/convert.h"
#include "kernels/common/packed_weight.h"
#include "kernels/cpu/matmul_weight.h"

namespace gdn::kernels {
namespace {

constexpr int32_t kSpinUs = 100;

struct FreeDeleter {
  void operator()(void* p) const { std::free(p); }
};

class Context {
 public:
  explicit Context(int64_t threads)
      : pool_(gdn_cpu_pool_create(static_cast<int32_t>(threads), kSpinUs)) {
    exec_.backend = GDN_BACKEND_CPU;
    exec_.pool = pool_;
  }
  ~Context() { gdn_cpu_pool_destroy(pool_); }
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  void SetWorkspace(size_t bytes) {
    workspace_.reset(std::aligned_alloc(64, (bytes + 64) / 64 * 64));
    exec_.workspace = workspace_.get();
    exec_.workspace_bytes = bytes;
  }
  const gdn_exec* exec() const { return &exec_; }

 private:
  gdn_cpu_pool* pool_;
  std::unique_ptr<void, FreeDeleter> workspace_;
  gdn_exec exec_{};
};

std::vector<float> RandomFloats(int64_t count) {
  std::mt19937 engine(1);
  std::vector<float> values(static_cast<size_t>(count));
  for (float& v : values) v = static_cast<float>(engine() >> 8) * 0x1p-23f - 1.0f;
  return values;
}

void Fail(benchmark::State& state) { state.SkipWithError(gdn_last_error()); }

enum Algorithm : int64_t { kBf16Panels, kF32Panels, kOnednnF32 };

// Weights of `copies` layers in turn, so that the caches see what a model's step shows them.
void BM_Matmul(benchmark::State& state) {
  const auto algorithm = static_cast<Algorithm>(state.range(0));
  const int64_t k = state.range(1);
  const int64_t n = state.range(2);
  const int64_t rows = state.range(3);
  Context context(state.range(4));
  const int64_t copies = state.range(5);
  const std::vector<float> source = RandomFloats(n * k);
  const gdn_weight_rows block = {source.data(), GDN_F32, n};
  const PackRequest request = {algorithm == kF32Panels ? GDN_MATH_F32 : GDN_MATH_BF16,
                               n,
                               k,
                               {&block, 1},
                               0,
                               static_cast<int32_t>(state.range(4))};
  std::vector<std::unique_ptr<cpu::CpuWeight>> weights;
  for (int64_t i = 0; i < copies; ++i) {
    weights.push_back(algorithm == kOnednnF32 ? cpu::PackOnednn(request, cpu::OnednnElement::kF32)
                                              : cpu::PackPanels(request));
    if (weights.back() == nullptr) return Fail(state);
  }
  const std::vector<float> x = RandomFloats(rows * k);
  std::vector<float> y(static_cast<size_t>(rows * n));
  gdn_matmul_args args = {rows, x.data(), k, weights[0].get(), y.data(), n, 0};
  context.SetWorkspace(cpu::MatmulWorkspace(*context.exec(), args));
  size_t next = 0;
  for (auto _ : state) {
    args.weight = weights[next].get();
    next = (next + 1) % weights.size();
    if (gdn_matmul(context.exec(), &args) != GDN_OK) return Fail(state);
    benchmark::ClobberMemory();
  }
  using benchmark::Counter;
  const auto iterations = static_cast<double>(state.iterations());
  state.counters["FLOP/s"] =
      Counter(2.0 * static_cast<double>(rows * k * n) * iterations, Counter::kIsRate);
  state.counters["weight_B/s"] =
      Counter(static_cast<double>(gdn_packed_weight_bytes(weights[0].get())) * iterations,
              Counter::kIsRate, Counter::kIs1000);
  state.SetLabel(gdn_packed_weight_kind(weights[0].get()));
}

void MatmulCases(benchmark::internal::Benchmark* bench) {
  bench->ArgNames({"algo", "K", "N", "M", "threads", "copies"})->UseRealTime();
  struct Shape {
    int64_t k, n;
  };
  for (const int64_t threads : {1, 2}) {
    for (const Shape& s :
         {Shape{256, 2056}, Shape{512, 256}, Shape{256, 1536}, Shape{768, 256}, Shape{256, 260}}) {
      for (const int64_t rows : {1, 2, 4, 8, 16, 32, 64, 256, 1024}) {
        bench->Args({kBf16Panels, s.k, s.n, rows, threads, 8});
      }
    }
    for (const int64_t rows : {1, 8, 64, 256}) {
      bench->Args({kF32Panels, 256, 2056, rows, threads, 8});
      bench->Args({kBf16Panels, 1024, 4096, rows, threads, 1});
      bench->Args({kOnednnF32, 256, 2056, rows, threads, 8});
    }
  }
}
BENCHMARK(BM_Matmul)->Apply(MatmulCases);

void BM_RmsNorm(benchmark::State& state) {
  const int64_t rows = state.range(0);
  const int64_t dim = state.range(1);
  Context context(1);
  const std::vector<float> x = RandomFloats(rows * dim);
  const std::vector<float> weight = RandomFloats(dim);
  std::vector<float> y(x.size());
  const gdn_rms_norm_args args = {rows, dim,   x.data(), GDN_F32, dim, weight.data(),
                                  1,    1e-6f, y.data(), GDN_F32, dim};
  for (auto _ : state) {
    if (gdn_rms_norm(context.exec(), &args) != GDN_OK) return Fail(state);
  }
  state.SetBytesProcessed(state.iterations() * rows * dim * 8);
}
BENCHMARK(BM_RmsNorm)->ArgNames({"rows", "dim"})->Args({1, 256})->Args({32, 256})->Args({256, 256});

void BM_GatedRmsNorm(benchmark::State& state) {
  const int64_t tokens = state.range(0);
  constexpr int64_t kHeads = 8;
  constexpr int64_t kDim = 64;
  Context context(1);
  const std::vector<float> x = RandomFloats(tokens * kHeads * kDim);
  const std::vector<float> gate = RandomFloats(tokens * 2056);
  const std::vector<float> weight = RandomFloats(kDim);
  std::vector<float> y(x.size());
  gdn_gated_rms_norm_args args = {};
  args.tokens = tokens;
  args.heads = kHeads;
  args.dim = kDim;
  args.x = x.data();
  args.x_token_stride = args.y_token_stride = kHeads * kDim;
  args.x_head_stride = args.y_head_stride = args.gate_head_stride = kDim;
  args.gate = gate.data();
  args.gate_token_stride = 2056;
  args.weight = weight.data();
  args.eps = 1e-6f;
  args.y = y.data();
  for (auto _ : state) {
    if (gdn_gated_rms_norm(context.exec(), &args) != GDN_OK) return Fail(state);
  }
  state.SetBytesProcessed(state.iterations() * tokens * kHeads * kDim * 12);
}
BENCHMARK(BM_GatedRmsNorm)->ArgName("tokens")->Arg(1)->Arg(32)->Arg(256);

void BM_SiluMul(benchmark::State& state) {
  const int64_t rows = state.range(0);
  constexpr int64_t kDim = 768;
  Context context(1);
  const std::vector<float> both = RandomFloats(rows * 2 * kDim);
  std::vector<float> y(static_cast<size_t>(rows * kDim));
  const gdn_silu_mul_args args = {
      rows, kDim, both.data(), both.data() + kDim, GDN_F32, 2 * kDim, y.data(), GDN_F32, kDim};
  for (auto _ : state) {
    if (gdn_silu_mul(context.exec(), &args) != GDN_OK) return Fail(state);
  }
  state.SetBytesProcessed(state.iterations() * rows * kDim * 12);
}
BENCHMARK(BM_SiluMul)->ArgName("rows")->Arg(1)->Arg(32)->Arg(256);

// Time per row; the filters are those of the argument.
void BM_Sample(benchmark::State& state) {
  const int64_t vocab = state.range(0);
  const gdn_sampling_params cases[] = {{0.0f, 0, 1.0f, 0.0f, 1.0f, 1},
                                       {1.0f, 0, 1.0f, 0.0f, 1.0f, 1},
                                       {1.0f, 50, 0.95f, 0.0f, 1.0f, 1},
                                       {1.0f, 0, 0.95f, 0.0f, 1.0f, 1},
                                       {1.0f, 0, 1.0f, 0.05f, 1.0f, 1}};
  static constexpr const char* kNames[] = {"greedy", "plain", "top_k 50, top_p .95", "top_p .95",
                                           "min_p .05"};
  const auto which = static_cast<size_t>(state.range(1));
  const auto scale = static_cast<float>(state.range(2));
  Context context(1);
  std::vector<float> logits = RandomFloats(vocab);
  for (float& l : logits) l *= scale;
  const int64_t position = 3;
  int32_t token = 0;
  float logprob = 0.0f;
  gdn_sampling_args args = {};
  args.rows = 1;
  args.vocab = vocab;
  args.logits = logits.data();
  args.logits_row_stride = vocab;
  args.params = &cases[which];
  args.position = &position;
  args.token = &token;
  args.logprob = &logprob;
  context.SetWorkspace(cpu::SampleWorkspace(*context.exec(), args));
  for (auto _ : state) {
    if (gdn_sample(context.exec(), &args) != GDN_OK) return Fail(state);
  }
  state.SetItemsProcessed(state.iterations() * vocab);
  state.SetLabel(kNames[which]);
}
BENCHMARK(BM_Sample)
    ->ArgNames({"vocab", "filters", "logit_scale"})
    ->ArgsProduct({{260, 248320}, {0, 1, 2, 3, 4}, {1, 16}});

}  // namespace
}  // namespace gdn::kernels

BENCHMARK_MAIN();
