// Batches for the tests of the sampler on a GPU, and their evaluation there and by REF.
#ifndef KERNELS_CUDA_SAMPLING_TEST_UTIL_H_
#define KERNELS_CUDA_SAMPLING_TEST_UTIL_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <thread>
#include <vector>

#include "gdn/kernels/sampling.h"
#include "kernels/common/sampling_math.h"
#include "kernels/cuda/cuda_test_util.h"
#include "kernels/linear_test_util.h"

namespace gdn::kernels {

inline constexpr float kInfinity = std::numeric_limits<float>::infinity();
inline constexpr gdn_sampling_params kPlain = {1.0f, 0, 1.0f, 0.0f, 1.0f, 0};
inline constexpr gdn_sampling_params kGreedy = {0.0f, 0, 1.0f, 0.0f, 1.0f, 0};
// What outputs hold before a call.
inline constexpr int32_t kPoisonId = -77;
inline constexpr float kPoisonValue = 77.0f;

struct SampleBatch {
  int64_t vocab = 0;
  int64_t stride_pad = 0;
  std::vector<std::vector<float>> logits;
  std::vector<gdn_sampling_params> params;
  std::vector<int64_t> position;
  std::vector<std::vector<int32_t>> history;
  bool with_history = true;
  int32_t top_logprobs = 0;

  int64_t rows() const { return static_cast<int64_t>(logits.size()); }
  void Add(std::vector<float> row, const gdn_sampling_params& p, int64_t pos,
           std::vector<int32_t> seen = {}) {
    vocab = static_cast<int64_t>(row.size());
    logits.push_back(std::move(row));
    params.push_back(p);
    position.push_back(pos);
    history.push_back(std::move(seen));
  }
  // Row `row` of this batch, alone.
  SampleBatch Alone(size_t row) const {
    SampleBatch alone;
    alone.top_logprobs = top_logprobs;
    alone.with_history = with_history;
    alone.Add(logits[row], params[row], position[row], history[row]);
    return alone;
  }
};

struct SampleResult {
  std::vector<int32_t> token;
  std::vector<float> logprob;
  std::vector<int32_t> top_ids;
  std::vector<float> top_values;
};

inline bool SameBits(const SampleResult& a, const SampleResult& b) {
  auto same = [](const auto& x, const auto& y) {
    return x.size() == y.size() && std::memcmp(x.data(), y.data(), x.size() * sizeof(x[0])) == 0;
  };
  return same(a.token, b.token) && same(a.logprob, b.logprob) && same(a.top_ids, b.top_ids) &&
         same(a.top_values, b.top_values);
}

// The arrays of a call on the host.
struct SampleArrays {
  explicit SampleArrays(const SampleBatch& batch)
      : stride(batch.vocab + batch.stride_pad),
        logits(static_cast<size_t>(batch.rows() * stride), std::nanf("")),
        history(3, 0),
        offsets(1, 3) {
    for (size_t r = 0; r < batch.logits.size(); ++r) {
      std::copy(batch.logits[r].begin(), batch.logits[r].end(),
                logits.begin() + static_cast<int64_t>(r) * stride);
      history.insert(history.end(), batch.history[r].begin(), batch.history[r].end());
      offsets.push_back(static_cast<int64_t>(history.size()));
    }
    const auto rows = static_cast<size_t>(batch.rows());
    const size_t alternatives = rows * static_cast<size_t>(batch.top_logprobs);
    result = {std::vector<int32_t>(rows, kPoisonId), std::vector<float>(rows, kPoisonValue),
              std::vector<int32_t>(alternatives, kPoisonId),
              std::vector<float>(alternatives, kPoisonValue)};
  }

  int64_t stride;
  std::vector<float> logits;
  std::vector<int32_t> history;
  std::vector<int64_t> offsets;
  SampleResult result;
};

inline SampleResult SampleByRef(const SampleBatch& batch) {
  SampleArrays host(batch);
  constexpr int64_t kThreads = 8;
  std::vector<std::thread> threads;
  for (int64_t t = 0; t < std::min(kThreads, batch.rows()); ++t) {
    threads.emplace_back([&, t] {
      Execution execution(kRef);
      for (int64_t row = t; row < batch.rows(); row += kThreads) {
        gdn_sampling_args args = {};
        args.rows = 1;
        args.vocab = batch.vocab;
        args.logits = host.logits.data() + row * host.stride;
        args.logits_row_stride = host.stride;
        args.params = batch.params.data() + row;
        args.position = batch.position.data() + row;
        args.history = batch.with_history ? host.history.data() : nullptr;
        args.history_offsets = batch.with_history ? host.offsets.data() + row : nullptr;
        args.top_logprobs = batch.top_logprobs;
        args.token = host.result.token.data() + row;
        args.logprob = host.result.logprob.data() + row;
        if (batch.top_logprobs > 0) {
          args.top_ids = host.result.top_ids.data() + row * batch.top_logprobs;
          args.top_values = host.result.top_values.data() + row * batch.top_logprobs;
        }
        size_t bytes = 0;
        EXPECT_EQ(gdn_sample_workspace(execution.exec(), &args, &bytes), GDN_OK);
        execution.SetWorkspace(bytes);
        EXPECT_EQ(gdn_sample(execution.exec(), &args), GDN_OK) << gdn_last_error();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return host.result;
}

// A batch on the device, with a poisoned workspace of exactly the size asked for and a guard
// behind.
class DeviceSample {
 public:
  explicit DeviceSample(const SampleBatch& batch)
      : host_(batch),
        logits_(host_.logits),
        params_(batch.params),
        position_(batch.position),
        history_(host_.history),
        offsets_(host_.offsets),
        token_(host_.result.token),
        logprob_(host_.result.logprob),
        top_ids_(host_.result.top_ids),
        top_values_(host_.result.top_values) {
    args_.rows = batch.rows();
    args_.vocab = batch.vocab;
    args_.logits = logits_.get<float>();
    args_.logits_row_stride = host_.stride;
    args_.params = params_.get<gdn_sampling_params>();
    args_.position = position_.get<int64_t>();
    args_.history = batch.with_history ? history_.get<int32_t>() : nullptr;
    args_.history_offsets = batch.with_history ? offsets_.get<int64_t>() : nullptr;
    args_.top_logprobs = batch.top_logprobs;
    args_.token = token_.get<int32_t>();
    args_.logprob = logprob_.get<float>();
    args_.top_ids = batch.top_logprobs > 0 ? top_ids_.get<int32_t>() : nullptr;
    args_.top_values = batch.top_logprobs > 0 ? top_values_.get<float>() : nullptr;
    exec_ = stream_.Exec();
    EXPECT_EQ(gdn_sample_workspace(&exec_, &args_, &workspace_bytes_), GDN_OK) << gdn_last_error();
    const std::vector<uint8_t> poison(workspace_bytes_ + kGuard, 0xa5);
    workspace_ = std::make_unique<DeviceBuffer>(poison);
    exec_.workspace = workspace_->get();
    exec_.workspace_bytes = workspace_bytes_;
  }

  gdn_sampling_args& args() { return args_; }
  const gdn_exec& exec() const { return exec_; }
  const Stream& stream() const { return stream_; }

  // The arrays of a batch of the same shape.
  void Upload(const SampleBatch& batch) {
    const SampleArrays host(batch);
    logits_.Upload(host.logits.data());
    params_.Upload(batch.params.data());
    position_.Upload(batch.position.data());
    if (host.history.size() * sizeof(int32_t) == history_.bytes()) {
      history_.Upload(host.history.data());
    }
    offsets_.Upload(host.offsets.data());
    token_.Upload(host.result.token.data());
    logprob_.Upload(host.result.logprob.data());
  }

  SampleResult Run() {
    EXPECT_EQ(gdn_sample(&exec_, &args_), GDN_OK) << gdn_last_error();
    stream_.Synchronize();
    return Result();
  }

  SampleResult Result() {
    token_.Download(host_.result.token.data());
    logprob_.Download(host_.result.logprob.data());
    top_ids_.Download(host_.result.top_ids.data());
    top_values_.Download(host_.result.top_values.data());
    const std::vector<uint8_t> workspace = workspace_->Bytes();
    EXPECT_TRUE(std::all_of(workspace.end() - kGuard, workspace.end(),
                            [](uint8_t byte) { return byte == 0xa5; }));
    return host_.result;
  }

 private:
  static constexpr int64_t kGuard = 256;
  Stream stream_;
  SampleArrays host_;
  DeviceBuffer logits_;
  DeviceBuffer params_;
  DeviceBuffer position_;
  DeviceBuffer history_;
  DeviceBuffer offsets_;
  DeviceBuffer token_;
  DeviceBuffer logprob_;
  DeviceBuffer top_ids_;
  DeviceBuffer top_values_;
  gdn_sampling_args args_ = {};
  gdn_exec exec_ = {};
  size_t workspace_bytes_ = 0;
  std::unique_ptr<DeviceBuffer> workspace_;
};

inline SampleResult SampleByCuda(const SampleBatch& batch) { return DeviceSample(batch).Run(); }

inline float PenalisedLogit(const SampleBatch& batch, size_t row, int32_t id) {
  const float l = batch.logits[row][static_cast<size_t>(id)];
  const auto& seen = batch.history[row];
  const bool penalised =
      batch.with_history && std::find(seen.begin(), seen.end(), id) != seen.end();
  return penalised ? Penalise(l, batch.params[row].repetition_penalty) : l;
}

// The difference of the scores of two tokens.
inline double ScoreGap(const SampleBatch& batch, size_t row, int32_t a, int32_t b) {
  const gdn_sampling_params& p = batch.params[row];
  const float max = PenalisedLogit(batch, row, a);
  auto score = [&](int32_t id) {
    return GumbelScore(PenalisedLogit(batch, row, id), max, p.temperature, p.seed,
                       batch.position[row], id);
  };
  return std::abs(score(a) - score(b));
}

// Counts the rows whose choices differ although nothing is at stake: scores within 1e-5.
inline int ExpectSameSamples(const SampleBatch& batch, const SampleResult& got,
                             const SampleResult& expected) {
  int near_ties = 0;
  for (size_t r = 0; r < batch.logits.size(); ++r) {
    const gdn_sampling_params& p = batch.params[r];
    if (got.token[r] != expected.token[r] && p.temperature > 0.0f && got.token[r] >= 0 &&
        expected.token[r] >= 0 && ScoreGap(batch, r, got.token[r], expected.token[r]) < 1e-5) {
      ++near_ties;
      continue;
    }
    EXPECT_EQ(got.token[r], expected.token[r])
        << "row " << r << " of " << batch.rows() << ", vocab " << batch.vocab << ": temperature "
        << p.temperature << ", top_k " << p.top_k << ", top_p " << p.top_p << ", min_p " << p.min_p
        << ", penalty " << p.repetition_penalty << ", seed " << p.seed << ", position "
        << batch.position[r];
    if (std::isnan(expected.logprob[r])) {
      EXPECT_TRUE(std::isnan(got.logprob[r])) << "row " << r;
    } else {
      EXPECT_NEAR(got.logprob[r], expected.logprob[r], 1e-5 + 1e-6 * std::abs(expected.logprob[r]))
          << "row " << r << ", vocab " << batch.vocab;
    }
  }
  EXPECT_EQ(got.top_ids, expected.top_ids) << "vocab " << batch.vocab;
  for (size_t i = 0; i < expected.top_values.size(); ++i) {
    const float value = expected.top_values[i];
    if (std::isnan(value)) {
      EXPECT_TRUE(std::isnan(got.top_values[i])) << i;
    } else if (std::isinf(value)) {
      EXPECT_EQ(got.top_values[i], value) << i;
    } else {
      EXPECT_NEAR(got.top_values[i], value, 1e-5 + 1e-6 * std::abs(value)) << i;
    }
  }
  return near_ties;
}

inline std::vector<float> NormalRow(Random& random, int64_t vocab, float scale) {
  std::vector<float> row(static_cast<size_t>(vocab));
  for (float& l : row) l = scale * random.Normal();
  return row;
}

inline std::vector<int32_t> DistinctIds(Random& random, int64_t vocab, int64_t count) {
  std::vector<int32_t> ids;
  std::vector<bool> used(static_cast<size_t>(vocab));
  while (static_cast<int64_t>(ids.size()) < std::min(count, vocab)) {
    const auto id = static_cast<int32_t>(random.Integer(static_cast<uint32_t>(vocab)));
    if (used[static_cast<size_t>(id)]) continue;
    used[static_cast<size_t>(id)] = true;
    ids.push_back(id);
  }
  return ids;
}

// Every option alone and with every other.
inline std::vector<gdn_sampling_params> SamplingCases() {
  std::vector<gdn_sampling_params> cases;
  uint64_t seed = 99;
  for (const float t : {0.0f, 0.01f, 0.7f, 1.0f, 3.0f}) {
    for (const int32_t k : {0, 1, 5, 50, 700, 100000}) {
      for (const float p : {1.0f, 0.999f, 0.9f, 0.3f, 1e-6f}) {
        for (const float m : {0.0f, 0.05f, 0.9f}) {
          for (const float r : {1.0f, 1.3f, 0.7f}) {
            cases.push_back({t, k, p, m, r, seed++ * 0x9e3779b97f4a7c15ull});
          }
        }
      }
    }
  }
  return cases;
}

}  // namespace gdn::kernels

#endif  // KERNELS_CUDA_SAMPLING_TEST_UTIL_H_
