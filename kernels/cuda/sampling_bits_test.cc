// The sampler on a GPU: bits that depend on nothing but the row, graphs, and refusals.
#include "kernels/cuda/sampling_test_util.h"

namespace gdn::kernels {
namespace {

using SamplingCudaBits = CudaTest;

SampleBatch MixedBatch(Random& random, int64_t vocab, int64_t rows, int32_t top_logprobs,
                       uint64_t seed) {
  const std::vector<gdn_sampling_params> cases = {kGreedy,
                                                  kPlain,
                                                  {0.8f, 50, 0.9f, 0.0f, 1.0f, 0},
                                                  {1.0f, 0, 0.95f, 0.0f, 1.1f, 0},
                                                  {1.5f, 0, 1.0f, 0.02f, 1.0f, 0},
                                                  {1.0f, 3000, 0.99f, 0.001f, 0.9f, 0},
                                                  {0.0f, 0, 1.0f, 0.0f, 1.5f, 0}};
  SampleBatch batch;
  batch.top_logprobs = top_logprobs;
  for (int64_t i = 0; i < rows; ++i) {
    gdn_sampling_params params = cases[(static_cast<size_t>(i) + seed) % cases.size()];
    params.seed = seed * 1000 + static_cast<uint64_t>(i);
    batch.Add(NormalRow(random, vocab, i % 2 == 0 ? 1.0f : 3.0f), params,
              static_cast<int64_t>(seed) + i, DistinctIds(random, vocab, 40));
  }
  return batch;
}

TEST_F(SamplingCudaBits, RepeatsAreIdentical) {
  Random random(71);
  for (const int32_t top_logprobs : {0, 5}) {
    DeviceSample sample(MixedBatch(random, 40000, 29, top_logprobs, 3));
    const SampleResult first = sample.Run();
    for (int i = 0; i < 100; ++i) ASSERT_TRUE(SameBits(sample.Run(), first)) << "repeat " << i;
  }
}

// Alone, and among others: another number of rows, another place, another alignment.
TEST_F(SamplingCudaBits, RowsDoNotDependOnTheBatch) {
  Random random(72);
  for (const int64_t vocab : {700, 40000}) {
    for (const int32_t top_logprobs : {0, 4}) {
      SampleBatch batch = MixedBatch(random, vocab, 300, top_logprobs, 5);
      batch.stride_pad = 3;
      const SampleResult together = SampleByCuda(batch);
      for (size_t r = 0; r < 300; r += 13) {
        const SampleResult alone = SampleByCuda(batch.Alone(r));
        ASSERT_EQ(alone.token[0], together.token[r]) << r;
        ASSERT_EQ(std::memcmp(&alone.logprob[0], &together.logprob[r], sizeof(float)), 0) << r;
        for (size_t i = 0; i < static_cast<size_t>(top_logprobs); ++i) {
          const size_t at = r * static_cast<size_t>(top_logprobs) + i;
          ASSERT_EQ(alone.top_ids[i], together.top_ids[at]);
          ASSERT_EQ(std::memcmp(&alone.top_values[i], &together.top_values[at], sizeof(float)), 0);
        }
      }
    }
  }
}

TEST_F(SamplingCudaBits, DifferentSeedsAndPositionsDrawDifferently) {
  Random random(73);
  const std::vector<float> row = NormalRow(random, 3000, 0.5f);
  SampleBatch batch;
  for (int64_t i = 0; i < 64; ++i) {
    gdn_sampling_params params = kPlain;
    params.seed = i < 32 ? 0 : static_cast<uint64_t>(i) << 40;
    batch.Add(row, params, i < 32 ? i << 35 : 0);
  }
  const SampleResult result = SampleByCuda(batch);
  std::vector<int32_t> tokens = result.token;
  std::sort(tokens.begin(), tokens.end());
  EXPECT_GT(std::unique(tokens.begin(), tokens.end()) - tokens.begin(), 50);
}

// One graph, replayed with other logits, parameters, histories and padding rows on the device.
TEST_F(SamplingCudaBits, GraphServesWhateverTheArraysHold) {
  Random random(74);
  constexpr int64_t kVocab = 30000;
  for (const int32_t top_logprobs : {0, 3}) {
    DeviceSample sample(MixedBatch(random, kVocab, 16, top_logprobs, 0));
    const CapturedGraph graph(sample.stream(), [&] {
      EXPECT_EQ(gdn_sample(&sample.exec(), &sample.args()), GDN_OK) << gdn_last_error();
    });
    for (uint64_t seed = 1; seed < 8; ++seed) {
      SampleBatch batch = MixedBatch(random, kVocab, 16, top_logprobs, seed);
      batch.position[seed] = -1;
      sample.Upload(batch);
      graph.Launch();
      sample.stream().Synchronize();
      SampleResult got = sample.Result();
      SampleResult expected = SampleByRef(batch);
      for (size_t i = seed * static_cast<size_t>(top_logprobs);
           i < (seed + 1) * static_cast<size_t>(top_logprobs); ++i) {
        got.top_ids[i] = expected.top_ids[i];  // Left over from the replay before.
        got.top_values[i] = expected.top_values[i];
      }
      EXPECT_EQ(ExpectSameSamples(batch, got, expected), 0);
      EXPECT_EQ(got.token[seed], -1);
    }
  }
}

TEST_F(SamplingCudaBits, WorksWithoutLogprobsAndRefusesWhatTheHostCanSee) {
  Random random(75);
  const SampleBatch batch = MixedBatch(random, 900, 9, 0, 1);
  DeviceSample sample(batch);
  const SampleResult expected = sample.Run();
  sample.Upload(batch);
  sample.args().logprob = nullptr;
  const SampleResult got = sample.Run();
  EXPECT_EQ(got.token, expected.token);
  EXPECT_EQ(got.logprob, std::vector<float>(9, kPoisonValue));

  gdn_exec exec = sample.exec();
  exec.workspace_bytes -= 1;
  EXPECT_EQ(gdn_sample(&exec, &sample.args()), GDN_WORKSPACE_TOO_SMALL);
  EXPECT_THAT(gdn_last_error(), testing::HasSubstr("exec.workspace must hold"));
  gdn_sampling_args args = sample.args();
  args.history_offsets = nullptr;
  EXPECT_EQ(gdn_sample(&sample.exec(), &args), GDN_INVALID_ARGUMENT);
  args = sample.args();
  args.params = nullptr;
  EXPECT_EQ(gdn_sample(&sample.exec(), &args), GDN_INVALID_ARGUMENT);
}

}  // namespace
}  // namespace gdn::kernels
