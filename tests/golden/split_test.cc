// A prompt cut anywhere, in any number of calls, equals one prefill, and equals stepping.
#include <gtest/gtest.h>

#include "tests/golden/testing.h"

namespace gdn::golden {
namespace {

constexpr double kBound = 1e-5;

class SplitTest : public testing::TestWithParam<Checkpoint> {
 protected:
  SplitTest() {
    StackOptions options;
    options.cpu.precision = pipeline::Precision::kFloat32;
    options.cpu.num_slots = 4;
    stack_ = LoadStack(GetParam().model_dir, options);
    const Goldens goldens(GetParam().golden_path);
    for (int i = 0; goldens.Has(std::to_string(i) + ".prompt"); ++i) {
      const std::vector<int32_t> prompt = goldens.Ints(std::to_string(i) + ".prompt");
      if (prompt.size() > prompt_.size()) prompt_ = prompt;
    }
    prompt_.resize(130);
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

INSTANTIATE_TEST_SUITE_P(Checkpoints, SplitTest, testing::ValuesIn(Checkpoints()),
                         [](const auto& param_info) { return param_info.param.name; });

}  // namespace
}  // namespace gdn::golden
