// The CPU pipeline against goldens of an independent implementation (float32 arithmetic on the
// stored weights), in both precisions.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <iterator>

#include "tests/golden/testing.h"

namespace gdn::golden {
namespace {

using pipeline::Positions;
using pipeline::Precision;

struct Case {
  Checkpoint checkpoint;
  Precision precision;
  double logits_bound;  // Relative L2 at every position.
  double min_gap;       // First choices are compared where the golden's two best differ by more.
};

std::vector<Case> Float32Cases() {
  std::vector<Case> cases;
  for (const Checkpoint& checkpoint : Checkpoints()) {
    cases.push_back({checkpoint, Precision::kFloat32, 1e-4, 0.0});
  }
  return cases;
}

std::vector<Case> AllCases() {
  std::vector<Case> cases = Float32Cases();
  for (const Checkpoint& checkpoint : Checkpoints()) {
    cases.push_back({checkpoint, Precision::kBFloat16, 3e-2, 0.25});
  }
  return cases;
}

std::string CaseName(const testing::TestParamInfo<Case>& info) {
  return info.param.checkpoint.name +
         (info.param.precision == Precision::kFloat32 ? "_float32" : "_bfloat16");
}

std::string Key(int prompt, const std::string& name) { return std::to_string(prompt) + "." + name; }

double Gap(std::vector<float> row) {
  std::nth_element(row.begin(), row.begin() + 1, row.end(), std::greater<float>());
  return double{row[0]} - double{row[1]};
}

class GoldenTest : public testing::TestWithParam<Case> {
 protected:
  GoldenTest() : goldens_(GetParam().checkpoint.golden_path) {
    StackOptions options;
    options.cpu.precision = GetParam().precision;
    options.cpu.num_slots = 4;
    stack_ = LoadStack(GetParam().checkpoint.model_dir, options);
    vocab_ = static_cast<size_t>(stack_->info().vocab_size);
  }

  // Compares rows of logits one position at a time.
  void ExpectRows(std::span<const float> ours, std::span<const float> golden) {
    ASSERT_EQ(ours.size(), golden.size());
    ASSERT_EQ(golden.size() % vocab_, 0u);
    for (size_t row = 0; row < golden.size() / vocab_; ++row) {
      const std::span<const float> a = ours.subspan(row * vocab_, vocab_);
      const std::span<const float> b = golden.subspan(row * vocab_, vocab_);
      ASSERT_LE(RelativeL2(a, b), GetParam().logits_bound) << "position " << row;
      if (Gap({b.begin(), b.end()}) > GetParam().min_gap) {
        ASSERT_EQ(ArgMax(a), ArgMax(b)) << "position " << row;
      }
    }
  }

  Goldens goldens_;
  std::unique_ptr<pipeline::Pipeline> stack_;
  size_t vocab_;
};

TEST_P(GoldenTest, PrefillLogitsAtEveryPosition) {
  int prompts = 0;
  for (; goldens_.Has(Key(prompts, "prompt")); ++prompts) {
    SCOPED_TRACE(prompts);
    Session session(stack_.get(), 1 + prompts % 3);
    ExpectRows(session.Feed(goldens_.Ints(Key(prompts, "prompt")), Positions::kAll),
               goldens_.Floats(Key(prompts, "logits")));
  }
  EXPECT_GE(prompts, 3);
}

// The golden's own tokens are fed, so that one near-tie does not decide everything behind it.
TEST_P(GoldenTest, DecodeLogitsOnTheGoldenPath) {
  for (int prompt = 0; goldens_.Has(Key(prompt, "greedy_logits")); ++prompt) {
    SCOPED_TRACE(prompt);
    Session session(stack_.get(), 1);
    session.Feed(goldens_.Ints(Key(prompt, "prompt")));
    std::vector<float> rows;
    for (const int32_t token : goldens_.Ints(Key(prompt, "greedy"))) {
      const std::vector<float> row = session.Feed({&token, 1});
      rows.insert(rows.end(), row.begin(), row.end());
    }
    ExpectRows(rows, goldens_.Floats(Key(prompt, "greedy_logits")));
  }
}

// In float32 only: bfloat16 products may leave the golden path at a near-tie.
class GreedyTest : public GoldenTest {};

TEST_P(GreedyTest, OwnTokensAreTheGoldens) {
  for (int prompt = 0; goldens_.Has(Key(prompt, "prompt")); ++prompt) {
    SCOPED_TRACE(prompt);
    const std::vector<int32_t> golden = goldens_.Ints(Key(prompt, "greedy"));
    Session session(stack_.get(), 2);
    std::vector<float> row = session.Feed(goldens_.Ints(Key(prompt, "prompt")));
    std::vector<int32_t> tokens;
    while (tokens.size() < golden.size()) {
      tokens.push_back(static_cast<int32_t>(ArgMax(row)));
      row = session.Feed({&tokens.back(), 1});
    }
    EXPECT_EQ(tokens, golden);
  }
}

TEST_P(GoldenTest, StatesAfterThePrompt) {
  model::LoadOptions load;
  load.path = GetParam().checkpoint.model_dir;
  const model::ModelSpec spec = model::LoadModel(load)->spec;
  const model::GdnDims& dims = spec.gdn;
  const double bound = GetParam().precision == Precision::kFloat32 ? 1e-4 : 3e-2;
  int compared = 0;
  for (int prompt = 0; goldens_.Has(Key(prompt, "prompt")); ++prompt) {
    Session session(stack_.get(), 3);
    session.Feed(goldens_.Ints(Key(prompt, "prompt")));
    const pipeline::SlotState state = session.State();
    for (int64_t layer = 0; layer < spec.num_layers; ++layer) {
      const std::string name = "layer" + std::to_string(layer);
      if (!goldens_.Has(Key(prompt, name + ".recurrent_state"))) continue;
      SCOPED_TRACE(Key(prompt, name));
      ++compared;
      // The golden is [HV][K][V], ours [HV][V][K].
      const std::vector<float> golden = goldens_.Floats(Key(prompt, name + ".recurrent_state"));
      ASSERT_EQ(static_cast<int64_t>(golden.size()), dims.recurrent_elements());
      std::vector<float> ours(golden.size());
      const float* block = state.recurrent.data() + layer * dims.recurrent_elements();
      for (int64_t h = 0; h < dims.value_heads; ++h) {
        for (int64_t k = 0; k < dims.key_dim; ++k) {
          for (int64_t v = 0; v < dims.value_dim; ++v) {
            ours[static_cast<size_t>((h * dims.key_dim + k) * dims.value_dim + v)] =
                block[(h * dims.value_dim + v) * dims.key_dim + k];
          }
        }
      }
      EXPECT_LE(RelativeL2(ours, golden), bound);
      // Both hold the newest columns; ours W-1 of them, zeros before the first token.
      const std::vector<float> tail = goldens_.Floats(Key(prompt, name + ".conv_input_tail"));
      const int64_t channels = dims.conv_channels();
      const int64_t kept =
          std::min<int64_t>(static_cast<int64_t>(tail.size()) / channels, dims.conv_width - 1);
      const std::span<const float> golden_window =
          std::span<const float>(tail).last(static_cast<size_t>(kept * channels));
      const std::span<const float> our_window =
          std::span<const float>(state.conv)
              .subspan(static_cast<size_t>(layer * dims.conv_elements()),
                       static_cast<size_t>(dims.conv_elements()));
      EXPECT_LE(RelativeL2(our_window.last(golden_window.size()), golden_window), bound);
      for (const float zero : our_window.first(our_window.size() - golden_window.size())) {
        ASSERT_EQ(zero, 0.0f);
      }
    }
  }
  if (GetParam().checkpoint.name == "demo") {
    EXPECT_EQ(compared, 6);
  }
}

// Slices [0, i) of the stack give the hidden states between the layers; slices chained through
// hidden states give the whole stack's logits.
TEST_P(GoldenTest, SlicesOfTheStack) {
  model::LoadOptions load;
  load.path = GetParam().checkpoint.model_dir;
  const int64_t num_layers = model::LoadModel(load)->spec.num_layers;
  const auto hidden = static_cast<size_t>(stack_->info().hidden_size);
  const std::vector<int32_t> prompt = goldens_.Ints("1.prompt");
  const std::vector<float> golden = goldens_.Floats("1.hidden_last");
  ASSERT_EQ(golden.size(), static_cast<size_t>(num_layers + 1) * hidden);
  for (int64_t last = 1; last < num_layers; ++last) {
    SCOPED_TRACE(last);
    StackOptions options;
    options.cpu.precision = GetParam().precision;
    options.cpu.num_slots = 2;
    options.layers = model::LayerRange{0, last};
    const auto front = LoadStack(GetParam().checkpoint.model_dir, options);
    EXPECT_FALSE(front->info().has_head);
    pipeline::SequenceInput input{
        .write_slot = 1, .fresh = true, .tokens = prompt, .want_hidden = Positions::kAll};
    std::vector<pipeline::SequenceOutput> outputs;
    ASSERT_TRUE(front->Run({&input, 1}, &outputs).ok());
    ASSERT_EQ(outputs[0].hidden.size(), prompt.size() * hidden);
    EXPECT_LE(
        RelativeL2(outputs[0].hidden.last(hidden), std::span<const float>(golden).subspan(
                                                       static_cast<size_t>(last) * hidden, hidden)),
        GetParam().logits_bound);

    options.layers = model::LayerRange{last, num_layers};
    const auto back = LoadStack(GetParam().checkpoint.model_dir, options);
    EXPECT_FALSE(back->info().has_embedding);
    const std::vector<float> middle(outputs[0].hidden.begin(), outputs[0].hidden.end());
    pipeline::SequenceInput rest{
        .write_slot = 1, .fresh = true, .hidden = middle, .want_logits = Positions::kAll};
    ASSERT_TRUE(back->Run({&rest, 1}, &outputs).ok());
    ExpectRows(outputs[0].logits, goldens_.Floats("1.logits"));
  }
}

INSTANTIATE_TEST_SUITE_P(Checkpoints, GoldenTest, testing::ValuesIn(AllCases()), CaseName);
INSTANTIATE_TEST_SUITE_P(Checkpoints, GreedyTest, testing::ValuesIn(Float32Cases()), CaseName);

// 32,768 bytes the model was not trained on, in windows of 4,096 from an empty state.
class HeldOutTest : public testing::TestWithParam<Precision> {};

TEST_P(HeldOutTest, BitsPerByte) {
  std::ifstream file(SourcePath("tests/data/demo-gdn-7m/heldout.bin"), std::ios::binary);
  const std::vector<char> bytes((std::istreambuf_iterator<char>(file)), {});
  ASSERT_EQ(bytes.size(), 32768u);
  StackOptions options;
  options.cpu.precision = GetParam();
  options.cpu.num_slots = 2;
  const auto stack = LoadStack(SourcePath("deploy/models/demo-gdn-7m"), options);
  const auto vocab = static_cast<size_t>(stack->info().vocab_size);
  double bits = 0;
  int64_t predicted = 0;
  for (size_t begin = 0; begin < bytes.size(); begin += 4096) {
    std::vector<int32_t> tokens;
    for (size_t i = begin; i < begin + 4096; ++i) {
      tokens.push_back(static_cast<unsigned char>(bytes[i]));
    }
    Session session(stack.get(), 1);
    const std::vector<float> logits = session.Feed(tokens, Positions::kAll);
    ASSERT_EQ(logits.size(), tokens.size() * vocab);
    for (size_t i = 0; i + 1 < tokens.size(); ++i) {
      const float* row = logits.data() + i * vocab;
      const double top = *std::max_element(row, row + vocab);
      double sum = 0;
      for (size_t id = 0; id < vocab; ++id) sum += std::exp(row[id] - top);
      bits -= (row[tokens[i + 1]] - top - std::log(sum)) / std::log(2.0);
      ++predicted;
    }
  }
  const double bound = GetParam() == Precision::kFloat32 ? 0.0005 : 0.003;
  EXPECT_NEAR(bits / static_cast<double>(predicted), 1.1066, bound);
  RecordProperty("bits_per_byte", std::to_string(bits / static_cast<double>(predicted)));
}

INSTANTIATE_TEST_SUITE_P(Precisions, HeldOutTest,
                         testing::Values(Precision::kFloat32, Precision::kBFloat16),
                         [](const auto& param_info) {
                           return param_info.param == Precision::kFloat32 ? "float32" : "bfloat16";
                         });

}  // namespace
}  // namespace gdn::golden
