// The CPU pipeline on a model with made-up weights: slots, forks, threads, damage. Its numbers are
// judged by the golden tests.
#include "server/pipeline/cpu_pipeline.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <set>
#include <string>

namespace gdn::pipeline {
namespace {

constexpr int64_t kSlots = 6;
const std::vector<int32_t> kPrompt = {3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5};

model::Model LoadModel(const std::string& name) {
  model::LoadOptions load;
  load.path = std::string(GDN_SOURCE_DIR) + "/tests/data/models/" + name;
  load.random_weights = 7;
  auto model = model::LoadModel(load);
  EXPECT_TRUE(model.ok()) << model.status();
  return *std::move(model);
}

// Over models of each type of layer, and of both.
class CpuPipelineTest : public testing::TestWithParam<const char*> {
 protected:
  static std::unique_ptr<Pipeline> Make(CpuOptions options = {}) {
    options.num_slots = kSlots;
    auto pipeline = CreateCpuPipeline(LoadModel(GetParam()), options);
    EXPECT_TRUE(pipeline.ok()) << pipeline.status();
    return *std::move(pipeline);
  }
};

std::vector<float> Advance(Pipeline* pipeline, const SequenceInput& input, bool* finite = nullptr) {
  std::vector<SequenceOutput> outputs;
  const absl::Status status = pipeline->Run({&input, 1}, &outputs);
  EXPECT_TRUE(status.ok()) << status;
  if (finite != nullptr) *finite = outputs[0].finite;
  return {outputs[0].logits.begin(), outputs[0].logits.end()};
}

SequenceInput Fresh(int64_t slot) {
  return {.write_slot = slot, .fresh = true, .tokens = kPrompt, .want_logits = Positions::kLast};
}

bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

bool SameBits(const SlotState& a, const SlotState& b) {
  return SameBits(a.recurrent, b.recurrent) && SameBits(a.conv, b.conv);
}

TEST_P(CpuPipelineTest, OtherSlotsKeepTheirBits) {
  auto pipeline = Make();
  Advance(pipeline.get(), Fresh(1));
  Advance(pipeline.get(), Fresh(3));
  const SlotState before = *pipeline->ReadSlot(1);
  SequenceInput input = Fresh(2);
  Advance(pipeline.get(), input);
  input.fresh = false;
  input.read_slot = 2;
  Advance(pipeline.get(), input);
  EXPECT_TRUE(SameBits(*pipeline->ReadSlot(1), before));
  EXPECT_TRUE(SameBits(*pipeline->ReadSlot(3), before));
  EXPECT_FALSE(SameBits(*pipeline->ReadSlot(2), before));
}

TEST_P(CpuPipelineTest, AReusedSlotStartsClean) {
  auto pipeline = Make();
  const std::vector<float> first = Advance(pipeline.get(), Fresh(1));
  SequenceInput more = Fresh(1);
  more.fresh = false;
  more.read_slot = 1;
  Advance(pipeline.get(), more);
  EXPECT_TRUE(SameBits(Advance(pipeline.get(), Fresh(1)), first));
}

TEST_P(CpuPipelineTest, ReadingOneSlotAndWritingAnotherForks) {
  auto pipeline = Make();
  Advance(pipeline.get(), Fresh(1));
  const SlotState parent = *pipeline->ReadSlot(1);
  const std::vector<int32_t> one = {7};
  for (const std::vector<int32_t>& tokens : {one, kPrompt}) {
    ASSERT_TRUE(pipeline->CopySlot(1, 2).ok());
    EXPECT_TRUE(SameBits(*pipeline->ReadSlot(2), parent));
    SequenceInput in_place = {
        .read_slot = 2, .write_slot = 2, .tokens = tokens, .want_logits = Positions::kLast};
    SequenceInput fork = in_place;
    fork.read_slot = 1;
    fork.write_slot = 4;
    EXPECT_TRUE(SameBits(Advance(pipeline.get(), fork), Advance(pipeline.get(), in_place)));
    EXPECT_TRUE(SameBits(*pipeline->ReadSlot(4), *pipeline->ReadSlot(2)));
    EXPECT_TRUE(SameBits(*pipeline->ReadSlot(1), parent));
  }
}

TEST_P(CpuPipelineTest, AnEmptySequenceLeavesItsStateAlone) {
  auto pipeline = Make();
  Advance(pipeline.get(), Fresh(1));
  const SlotState before = *pipeline->ReadSlot(1);
  SequenceInput empty = {.read_slot = 1, .write_slot = 1, .want_logits = Positions::kLast};
  EXPECT_TRUE(Advance(pipeline.get(), empty).empty());
  EXPECT_TRUE(SameBits(*pipeline->ReadSlot(1), before));
}

TEST_P(CpuPipelineTest, TheNumberOfThreadsDoesNotChangeTheBits) {
  auto one = Make({.threads = 1});
  auto three = Make({.threads = 3});
  std::vector<SequenceInput> batch = {Fresh(1), Fresh(2), Fresh(3)};
  batch[1].tokens = batch[1].tokens.first(1);
  std::vector<SequenceOutput> a;
  std::vector<SequenceOutput> b;
  ASSERT_TRUE(one->Run(batch, &a).ok());
  ASSERT_TRUE(three->Run(batch, &b).ok());
  for (size_t i = 0; i < batch.size(); ++i) {
    EXPECT_TRUE(SameBits({a[i].logits.begin(), a[i].logits.end()},
                         {b[i].logits.begin(), b[i].logits.end()}));
    EXPECT_TRUE(SameBits(*one->ReadSlot(1 + static_cast<int64_t>(i)),
                         *three->ReadSlot(1 + static_cast<int64_t>(i))));
  }
}

TEST_P(CpuPipelineTest, DamageIsReportedForItsSequenceAlone) {
  auto pipeline = Make();
  std::vector<float> rows(2 * static_cast<size_t>(pipeline->info().hidden_size), 1.0f);
  rows[5] = std::numeric_limits<float>::quiet_NaN();
  SequenceInput poison = {.write_slot = 1, .fresh = true, .hidden = rows};
  const std::vector<SequenceInput> batch = {Fresh(2), poison, Fresh(3)};
  std::vector<SequenceOutput> outputs;
  ASSERT_TRUE(pipeline->Run(batch, &outputs).ok());
  EXPECT_TRUE(outputs[0].finite);
  EXPECT_FALSE(outputs[1].finite);
  EXPECT_TRUE(outputs[2].finite);
  // The damage stays in the slot, and a fresh start cleans it.
  SequenceInput next = {.read_slot = 1, .write_slot = 1, .tokens = kPrompt};
  bool finite = true;
  Advance(pipeline.get(), next, &finite);
  EXPECT_FALSE(finite);
  Advance(pipeline.get(), Fresh(1), &finite);
  EXPECT_TRUE(finite);
}

TEST_P(CpuPipelineTest, Bfloat16StatesStayClose) {
  auto exact = Make();
  auto rounded = Make({.state_type = StateType::kBFloat16});
  EXPECT_LT(rounded->info().state_bytes_per_slot, exact->info().state_bytes_per_slot);
  const std::vector<float> a = Advance(exact.get(), Fresh(1));
  const std::vector<float> b = Advance(rounded.get(), Fresh(1));
  ASSERT_EQ(a.size(), b.size());
  double error = 0;
  double norm = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    error += std::pow(double{a[i]} - double{b[i]}, 2);
    norm += std::pow(double{a[i]}, 2);
  }
  EXPECT_LE(std::sqrt(error / norm), 1e-2);
}

TEST_P(CpuPipelineTest, RefusesBadOptionsAndSlots) {
  EXPECT_EQ(CreateCpuPipeline(LoadModel(GetParam()), {.num_slots = 1}).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(CreateCpuPipeline(LoadModel(GetParam()), {.threads = -1}).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(
      CreateCpuPipeline(LoadModel(GetParam()), {.num_slots = int64_t{1} << 50}).status().code(),
      absl::StatusCode::kResourceExhausted);
  auto pipeline = Make();
  EXPECT_EQ(pipeline->CopySlot(0, kSlots).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(pipeline->ReadSlot(-1).status().code(), absl::StatusCode::kInvalidArgument);
}

class OpCounter final : public KernelTimer {
 public:
  void OnKernel(std::string_view op, Phase phase, int64_t duration_ns) override {
    names.insert(std::string(op));
    phases.insert(phase);
    EXPECT_GE(duration_ns, 0);
  }
  void OnDecodeStateBytes(int64_t bytes) override { state_bytes += bytes; }
  int64_t state_bytes = 0;
  std::set<std::string> names;
  std::set<Phase> phases;
};

TEST_P(CpuPipelineTest, TimesEveryOpUnderItsName) {
  auto pipeline = Make();
  OpCounter counter;
  pipeline->set_kernel_timer(&counter);
  SampleSpec sample;
  std::vector<SequenceInput> batch = {Fresh(1), Fresh(2)};
  batch[0].tokens = batch[0].tokens.first(1);
  batch[0].sample = &sample;
  std::vector<SequenceOutput> outputs;
  ASSERT_TRUE(pipeline->Run(batch, &outputs).ok());
  const auto names = pipeline->OpNames();
  EXPECT_EQ(counter.names, std::set<std::string>(names.begin(), names.end()));
  EXPECT_EQ(counter.phases, std::set<Phase>{Phase::kMixed});
  // One row stepped: all of its recurrent state and none of the convolution's.
  auto state = pipeline->ReadSlot(1);
  ASSERT_TRUE(state.ok()) << state.status();
  EXPECT_EQ(counter.state_bytes, 2 * static_cast<int64_t>(state->recurrent.size() * sizeof(float)));
}

TEST_P(CpuPipelineTest, SaysWhatItHolds) {
  auto pipeline = Make();
  EXPECT_GT(pipeline->info().weight_bytes, 0);
  EXPECT_GT(pipeline->info().workspace_bytes, 0);
}

INSTANTIATE_TEST_SUITE_P(Models, CpuPipelineTest,
                         testing::Values("qwen3_5-pure-d64", "gdn2", "gdn2-mixed"),
                         [](const auto& param_info) {
                           std::string name = param_info.param;
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

}  // namespace
}  // namespace gdn::pipeline
