// What measuring costs: a token, a step of the demo model, a call, a scrape.
#include <benchmark/benchmark.h>

#include <string>
#include <string_view>
#include <vector>

#include "server/metrics/metrics.h"

namespace gdn::metrics {
namespace {

constexpr int kOps = 14;     // Of the CPU pipeline.
constexpr int kOpRuns = 64;  // Of a decode step of six layers.

struct Fixture {
  Fixture() : metrics("0") {
    for (int i = 0; i < kOps; ++i) names.push_back("op_" + std::to_string(i));
    ops.assign(names.begin(), names.end());
    metrics.SetModel({.name = "m"}, ops);
  }
  std::vector<std::string> names;
  std::vector<std::string_view> ops;
  Metrics metrics;
};

void BM_Token(benchmark::State& state) {
  Fixture fixture;
  for (auto _ : state) fixture.metrics.OnInterToken(3'000'000);
}
BENCHMARK(BM_Token);

void BM_StepWithoutKernels(benchmark::State& state) {
  Fixture fixture;
  for (auto _ : state) {
    fixture.metrics.OnStep({.duration_ns = 3'000'000, .decode_tokens = 32, .decode_sequences = 32});
    fixture.metrics.OnLevels({});
  }
}
BENCHMARK(BM_StepWithoutKernels);

void BM_KernelsOfAStep(benchmark::State& state) {
  Fixture fixture;
  for (auto _ : state) {
    for (int i = 0; i < kOpRuns; ++i) {
      fixture.metrics.OnKernel(fixture.ops[static_cast<size_t>(i % kOps)], pipeline::Phase::kDecode,
                               20'000);
    }
  }
}
BENCHMARK(BM_KernelsOfAStep);

void BM_Call(benchmark::State& state) {
  Fixture fixture;
  for (auto _ : state) {
    fixture.metrics.OnCallStarted(rpc::Rpc::kGenerate);
    fixture.metrics.OnStreamStarted();
    fixture.metrics.OnQueueTime(1000);
    fixture.metrics.OnFirstToken(3'000'000);
    fixture.metrics.OnStreamEnded(engine::StreamEnd::kLength);
    fixture.metrics.OnCallEnded(9'000'000, 3'000'000);
    fixture.metrics.OnCallDone(rpc::Rpc::kGenerate, 0, 9'000'000);
  }
}
BENCHMARK(BM_Call);

// The whole page, without HTTP.
void BM_Scrape(benchmark::State& state) {
  Fixture fixture;
  size_t bytes = 0;
  for (auto _ : state) bytes = fixture.metrics.Text().size();
  state.counters["page_bytes"] = static_cast<double>(bytes);
}
BENCHMARK(BM_Scrape)->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace gdn::metrics

BENCHMARK_MAIN();
