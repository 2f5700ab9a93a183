// How the CUDA pipeline behaves as a pipeline: graphs and chaining, choices, independence of the
// batch, slots, errors.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <set>
#include <string>
#include <utility>

#include "gdn/kernels/sampling.h"
#include "server/pipeline/cuda/device_state_pool.h"
#include "tests/golden/cuda_testing.h"

namespace gdn::golden {
namespace {

using pipeline::Positions;
using pipeline::SampleSpec;
using pipeline::SequenceInput;
using pipeline::SequenceOutput;

constexpr char kDemo[] = "deploy/models/demo-gdn-7m";

class CudaPipelineTest : public testing::Test {
 protected:
  void SetUp() override { GDN_NEED_GPU(); }

  static std::unique_ptr<pipeline::Pipeline> Load(pipeline::CudaOptions options) {
    options.num_slots = options.num_slots == 0 ? 300 : options.num_slots;
    return LoadCudaStack(SourcePath(kDemo), options);
  }

  static SequenceInput Step(int64_t slot, std::span<const int32_t> token,
                            const SampleSpec* sample) {
    return {.read_slot = slot, .write_slot = slot, .tokens = token, .sample = sample};
  }

  // Prompts into slots 1..n; returns the first token each chooses.
  static std::vector<int32_t> Prefill(pipeline::Pipeline* stack, size_t n,
                                      std::vector<SampleSpec>& samples) {
    std::vector<std::vector<int32_t>> prompts;
    for (size_t i = 0; i < n; ++i) prompts.push_back(TextTokens(i, 4 + i % 7));
    std::vector<SequenceInput> batch;
    for (size_t i = 0; i < n; ++i) {
      samples[i].position = static_cast<int64_t>(prompts[i].size());
      batch.push_back({.write_slot = static_cast<int64_t>(1 + i),
                       .fresh = true,
                       .tokens = prompts[i],
                       .sample = &samples[i]});
    }
    std::vector<SequenceOutput> outputs;
    const absl::Status status = stack->Run(batch, &outputs);
    EXPECT_TRUE(status.ok()) << status;
    std::vector<int32_t> tokens;
    for (const SequenceOutput& output : outputs) tokens.push_back(output.token.id);
    return tokens;
  }
};

// What the host picks from the logits with the reference sampler.
int32_t RefChoice(std::span<const float> logits, const SampleSpec& spec) {
  const gdn_sampling_params params = {spec.temperature,        spec.top_k, spec.top_p, spec.min_p,
                                      spec.repetition_penalty, spec.seed};
  const int64_t offsets[2] = {0, static_cast<int64_t>(spec.history.size())};
  int32_t token = -2;
  gdn_sampling_args args{};
  args.rows = 1;
  args.vocab = static_cast<int64_t>(logits.size());
  args.logits = logits.data();
  args.logits_row_stride = args.vocab;
  args.params = &params;
  args.position = &spec.position;
  args.history = spec.history.empty() ? nullptr : spec.history.data();
  args.history_offsets = spec.history.empty() ? nullptr : offsets;
  args.token = &token;
  gdn_exec exec{};
  size_t bytes = 0;
  EXPECT_EQ(gdn_sample_workspace(&exec, &args, &bytes), GDN_OK);
  std::vector<std::byte> workspace(bytes + 64);
  exec.workspace = workspace.data() + (64 - reinterpret_cast<uintptr_t>(workspace.data()) % 64);
  exec.workspace_bytes = bytes;
  EXPECT_EQ(gdn_sample(&exec, &args), GDN_OK) << gdn_last_error();
  return token;
}

std::vector<SampleSpec> MixedSamples(size_t n) {
  std::vector<SampleSpec> samples(n);
  for (size_t i = 0; i < n; ++i) {
    samples[i].seed = 1000 + i;
    if (i % 4 == 1) samples[i].temperature = 0.8f;
    if (i % 4 == 2) {
      samples[i].temperature = 1.0f;
      samples[i].top_k = 20;
      samples[i].top_p = 0.9f;
    }
    if (i % 4 == 3) {
      samples[i].temperature = 1.2f;
      samples[i].min_p = 0.05f;
    }
  }
  return samples;
}

// Steps through graphs, fed from the host and chained on the device with two batches in flight,
// give the same tokens.
TEST_F(CudaPipelineTest, ChainedStepsEqualFedSteps) {
  constexpr size_t kStreams = 5;  // Padded to 6.
  constexpr int kSteps = 40;
  const auto stack = Load({.timed_interval = 7});
  std::vector<SampleSpec> samples = MixedSamples(kStreams);
  std::vector<std::vector<int32_t>> fed(kStreams);
  std::vector<int32_t> last = Prefill(stack.get(), kStreams, samples);
  std::vector<SequenceOutput> outputs;
  for (int step = 0; step < kSteps; ++step) {
    std::vector<SequenceInput> batch;
    for (size_t i = 0; i < kStreams; ++i) {
      ++samples[i].position;
      batch.push_back(Step(static_cast<int64_t>(1 + i), {&last[i], 1}, &samples[i]));
    }
    ASSERT_TRUE(stack->Run(batch, &outputs).ok());
    for (size_t i = 0; i < kStreams; ++i) {
      ASSERT_TRUE(outputs[i].finite);
      fed[i].push_back(outputs[i].token.id);
    }
    for (size_t i = 0; i < kStreams; ++i) last[i] = outputs[i].token.id;
  }

  samples = MixedSamples(kStreams);
  last = Prefill(stack.get(), kStreams, samples);
  std::vector<std::vector<int32_t>> chained(kStreams);
  const auto launch = [&](int step) {
    std::vector<SequenceInput> batch;
    // The order changes from step to step: input i is sequence (i + step) % n.
    for (size_t i = 0; i < kStreams; ++i) {
      const size_t s = (i + static_cast<size_t>(step)) % kStreams;
      ++samples[s].position;
      SequenceInput input = Step(static_cast<int64_t>(1 + s), {}, &samples[s]);
      if (step == 0) {
        input.tokens = {&last[s], 1};
      } else {
        input.chained = static_cast<int64_t>((i + 1) % kStreams);
      }
      batch.push_back(input);
    }
    return stack->Launch(batch);
  };
  ASSERT_TRUE(launch(0).ok());
  for (int step = 0; step < kSteps; ++step) {
    if (step + 1 < kSteps) {
      const absl::Status status = launch(step + 1);
      ASSERT_TRUE(status.ok()) << status;
    }
    ASSERT_TRUE(stack->Wait(&outputs).ok());
    for (size_t i = 0; i < kStreams; ++i) {
      chained[(i + static_cast<size_t>(step)) % kStreams].push_back(outputs[i].token.id);
    }
  }
  EXPECT_EQ(chained, fed);
}

// The device's choices are what the reference sampler picks from the logits that come back.
TEST_F(CudaPipelineTest, ChoicesFollowFromTheLogits) {
  constexpr size_t kStreams = 12;
  const auto stack = Load({});
  std::vector<SampleSpec> samples = MixedSamples(kStreams);
  std::vector<int32_t> history = {32, 101, 116, 97};
  samples[5].repetition_penalty = 1.3f;
  samples[5].history = history;
  samples[6].top_logprobs = 5;
  std::vector<int32_t> last = Prefill(stack.get(), kStreams, samples);
  int differ = 0;
  for (int step = 0; step < 20; ++step) {
    std::vector<SequenceInput> batch;
    for (size_t i = 0; i < kStreams; ++i) {
      ++samples[i].position;
      batch.push_back(Step(static_cast<int64_t>(1 + i), {&last[i], 1}, &samples[i]));
      batch.back().want_logits = Positions::kLast;
    }
    std::vector<SequenceOutput> outputs;
    ASSERT_TRUE(stack->Run(batch, &outputs).ok());
    for (size_t i = 0; i < kStreams; ++i) {
      differ += outputs[i].token.id != RefChoice(outputs[i].logits, samples[i]) ? 1 : 0;
      last[i] = outputs[i].token.id;
    }
    ASSERT_EQ(outputs[6].top.size(), 5u);
    EXPECT_EQ(outputs[6].top[0].id, static_cast<int32_t>(ArgMax(outputs[6].logits)));
    EXPECT_TRUE(outputs[0].top.empty());
    double sum = 0;
    for (const float x : outputs[6].logits)
      sum += std::exp(double{x} - outputs[6].logits[static_cast<size_t>(outputs[6].top[0].id)]);
    EXPECT_NEAR(outputs[6].top[0].logprob, -std::log(sum), 1e-4);
  }
  EXPECT_LE(differ, 1);  // Of 240: two perturbed logits may be a rounding of log apart.
}

// With batch_invariant the bits do not depend on the batch; without it they are close.
class CudaBatchTest : public CudaPipelineTest, public testing::WithParamInterface<bool> {
 protected:
  void ExpectSame(std::span<const float> together, std::span<const float> alone) {
    ASSERT_EQ(together.size(), alone.size());
    if (alone.empty()) return;
    if (GetParam()) {
      EXPECT_EQ(std::memcmp(together.data(), alone.data(), alone.size_bytes()), 0);
    } else {
      EXPECT_LE(RelativeL2(together, alone), 1e-2);
    }
  }
};

TEST_P(CudaBatchTest, RaggedPrefill) {
  const auto stack = Load({.batch_invariant = GetParam(), .max_step_tokens = 2048});
  CompareRaggedPrefill(stack.get(),
                       [&](std::span<const float> together, std::span<const float> alone) {
                         ExpectSame(together, alone);
                       });
}

// A sequence alone, and as one of 256, at several places of the batch.
TEST_P(CudaBatchTest, OneAmong256) {
  constexpr size_t kOthers = 256;
  const auto stack =
      Load({.batch_invariant = GetParam(), .max_rows = kOthers, .max_step_tokens = 4096});
  std::vector<SampleSpec> samples(kOthers);
  const std::vector<int32_t> last = Prefill(stack.get(), kOthers, samples);
  for (const size_t probe : {size_t{0}, size_t{77}, size_t{255}}) {
    SCOPED_TRACE(probe);
    const auto slot = static_cast<int64_t>(1 + probe);
    ASSERT_TRUE(stack->CopySlot(slot, 290).ok());
    std::vector<SequenceInput> batch;
    for (size_t i = 0; i < kOthers; ++i) {
      SequenceInput input = Step(static_cast<int64_t>(1 + i), {&last[i], 1}, nullptr);
      if (i == probe) input.want_logits = Positions::kLast;
      batch.push_back(input);
    }
    std::vector<SequenceOutput> outputs;
    ASSERT_TRUE(stack->Run(batch, &outputs).ok());
    const std::vector<float> together(outputs[probe].logits.begin(), outputs[probe].logits.end());
    SequenceInput alone = Step(290, {&last[probe], 1}, nullptr);
    alone.want_logits = Positions::kLast;
    ASSERT_TRUE(stack->Run({&alone, 1}, &outputs).ok());
    ExpectSame(together, outputs[0].logits);
    const pipeline::SlotState a = *stack->ReadSlot(slot);
    const pipeline::SlotState b = *stack->ReadSlot(290);
    ExpectSame(a.recurrent, b.recurrent);
    ExpectSame(a.conv, b.conv);
  }
}

INSTANTIATE_TEST_SUITE_P(Modes, CudaBatchTest, testing::Bool(), [](const auto& param_info) {
  return param_info.param ? "invariant" : "default";
});

// Padding rows of a graph, empty sequences and other sessions' steps change no byte of a slot.
TEST_F(CudaPipelineTest, OtherSlotsKeepTheirBits) {
  const auto stack = Load({.num_slots = 12});
  std::vector<SampleSpec> samples(8);
  const std::vector<int32_t> last = Prefill(stack.get(), 8, samples);
  std::vector<pipeline::SlotState> before;
  for (int64_t slot = 4; slot <= 8; ++slot) before.push_back(*stack->ReadSlot(slot));
  std::vector<SequenceOutput> outputs;
  for (int step = 0; step < 4; ++step) {
    std::vector<SequenceInput> batch;
    for (size_t i = 0; i < 3; ++i) {
      batch.push_back(Step(static_cast<int64_t>(1 + i), {&last[i], 1}, &samples[i]));
    }
    // An empty sequence, in every other step: that one is no graph.
    if (step % 2 == 1) batch.push_back({.read_slot = 4, .write_slot = 4});
    ASSERT_TRUE(stack->Run(batch, &outputs).ok());
  }
  for (int64_t slot = 4; slot <= 8; ++slot) {
    const pipeline::SlotState after = *stack->ReadSlot(slot);
    EXPECT_EQ(after.recurrent, before[static_cast<size_t>(slot - 4)].recurrent) << slot;
    EXPECT_EQ(after.conv, before[static_cast<size_t>(slot - 4)].conv) << slot;
  }
  // A copy is the whole state, in the order of the launches.
  SequenceInput step = Step(5, {&last[4], 1}, &samples[4]);
  ASSERT_TRUE(stack->Launch({&step, 1}).ok());
  ASSERT_TRUE(stack->CopySlot(5, 9).ok());
  ASSERT_TRUE(stack->Wait(&outputs).ok());
  EXPECT_EQ(stack->ReadSlot(9)->recurrent, stack->ReadSlot(5)->recurrent);
  EXPECT_EQ(stack->ReadSlot(9)->conv, stack->ReadSlot(5)->conv);
  EXPECT_NE(stack->ReadSlot(9)->recurrent, before[1].recurrent);
}

TEST_F(CudaPipelineTest, NonFiniteInputsAreFoundAndStayAlone) {
  const auto stack = LoadCudaStack(SourcePath(kDemo), {.num_slots = 4}, model::LayerRange{1, 3});
  const auto hidden = static_cast<size_t>(stack->info().hidden_size);
  std::vector<float> good(3 * hidden, 0.5f);
  std::vector<float> bad = good;
  bad[hidden + 3] = std::numeric_limits<float>::quiet_NaN();
  const std::vector<SequenceInput> batch = {
      {.write_slot = 1, .fresh = true, .hidden = good, .want_hidden = Positions::kAll},
      {.write_slot = 2, .fresh = true, .hidden = bad, .want_hidden = Positions::kLast}};
  std::vector<SequenceOutput> outputs;
  ASSERT_TRUE(stack->Run(batch, &outputs).ok());
  EXPECT_TRUE(outputs[0].finite);
  EXPECT_FALSE(outputs[1].finite);
  EXPECT_EQ(outputs[0].hidden.size(), 3 * hidden);
  EXPECT_EQ(outputs[1].hidden.size(), hidden);
  const std::vector<float> together(outputs[0].hidden.begin(), outputs[0].hidden.end());
  // A reused slot starts clean.
  const SequenceInput again = {
      .write_slot = 2, .fresh = true, .hidden = good, .want_hidden = Positions::kAll};
  ASSERT_TRUE(stack->Run({&again, 1}, &outputs).ok());
  EXPECT_TRUE(outputs[0].finite);
  EXPECT_LE(RelativeL2(outputs[0].hidden, together), 1e-2);
}

// Reports each op's time, under names that were announced, on the steps chosen for it.
TEST_F(CudaPipelineTest, TimesOpsOnChosenSteps) {
  class Timer final : public pipeline::KernelTimer {
   public:
    void OnKernel(std::string_view op, pipeline::Phase, int64_t ns) override {
      EXPECT_GT(ns, 0);
      ops.insert(std::string(op));
      ++count;
      kernels_ns += ns;
    }
    void OnDecodeStateBytes(int64_t bytes) override { state_bytes += bytes; }
    void OnGraphReplay(bool hit, int64_t padding_rows) override {
      ++(hit ? hits : misses);
      padding += padding_rows;
    }
    // Comes after the ops of the same step, whose times must add up to it.
    void OnGpuBusy(pipeline::Phase, int64_t ns) override {
      ++steps;
      EXPECT_GT(ns, 0);
      if (kernels_ns == 0) return;
      EXPECT_NEAR(static_cast<double>(kernels_ns), static_cast<double>(ns),
                  0.05 * static_cast<double>(ns));
      kernels_ns = 0;
    }
    std::set<std::string> ops;
    int count = 0;
    int steps = 0;
    int hits = 0;
    int misses = 0;
    int64_t padding = 0;
    int64_t state_bytes = 0;
    int64_t kernels_ns = 0;
  };
  const auto stack = Load({.timed_interval = 4});
  // Greedy rows choose within the head.
  for (const float temperature : {0.0f, 0.7f}) {
    SCOPED_TRACE(temperature);
    Timer timer;
    std::vector<SampleSpec> samples(2);
    samples[0].temperature = temperature;
    const std::vector<int32_t> last = Prefill(stack.get(), 2, samples);
    stack->set_kernel_timer(&timer);
    std::vector<SequenceOutput> outputs;
    const SequenceInput input = Step(1, {&last[0], 1}, samples.data());
    int after_first = 0;
    for (int step = 0; step < 6; ++step) {  // Steps 0 and 4 are timed.
      ASSERT_TRUE(stack->Run({&input, 1}, &outputs).ok());
      if (step == 0) after_first = timer.count;
      EXPECT_EQ(timer.count, step < 4 ? after_first : 2 * after_first) << step;
    }
    for (const char* op :
         {"in_proj", "fused_decode", "out_proj", "gate_up_proj", "down_proj", "head"}) {
      EXPECT_TRUE(timer.ops.contains(op)) << op;
    }
    if (pipeline::UseDevice(0)->capability == 90) {
      EXPECT_EQ(timer.ops.contains("sample"), temperature != 0.0f);
    }
    EXPECT_EQ(timer.steps, 6);
    EXPECT_EQ(timer.misses, 2);
    EXPECT_EQ(timer.hits, 4);
    EXPECT_EQ(timer.padding, 0);
    EXPECT_EQ(timer.state_bytes, 2 * 2 * stack->info().state_bytes_per_slot);
    EXPECT_GT(stack->info().weight_bytes, 0);
    const std::set<std::string> names(stack->OpNames().begin(), stack->OpNames().end());
    for (const std::string& op : timer.ops) EXPECT_TRUE(names.contains(op)) << op;
    stack->set_kernel_timer(nullptr);
  }
}

// Rows that are all greedy take a head that keeps no logits: they choose what the logits say.
TEST_F(CudaPipelineTest, GreedyStepsChooseWhatTheLogitsSay) {
  for (const size_t streams : {1, 5, 20, 64, 100}) {
    SCOPED_TRACE(streams);
    const auto stack = Load({.max_rows = 128});
    std::vector<SampleSpec> samples(streams);
    std::vector<std::vector<int32_t>> fed;
    std::vector<std::vector<SequenceOutput>> with_logits;
    std::vector<std::vector<float>> gaps;
    std::vector<SequenceOutput> outputs;
    int compared = 0;
    for (const bool logits : {true, false}) {
      std::vector<int32_t> last = Prefill(stack.get(), streams, samples);
      for (size_t step = 0; step < 12; ++step) {
        if (logits) fed.push_back(last);
        std::vector<SequenceInput> batch;
        for (size_t i = 0; i < streams; ++i) {
          ++samples[i].position;
          batch.push_back(Step(static_cast<int64_t>(1 + i), {&fed[step][i], 1}, &samples[i]));
          if (logits) batch.back().want_logits = Positions::kLast;
        }
        ASSERT_TRUE(stack->Run(batch, &outputs).ok());
        if (logits) {
          gaps.emplace_back();
          for (size_t i = 0; i < streams; ++i) {
            last[i] = outputs[i].token.id;
            std::vector<float> sorted(outputs[i].logits.begin(), outputs[i].logits.end());
            std::partial_sort(sorted.begin(), sorted.begin() + 2, sorted.end(), std::greater<>());
            gaps.back().push_back(sorted[0] - sorted[1]);
            outputs[i].logits = {};  // It dies with the next step.
          }
          with_logits.push_back(outputs);
          continue;
        }
        for (size_t i = 0; i < streams; ++i) {
          const SequenceOutput& expected = with_logits[step][i];
          EXPECT_TRUE(outputs[i].finite);
          if (gaps[step][i] < 0.1f) continue;
          ++compared;
          EXPECT_EQ(outputs[i].token.id, expected.token.id) << step << " " << i;
          EXPECT_NEAR(outputs[i].token.logprob, expected.token.logprob, 0.05) << step << " " << i;
        }
      }
    }
    EXPECT_GT(compared, static_cast<int>(streams) * 6);
  }
}

TEST_F(CudaPipelineTest, ErrorsLeaveThePipelineUsable) {
  const auto stack = Load({.num_slots = 8, .max_rows = 4, .max_step_tokens = 64});
  std::vector<SampleSpec> samples(3);
  const std::vector<int32_t> last = Prefill(stack.get(), 3, samples);
  std::vector<SequenceOutput> outputs;
  EXPECT_EQ(stack->Wait(&outputs).code(), absl::StatusCode::kFailedPrecondition);

  const std::vector<int32_t> token = {65};
  const SequenceInput step = Step(1, token, samples.data());
  const std::vector<SequenceInput> many(5, step);
  EXPECT_EQ(stack->Launch(many).code(), absl::StatusCode::kInvalidArgument);
  const std::vector<int32_t> tokens(65, 65);
  const SequenceInput prompt = Step(1, tokens, nullptr);
  EXPECT_EQ(stack->Launch({&prompt, 1}).code(), absl::StatusCode::kInvalidArgument);
  SequenceInput chained = Step(1, {}, samples.data());
  chained.chained = 3;  // The batch before has three inputs.
  EXPECT_EQ(stack->Launch({&chained, 1}).code(), absl::StatusCode::kInvalidArgument);
  SequenceInput alternatives = step;
  SampleSpec spec;
  spec.top_logprobs = 100;
  alternatives.sample = &spec;
  EXPECT_EQ(stack->Launch({&alternatives, 1}).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(stack->CopySlot(1, 8).code(), absl::StatusCode::kInvalidArgument);

  ASSERT_TRUE(stack->Launch({&step, 1}).ok());
  ASSERT_TRUE(stack->Launch({&step, 1}).ok());
  EXPECT_EQ(stack->Launch({&step, 1}).code(), absl::StatusCode::kFailedPrecondition);
  ASSERT_TRUE(stack->Wait(&outputs).ok());
  ASSERT_TRUE(stack->Wait(&outputs).ok());
  EXPECT_TRUE(outputs[0].finite);
  EXPECT_GE(outputs[0].token.id, 0);
}

// What is left beside weights and buffers, less a reserve, and refused with that number.
TEST_F(CudaPipelineTest, APoolThatCannotFitIsRefusedWithTheArithmetic) {
  model::LoadOptions load;
  load.path = SourcePath(kDemo);
  const auto before = pipeline::UseDevice(0);
  ASSERT_TRUE(before.ok()) << before.status();
  const auto created =
      pipeline::CreateCudaPipeline(*model::LoadModel(load), {.num_slots = 100'000'000});
  ASSERT_EQ(created.status().code(), absl::StatusCode::kResourceExhausted);
  const std::string message(created.status().message());
  for (const char* part : {"100000000 slots", "bytes a slot", "--max-sessions"}) {
    EXPECT_NE(message.find(part), std::string::npos) << message;
  }
  const size_t but = message.find("but ");
  ASSERT_NE(but, std::string::npos) << message;
  const int64_t budget = std::stoll(message.substr(but + 4));
  EXPECT_LE(budget, before->free_bytes - (int64_t{512} << 20));
  EXPECT_GE(budget, before->free_bytes - (int64_t{4} << 30));  // A small model's.
}

TEST_F(CudaPipelineTest, APoolHasAsManySlotsAsItsBudgetHolds) {
  const model::GdnDims dims = {
      .key_heads = 1, .value_heads = 2, .key_dim = 64, .value_dim = 64, .conv_width = 4};
  constexpr int64_t kLayers = 3;
  constexpr int64_t kMost = pipeline::DeviceStatePool::kMaxAutoSlots;
  for (const gdn_dtype type : {GDN_F32, GDN_BF16}) {
    const int64_t bytes = kLayers * (2 * 64 * 64 * (type == GDN_F32 ? 4 : 2) + 3 * 256 * 2);
    for (const auto& [budget, slots] : {std::pair{2 * bytes, int64_t{2}},
                                        {10 * bytes, 10},
                                        {11 * bytes - 1, 10},
                                        {(kMost - 1) * bytes, kMost - 1},
                                        {(kMost + 1) * bytes, kMost}}) {
      pipeline::DeviceStatePool pool;
      const absl::Status status = pool.Create(dims, kLayers, 0, type, budget);
      ASSERT_TRUE(status.ok()) << status;
      EXPECT_EQ(pool.num_slots(), slots) << budget;
      EXPECT_EQ(pool.bytes_per_slot(), bytes);
    }
    for (const auto& [budget, slots] :
         {std::pair{2 * bytes - 1, int64_t{0}}, {11 * bytes - 1, 11}}) {
      pipeline::DeviceStatePool pool;
      EXPECT_EQ(pool.Create(dims, kLayers, slots, type, budget).code(),
                absl::StatusCode::kResourceExhausted);
    }
  }
}

// All that a small model may have: every device has room for them.
TEST_F(CudaPipelineTest, ThePoolIsSizedFromFreeMemory) {
  pipeline::CudaReport report;
  model::LoadOptions load;
  load.path = SourcePath(kDemo);
  const auto created = pipeline::CreateCudaPipeline(*model::LoadModel(load), {}, &report);
  ASSERT_TRUE(created.ok()) << created.status();
  const int64_t bytes = (*created)->info().state_bytes_per_slot;
  const int64_t fitting = (report.free_bytes + report.state_bytes) / bytes;  // The reserve too.
  ASSERT_GT(fitting, pipeline::DeviceStatePool::kMaxAutoSlots);
  EXPECT_EQ((*created)->info().num_slots, pipeline::DeviceStatePool::kMaxAutoSlots);
  EXPECT_EQ(report.state_bytes, (*created)->info().num_slots * bytes);
  EXPECT_GT(report.num_graphs, 5);
  EXPECT_GT(report.upload_bytes_per_second, 0);
}

}  // namespace
}  // namespace gdn::golden
