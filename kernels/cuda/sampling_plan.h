// What the kernels of the sampler share: the arguments, where things lie in the workspace, and the
// launchers.
//
//   1. MarkHistory  a row's history becomes a bitmap over the vocabulary; only with a history.
//   2. ScanLogits   one pass over all logits by slices of fixed size, so that sums do not depend on
//                   the number of rows: maximum and sum of exponentials of each slice, and the best
//                   candidate of each warp.
//   3. ChooseTokens a block per greedy or plainly sampled row makes the result of these; a team of
//                   blocks per row that needs more passes (top-k, top-p, min-p, alternatives).
//
// The host sees none of the arrays, so each row takes its path on the device.
#ifndef KERNELS_CUDA_SAMPLING_PLAN_H_
#define KERNELS_CUDA_SAMPLING_PLAN_H_

#include <cstddef>
#include <cstdint>

#include "gdn/kernels/sampling.h"
#include "kernels/cuda/launch.h"

namespace gdn::cuda {

// Logits of a slice: 16 a lane.
constexpr int64_t kSliceSize = 512;
constexpr int kScanWarps = 4;
// Entries of a list that fits in shared memory.
constexpr int64_t kSharedList = 4096;

struct SliceStats {
  float max;            // Of the input.
  float sum;            // Of exp(logit - max); NaN if the slice holds NaN or +inf.
  float penalised_max;  // After the repetition penalty.
};

// The best of a warp's slices; id -1: none.
struct Candidate {
  float logit;  // After the penalty.
  int32_t id;
};

struct SamplingPlan {
  gdn_sampling_args args;
  int64_t slices;
  int64_t slices_per_warp;
  int64_t candidates;  // Written per row.
  int64_t candidate_stride;
  int64_t seen_words;
  int64_t teams;
  int64_t list_capacity;
  // In the workspace:
  SliceStats* stats;     // [rows, slices]
  Candidate* candidate;  // [rows, candidate_stride]
  uint32_t* seen;        // [rows, seen_words] bitmaps of the histories
  int32_t* damaged;      // [rows] whether the history is illegal
  uint64_t* list;        // [teams, list_capacity]
};

gdn_status LaunchMarkHistory(const SamplingPlan& plan, cudaStream_t stream);
gdn_status LaunchScanLogits(const SamplingPlan& plan, cudaStream_t stream);
gdn_status LaunchChooseTokens(const SamplingPlan& plan, const Device& device, cudaStream_t stream);

}  // namespace gdn::cuda

#endif  // KERNELS_CUDA_SAMPLING_PLAN_H_
