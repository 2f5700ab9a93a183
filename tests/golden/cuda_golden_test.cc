// The CUDA pipeline against the goldens, with FP32 and with BF16 state.
#include <gtest/gtest.h>

#include "tests/golden/cuda_testing.h"

namespace gdn::golden {
namespace {

using pipeline::Positions;

constexpr GoldenBounds kBounds = {.logits = 3e-2, .min_gap = 0.25, .states = 3e-2};

struct Case {
  Checkpoint checkpoint;
  gdn_dtype state_type;
};

std::vector<Case> Cases() {
  std::vector<Case> cases;
  for (const Checkpoint& checkpoint : Checkpoints()) {
    cases.push_back({checkpoint, GDN_F32});
    cases.push_back({checkpoint, GDN_BF16});
  }
  return cases;
}

class CudaGoldenTest : public testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    GDN_NEED_GPU();
    stack_ = Load(std::nullopt);
    vocab_ = static_cast<size_t>(stack_->info().vocab_size);
  }

  static std::unique_ptr<pipeline::Pipeline> Load(std::optional<model::LayerRange> layers) {
    return LoadCudaStack(GetParam().checkpoint.model_dir,
                         {.state_type = GetParam().state_type, .num_slots = 8}, layers);
  }
  void ExpectRows(std::span<const float> ours, std::span<const float> golden) {
    ExpectGoldenRows(ours, golden, vocab_, kBounds.logits, kBounds.min_gap);
  }

  const Goldens goldens_{GetParam().checkpoint.golden_path};
  std::unique_ptr<pipeline::Pipeline> stack_;
  size_t vocab_ = 0;
};

TEST_P(CudaGoldenTest, PrefillLogitsAtEveryPosition) {
  ExpectPrefillGoldens(stack_.get(), goldens_, kBounds);
}

TEST_P(CudaGoldenTest, DecodeLogitsOnTheGoldenPath) {
  ExpectDecodeGoldens(stack_.get(), goldens_, GetParam().checkpoint, kBounds);
}

// The whole prompt token by token through the fused step.
TEST_P(CudaGoldenTest, SteppedPromptLogits) {
  Session session(stack_.get(), 4);
  std::vector<float> rows;
  for (const int32_t token : goldens_.Ints("1.prompt")) {
    const std::vector<float> row = session.Feed({&token, 1});
    rows.insert(rows.end(), row.begin(), row.end());
  }
  ExpectRows(rows, goldens_.Floats("1.logits"));
}

TEST_P(CudaGoldenTest, StatesAfterThePrompt) {
  ExpectStateGoldens(stack_.get(), goldens_, GetParam().checkpoint, kBounds);
}

// Two slices chained through hidden states give the whole stack's logits.
TEST_P(CudaGoldenTest, SlicesOfTheStack) {
  model::LoadOptions load;
  load.path = GetParam().checkpoint.model_dir;
  const int64_t num_layers = model::LoadModel(load)->spec.num_layers;
  const std::vector<int32_t> prompt = goldens_.Ints("1.prompt");
  const auto front = Load(model::LayerRange{0, 1});
  EXPECT_FALSE(front->info().has_head);
  pipeline::SequenceInput input{
      .write_slot = 1, .fresh = true, .tokens = prompt, .want_hidden = Positions::kAll};
  std::vector<pipeline::SequenceOutput> outputs;
  ASSERT_TRUE(front->Run({&input, 1}, &outputs).ok());
  const std::vector<float> middle(outputs[0].hidden.begin(), outputs[0].hidden.end());
  ASSERT_EQ(middle.size(), prompt.size() * static_cast<size_t>(front->info().hidden_size));

  const auto back = Load(model::LayerRange{1, num_layers});
  EXPECT_FALSE(back->info().has_embedding);
  pipeline::SequenceInput rest{
      .write_slot = 1, .fresh = true, .hidden = middle, .want_logits = Positions::kAll};
  ASSERT_TRUE(back->Run({&rest, 1}, &outputs).ok());
  ExpectRows(outputs[0].logits, goldens_.Floats("1.logits"));
}

INSTANTIATE_TEST_SUITE_P(Checkpoints, CudaGoldenTest, testing::ValuesIn(Cases()),
                         [](const testing::TestParamInfo<Case>& param_info) {
                           return param_info.param.checkpoint.name +
                                  (param_info.param.state_type == GDN_F32 ? "_f32" : "_bf16");
                         });

class CudaHeldOutTest : public testing::TestWithParam<gdn_dtype> {
 protected:
  void SetUp() override { GDN_NEED_GPU(); }
};

TEST_P(CudaHeldOutTest, BitsPerByte) {
  const auto stack =
      LoadCudaStack(SourcePath("deploy/models/demo-gdn-7m"),
                    {.state_type = GetParam(), .num_slots = 2, .max_step_tokens = 4096});
  const double bits = HeldOutBitsPerByte(stack.get());
  EXPECT_NEAR(bits, 1.1066, 0.003);
  RecordProperty("bits_per_byte", std::to_string(bits));
  std::printf("bits per byte: %.5f\n", bits);
}

INSTANTIATE_TEST_SUITE_P(States, CudaHeldOutTest, testing::Values(GDN_F32, GDN_BF16),
                         [](const auto& param_info) {
                           return param_info.param == GDN_F32 ? "f32" : "bf16";
                         });

}  // namespace
}  // namespace gdn::golden
