// Decode on a GPU without a wire: the pipeline alone with chained steps, and the engine, beside the
// roofline of the bytes a step must move over this run's copy bandwidth.
//
// usage: cuda_engine_bench --model DIR [--random-weights SEED] [--streams 1,16,64,256]
//                          [--tokens 256] [--state-type float32|bfloat16] [--batch-invariant]
//                          [--prefill 1x2048,16x512] [--ops]
#include <cuda_runtime_api.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "server/engine/engine.h"
#include "server/model/weights.h"
#include "server/pipeline/cuda/cuda_pipeline.h"
#include "server/pipeline/cuda/device_memory.h"
#include "tests/load/decode_roofline.h"
#include "tests/load/engine_load.h"

namespace gdn {
namespace {

using pipeline::SampleSpec;
using pipeline::SequenceInput;
using pipeline::SequenceOutput;

[[noreturn]] void Die(const std::string& message) {
  std::fprintf(stderr, "cuda_engine_bench: %s\n", message.c_str());
  std::exit(1);
}
void Must(const absl::Status& status) {
  if (!status.ok()) Die(std::string(status.message()));
}

struct Flags {
  std::string model;
  std::vector<int> streams = {1, 16, 64, 256};
  int tokens = 256;
  std::vector<std::string> prefill = {"1x2048"};
  bool ops = false;
  pipeline::CudaOptions cuda;
  std::optional<uint64_t> random_weights;
};

// Mean time by op over the steps that were timed.
class OpTimes final : public pipeline::KernelTimer {
 public:
  void OnKernel(std::string_view op, pipeline::Phase, int64_t ns) override {
    ns_[std::string(op)] += ns;
    if (op == "embedding") ++steps_;
  }
  void Print() {
    for (const auto& [op, ns] : ns_) {
      std::printf("    %-20s %9.1f us a step\n", op.c_str(),
                  static_cast<double>(ns) * 1e-3 / std::max(steps_, 1));
    }
    ns_.clear();
    steps_ = 0;
  }

 private:
  std::map<std::string, int64_t> ns_;
  int steps_ = 0;
};

// Bytes read plus written per second of a large copy on the device, the best of several.
double CopyBandwidth() {
  constexpr int64_t kBytes = int64_t{2} << 30;
  pipeline::DeviceArray<std::byte> from;
  pipeline::DeviceArray<std::byte> to;
  Must(from.Allocate(kBytes, "copy"));
  Must(to.Allocate(kBytes, "copy"));
  auto start = pipeline::CreateEvent(cudaEventDefault);
  auto end = pipeline::CreateEvent(cudaEventDefault);
  auto stream = pipeline::CreateStream();
  float best = 1e9f;
  for (int repeat = 0; repeat < 8; ++repeat) {
    (void)cudaEventRecord(start->get(), stream->get());
    (void)cudaMemcpyAsync(to.data(), from.data(), kBytes, cudaMemcpyDeviceToDevice, stream->get());
    (void)cudaEventRecord(end->get(), stream->get());
    Must(pipeline::CudaStatus(cudaEventSynchronize(end->get()), "copy"));
    float ms = 0;
    (void)cudaEventElapsedTime(&ms, start->get(), end->get());
    best = std::min(best, ms);
  }
  return 2.0 * kBytes / (double{best} * 1e-3);
}

// Seconds of a chained step of `rows` rows, two in flight.
double StepSeconds(pipeline::Pipeline* pipeline, int rows, int steps) {
  std::vector<SampleSpec> samples(static_cast<size_t>(rows));
  const std::vector<int32_t> token = {65};
  const auto launch = [&](bool first) {
    std::vector<SequenceInput> batch;
    for (int i = 0; i < rows; ++i) {
      SampleSpec& sample = samples[static_cast<size_t>(i)];
      ++sample.position;
      SequenceInput input{.read_slot = 1 + i, .write_slot = 1 + i, .fresh = first};
      input.sample = &sample;
      if (first) {
        input.tokens = token;
      } else {
        input.chained = i;
      }
      batch.push_back(input);
    }
    Must(pipeline->Launch(batch));
  };
  std::vector<SequenceOutput> outputs;
  launch(true);
  constexpr int kWarm = 16;
  double start = 0;
  for (int step = 0; step < kWarm + steps; ++step) {
    if (step == kWarm) start = Seconds();
    launch(false);
    Must(pipeline->Wait(&outputs));
  }
  const double seconds = Seconds() - start;
  Must(pipeline->Wait(&outputs));
  return seconds / steps;
}

// Prompts that enter in one batch.
struct Prompts {
  int sequences = 0;
  int tokens = 0;  // Of each.
};
Prompts ParsePrompts(const std::string& text) {
  Prompts prompts;
  char rest = 0;
  if (std::sscanf(text.c_str(), "%dx%d%c", &prompts.sequences, &prompts.tokens, &rest) != 2 ||
      prompts.sequences < 1 || prompts.tokens < 1) {
    Die("--prefill: expected sequences x tokens like 16x512, got '" + text + "'");
  }
  return prompts;
}

// Seconds from the call to the first tokens, the best of several.
double PrefillSeconds(pipeline::Pipeline* pipeline, const Prompts& prompts) {
  std::vector<int32_t> ids(static_cast<size_t>(prompts.tokens));
  for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int32_t>(32 + i * 7 % 90);
  const SampleSpec sample;
  std::vector<SequenceInput> batch;
  for (int i = 0; i < prompts.sequences; ++i) {
    batch.push_back({.write_slot = 1 + i, .fresh = true, .tokens = ids, .sample = &sample});
  }
  std::vector<SequenceOutput> outputs;
  double best = 1e9;
  for (int repeat = 0; repeat < 5; ++repeat) {
    const double start = Seconds();
    Must(pipeline->Run(batch, &outputs));
    best = std::min(best, Seconds() - start);
  }
  return best;
}

int Main(Flags flags) {
  model::LoadOptions load;
  load.path = flags.model;
  load.random_weights = flags.random_weights;
  double start = Seconds();
  auto model = model::LoadModel(load);
  if (!model.ok()) Die(std::string(model.status().message()));
  const model::ModelSpec spec = model->spec;
  std::printf("weights on the host after %.2f s\n", Seconds() - start);
  int most = *std::max_element(flags.streams.begin(), flags.streams.end());
  int64_t most_tokens = 512;
  std::vector<Prompts> prefills;
  for (const std::string& text : flags.prefill) {
    const Prompts prompts = ParsePrompts(text);
    prefills.push_back(prompts);
    most = std::max(most, prompts.sequences);
    most_tokens = std::max(most_tokens, int64_t{prompts.sequences} * prompts.tokens);
  }
  flags.cuda.num_slots = most + 2;
  flags.cuda.max_rows = most;
  flags.cuda.max_step_tokens = most_tokens + most;
  pipeline::CudaReport report;
  start = Seconds();
  auto pipeline = pipeline::CreateCudaPipeline(*std::move(model), flags.cuda, &report);
  if (!pipeline.ok()) Die(std::string(pipeline.status().message()));
  std::printf("%s: ready after %.2f s; weights %.0f MB at %.2f GB/s, states %.0f MB, %lld graphs\n",
              report.device_name.c_str(), Seconds() - start,
              static_cast<double>(report.weight_bytes) * 1e-6,
              report.upload_bytes_per_second * 1e-9, static_cast<double>(report.state_bytes) * 1e-6,
              static_cast<long long>(report.num_graphs));
  for (const bool greedy : {false, true}) {
    std::printf("launches of a%s step, by padded rows:", greedy ? " greedy" : "");
    for (const auto& size : greedy ? report.greedy_graph_sizes : report.graph_sizes) {
      std::printf(" %lld:%lld", static_cast<long long>(size.rows),
                  static_cast<long long>(size.nodes));
    }
    std::printf("\n");
  }
  OpTimes ops;
  if (flags.ops) (*pipeline)->set_kernel_timer(&ops);

  const double bandwidth = CopyBandwidth();
  const DecodeBytes bytes = BytesOfDecode(spec, flags.cuda.state_type == GDN_F32 ? 4 : 2);
  std::printf("copy %.3f TB/s; a step reads %.1f MB of weights and moves %.2f MB of state a row\n",
              bandwidth * 1e-12, bytes.weights * 1e-6, bytes.states * 1e-6);
  engine::SystemClock clock;
  engine::Observer observer;
  engine::EngineOptions options;
  options.max_batch_rows = most;
  auto engine = engine::Engine::Create(options, pipeline->get(), &clock, &observer);
  if (!engine.ok()) Die(std::string(engine.status().message()));
  Must((*engine)->WarmUp());
  std::printf("%8s %12s %12s %8s %12s %8s %8s\n", "streams", "roofline us", "step us", "share",
              "engine tok/s", "share", "idle");
  std::vector<double> step_seconds;
  for (const int streams : flags.streams) {
    step_seconds.push_back(StepSeconds(pipeline->get(), streams, flags.tokens));
    if (flags.ops) ops.Print();
  }
  for (const Prompts& prompts : prefills) {
    const double seconds = PrefillSeconds(pipeline->get(), prompts);
    std::printf("prefill %dx%d: %.2f ms, %.0f tokens/s\n", prompts.sequences, prompts.tokens,
                seconds * 1e3, prompts.sequences * prompts.tokens / seconds);
    if (flags.ops) ops.Print();
  }
  (*engine)->Start();
  for (size_t i = 0; i < flags.streams.size(); ++i) {
    const int streams = flags.streams[i];
    const double least = (bytes.weights + streams * bytes.states) / bandwidth;
    double rate = 0;
    for (int repeat = 0; repeat < 3; ++repeat) {
      const auto decoded = DecodeRate(engine->get(), streams, flags.tokens);
      Must(decoded.status());
      rate = std::max(rate, *decoded);
    }
    const double engine_step = streams / rate;
    std::printf("%8d %12.1f %12.1f %7.1f%% %12.0f %7.1f%% %7.1f%%\n", streams, least * 1e6,
                step_seconds[i] * 1e6, 100 * least / step_seconds[i], rate,
                100 * least / engine_step, 100 * std::max(0.0, 1 - step_seconds[i] / engine_step));
  }
  (*engine)->Stop();
  return 0;
}

}  // namespace
}  // namespace gdn

int main(int argc, char** argv) {
  gdn::Flags flags;
  std::string state_type = "float32";
  uint64_t seed = 0;
  CLI::App app("Decode on a GPU beside its roofline: the pipeline alone, and the engine.");
  app.add_option("--model", flags.model, "Checkpoint folder")->required();
  app.add_option("--streams", flags.streams, "Concurrent streams, a list")->delimiter(',');
  app.add_option("--tokens", flags.tokens, "New tokens of each stream");
  app.add_option("--prefill", flags.prefill, "Prompts of the prefill runs, a list like 16x512")
      ->delimiter(',');
  app.add_option("--state-type", state_type)->check(CLI::IsMember({"float32", "bfloat16"}));
  app.add_flag("--batch-invariant", flags.cuda.batch_invariant);
  app.add_flag("--ops", flags.ops, "Time the ops of some steps, and print them");
  app.add_option("--kernel-timing-interval", flags.cuda.timed_interval,
                 "Of every so many, with --ops")
      ->capture_default_str();
  CLI::Option* random = app.add_option("--random-weights", seed, "Make weights up from this seed");
  CLI11_PARSE(app, argc, argv);
  if (random->count() > 0) flags.random_weights = seed;
  flags.cuda.state_type = state_type == "float32" ? GDN_F32 : GDN_BF16;
  return gdn::Main(flags);
}
