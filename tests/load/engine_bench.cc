// The engine alone, without a wire: tokens per second of decode and prefill, beside the bound that
// the same run's matrix products and memory bandwidth allow.
//
// usage: engine_bench --model DIR [--streams 1,32] [--tokens 256] [--prefill 4096] [--threads 0]
//                     [--precision bfloat16|float32] [--batch-invariant] [--random-weights SEED]
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "gdn/kernels/cpu_pool.h"
#include "gdn/kernels/matmul.h"
#include "server/engine/engine.h"
#include "server/model/weights.h"
#include "server/pipeline/cpu_pipeline.h"
#include "tests/load/engine_load.h"

namespace gdn {
namespace {

struct Flags {
  std::string model;
  std::vector<int> streams = {1, 32};
  int tokens = 256;
  int prefill = 4096;
  int repeats = 3;
  pipeline::CpuOptions cpu;
  std::optional<uint64_t> random_weights;
};

// Sums kernel time by op.
class OpTimes final : public pipeline::KernelTimer {
 public:
  void OnKernel(std::string_view op, pipeline::Phase, int64_t ns) override {
    ns_[std::string(op)] += ns;
  }
  void Print(double total_seconds) {
    for (const auto& [op, ns] : ns_) {
      std::printf("    %-20s %7.1f ms  %5.1f %%\n", op.c_str(), static_cast<double>(ns) * 1e-6,
                  static_cast<double>(ns) * 1e-7 / total_seconds);
    }
    ns_.clear();
  }
  void Clear() { ns_.clear(); }

 private:
  std::map<std::string, int64_t> ns_;
};

[[noreturn]] void Die(const std::string& message) {
  std::fprintf(stderr, "engine_bench: %s\n", message.c_str());
  std::exit(1);
}

double Prefill(engine::Engine* engine, int tokens) {
  auto session = engine->CreateSession(std::nullopt);
  if (!session.ok()) Die(std::string(session.status().message()));
  engine::BatchRequest request;
  engine::SequenceRequest& sequence = request.sequences.emplace_back();
  sequence.session_id = session->id;
  for (int i = 0; i < tokens; ++i) sequence.input.tokens.push_back(32 + (i * 7) % 90);
  Waiter waiter;
  const double start = Seconds();
  auto call = engine->Submit(std::move(request), {.on_ready = [&] { waiter.Wake(); }});
  if (!call.ok()) Die(std::string(call.status().message()));
  std::optional<engine::BatchResult> result;
  waiter.Wait([&] { return (result = (*call)->Take()).has_value(); });
  const double seconds = Seconds() - start;
  if (!result->status.ok()) Die(std::string(result->status.message()));
  if (!engine->DeleteSession(session->id).ok()) Die("the session is gone");
  return tokens / seconds;
}

// Seconds that one step of `rows` rows spends in its matrix products alone.
double ProductSeconds(const model::ModelSpec& spec, const Flags& flags, int32_t threads, int rows) {
  struct Shape {
    int64_t n, k;
  };
  const model::GdnDims& dims = spec.gdn;
  std::vector<Shape> shapes;
  for (const model::LayerType type : spec.layer_types) {
    shapes.push_back({dims.projection_size(type), spec.hidden_size});
    shapes.push_back({spec.hidden_size, dims.value_size()});
    shapes.push_back({2 * spec.intermediate_size, spec.hidden_size});
    shapes.push_back({spec.hidden_size, spec.intermediate_size});
  }
  shapes.push_back({spec.vocab_size, spec.hidden_size});
  gdn_cpu_pool* pool = gdn_cpu_pool_create(threads, threads == 1 ? 0 : 50);
  std::vector<gdn_packed_weight*> weights;
  int64_t max_n = 0;
  int64_t max_k = 0;
  for (const Shape& shape : shapes) {
    std::vector<uint16_t> values(static_cast<size_t>(shape.n * shape.k));
    for (size_t i = 0; i < values.size(); ++i) {
      values[i] = static_cast<uint16_t>(0x3c00 + (i * 2654435761u >> 20) % 512);
    }
    const gdn_weight_rows block = {values.data(), GDN_BF16, shape.n};
    gdn_packed_weight* packed = nullptr;
    const auto math =
        flags.cpu.precision == pipeline::Precision::kFloat32 ? GDN_MATH_F32 : GDN_MATH_BF16;
    if (gdn_packed_weight_create(GDN_BACKEND_CPU, math, shape.k, &block, 1,
                                 flags.cpu.batch_invariant ? 8 : 0, threads, &packed) != GDN_OK) {
      Die(gdn_last_error());
    }
    weights.push_back(packed);
    max_n = std::max(max_n, shape.n);
    max_k = std::max(max_k, shape.k);
  }
  std::vector<float> x(static_cast<size_t>(rows * max_k), 0.37f);
  std::vector<float> y(static_cast<size_t>(rows * max_n));
  std::vector<std::byte> workspace;
  gdn_exec exec{GDN_BACKEND_CPU, pool, nullptr, 0};
  std::vector<double> times;
  for (int repeat = 0; repeat < 30; ++repeat) {
    const double start = Seconds();
    for (size_t i = 0; i < shapes.size(); ++i) {
      gdn_matmul_args args{};
      args.rows = rows;
      args.x = x.data();
      args.x_row_stride = shapes[i].k;
      args.weight = weights[i];
      args.y = y.data();
      args.y_row_stride = shapes[i].n;
      size_t bytes = 0;
      gdn_matmul_workspace(&exec, &args, &bytes);
      if (bytes + 64 > workspace.size()) workspace.resize(bytes + 64);
      const auto address = reinterpret_cast<uintptr_t>(workspace.data());
      exec.workspace = workspace.data() + (64 - address % 64) % 64;
      exec.workspace_bytes = bytes;
      if (gdn_matmul(&exec, &args) != GDN_OK) Die(gdn_last_error());
    }
    times.push_back(Seconds() - start);
  }
  std::printf("  products: %s\n", gdn_packed_weight_kind(weights[0]));
  for (gdn_packed_weight* weight : weights) gdn_packed_weight_destroy(weight);
  gdn_cpu_pool_destroy(pool);
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

// Multiply-adds per second, times two, of products whose operands stay in the caches: what the
// cores give at this moment. On a shared host it moves by a third within minutes.
double ProductPeak(int32_t threads) {
  constexpr int64_t kRows = 96;
  constexpr int64_t kDepth = 768;
  constexpr int64_t kColumns = 256;
  const std::vector<uint16_t> values(kColumns * kDepth, 0x3c10);
  const gdn_weight_rows block = {values.data(), GDN_BF16, kColumns};
  gdn_packed_weight* weight = nullptr;
  if (gdn_packed_weight_create(GDN_BACKEND_CPU, GDN_MATH_F32, kDepth, &block, 1, 0, threads,
                               &weight) != GDN_OK) {
    Die(gdn_last_error());
  }
  gdn_cpu_pool* pool = gdn_cpu_pool_create(threads, 50);
  const gdn_exec exec{GDN_BACKEND_CPU, pool, nullptr, 0};
  const std::vector<float> x(kRows * kDepth, 0.1f);
  std::vector<float> y(kRows * kColumns);
  gdn_matmul_args args{};
  args.rows = kRows;
  args.x = x.data();
  args.x_row_stride = kDepth;
  args.weight = weight;
  args.y = y.data();
  args.y_row_stride = kColumns;
  double best = 1e9;
  for (int repeat = 0; repeat < 200; ++repeat) {
    const double start = Seconds();
    if (gdn_matmul(&exec, &args) != GDN_OK) Die(gdn_last_error());
    best = std::min(best, Seconds() - start);
  }
  gdn_packed_weight_destroy(weight);
  gdn_cpu_pool_destroy(pool);
  return 2.0 * kRows * kDepth * kColumns / best;
}

// Bytes read plus bytes written per second of a large copy on all threads.
double CopyBandwidth(int32_t threads) {
  const size_t bytes = size_t{256} << 20;
  std::vector<char> from(bytes, 1);
  std::vector<char> to(bytes, 2);
  gdn_cpu_pool* pool = gdn_cpu_pool_create(threads, 50);
  double best = 1e9;
  for (int repeat = 0; repeat < 8; ++repeat) {
    const double start = Seconds();
    cpu::ParallelFor(pool, threads, 1, [&](int64_t begin, int64_t end, int32_t) {
      const size_t first = bytes / static_cast<size_t>(threads) * static_cast<size_t>(begin);
      const size_t last = bytes / static_cast<size_t>(threads) * static_cast<size_t>(end);
      std::memcpy(to.data() + first, from.data() + first, last - first);
    });
    best = std::min(best, Seconds() - start);
  }
  gdn_cpu_pool_destroy(pool);
  return 2.0 * static_cast<double>(bytes) / best;
}

int Main(const Flags& flags) {
  model::LoadOptions load;
  load.path = flags.model;
  load.random_weights = flags.random_weights;
  const double load_start = Seconds();
  auto model = model::LoadModel(load);
  if (!model.ok()) Die(std::string(model.status().message()));
  const model::ModelSpec spec = model->spec;
  const int max_streams = *std::max_element(flags.streams.begin(), flags.streams.end());
  pipeline::CpuOptions cpu = flags.cpu;
  cpu.num_slots = max_streams + 4;
  auto pipeline = pipeline::CreateCpuPipeline(*std::move(model), cpu);
  if (!pipeline.ok()) Die(std::string(pipeline.status().message()));
  OpTimes ops;
  (*pipeline)->set_kernel_timer(&ops);
  engine::SystemClock clock;
  engine::Observer observer;
  auto engine = engine::Engine::Create({}, pipeline->get(), &clock, &observer);
  if (!engine.ok()) Die(std::string(engine.status().message()));
  if (absl::Status status = (*engine)->WarmUp(); !status.ok()) Die(std::string(status.message()));
  std::printf("%s: ready after %.2f s\n", flags.model.c_str(), Seconds() - load_start);
  (*engine)->Start();
  ops.Clear();

  const auto threads = static_cast<int32_t>(flags.cpu.threads > 0 ? flags.cpu.threads
                                                                  : sysconf(_SC_NPROCESSORS_ONLN));
  const double bandwidth = CopyBandwidth(threads);
  const double state_bytes =
      2.0 * 4.0 * static_cast<double>(spec.num_layers * spec.gdn.recurrent_elements());
  std::printf("threads %d, copy bandwidth %.1f GB/s, products in cache %.0f GFLOP/s\n", threads,
              bandwidth * 1e-9, ProductPeak(threads) * 1e-9);

  for (const int streams : flags.streams) {
    double best = 0;
    for (int repeat = 0; repeat < flags.repeats; ++repeat) {
      ops.Clear();
      const double start = Seconds();
      const auto decoded = DecodeRate(engine->get(), streams, flags.tokens);
      if (!decoded.ok()) Die(std::string(decoded.status().message()));
      const double rate = *decoded;
      const double seconds = Seconds() - start;
      if (rate > best) best = rate;
      if (repeat + 1 == flags.repeats) ops.Print(seconds);
    }
    const double bound_seconds =
        ProductSeconds(spec, flags, threads, streams) + streams * state_bytes / bandwidth;
    const double bound = streams / bound_seconds;
    std::printf("decode, %d streams: %.0f tokens/s, bound %.0f, share %.0f %%\n", streams, best,
                bound, 100 * best / bound);
  }
  if (flags.prefill > 0) {
    double best = 0;
    for (int repeat = 0; repeat < flags.repeats; ++repeat) {
      ops.Clear();
      const double start = Seconds();
      best = std::max(best, Prefill(engine->get(), flags.prefill));
      const double seconds = Seconds() - start;
      if (repeat + 1 == flags.repeats) ops.Print(seconds);
    }
    std::printf("prefill, %d tokens: %.0f tokens/s\n", flags.prefill, best);
  }
  (*engine)->Stop();
  return 0;
}

}  // namespace
}  // namespace gdn

int main(int argc, char** argv) {
  gdn::Flags flags;
  std::string precision = "bfloat16";
  uint64_t seed = 0;
  CLI::App app("The engine alone: decode and prefill rates beside their bound.");
  app.add_option("--model", flags.model, "Checkpoint folder")->required();
  app.add_option("--streams", flags.streams, "Concurrent streams, a list")->delimiter(',');
  app.add_option("--tokens", flags.tokens, "New tokens of each stream");
  app.add_option("--prefill", flags.prefill, "Tokens of the prefill run; 0: none");
  app.add_option("--repeats", flags.repeats, "Runs of each kind; the best counts");
  app.add_option("--threads", flags.cpu.threads, "Worker threads; 0: all cores");
  app.add_option("--precision", precision)->check(CLI::IsMember({"bfloat16", "float32"}));
  app.add_flag("--batch-invariant", flags.cpu.batch_invariant);
  CLI::Option* random = app.add_option("--random-weights", seed, "Make weights up from this seed");
  CLI11_PARSE(app, argc, argv);
  if (random->count() > 0) flags.random_weights = seed;
  flags.cpu.precision = precision == "float32" ? gdn::pipeline::Precision::kFloat32
                                               : gdn::pipeline::Precision::kBFloat16;
  return gdn::Main(flags);
}
