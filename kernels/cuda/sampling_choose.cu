// The last kernel of the sampler: from the scan's records to tokens.
#include <algorithm>

#include "kernels/cuda/sampling_plan.h"
#include "kernels/cuda/sampling_select.cuh"

namespace gdn::cuda {
namespace {

// Resolution of the first histogram: bins per nat of probability, and per unit of logit where
// elements are counted. Only speed depends on it.
constexpr float kBinsPerNat = 64.0f;
constexpr float kBinsPerUnit = 128.0f;
constexpr uint32_t kClusters = 32;

struct RowSummary {
  bool valid;
  float max;  // Of the input.
  float penalised_max;
  double log_sum;  // Of the input's exponentials.
};

// The same bits in every block.
__device__ RowSummary Summarise(ChooseShared& s, const SamplingPlan& p, int64_t row) {
  const SliceStats* stats = p.stats + row * p.slices;
  float max = -kSamplingInf;
  float penalised_max = -kSamplingInf;
  int damaged = 0;
  for (int64_t i = threadIdx.x; i < p.slices; i += kChooseThreads) {
    max = fmaxf(max, stats[i].max);
    penalised_max = fmaxf(penalised_max, stats[i].penalised_max);
    damaged |= isnan(stats[i].sum) ? 1 : 0;
  }
  RowSummary row_summary;
  row_summary.max = BlockMax(s, max);
  row_summary.penalised_max = BlockMax(s, penalised_max);
  row_summary.valid = __syncthreads_or(damaged) == 0 && isfinite(row_summary.max);
  double sum = 0.0;
  for (int64_t i = threadIdx.x; row_summary.valid && i < p.slices; i += kChooseThreads) {
    if (stats[i].max == -kSamplingInf) continue;
    sum += static_cast<double>(stats[i].sum) *
           exp(static_cast<double>(stats[i].max) - row_summary.max);
  }
  row_summary.log_sum = row_summary.max + log(BlockSum(s, sum));
  return row_summary;
}

__device__ double ScoreOf(const gdn_sampling_params& params, int64_t position, float max,
                          float logit, int32_t id) {
  const RowPhilox philox(params.seed, position);
  return (static_cast<double>(logit) - max) / params.temperature +
         GumbelOf(philox.Word(static_cast<uint32_t>(id)));
}

// The best of the scan's candidates. By a block.
__device__ int32_t BestCandidate(ChooseShared& s, const SamplingPlan& p, int64_t row, bool greedy,
                                 float penalised_max) {
  const gdn_sampling_params& params = p.args.params[row];
  double best = -static_cast<double>(kSamplingInf);
  int32_t best_id = -1;
  for (int64_t i = threadIdx.x; i < p.candidates; i += kChooseThreads) {
    const Candidate c = p.candidate[row * p.candidate_stride + i];
    if (c.id < 0) continue;
    const double score = greedy
                             ? static_cast<double>(c.logit)
                             : ScoreOf(params, p.args.position[row], penalised_max, c.logit, c.id);
    if (best_id < 0 || score > best || (score == best && c.id < best_id)) {
      best = score;
      best_id = c.id;
    }
  }
  return BlockBest(s, best, best_id);
}

__device__ void WriteToken(const SamplingPlan& p, int64_t row, const RowSummary& summary,
                           int32_t token) {
  if (threadIdx.x != 0) return;
  p.args.token[row] = token;
  if (p.args.logprob == nullptr) return;
  const float logit = p.args.logits[row * p.args.logits_row_stride + token];
  p.args.logprob[row] = static_cast<float>(logit - summary.log_sum);
}

__device__ void WriteInvalid(const SamplingPlan& p, int64_t row) {
  const float nan = __int_as_float(0x7fffffff);
  if (threadIdx.x == 0) {
    p.args.token[row] = -1;
    if (p.args.logprob != nullptr) p.args.logprob[row] = nan;
  }
  const int64_t k = p.args.top_logprobs;
  for (int64_t i = threadIdx.x; i < k; i += kChooseThreads) {
    p.args.top_ids[row * k + i] = -1;
    p.args.top_values[row * k + i] = nan;
  }
}

// ---- Selection of a prefix of the row in descending order.

// What to select: the first `count` ranks, or, with count 0, the shortest prefix of the ranks from
// `least` on that holds `fraction` of their mass exp((logit - max) / temperature).
struct Goal {
  uint32_t count;
  double fraction;
  uint64_t least;
  float max;  // Of the view.
  float temperature;
};

// The prefix ends with `boundary`. If it is listed, the team's list holds its ranks and perhaps
// some below, `listed` in all, and the boundary is left to the list's reader, with the mass to
// reach.
struct Prefix {
  uint64_t boundary;
  uint32_t listed;
  double target;
};

// A monotone map of logits to bins, the largest in bin 0.
__device__ inline uint32_t LinearBin(float max, float scale, float logit, float* position) {
  *position = (max - logit) * scale;
  return static_cast<uint32_t>(fminf(*position, static_cast<float>(kBins - 1)));
}

// At least `count` logits of the row have this key or a larger one: each thread knows of one.
__device__ uint32_t KeyBelow(const SamplingPlan& p, int64_t row, uint32_t count, bool penalised) {
  const SliceStats* stats = p.stats + row * p.slices;
  float max = -kSamplingInf;
  for (int64_t i = threadIdx.x; i < p.slices; i += kChooseThreads) {
    max = fmaxf(max, penalised ? stats[i].penalised_max : stats[i].max);
  }
  const uint32_t own = threadIdx.x < p.slices ? KeyOf(max) : 0;
  uint32_t key = 0;
  for (uint32_t bit = 0x80000000u; bit != 0; bit >>= 1) {
    if (static_cast<uint32_t>(__syncthreads_count(own >= (key | bit))) >= count) key |= bit;
  }
  return key;
}

__device__ double MassOf(const Goal& goal, uint64_t rank) {
  return exp((static_cast<double>(RankValue(rank)) - goal.max) / goal.temperature);
}

// Rank 0 finds the boundary in a sorted list, and tells the team.
__device__ uint64_t ResolveList(ChooseShared& s, const Team& team, const Goal& goal, uint32_t count,
                                double target) {
  if (team.rank == 0) {
    const uint64_t* list = SortedList(s, team, count);
    const Pick pick = PickFirst(
        s, count, target, [&](uint32_t i) { return goal.count > 0 ? 1.0 : MassOf(goal, list[i]); });
    const uint64_t boundary = list[pick.item];
    if (threadIdx.x < team.size) *Remote(&s.boundary, threadIdx.x) = boundary;
  }
  TeamSync();
  return s.boundary;
}

__device__ Prefix SelectPrefix(ChooseShared& s, const Team& team, const RowView& view,
                               const Goal& goal) {
  const bool by_count = goal.count > 0;
  const float scale = by_count ? kBinsPerUnit : fminf(kBinsPerNat / goal.temperature, 3e38f);
  auto amount_of = [&](float position, uint32_t bin) {
    if (by_count) return 1u;
    return static_cast<uint32_t>(
        expf((static_cast<float>(bin) - position) / kBinsPerNat) * kMassOne + 0.5f);
  };
  auto unit_of = [&](uint32_t bin) {
    return by_count ? 1.0 : exp(-static_cast<double>(bin) / kBinsPerNat) / kMassOne;
  };
  // No fewer than the elements of a bin of which this is the sum.
  auto most = [&](double sum) { return by_count ? sum : sum / kMassOne * 1.02 + 1.0; };

  Histogram(s, team, view, [&](uint32_t id, float logit, uint32_t* amount) {
    if (RankOf(logit, id) < goal.least) return static_cast<uint32_t>(kBins);
    float position;
    const uint32_t bin = LinearBin(goal.max, scale, logit, &position);
    *amount = amount_of(position, bin);
    return bin;
  });
  double target = goal.count;
  if (!by_count) {
    double sum = 0.0;
    for (uint32_t i = threadIdx.x; i < kBins; i += kChooseThreads) {
      sum += static_cast<double>(s.merged[i]) * unit_of(i);
    }
    target = goal.fraction * BlockSum(s, sum);
  }
  const Pick first = PickFirst(
      s, kBins, target, [&](uint32_t i) { return static_cast<double>(s.merged[i]) * unit_of(i); });
  double upper = 0.0;
  for (uint32_t i = threadIdx.x; i <= first.item; i += kChooseThreads) {
    upper += static_cast<double>(s.merged[i]);
  }
  upper = BlockSum(s, upper);
  if (most(upper) <= team.list_capacity) {
    const uint32_t listed = Gather(s, team, view, [&](float logit, uint64_t rank) {
      float position;
      return LinearBin(goal.max, scale, logit, &position) <= first.item && rank >= goal.least;
    });
    if (listed <= team.list_capacity) return {0, listed, target};
  }

  // The boundary is in this bin: the interval of ranks shrinks until a list holds it.
  double before = first.before;
  double inside = static_cast<double>(s.merged[first.item]);
  auto bin_of = [&](uint32_t key) {
    float position;
    return LinearBin(goal.max, scale, ValueOf(key), &position);
  };
  const uint32_t lowest = KeyOf(-kSamplingInf);
  const uint32_t highest = KeyOf(goal.max);
  const uint32_t low_key =
      SmallestKey(lowest, highest, [&](uint32_t key) { return bin_of(key) <= first.item; });
  const uint32_t high_key =
      first.item == 0 ? highest : SmallestKey(lowest, highest, [&](uint32_t key) {
                                    return bin_of(key) < first.item;
                                  }) - 1;
  uint64_t low = uint64_t{low_key} << 32 | static_cast<uint32_t>(~(view.vocab - 1));
  uint64_t high = uint64_t{high_key} << 32 | 0xffffffffu;
  if (low < goal.least) low = goal.least;
  while (low < high) {
    if (most(inside) <= team.list_capacity) {
      const uint32_t listed =
          Gather(s, team, view, [&](float, uint64_t rank) { return rank >= low && rank <= high; });
      if (listed > 0 && listed <= team.list_capacity) {
        return {ResolveList(s, team, goal, listed, target - before), 0, 0.0};
      }
    }
    const int shift = max(0, 64 - __clzll(static_cast<long long>(high - low)) - 11);
    Histogram(s, team, view, [&](uint32_t id, float logit, uint32_t* amount) {
      const uint64_t rank = RankOf(logit, id);
      if (rank < low || rank > high) return static_cast<uint32_t>(kBins);
      float position;
      LinearBin(goal.max, scale, logit, &position);
      *amount = amount_of(position, first.item);
      return static_cast<uint32_t>((high - rank) >> shift);
    });
    const double unit = unit_of(first.item);
    const Pick pick = PickFirst(s, kBins, target - before, [&](uint32_t i) {
      return static_cast<double>(s.merged[i]) * unit;
    });
    before += pick.before;
    inside = static_cast<double>(s.merged[pick.item]);
    high -= uint64_t{pick.item} << shift;
    const uint64_t width = (uint64_t{1} << shift) - 1;
    if (high - low > width) low = high - width;
  }
  return {low, 0, 0.0};
}

// ---- Rows for a team.

__device__ void ReportAlternatives(ChooseShared& s, const SamplingPlan& p, const Team& team,
                                   int64_t row, const RowSummary& summary) {
  const auto k = static_cast<uint32_t>(p.args.top_logprobs);
  const RowView view(p, row);
  uint32_t listed = team.list_capacity + 1;
  uint64_t least = 0;
  if (k < view.vocab) {
    if (k <= kChooseThreads && k <= p.slices) {
      const uint64_t enough = uint64_t{KeyBelow(p, row, k, false)} << 32;
      listed = Gather(s, team, view, [&](float, uint64_t rank) { return rank >= enough; });
    }
    if (listed > team.list_capacity) {
      const Prefix prefix = SelectPrefix(s, team, view, {k, 1.0, 0, summary.max, 1.0f});
      if (prefix.listed > 0) listed = prefix.listed;
      least = prefix.boundary;
    }
  }
  if (listed > team.list_capacity) {
    listed = Gather(s, team, view, [&](float, uint64_t rank) { return rank >= least; });
  }
  if (team.rank == 0) {
    const uint64_t* list = SortedList(s, team, listed);
    for (uint32_t i = threadIdx.x; i < k; i += kChooseThreads) {
      p.args.top_ids[row * k + i] = RankId(list[i]);
      p.args.top_values[row * k + i] = static_cast<float>(RankValue(list[i]) - summary.log_sum);
    }
  }
  TeamSync();  // The list is free.
}

// Draws from a sorted list, by rank 0.
__device__ int32_t DrawFromList(ChooseShared& s, const SamplingPlan& p, int64_t row,
                                const Goal& goal, const uint64_t* list, uint32_t count) {
  const gdn_sampling_params& params = p.args.params[row];
  double best = -static_cast<double>(kSamplingInf);
  int32_t best_id = -1;
  for (uint32_t i = threadIdx.x; i < count; i += kChooseThreads) {
    if (params.min_p > 0.0f && MassOf(goal, list[i]) < params.min_p) continue;
    const int32_t id = RankId(list[i]);
    const double score = ScoreOf(params, p.args.position[row], goal.max, RankValue(list[i]), id);
    if (score > best || (score == best && id < best_id)) {
      best = score;
      best_id = id;
    }
  }
  return BlockBest(s, best, best_id);
}

// Draws from all ranks from `least` on. Rank 0 returns the token.
__device__ int32_t DrawFromRow(ChooseShared& s, const SamplingPlan& p, const Team& team,
                               int64_t row, const RowView& view, const Goal& goal, uint64_t least) {
  const gdn_sampling_params& params = p.args.params[row];
  WarpDraw draw(params, p.args.position[row]);
  const SliceStats* stats = p.stats + row * p.slices;
  const int64_t warp = team.rank * kChooseWarps + threadIdx.x / 32;
  const float least_value = RankValue(least);
  for (int64_t slice = warp; slice < p.slices; slice += team.size * kChooseWarps) {
    const float max = stats[slice].penalised_max;
    if (least == 0 || max >= least_value) {
      draw.AddSlice(view, static_cast<uint32_t>(slice * kSliceSize), max, least);
    }
  }
  if (threadIdx.x % 32 == 0) s.warp_best[threadIdx.x / 32] = draw.best();
  TeamSync();
  int32_t token = -1;
  if (team.rank == 0) {
    double score = -static_cast<double>(kSamplingInf);
    int32_t id = -1;
    if (threadIdx.x < team.size * kChooseWarps) {
      const Candidate c =
          Remote(s.warp_best, threadIdx.x / kChooseWarps)[threadIdx.x % kChooseWarps];
      id = c.id;
      if (id >= 0) score = ScoreOf(params, p.args.position[row], goal.max, c.logit, id);
    }
    token = BlockBest(s, score, id);
  }
  TeamSync();  // The candidates have been read.
  return token;
}

__device__ void ChooseFiltered(ChooseShared& s, const SamplingPlan& p, const Team& team,
                               int64_t row, const RowSummary& summary) {
  const gdn_sampling_params& params = p.args.params[row];
  const RowView view = RowView::WithPenalty(p, row);
  Goal goal = {0, params.top_p, 0, summary.penalised_max, params.temperature};
  uint32_t listed = 0;
  if (params.top_k > 0 && params.top_k < p.args.vocab) {
    goal.count = static_cast<uint32_t>(params.top_k);
    if (goal.count <= kChooseThreads && goal.count <= p.slices) {
      const uint64_t enough = uint64_t{KeyBelow(p, row, goal.count, true)} << 32;
      listed = Gather(s, team, view, [&](float, uint64_t rank) { return rank >= enough; });
      if (listed > team.list_capacity) listed = 0;
    }
    if (listed == 0) {
      const Prefix prefix = SelectPrefix(s, team, view, goal);
      listed = prefix.listed;
      goal.least = prefix.boundary;
    }
    if (listed > 0) {
      if (team.rank == 0) {
        const uint64_t* list = SortedList(s, team, listed);
        uint32_t kept = goal.count;
        if (params.top_p < 1.0f) {
          double sum = 0.0;
          for (uint32_t i = threadIdx.x; i < kept; i += kChooseThreads) {
            sum += MassOf(goal, list[i]);
          }
          const double target = goal.fraction * BlockSum(s, sum);
          kept = 1 +
                 PickFirst(s, kept, target, [&](uint32_t i) { return MassOf(goal, list[i]); }).item;
        }
        WriteToken(p, row, summary, DrawFromList(s, p, row, goal, list, kept));
      }
      TeamSync();  // The list is free.
      return;
    }
    goal.count = 0;
  }
  if (params.top_p < 1.0f) {
    const Prefix prefix = SelectPrefix(s, team, view, goal);
    if (prefix.listed > 0) {
      if (team.rank == 0) {
        const uint64_t* list = SortedList(s, team, prefix.listed);
        const Pick pick = PickFirst(s, prefix.listed, prefix.target,
                                    [&](uint32_t i) { return MassOf(goal, list[i]); });
        WriteToken(p, row, summary, DrawFromList(s, p, row, goal, list, pick.item + 1));
      }
      TeamSync();  // The list is free.
      return;
    }
    goal.least = prefix.boundary;
  }
  if (params.min_p > 0.0f) {
    const uint32_t key = SmallestKey(KeyOf(-kSamplingInf), KeyOf(goal.max), [&](uint32_t k) {
      return !(MassOf(goal, uint64_t{k} << 32) < params.min_p);
    });
    const uint64_t least = uint64_t{key} << 32;
    if (least > goal.least) goal.least = least;
  }
  const int32_t token = DrawFromRow(s, p, team, row, view, goal, goal.least);
  if (team.rank == 0) WriteToken(p, row, summary, token);
}

__device__ void FinishAlone(ChooseShared& s, const SamplingPlan& p, int64_t row, RowKind kind,
                            const RowSummary& summary) {
  const int32_t token = BestCandidate(s, p, row, kind == RowKind::kGreedy, summary.penalised_max);
  WriteToken(p, row, summary, token);
}

__global__ void __launch_bounds__(kChooseThreads, 2)
    Choose(const __grid_constant__ SamplingPlan p) {
  __shared__ ChooseShared s;
  WaitForPreviousKernel();
  const bool alternatives = p.args.top_logprobs > 0;
  // Rows of a pass each, by single blocks.
  for (int64_t row = blockIdx.x; row < p.args.rows; row += gridDim.x) {
    const RowKind kind = KindOf(p, row);
    if (kind == RowKind::kSkipped) {
      if (threadIdx.x == 0) p.args.token[row] = -1;
    } else if (kind == RowKind::kInvalid) {
      WriteInvalid(p, row);
    } else if (kind != RowKind::kFiltered && !alternatives) {
      const RowSummary summary = Summarise(s, p, row);
      if (summary.valid) {
        FinishAlone(s, p, row, kind, summary);
      } else {
        WriteInvalid(p, row);
      }
    }
  }
  const uint32_t size = TeamSize();
  const int64_t index = blockIdx.x / size;
  const Team team = {blockIdx.x % size, size, p.list + index * p.list_capacity,
                     static_cast<uint32_t>(p.list_capacity)};
  for (int64_t row = index; row < p.args.rows; row += gridDim.x / size) {
    const RowKind kind = KindOf(p, row);
    if (kind == RowKind::kSkipped || kind == RowKind::kInvalid) continue;
    if (kind != RowKind::kFiltered && !alternatives) continue;
    const RowSummary summary = Summarise(s, p, row);
    if (!summary.valid) {
      if (team.rank == 0) WriteInvalid(p, row);
      continue;
    }
    if (alternatives) ReportAlternatives(s, p, team, row, summary);
    if (kind == RowKind::kFiltered) {
      ChooseFiltered(s, p, team, row, summary);
    } else if (team.rank == 0) {
      FinishAlone(s, p, row, kind, summary);
    }
  }
  TeamSync();  // No block leaves while another reads its shared memory.
}

}  // namespace

gdn_status LaunchChooseTokens(const SamplingPlan& plan, const Device& device, cudaStream_t stream) {
  const bool clusters = device.compute_capability >= 90;
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {kTeamBlocks, 1, 1};
  // Its blocks may be placed while the scan's last ones run; it waits for their results.
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim =
      clusters ? static_cast<unsigned>(std::min<int64_t>(plan.teams, kClusters)) * kTeamBlocks
               : static_cast<unsigned>(plan.teams);
  config.blockDim = kChooseThreads;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = clusters ? 2 : 0;
  const cudaError_t error = cudaLaunchKernelEx(&config, Choose, plan);
  (void)cudaGetLastError();
  return CheckCuda("sample", error);
}

}  // namespace gdn::cuda
