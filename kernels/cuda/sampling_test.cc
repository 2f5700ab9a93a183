// The sampler on a GPU against REF: the same choice for the same seed and logits.
#include "kernels/cuda/sampling_test_util.h"

namespace gdn::kernels {
namespace {

using SamplingCuda = CudaTest;

// Rows of all cases in turn from `first` on, over logits of one kind.
template <typename MakeRow>
SampleBatch CaseBatch(Random& random, int64_t vocab, int64_t rows, size_t first,
                      const MakeRow& make_row) {
  static const std::vector<gdn_sampling_params> cases = SamplingCases();
  SampleBatch batch;
  for (int64_t i = 0; i < rows; ++i) {
    const gdn_sampling_params& params = cases[(first + static_cast<size_t>(i) * 7) % cases.size()];
    std::vector<int32_t> seen;
    if (params.repetition_penalty != 1.0f) {
      seen = DistinctIds(random, vocab, std::min<int64_t>(200, 1 + vocab / 3));
    }
    batch.Add(make_row(), params, i * 3 + (i << 33), seen);
  }
  return batch;
}

int Check(const SampleBatch& batch) {
  return ExpectSameSamples(batch, SampleByCuda(batch), SampleByRef(batch));
}

TEST_F(SamplingCuda, MatchesRefForEveryOptionCombined) {
  Random random(61);
  int near_ties = 0;
  for (const int64_t vocab : {1, 2, 31, 256, 1000, 5000}) {
    for (const float scale : {0.5f, 3.0f}) {
      const auto rows = static_cast<int64_t>(SamplingCases().size());
      near_ties +=
          Check(CaseBatch(random, vocab, rows, 0, [&] { return NormalRow(random, vocab, scale); }));
      if (HasFailure()) return;
    }
  }
  EXPECT_LE(near_ties, 2);
}

TEST_F(SamplingCuda, MatchesRefForEveryShape) {
  Random random(62);
  int near_ties = 0;
  size_t first = 0;
  for (const int64_t vocab : {1, 2, 31, 256, 1000, 32000}) {
    for (const int64_t rows : {1, 3, 64}) {
      for (const int64_t pad : {0, 3, 4}) {
        for (const int32_t alternatives : {0, 1, 20}) {
          SampleBatch batch = CaseBatch(random, vocab, rows, first += 11,
                                        [&] { return NormalRow(random, vocab, 2.0f); });
          batch.stride_pad = pad;
          batch.with_history = pad != 4;
          batch.top_logprobs = static_cast<int32_t>(std::min<int64_t>(alternatives, vocab));
          near_ties += Check(batch);
          if (HasFailure()) return;
        }
      }
    }
  }
  EXPECT_LE(near_ties, 2);
}

TEST_F(SamplingCuda, MatchesRefForLargeVocabularies) {
  Random random(63);
  int near_ties = 0;
  for (const float scale : {0.01f, 1.0f, 4.0f}) {
    SampleBatch batch = CaseBatch(random, 248320, 64, 17 + static_cast<size_t>(scale * 100),
                                  [&] { return NormalRow(random, 248320, scale); });
    batch.top_logprobs = 5;
    near_ties += Check(batch);
    if (HasFailure()) return;
  }
  // More than a block's histogram holds between two of its folds, and a block alone.
  for (const int64_t rows : {1, 3}) {
    SampleBatch batch;
    for (int64_t i = 0; i < rows; ++i) {
      batch.Add(NormalRow(random, 1200001, 2.0f), {1.0f, 300000, 0.7f, 0.0f, 1.0f, 5}, i);
    }
    near_ties += Check(batch);
  }
  EXPECT_LE(near_ties, 1);
}

// Equal logits, few distinct ones, spreads that no histogram resolves at once: the ties at every
// boundary are cut by id.
TEST_F(SamplingCuda, CutsTiesAsRefDoes) {
  Random random(64);
  int near_ties = 0;
  for (const int64_t vocab : {300, 9000, 70000}) {
    const int64_t rows = vocab > 10000 ? 48 : 192;
    auto rounded = [&](float step) {
      std::vector<float> row = NormalRow(random, vocab, 2.0f);
      for (float& l : row) l = std::round(l / step) * step;
      return row;
    };
    near_ties += Check(CaseBatch(random, vocab, rows, 5, [&] { return rounded(0.5f); }));
    near_ties += Check(CaseBatch(random, vocab, rows, 50, [&] { return rounded(8.0f); }));
    near_ties += Check(CaseBatch(random, vocab, rows, 500, [&] {
      return std::vector<float>(static_cast<size_t>(vocab), random.Uniform(-5.0f, 5.0f));
    }));
    near_ties += Check(CaseBatch(random, vocab, rows, 5, [&] {  // +0 and -0 are equal.
      std::vector<float> row(static_cast<size_t>(vocab), -0.0f);
      for (size_t i = random.Integer(7); i < row.size(); i += 3) row[i] = 0.0f;
      return row;
    }));
    for (const float scale : {1e-6f, 1e6f, 1e30f}) {
      near_ties +=
          Check(CaseBatch(random, vocab, rows, 3, [&] { return NormalRow(random, vocab, scale); }));
    }
    near_ties += Check(CaseBatch(random, vocab, rows, 9, [&] {  // An outlier above a flat field.
      std::vector<float> row = NormalRow(random, vocab, 1e-3f);
      row[random.Integer(static_cast<uint32_t>(vocab))] = 1e4f;
      return row;
    }));
    near_ties += Check(CaseBatch(random, vocab, rows, 1, [&] {  // Descending: all slices differ.
      std::vector<float> row(static_cast<size_t>(vocab));
      for (size_t i = 0; i < row.size(); ++i) row[i] = 10.0f - 1e-3f * static_cast<float>(i);
      return row;
    }));
    if (HasFailure()) return;
  }
  EXPECT_LE(near_ties, 2);
}

TEST_F(SamplingCuda, MaskedLogitsAreNeverChosen) {
  Random random(65);
  int near_ties = 0;
  for (const int64_t vocab : {40, 3000, 20000}) {
    for (const uint32_t one_in : {2u, 50u, 1000u}) {
      SampleBatch batch = CaseBatch(random, vocab, 128, 13, [&] {
        std::vector<float> row = NormalRow(random, vocab, 2.0f);
        for (float& l : row) {
          if (random.Integer(one_in) != 0) l = -kInfinity;
        }
        row[random.Integer(static_cast<uint32_t>(vocab))] = 0.5f;
        return row;
      });
      batch.top_logprobs = 30;
      near_ties += Check(batch);
      const SampleResult result = SampleByCuda(batch);
      for (size_t r = 0; r < result.token.size(); ++r) {
        ASSERT_GT(batch.logits[r][static_cast<size_t>(result.token[r])], -kInfinity);
      }
    }
  }
  EXPECT_LE(near_ties, 1);
}

TEST_F(SamplingCuda, AlternativesInOrderForEveryCount) {
  Random random(66);
  for (const int64_t vocab : {5, 260, 7001}) {
    for (const int32_t k : {1, 5, 300, 513, 4096, 5000, 7001}) {
      if (k > vocab && k != 7001) continue;
      SampleBatch batch;
      batch.top_logprobs = static_cast<int32_t>(std::min<int64_t>(k, vocab));
      batch.Add(NormalRow(random, vocab, 2.0f), kPlain, 1);
      batch.Add(std::vector<float>(static_cast<size_t>(vocab), 0.5f), kGreedy, 2);
      std::vector<float> rising(static_cast<size_t>(vocab));
      for (size_t i = 0; i < rising.size(); ++i) rising[i] = static_cast<float>(i) - 1000.0f;
      batch.Add(rising, {1.0f, 3, 1.0f, 0.0f, 1.0f, 1}, 3);
      std::vector<float> masked(static_cast<size_t>(vocab), -kInfinity);
      masked[3] = 1.0f;
      masked[1] = 2.0f;
      batch.Add(masked, kPlain, 4);
      EXPECT_EQ(Check(batch), 0);
      ASSERT_FALSE(HasFailure()) << "vocab " << vocab << " k " << k;
    }
  }
}

// Also the values that the host back ends refuse: the host cannot see them here.
TEST_F(SamplingCuda, DamagedRowsGiveMinusOneAndLeaveTheOthersAlone) {
  Random random(67);
  for (const int64_t vocab : {37, 5000}) {
    const std::vector<float> good = NormalRow(random, vocab, 1.0f);
    SampleBatch batch;
    batch.top_logprobs = 2;
    const gdn_sampling_params filtered = {1.0f, 5, 0.9f, 0.01f, 1.2f, 3};
    std::vector<bool> valid;
    auto add = [&](const std::vector<float>& row, const gdn_sampling_params& p, bool is_valid,
                   std::vector<int32_t> seen = {1}) {
      batch.Add(row, p, 5, std::move(seen));
      valid.push_back(is_valid);
    };
    for (const gdn_sampling_params& p : {kPlain, kGreedy, filtered}) {
      for (const float bad : {std::nanf(""), -std::nanf(""), kInfinity}) {
        for (const int64_t at : {int64_t{0}, vocab / 2, vocab - 1}) {
          std::vector<float> row = good;
          row[static_cast<size_t>(at)] = bad;
          add(good, p, true);
          add(row, p, false);
        }
      }
      add(std::vector<float>(good.size(), -kInfinity), p, false);
      add(std::vector<float>(good.size(), std::nanf("")), p, false);
      add(good, p, false, {1, static_cast<int32_t>(vocab)});
      add(good, p, false, {-1});
      auto with = [&](auto change) {
        gdn_sampling_params changed = p;
        change(changed);
        add(good, changed, false);
      };
      with([](auto& c) { c.temperature = -1.0f; });
      with([](auto& c) { c.temperature = std::nanf(""); });
      with([](auto& c) { c.temperature = kInfinity; });
      with([](auto& c) { c.top_k = -3; });
      with([](auto& c) { c.top_p = 0.0f; });
      with([](auto& c) { c.top_p = 1.5f; });
      with([](auto& c) { c.min_p = 1.0f; });
      with([](auto& c) { c.repetition_penalty = 0.0f; });
      add(good, p, true);
    }
    for (const int32_t alternatives : {0, 2}) {
      batch.top_logprobs = alternatives;
      const SampleResult result = SampleByCuda(batch);
      for (size_t r = 0; r < valid.size(); ++r) {
        ASSERT_EQ(result.token[r] >= 0, valid[r]) << "row " << r;
        ASSERT_EQ(std::isnan(result.logprob[r]), !valid[r]) << "row " << r;
        if (valid[r]) {
          const SampleBatch alone = batch.Alone(r);
          ASSERT_EQ(ExpectSameSamples(alone, SampleByCuda(alone), SampleByRef(alone)), 0);
          ASSERT_EQ(result.token[r], SampleByRef(alone).token[0]) << "row " << r;
        } else {
          ASSERT_EQ(result.token[r], -1) << "row " << r;
        }
        for (size_t i = 2 * r; alternatives > 0 && i < 2 * r + 2; ++i) {
          ASSERT_EQ(result.top_ids[i] == -1, !valid[r]) << "row " << r;
          ASSERT_EQ(std::isnan(result.top_values[i]), !valid[r]) << "row " << r;
        }
      }
    }
  }
}

TEST_F(SamplingCuda, PaddingRowsGetMinusOneAndNothingElse) {
  Random random(68);
  SampleBatch batch = CaseBatch(random, 700, 60, 0, [&] { return NormalRow(random, 700, 2.0f); });
  batch.top_logprobs = 3;
  for (size_t r = 0; r < 60; r += 3) {
    batch.position[r] = r % 2 == 0 ? -1 : std::numeric_limits<int64_t>::min();
    batch.params[r].temperature = std::nanf("");
    batch.logits[r].assign(700, std::nanf(""));
  }
  const SampleResult got = SampleByCuda(batch);
  EXPECT_EQ(ExpectSameSamples(batch, got, SampleByRef(batch)), 0);
  for (size_t r = 0; r < 60; r += 3) {
    EXPECT_EQ(got.token[r], -1);
    EXPECT_EQ(got.logprob[r], kPoisonValue);
    EXPECT_EQ(got.top_ids[3 * r + 2], kPoisonId);
    EXPECT_EQ(got.top_values[3 * r], kPoisonValue);
  }
}

TEST_F(SamplingCuda, RepetitionPenaltyActsOnHistoryOfItsRowOnly) {
  gdn_sampling_params params = kGreedy;
  params.repetition_penalty = 2.0f;
  const std::vector<float> row = {4.0f, 3.0f, -1.0f, 2.5f};
  SampleBatch batch;
  batch.Add(row, params, 0, {});
  batch.Add(row, params, 0, {0});
  batch.Add(row, params, 0, {1, 0});
  batch.Add({-1, -1.5, -9, -9}, params, 0, {0});
  batch.Add(row, params, 0, {});
  params.repetition_penalty = 1e-30f;  // Overflows to a large finite logit.
  batch.Add({1e20f, 2e20f, 0, 0}, params, 0, {0, 1});
  EXPECT_EQ(SampleByCuda(batch).token, (std::vector<int32_t>{0, 1, 3, 1, 0, 0}));
}

}  // namespace
}  // namespace gdn::kernels
