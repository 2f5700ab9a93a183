#include "gdn/kernels/sampling.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <set>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/common/sampling_math.h"
#include "kernels/linear_test_util.h"

namespace gdn::kernels {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr gdn_sampling_params kPlain = {1.0f, 0, 1.0f, 0.0f, 1.0f, 0};

struct Batch {
  int64_t vocab = 0;
  std::vector<std::vector<float>> logits;
  std::vector<gdn_sampling_params> params;
  std::vector<int64_t> position;
  std::vector<std::vector<int32_t>> history;  // empty: none
  int32_t top_logprobs = 0;

  void Add(std::vector<float> row, const gdn_sampling_params& p, int64_t pos,
           std::vector<int32_t> seen = {}) {
    vocab = static_cast<int64_t>(row.size());
    logits.push_back(std::move(row));
    params.push_back(p);
    position.push_back(pos);
    history.push_back(std::move(seen));
  }
};

struct Result {
  std::vector<int32_t> token;
  std::vector<float> logprob;
  std::vector<int32_t> top_ids;
  std::vector<float> top_values;
};

Result Sample(Execution& execution, const Batch& batch) {
  const size_t rows = batch.logits.size();
  const auto stride = static_cast<size_t>(batch.vocab) + 3;
  std::vector<float> logits(rows * stride, std::nanf(""));
  std::vector<int32_t> history = {0};  // never NULL
  std::vector<int64_t> offsets = {1};
  for (size_t r = 0; r < rows; ++r) {
    std::copy(batch.logits[r].begin(), batch.logits[r].end(), logits.begin() + r * stride);
    history.insert(history.end(), batch.history[r].begin(), batch.history[r].end());
    offsets.push_back(static_cast<int64_t>(history.size()));
  }
  const std::vector<float> before = logits;
  const size_t alternatives = rows * static_cast<size_t>(batch.top_logprobs);
  Result result = {std::vector<int32_t>(rows, -77), std::vector<float>(rows, 77.0f),
                   std::vector<int32_t>(alternatives, -77),
                   std::vector<float>(alternatives, 77.0f)};
  gdn_sampling_args args = {};
  args.rows = static_cast<int64_t>(rows);
  args.vocab = batch.vocab;
  args.logits = logits.data();
  args.logits_row_stride = static_cast<int64_t>(stride);
  args.params = batch.params.data();
  args.position = batch.position.data();
  args.history = history.data();
  args.history_offsets = offsets.data();
  args.top_logprobs = batch.top_logprobs;
  args.token = result.token.data();
  args.logprob = result.logprob.data();
  args.top_ids = batch.top_logprobs > 0 ? result.top_ids.data() : nullptr;
  args.top_values = batch.top_logprobs > 0 ? result.top_values.data() : nullptr;
  size_t bytes = 0;
  EXPECT_EQ(gdn_sample_workspace(execution.exec(), &args, &bytes), GDN_OK);
  execution.SetWorkspace(bytes);
  EXPECT_EQ(gdn_sample(execution.exec(), &args), GDN_OK) << gdn_last_error();
  EXPECT_EQ(0, std::memcmp(before.data(), logits.data(), logits.size() * sizeof(float)));
  return result;
}

std::vector<float> NormalRow(Random& random, int64_t vocab, float scale) {
  std::vector<float> row(static_cast<size_t>(vocab));
  for (float& l : row) l = scale * random.Normal();
  return row;
}

// Ids that survive the filters, by sorting everything, in FP64; the margin is how close any
// decision of the filters was.
std::vector<int32_t> KeptIds(const std::vector<float>& l, const gdn_sampling_params& p,
                             double* margin) {
  std::vector<int32_t> order(l.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return l[a] > l[b]; });
  if (p.top_k > 0 && order.size() > static_cast<size_t>(p.top_k)) {
    order.resize(static_cast<size_t>(p.top_k));
  }
  std::vector<double> mass;
  for (const int32_t id : order) {
    mass.push_back(std::exp((static_cast<double>(l[id]) - l[order[0]]) / p.temperature));
  }
  const double total = std::accumulate(mass.begin(), mass.end(), 0.0);
  *margin = 1.0;
  size_t kept = order.size();
  if (p.top_p < 1.0f) {
    double sum = 0.0;
    kept = 0;
    while (kept < order.size()) {
      sum += mass[kept++] / total;
      *margin = std::min(*margin, std::abs(sum - p.top_p));
      if (sum >= p.top_p) break;
    }
  }
  order.resize(kept);
  if (p.min_p > 0.0f) {
    size_t above = 0;
    for (size_t i = 0; i < kept; ++i) {
      *margin = std::min(*margin, std::abs(mass[i] - p.min_p));
      above += mass[i] >= p.min_p;
    }
    order.resize(above);
  }
  return order;
}

std::vector<gdn_sampling_params> FilterCases() {
  std::vector<gdn_sampling_params> cases;
  for (const float t : {0.01f, 0.7f, 1.0f, 3.0f}) {
    for (const int32_t k : {0, 1, 5, 40, 100000}) {
      for (const float p : {1.0f, 0.999f, 0.9f, 0.3f, 1e-6f}) {
        for (const float m : {0.0f, 0.05f, 0.9f}) cases.push_back({t, k, p, m, 1.0f, 99});
      }
    }
  }
  return cases;
}

TEST(SamplingTest, CpuDrawsTheTokenOfTheDefinition) {
  Random random(61);
  Execution reference(kRef);
  for (const Variant& variant : kVariants) {
    const BaselineTargetScope target(variant.baseline);
    Execution execution(CpuBackend(variant.threads));
    for (const int64_t vocab : {1, 2, 9, 33, 260, 2500}) {
      Batch batch;
      for (const gdn_sampling_params& params : FilterCases()) {
        batch.Add(NormalRow(random, vocab, 3.0f), params,
                  static_cast<int64_t>(batch.logits.size()));
      }
      const Result got = Sample(execution, batch);
      const Result expected = Sample(reference, batch);
      for (size_t r = 0; r < batch.logits.size(); ++r) {
        double margin = 0.0;
        const auto kept = KeptIds(batch.logits[r], batch.params[r], &margin);
        // Both members of the pair sit in the kept set unless a filter's own sum is a near tie.
        if (margin > 1e-6) {
          ASSERT_EQ(got.token[r], expected.token[r])
              << variant.name << " vocab " << vocab << " row " << r;
          ASSERT_NE(std::find(kept.begin(), kept.end(), got.token[r]), kept.end()) << "row " << r;
        }
        ASSERT_NEAR(got.logprob[r], expected.logprob[r], 1e-5) << "row " << r;
      }
    }
  }
}

// Every member of the kept set is drawn, and nothing else is: with flat logits each of n members
// shows up within 40 * n draws except with probability n * e^-40.
TEST(SamplingTest, KeptSetIsExactlyTheBruteForceOne) {
  Random random(62);
  Execution execution(CpuBackend(0));
  const std::vector<gdn_sampling_params> cases = {
      {1.0f, 7, 1.0f, 0.0f, 1.0f, 1},  {1.0f, 0, 0.8f, 0.0f, 1.0f, 2},
      {1.0f, 0, 1.0f, 0.6f, 1.0f, 3},  {0.5f, 20, 0.5f, 0.0f, 1.0f, 4},
      {2.0f, 12, 0.9f, 0.7f, 1.0f, 5}, {1.0f, 5, 1e-9f, 0.0f, 1.0f, 6}};
  for (const gdn_sampling_params& params : cases) {
    for (const bool tied : {false, true}) {
      std::vector<float> row = NormalRow(random, 50, 0.3f);
      if (tied) {
        for (float& l : row) l = std::round(l * 4.0f) / 4.0f;
      }
      double margin = 0.0;
      const std::vector<int32_t> kept = KeptIds(row, params, &margin);
      ASSERT_GT(margin, 1e-6);
      Batch batch;
      for (int64_t i = 0; i < 40 * 50; ++i) batch.Add(row, params, i);
      const Result result = Sample(execution, batch);
      EXPECT_EQ(std::set<int32_t>(result.token.begin(), result.token.end()),
                std::set<int32_t>(kept.begin(), kept.end()))
          << "seed " << params.seed << " tied " << tied;
    }
  }
}

// Chi-square of the frequencies against the softmax over the kept ids.
TEST(SamplingTest, FrequenciesFollowTheSoftmax) {
  Random random(63);
  Execution execution(CpuBackend(2));
  for (const gdn_sampling_params& params : {gdn_sampling_params{1.0f, 0, 1.0f, 0.0f, 1.0f, 7},
                                            gdn_sampling_params{0.6f, 12, 1.0f, 0.0f, 1.0f, 8},
                                            gdn_sampling_params{1.5f, 0, 0.8f, 0.0f, 1.0f, 9}}) {
    const std::vector<float> row = NormalRow(random, 24, 1.0f);
    double margin = 0.0;
    const std::vector<int32_t> kept = KeptIds(row, params, &margin);
    constexpr int kDraws = 60000;
    Batch batch;
    for (int64_t i = 0; i < kDraws; ++i) batch.Add(row, params, i * 3 + (i << 33));
    const Result result = Sample(execution, batch);
    double total = 0.0;
    for (const int32_t id : kept) total += std::exp(row[id] / params.temperature);
    double chi_square = 0.0;
    for (const int32_t id : kept) {
      const double expected = kDraws * std::exp(row[id] / params.temperature) / total;
      ASSERT_GT(expected, 5.0);
      const auto seen =
          static_cast<double>(std::count(result.token.begin(), result.token.end(), id));
      chi_square += (seen - expected) * (seen - expected) / expected;
    }
    // Mean n-1, variance 2(n-1): five standard deviations.
    const auto freedom = static_cast<double>(kept.size() - 1);
    EXPECT_LT(chi_square, freedom + 5.0 * std::sqrt(2.0 * freedom)) << "seed " << params.seed;
    EXPECT_GT(chi_square, 0.05 * freedom) << "suspiciously even";
  }
}

TEST(SamplingTest, GreedyTakesTheLargestLogitAndTheLowestIdOnTies) {
  gdn_sampling_params greedy = kPlain;
  greedy.temperature = 0.0f;
  greedy.top_k = 1;
  Batch batch;
  std::vector<float> row(40, 1.0f);
  batch.Add(row, greedy, 0);
  row[37] = 2.0f;
  batch.Add(row, greedy, 0);
  row[19] = 2.0f;
  batch.Add(row, greedy, 0);
  row.assign(40, -kInfinity);
  row[39] = -3e38f;
  batch.Add(row, greedy, 0);
  for (const Backend& backend : {kRef, CpuBackend(0), CpuBackend(2)}) {
    Execution execution(backend);
    EXPECT_EQ(Sample(execution, batch).token, (std::vector<int32_t>{0, 37, 19, 39}));
  }
}

TEST(SamplingTest, RepetitionPenaltyActsOnHistoryOfItsRowOnly) {
  gdn_sampling_params params = kPlain;
  params.temperature = 0.0f;
  params.repetition_penalty = 2.0f;
  const std::vector<float> row = {4.0f, 3.0f, -1.0f, 2.5f};
  Batch batch;
  batch.Add(row, params, 0, {});
  batch.Add(row, params, 0, {0});                 // 2, 3, -1, 2.5
  batch.Add(row, params, 0, {1, 0});              // 2, 1.5, -1, 2.5
  batch.Add({-1, -1.5, -9, -9}, params, 0, {0});  // -2, -1.5
  batch.Add(row, params, 0, {});
  params.repetition_penalty = 1e-30f;  // overflows to a large finite logit
  batch.Add({1e20f, 2e20f, 0, 0}, params, 0, {0, 1});
  batch.top_logprobs = 2;
  for (const Backend& backend : {kRef, CpuBackend(0)}) {
    Execution execution(backend);
    const Result result = Sample(execution, batch);
    EXPECT_EQ(result.token, (std::vector<int32_t>{0, 1, 3, 1, 0, 0})) << backend.name;
    // Log-probabilities are the model's own, before the penalty.
    const double log_sum = 4.0 + std::log(1.0 + std::exp(-1.0) + std::exp(-5.0) + std::exp(-1.5));
    EXPECT_NEAR(result.logprob[1], 3.0 - log_sum, 1e-5);
    EXPECT_EQ(result.top_ids[2], 0);
    EXPECT_NEAR(result.top_values[2], 4.0 - log_sum, 1e-5);
  }
}

TEST(SamplingTest, AlternativesAreTheLargestInOrder) {
  Random random(64);
  for (const Variant& variant : kVariants) {
    const BaselineTargetScope target(variant.baseline);
    Execution execution(CpuBackend(variant.threads));
    Execution reference(kRef);
    for (const int64_t vocab : {5, 260, 7001}) {
      for (const int32_t k : {1, 5, static_cast<int32_t>(vocab)}) {
        Batch batch;
        batch.top_logprobs = k;
        batch.Add(NormalRow(random, vocab, 2.0f), kPlain, 1);
        batch.Add(std::vector<float>(static_cast<size_t>(vocab), 0.5f), kPlain, 2);
        std::vector<float> rising(static_cast<size_t>(vocab));
        std::iota(rising.begin(), rising.end(), -1000.0f);
        batch.Add(rising, kPlain, 3);
        std::vector<float> masked(static_cast<size_t>(vocab), -kInfinity);
        masked[3] = 1.0f;
        masked[1] = 2.0f;
        batch.Add(masked, kPlain, 4);
        const Result got = Sample(execution, batch);
        const Result expected = Sample(reference, batch);
        ASSERT_EQ(got.top_ids, expected.top_ids) << "vocab " << vocab << " k " << k;
        for (size_t i = 0; i < got.top_values.size(); ++i) {
          if (std::isinf(expected.top_values[i])) {
            ASSERT_EQ(got.top_values[i], expected.top_values[i]);
          } else {
            ASSERT_NEAR(got.top_values[i], expected.top_values[i],
                        1e-5 + 1e-6 * std::abs(expected.top_values[i]));
          }
        }
      }
    }
  }
}

TEST(SamplingTest, DamagedRowsGiveMinusOneAndLeaveTheOthersAlone) {
  Random random(65);
  for (const Backend& backend : {kRef, CpuBackend(0), CpuBackend(3)}) {
    Execution execution(backend);
    Batch batch;
    batch.top_logprobs = 2;
    const std::vector<float> good = NormalRow(random, 37, 1.0f);
    for (const float bad : {std::nanf(""), kInfinity}) {
      for (const size_t at : {0, 20, 36}) {
        batch.Add(good, kPlain, 5);
        std::vector<float> row = good;
        row[at] = bad;
        batch.Add(row, kPlain, 5);
      }
    }
    batch.Add(std::vector<float>(37, -kInfinity), kPlain, 5);
    const Result result = Sample(execution, batch);
    for (size_t r = 0; r < 12; r += 2) {
      EXPECT_EQ(result.token[r], result.token[0]);
      EXPECT_GE(result.token[r], 0);
      EXPECT_EQ(result.token[r + 1], -1) << r;
      EXPECT_TRUE(std::isnan(result.logprob[r + 1]));
      EXPECT_EQ(result.top_ids[2 * (r + 1)], -1);
      EXPECT_TRUE(std::isnan(result.top_values[2 * (r + 1) + 1]));
    }
    EXPECT_EQ(result.token[12], -1);
  }
}

// Of a padding row not even the parameters need to be legal.
TEST(SamplingTest, PaddingRowsGetMinusOneAndNothingElse) {
  Random random(68);
  for (const Backend& backend : {kRef, CpuBackend(0), CpuBackend(3)}) {
    Execution execution(backend);
    Batch batch;
    batch.top_logprobs = 2;
    for (int64_t i = 0; i < 9; ++i) {
      gdn_sampling_params params = kPlain;
      if (i % 3 == 1) params.temperature = std::nanf("");
      batch.Add(NormalRow(random, 37, 1.0f), params, i % 3 == 1 ? -i : i);
    }
    const Result result = Sample(execution, batch);
    for (size_t r = 0; r < 9; ++r) {
      const bool padding = r % 3 == 1;
      EXPECT_EQ(result.token[r] == -1, padding) << r;
      EXPECT_EQ(result.logprob[r] == 77.0f, padding) << r;
      EXPECT_EQ(result.top_ids[2 * r + 1] == -77, padding) << r;
      EXPECT_EQ(result.top_values[2 * r] == 77.0f, padding) << r;
    }
  }
}

TEST(SamplingTest, DependsOnSeedAndPositionAndNotOnTheBatch) {
  Random random(66);
  Batch batch;
  const std::vector<float> row = NormalRow(random, 300, 0.5f);
  for (int64_t i = 0; i < 64; ++i) {
    gdn_sampling_params params = kPlain;
    params.seed = static_cast<uint64_t>(i % 4) << 33;
    params.top_p = i % 3 == 0 ? 0.95f : 1.0f;
    batch.Add(i % 2 == 0 ? row : NormalRow(random, 300, 0.5f), params, i / 4);
  }
  Execution three(CpuBackend(3));
  const Result together = Sample(three, batch);
  for (size_t r = 0; r < 64; ++r) {
    Batch alone;
    alone.Add(batch.logits[r], batch.params[r], batch.position[r]);
    Execution execution(CpuBackend(0));
    const Result result = Sample(execution, alone);
    ASSERT_EQ(result.token[0], together.token[r]);
    ASSERT_EQ(0, std::memcmp(&result.logprob[0], &together.logprob[r], sizeof(float)));
  }
  EXPECT_EQ(Sample(three, batch).token, together.token);
  // Different seeds and positions draw different noise: 64 equal tokens would be a miracle.
  Batch varied;
  for (int64_t i = 0; i < 64; ++i) varied.Add(row, kPlain, i);
  const Result result = Sample(three, varied);
  EXPECT_GT(std::set<int32_t>(result.token.begin(), result.token.end()).size(), 30u);
}

TEST(SamplingTest, LargeVocabulary) {
  Random random(67);
  constexpr int64_t kVocab = 248320;
  Batch batch;
  batch.top_logprobs = 5;
  for (const float scale : {0.0f, 3.0f}) {
    for (const gdn_sampling_params& params :
         {gdn_sampling_params{1.0f, 0, 1.0f, 0.0f, 1.0f, 1},
          gdn_sampling_params{1.0f, 50, 0.95f, 0.0f, 1.0f, 2},
          gdn_sampling_params{1.0f, 0, 0.95f, 0.0f, 1.0f, 3},
          gdn_sampling_params{1.0f, 0, 1.0f, 0.5f, 1.0f, 4},
          gdn_sampling_params{1.0f, 200000, 1.0f, 0.0f, 1.0f, 5}}) {
      batch.Add(NormalRow(random, kVocab, scale), params, 17);
    }
  }
  Execution execution(CpuBackend(2));
  Execution reference(kRef);
  const Result got = Sample(execution, batch);
  const Result expected = Sample(reference, batch);
  EXPECT_EQ(got.token, expected.token);
  EXPECT_EQ(got.top_ids, expected.top_ids);
}

TEST(SamplingTest, GumbelSpansItsDocumentedRange) {
  EXPECT_NEAR(GumbelFromWord(0), std::log(0x1p33), 1e-9);
  EXPECT_LE(GumbelFromWord(0), kGumbelMax);
  EXPECT_NEAR(GumbelFromWord(0xffffffffu), -std::log(std::log(0x1p33)), 1e-9);
  EXPECT_NEAR(GumbelFromWord(0x80000000u), -std::log(std::log(2.0)), 1e-8);
}

TEST(SamplingTest, RefusesMisuseByName) {
  const std::vector<float> logits(8, 0.0f);
  std::vector<gdn_sampling_params> params(2, kPlain);
  const std::vector<int64_t> position = {0, 0};
  std::vector<int32_t> history = {1, 9};
  std::vector<int64_t> offsets = {0, 1, 2};
  Tensor token(GDN_F32, 2);
  Tensor values(GDN_F32, 4);
  Execution execution(CpuBackend(0));
  execution.SetWorkspace(1 << 16);
  gdn_sampling_args good = {};
  good.rows = 2;
  good.vocab = 4;
  good.logits = logits.data();
  good.logits_row_stride = 4;
  good.params = params.data();
  good.position = position.data();
  good.token = static_cast<int32_t*>(token.data());
  auto refused = [&](gdn_status status, const char* sentence, auto change) {
    gdn_sampling_args args = good;
    params.assign(2, kPlain);
    change(args);
    ExpectRefused(gdn_sample(execution.exec(), &args), status, token, sentence);
  };
  const auto kBad = GDN_INVALID_ARGUMENT;
  refused(kBad, "rows must be in 0..2^40, got -1", [](auto& a) { a.rows = -1; });
  refused(kBad, "vocab must be in 1..2^31-1, got 0", [](auto& a) { a.vocab = 0; });
  refused(kBad, "logits must not be NULL", [](auto& a) { a.logits = nullptr; });
  refused(kBad, "params must not be NULL", [](auto& a) { a.params = nullptr; });
  refused(kBad, "position must not be NULL", [](auto& a) { a.position = nullptr; });
  refused(kBad, "token must not be NULL", [](auto& a) { a.token = nullptr; });
  refused(kBad, "logits_row_stride", [](auto& a) { a.logits_row_stride = 3; });
  refused(kBad, "top_logprobs must be in 0..vocab (4), got 5", [](auto& a) { a.top_logprobs = 5; });
  refused(kBad, "top_ids and top_values", [](auto& a) { a.top_logprobs = 1; });
  refused(kBad, "both be given", [&](auto& a) { a.history = history.data(); });
  refused(kBad, "history[1] of row 1 must be in 0..3, got 9", [&](auto& a) {
    a.history = history.data();
    a.history_offsets = offsets.data();
  });
  refused(kBad, "history_offsets must not decrease, got 1 then 0", [&](auto& a) {
    offsets = {0, 1, 0};
    a.history = history.data();
    a.history_offsets = offsets.data();
  });
  refused(kBad, "params[1].temperature must be finite and >= 0, got -1",
          [&](auto&) { params[1].temperature = -1.0f; });
  refused(kBad, "params[0].temperature", [&](auto&) { params[0].temperature = std::nanf(""); });
  refused(kBad, "params[1].top_k must be >= 0, got -3", [&](auto&) { params[1].top_k = -3; });
  refused(kBad, "params[1].top_p must be in (0, 1], got 0", [&](auto&) { params[1].top_p = 0.0f; });
  refused(kBad, "params[1].min_p must be in [0, 1), got 1", [&](auto&) { params[1].min_p = 1.0f; });
  refused(kBad, "params[1].repetition_penalty",
          [&](auto&) { params[1].repetition_penalty = 0.0f; });
  params.assign(2, kPlain);
  execution.mutable_exec()->workspace_bytes = 16;
  refused(GDN_WORKSPACE_TOO_SMALL, "exec.workspace must hold", [](auto&) {});
  execution.mutable_exec()->workspace_bytes = (1 << 16) - 4;
  auto* bytes = static_cast<char*>(execution.exec()->workspace);
  gdn_exec shifted = *execution.exec();
  shifted.workspace = bytes + 4;
  ExpectRefused(gdn_sample(&shifted, &good), kBad, token, "64-byte aligned");
}

}  // namespace
}  // namespace gdn::kernels
