// The sampler by its definition: sorts the whole vocabulary and works in FP64 after the penalty.
#include "gdn/kernels/sampling.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <span>

#include "kernels/common/sampling_math.h"

namespace gdn::ref {
namespace {

struct Scratch {
  std::span<float> penalised;  // [vocab]
  std::span<int32_t> order;    // [vocab] ids, best first
};

// Descending by value, lower id first on ties.
void SortIds(const float* values, std::span<int32_t> order) {
  for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int32_t>(i);
  std::sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
    return values[a] != values[b] ? values[a] > values[b] : a < b;
  });
}

// Length of the prefix of `order` that survives top-k, top-p and min-p.
size_t KeptCount(const gdn_sampling_params& params, std::span<const float> l,
                 std::span<const int32_t> order) {
  size_t kept = order.size();
  if (params.top_k > 0) kept = std::min(kept, static_cast<size_t>(params.top_k));
  const double best = l[static_cast<size_t>(order[0])];
  auto mass = [&](size_t rank) {
    return std::exp((l[static_cast<size_t>(order[rank])] - best) / params.temperature);
  };
  if (params.top_p < 1.0f) {
    double total = 0.0;
    for (size_t rank = 0; rank < kept; ++rank) total += mass(rank);
    double sum = 0.0;
    size_t prefix = 0;
    while (prefix < kept && (prefix == 0 || sum < params.top_p * total)) sum += mass(prefix++);
    kept = prefix;
  }
  if (params.min_p > 0.0f) {
    while (kept > 1 && mass(kept - 1) < params.min_p) --kept;
  }
  return kept;
}

void SampleRow(const gdn_sampling_args& args, int64_t row, const Scratch& scratch) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  const float* logits = args.logits + row * args.logits_row_stride;
  const gdn_sampling_params& params = args.params[row];
  const auto top = static_cast<size_t>(args.top_logprobs);
  if (args.position[row] < 0) {
    args.token[row] = -1;
    return;
  }

  float max = -std::numeric_limits<float>::infinity();
  bool valid = true;
  for (int64_t i = 0; i < args.vocab; ++i) {
    valid = valid && !std::isnan(logits[i]);
    max = std::max(max, logits[i]);
  }
  if (!valid || std::isinf(max)) {
    args.token[row] = -1;
    if (args.logprob != nullptr) args.logprob[row] = kNan;
    for (size_t i = 0; i < top; ++i) {
      args.top_ids[static_cast<size_t>(row) * top + i] = -1;
      args.top_values[static_cast<size_t>(row) * top + i] = kNan;
    }
    return;
  }
  double sum = 0.0;
  for (int64_t i = 0; i < args.vocab; ++i) sum += std::exp(static_cast<double>(logits[i]) - max);
  const double log_sum = max + std::log(sum);

  if (top > 0) {
    SortIds(logits, scratch.order);
    for (size_t i = 0; i < top; ++i) {
      const int32_t id = scratch.order[i];
      args.top_ids[static_cast<size_t>(row) * top + i] = id;
      args.top_values[static_cast<size_t>(row) * top + i] =
          static_cast<float>(logits[id] - log_sum);
    }
  }

  std::copy_n(logits, args.vocab, scratch.penalised.begin());
  if (args.history != nullptr) {
    for (int64_t i = args.history_offsets[row]; i < args.history_offsets[row + 1]; ++i) {
      const int32_t id = args.history[i];
      scratch.penalised[static_cast<size_t>(id)] =
          kernels::Penalise(logits[id], params.repetition_penalty);
    }
  }
  SortIds(scratch.penalised.data(), scratch.order);

  int32_t token = scratch.order[0];
  if (params.temperature > 0.0f) {
    double best = -std::numeric_limits<double>::infinity();
    const size_t kept = KeptCount(params, scratch.penalised, scratch.order);
    const float reference = scratch.penalised[static_cast<size_t>(scratch.order[0])];
    for (size_t rank = 0; rank < kept; ++rank) {
      const int32_t id = scratch.order[rank];
      const double score =
          kernels::GumbelScore(scratch.penalised[static_cast<size_t>(id)], reference,
                               params.temperature, params.seed, args.position[row], id);
      if (score > best || (score == best && id < token)) {
        best = score;
        token = id;
      }
    }
  }
  args.token[row] = token;
  if (args.logprob != nullptr) args.logprob[row] = static_cast<float>(logits[token] - log_sum);
}

}  // namespace

size_t SampleWorkspace(const gdn_exec&, const gdn_sampling_args& args) {
  return static_cast<size_t>(args.vocab) * (sizeof(float) + sizeof(int32_t));
}

gdn_status Sample(const gdn_exec& exec, const gdn_sampling_args& args) {
  const auto vocab = static_cast<size_t>(args.vocab);
  auto* floats = static_cast<float*>(exec.workspace);
  const Scratch scratch{{floats, vocab}, {reinterpret_cast<int32_t*>(floats + vocab), vocab}};
  for (int64_t row = 0; row < args.rows; ++row) SampleRow(args, row, scratch);
  return GDN_OK;
}

}  // namespace gdn::ref
