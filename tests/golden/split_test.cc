// A prompt cut anywhere, in any number of calls, equals one prefill, and equals stepping.
#include <gtest/gtest.h>

#include "tests/golden/testing.h"

namespace gdn::golden {
namespace {

constexpr double kBound = 1e-5;

std::vector<int32_t> LongestPrompt(const Goldens& goldens) {
  std::vector<int32_t> longest;
  for (int i = 0; goldens.Has(Key(i, "prompt")); ++i) {
    const std::vector<int32_t> prompt = goldens.Ints(Key(i, "prompt"));
    if (prompt.size() > longest.size()) longest = prompt;
  }
  return longest;
}

class SplitTest : public testing::TestWithParam<Checkpoint> {
 protected:
  SplitTest() {
    StackOptions options;
    options.cpu.precision = pipeline::Precision::kFloat32;
    options.cpu.num_slots = 4;
    if (GetParam().golden_path.empty()) {
      options.random_weights = 11;
      prompt_ = TextTokens(0, 130);
    } else {
      prompt_ = LongestPrompt(Goldens(GetParam().golden_path));
      prompt_.resize(130);
    }
    stack_ = LoadStack(GetParam().model_dir, options);
    Session whole(stack_.get(), 1);
    logits_ = whole.Feed(prompt_);
    state_ = whole.State();
  }

  // Feeds the prompt in pieces and compares what is left behind with the whole.
  void ExpectSame(const std::vector<size_t>& pieces) {
    Session session(stack_.get(), 2);
    std::vector<float> logits;
    size_t at = 0;
    for (const size_t piece : pieces) {
      logits = session.Feed(std::span<const int32_t>(prompt_).subspan(at, piece));
      at += piece;
    }
    ASSERT_EQ(at, prompt_.size());
    EXPECT_LE(RelativeL2(logits, logits_), kBound);
    const pipeline::SlotState state = session.State();
    EXPECT_LE(RelativeL2(state.recurrent, state_.recurrent), kBound);
    EXPECT_LE(RelativeL2(state.conv, state_.conv), kBound);
  }

  std::unique_ptr<pipeline::Pipeline> stack_;
  std::vector<int32_t> prompt_;
  std::vector<float> logits_;
  pipeline::SlotState state_;
};

TEST_P(SplitTest, EverySplitPoint) {
  for (size_t cut = 1; cut < prompt_.size(); ++cut) {
    SCOPED_TRACE(cut);
    ExpectSame({cut, prompt_.size() - cut});
  }
}

TEST_P(SplitTest, EqualChunks) {
  for (const size_t chunk : {1u, 2u, 3u, 5u, 63u, 64u, 65u, 128u}) {
    SCOPED_TRACE(chunk);
    std::vector<size_t> pieces(prompt_.size() / chunk, chunk);
    if (prompt_.size() % chunk != 0) pieces.push_back(prompt_.size() % chunk);
    ExpectSame(pieces);
  }
}

std::string Name(const testing::TestParamInfo<Checkpoint>& info) { return info.param.name; }
INSTANTIATE_TEST_SUITE_P(Checkpoints, SplitTest, testing::ValuesIn(Checkpoints()), Name);
INSTANTIATE_TEST_SUITE_P(Gdn2, SplitTest, testing::ValuesIn(Gdn2Models()), Name);

}  // namespace
}  // namespace gdn::golden
