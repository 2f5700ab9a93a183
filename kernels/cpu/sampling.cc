#include "gdn/kernels/sampling.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "gdn/kernels/cpu_pool.h"
#include "kernels/common/sampling_math.h"
#include "kernels/cpu/sampling_scan.h"

namespace gdn::cpu {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr size_t kAlignment = 64;
// Nats around min_p's limit within which FP32 does not decide.
constexpr float kMinPMargin = 1e-3f;
// Room behind the ids for one vector that Collect writes ahead.
constexpr int64_t kIdPadding = 64;

size_t AlignedBytes(int64_t elements) {
  return (static_cast<size_t>(elements) * 4 + kAlignment - 1) / kAlignment * kAlignment;
}

size_t WorkerBytes(int64_t vocab) {
  return 2 * AlignedBytes(vocab) + AlignedBytes(vocab + kIdPadding);
}

// Samples rows with one worker's scratch.
class RowSampler {
 public:
  RowSampler(const gdn_sampling_args& args, std::byte* scratch)
      : args_(args),
        scans_(BestSamplingScans()),
        vocab_(args.vocab),
        penalised_(reinterpret_cast<float*>(scratch)),
        mass_(reinterpret_cast<float*>(scratch + AlignedBytes(vocab_))),
        ids_(reinterpret_cast<int32_t*>(scratch + 2 * AlignedBytes(vocab_))) {}

  void Sample(int64_t row);

 private:
  void Refuse(int64_t row) const;
  void ReportAlternatives(int64_t row, const float* logits, double log_sum);
  const float* Penalised(int64_t row, const float* logits);
  // ids_[0, k) become the k largest of l, unordered; returns k, or less if fewer exceed -inf.
  int64_t TopK(const float* l, int64_t k);
  // ids_[0, return) become the prefix of ids_[0, count) that reaches `target`.
  int64_t TopPrefix(const float* l, int64_t count, double target);
  int64_t TopP(const float* l, float max, const gdn_sampling_params& params, int64_t count);
  int64_t MinP(const float* l, float max, const gdn_sampling_params& params, int64_t count);
  int32_t Draw(const float* l, float max, const gdn_sampling_params& params, int64_t position);

  const gdn_sampling_args& args_;
  const SamplingScans& scans_;
  const int64_t vocab_;
  float* penalised_;
  float* mass_;
  int32_t* ids_;
};

// Descending by value, lower id first on ties.
struct Better {
  const float* l;
  bool operator()(int32_t a, int32_t b) const { return l[a] != l[b] ? l[a] > l[b] : a < b; }
};

void RowSampler::Refuse(int64_t row) const {
  args_.token[row] = -1;
  if (args_.logprob != nullptr) args_.logprob[row] = kNan;
  for (int64_t i = 0; i < args_.top_logprobs; ++i) {
    args_.top_ids[row * args_.top_logprobs + i] = -1;
    args_.top_values[row * args_.top_logprobs + i] = kNan;
  }
}

int64_t RowSampler::TopK(const float* l, int64_t k) {
  // Collects what beats the k-th best so far, cutting back whenever the buffer is full. A later
  // element equal to the k-th best has a higher id and loses, so strictly greater is right.
  const int64_t capacity = std::min(vocab_ + kIdPadding, std::max<int64_t>(4 * k, 2048));
  float threshold = -kInfinity;
  int64_t size = 0;
  for (int64_t next = 0; next < vocab_;) {
    size = scans_.collect(l, vocab_, threshold, &next, ids_, size, capacity);
    if (size > k) {
      std::nth_element(ids_, ids_ + k - 1, ids_ + size, Better{l});
      threshold = l[ids_[k - 1]];
      size = k;
    }
  }
  return size;
}

void RowSampler::ReportAlternatives(int64_t row, const float* logits, double log_sum) {
  const int64_t k = args_.top_logprobs;
  int64_t size = TopK(logits, k);
  std::sort(ids_, ids_ + size, Better{logits});
  // Too few finite logits: the others are -inf, lowest id first.
  for (int64_t id = 0; size < k; ++id) {
    if (logits[id] == -kInfinity) ids_[size++] = static_cast<int32_t>(id);
  }
  for (int64_t i = 0; i < k; ++i) {
    args_.top_ids[row * k + i] = ids_[i];
    args_.top_values[row * k + i] = static_cast<float>(logits[ids_[i]] - log_sum);
  }
}

const float* RowSampler::Penalised(int64_t row, const float* logits) {
  const float penalty = args_.params[row].repetition_penalty;
  if (args_.history == nullptr || penalty == 1.0f) return logits;
  const int64_t begin = args_.history_offsets[row];
  const int64_t end = args_.history_offsets[row + 1];
  if (begin == end) return logits;
  std::copy_n(logits, vocab_, penalised_);
  for (int64_t i = begin; i < end; ++i) {
    const int32_t id = args_.history[i];
    penalised_[id] = kernels::Penalise(logits[id], penalty);
  }
  return penalised_;
}

int64_t RowSampler::TopPrefix(const float* l, int64_t count, double target) {
  int64_t low = 0;
  int64_t high = count;
  double sum = 0.0;
  constexpr int64_t kSortBelow = 32;
  while (high - low > kSortBelow) {
    const int64_t middle = low + (high - low) / 2;
    std::nth_element(ids_ + low, ids_ + middle, ids_ + high, Better{l});
    double upper = 0.0;
    for (int64_t i = low; i < middle; ++i) upper += static_cast<double>(mass_[ids_[i]]);
    if (sum + upper >= target) {
      high = middle;
    } else {
      sum += upper;
      low = middle;
    }
  }
  std::sort(ids_ + low, ids_ + high, Better{l});
  while (low < high && (low == 0 || sum < target)) sum += static_cast<double>(mass_[ids_[low++]]);
  return low;
}

int64_t RowSampler::TopP(const float* l, float max, const gdn_sampling_params& params,
                         int64_t count) {
  if (count < vocab_) {
    double total = 0.0;
    for (int64_t i = 0; i < count; ++i) {
      const double z = (static_cast<double>(l[ids_[i]]) - max) / params.temperature;
      mass_[ids_[i]] = static_cast<float>(std::exp(z));
      total += static_cast<double>(mass_[ids_[i]]);
    }
    return TopPrefix(l, count, params.top_p * total);
  }
  // Whole vocabulary: usually a few nats below the best already hold top_p of the mass, and only
  // the ids above that level need to be ranked.
  constexpr std::array<float, kNumMassLevels> kNats = {2.0f, 4.0f, 8.0f, 16.0f, 32.0f};
  std::array<float, kNumMassLevels> levels;
  std::array<double, kNumMassLevels> level_sums;
  for (size_t i = 0; i < kNats.size(); ++i) levels[i] = max - kNats[i] * params.temperature;
  const double total =
      scans_.masses(l, vocab_, max, params.temperature, mass_, levels, &level_sums);
  const double target = params.top_p * total;
  float threshold = -kInfinity;
  for (size_t i = 0; i < kNats.size(); ++i) {
    if (level_sums[i] > target * (1.0 + 1e-6)) {
      threshold = levels[i];
      break;
    }
  }
  int64_t next = 0;
  const int64_t size = scans_.collect(l, vocab_, threshold, &next, ids_, 0, vocab_ + kIdPadding);
  return TopPrefix(l, size, target);
}

int64_t RowSampler::MinP(const float* l, float max, const gdn_sampling_params& params,
                         int64_t count) {
  // Well above the limit no exponential is needed.
  const float surely = max + params.temperature * (std::log(params.min_p) + kMinPMargin);
  int32_t* end = std::remove_if(ids_, ids_ + count, [&](int32_t id) {
    return l[id] <= surely &&
           std::exp((static_cast<double>(l[id]) - max) / params.temperature) < params.min_p;
  });
  return end - ids_;
}

int32_t RowSampler::Draw(const float* l, float max, const gdn_sampling_params& params,
                         int64_t position) {
  const auto best = static_cast<int32_t>(scans_.find(l, vocab_, max));
  if (params.temperature == 0.0f) return best;
  const GumbelDraw draw = {l, max, params.temperature, params.seed, position};
  const bool filter_k = params.top_k > 0 && params.top_k < vocab_;
  const bool filter_p = params.top_p < 1.0f;
  const bool filter_min = params.min_p > 0.0f;
  if (!filter_k && !filter_p && !filter_min) return scans_.draw(draw, nullptr, vocab_, best);

  int64_t count = filter_k ? TopK(l, params.top_k) : vocab_;
  if (filter_p) count = TopP(l, max, params, count);
  if (filter_min) {
    if (!filter_k && !filter_p) {
      // A margin below the exact limit, which MinP applies.
      const float level = max + params.temperature * (std::log(params.min_p) - kMinPMargin);
      int64_t next = 0;
      count = scans_.collect(l, vocab_, std::nextafter(level, -kInfinity), &next, ids_, 0,
                             vocab_ + kIdPadding);
    }
    count = MinP(l, max, params, count);
  }
  return scans_.draw(draw, ids_, count, best);
}

void RowSampler::Sample(int64_t row) {
  if (args_.position[row] < 0) {
    args_.token[row] = -1;
    return;
  }
  const float* logits = args_.logits + row * args_.logits_row_stride;
  const float max = scans_.max(logits, vocab_);
  if (!std::isfinite(max)) return Refuse(row);
  double log_sum = 0.0;
  if (args_.logprob != nullptr || args_.top_logprobs > 0) {
    log_sum = max + std::log(scans_.sum_exp(logits, vocab_, max));
  }
  if (args_.top_logprobs > 0) ReportAlternatives(row, logits, log_sum);
  const float* l = Penalised(row, logits);
  const float penalised_max = l == logits ? max : scans_.max(l, vocab_);
  const int32_t token = Draw(l, penalised_max, args_.params[row], args_.position[row]);
  args_.token[row] = token;
  if (args_.logprob != nullptr) args_.logprob[row] = static_cast<float>(logits[token] - log_sum);
}

}  // namespace

size_t SampleWorkspace(const gdn_exec& exec, const gdn_sampling_args& args) {
  return static_cast<size_t>(gdn_cpu_pool_threads(exec.pool)) * WorkerBytes(args.vocab);
}

gdn_status Sample(const gdn_exec& exec, const gdn_sampling_args& args) {
  constexpr int64_t kGrainElements = 2048;
  auto* workspace = static_cast<std::byte*>(exec.workspace);
  ParallelFor(exec.pool, args.rows, std::max<int64_t>(1, kGrainElements / args.vocab),
              [&](int64_t begin, int64_t end, int32_t worker) {
                RowSampler sampler(
                    args, workspace + static_cast<size_t>(worker) * WorkerBytes(args.vocab));
                for (int64_t row = begin; row < end; ++row) sampler.Sample(row);
              });
  return GDN_OK;
}

}  // namespace gdn::cpu
