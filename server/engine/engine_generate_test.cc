// Generate: tokens, positions, ends of streams, sampling.
#include <gtest/gtest.h>

#include "server/engine/testing/engine_fixture.h"

namespace gdn::engine {
namespace {

using EngineGenerateTest = EngineFixture;

TEST_F(EngineGenerateTest, StreamsWhatOneSessionAloneGives) {
  Make(4);
  auto call = MustGenerate(Gen("", Tokens(10), 20));
  const GenerateChunk all = Finish(call.get());
  FakeSequence alone = Alone();
  alone.ConsumeAll(Tokens(10));
  EXPECT_EQ(Ids(all.tokens), alone.Generate(20, 5));
  EXPECT_TRUE(all.status.ok());
  EXPECT_EQ(all.finish_reason, FinishReason::kLength);
  EXPECT_EQ(all.input_tokens, 10);
  EXPECT_EQ(all.output_tokens, 20);
  EXPECT_EQ(all.position, 29);  // Without the newest token.
  EXPECT_FALSE(call->Drain().has_value());
  EXPECT_EQ(engine_->levels().slots_free, 4);
}

}  // namespace
}  // namespace gdn::engine
