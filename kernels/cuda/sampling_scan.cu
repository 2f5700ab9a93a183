#include <algorithm>

#include "kernels/cuda/cluster.cuh"
#include "kernels/cuda/sampling_plan.h"
#include "kernels/cuda/sampling_row.cuh"

namespace gdn::cuda {
namespace {

constexpr int kMarkThreads = 512;
constexpr int kScanThreads = 32 * kScanWarps;
constexpr int kParts = kSliceSize / 128;

// One block per row: checks the history, and makes the bitmap of a row that has a penalty.
__global__ void __launch_bounds__(kMarkThreads) Mark(const __grid_constant__ SamplingPlan p) {
  const gdn_sampling_args& a = p.args;
  for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x) {
    if (a.position[row] < 0) continue;
    const int64_t begin = a.history_offsets[row];
    const int64_t end = a.history_offsets[row + 1];
    const bool legal = begin >= 0 && begin <= end;
    uint32_t* seen = p.seen + row * p.seen_words;
    const bool marks = legal && begin < end && a.params[row].repetition_penalty != 1.0f;
    if (marks) {
      for (int64_t i = threadIdx.x; i < p.seen_words; i += kMarkThreads) seen[i] = 0;
    }
    __syncthreads();
    int damaged = legal ? 0 : 1;
    for (int64_t i = begin + threadIdx.x; legal && i < end; i += kMarkThreads) {
      const int32_t id = a.history[i];
      if (id < 0 || id >= a.vocab) {
        damaged = 1;
      } else if (marks) {
        atomicOr(&seen[id / 32], 1u << (id % 32));
      }
    }
    damaged = __syncthreads_or(damaged);
    if (threadIdx.x == 0) p.damaged[row] = damaged;
  }
}

// Slices along x, rows along y; each warp takes neighbouring slices.
__global__ void __launch_bounds__(kScanThreads) Scan(const __grid_constant__ SamplingPlan p) {
  AllowNextKernel();
  const uint32_t lane = threadIdx.x % 32;
  const int64_t warp = blockIdx.x * int64_t{kScanWarps} + threadIdx.x / 32;
  const int64_t first_slice = warp * p.slices_per_warp;
  const int64_t end_slice = min(first_slice + p.slices_per_warp, p.slices);
  for (int64_t row = blockIdx.y; row < p.args.rows; row += gridDim.y) {
    const RowKind kind = KindOf(p, row);
    if (kind == RowKind::kSkipped || kind == RowKind::kInvalid) continue;
    const RowView view = RowView::WithPenalty(p, row);
    WarpDraw draw(p.args.params[row], p.args.position[row]);
    Candidate greedy = {-kSamplingInf, -1};
    for (int64_t slice = first_slice; slice < end_slice; ++slice) {
      const auto first = static_cast<uint32_t>(slice * kSliceSize);
      float4 v[kParts];
#pragma unroll
      for (int i = 0; i < kParts; ++i) v[i] = view.LoadRaw(first + 128 * i + 4 * lane);
      float max = -kSamplingInf;
#pragma unroll
      for (int i = 0; i < kParts; ++i) max = fmaxf(max, Max4(v[i]));
      max = WarpMax(max);
      const float shift = max == -kSamplingInf ? 0.0f : max;
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < kParts; ++i) {
        sum += (__expf(v[i].x - shift) + __expf(v[i].y - shift)) +
               (__expf(v[i].z - shift) + __expf(v[i].w - shift));
      }
      sum = LaneSum(sum);
      float penalised_max = max;
      if (view.seen != nullptr) {
        penalised_max = -kSamplingInf;
#pragma unroll
        for (int i = 0; i < kParts; ++i) {
          v[i] = view.Apply(first + 128 * i + 4 * lane, v[i]);
          penalised_max = fmaxf(penalised_max, Max4(v[i]));
        }
        penalised_max = WarpMax(penalised_max);
      }
      if (lane == 0) p.stats[row * p.slices + slice] = {max, sum, penalised_max};
      if (kind == RowKind::kPlain) {
        draw.AddSlice(view, first, penalised_max, 0);
      } else if (penalised_max > greedy.logit) {
        uint32_t id = 0xffffffffu;
#pragma unroll
        for (int i = kParts - 1; i >= 0; --i) {
          const uint32_t part = first + 128 * i + 4 * lane;
          if (v[i].w == penalised_max) id = part + 3;
          if (v[i].z == penalised_max) id = part + 2;
          if (v[i].y == penalised_max) id = part + 1;
          if (v[i].x == penalised_max) id = part;
        }
        greedy = {penalised_max, static_cast<int32_t>(__reduce_min_sync(kFullMask, id))};
      }
    }
    if (lane == 0) {
      p.candidate[row * p.candidate_stride + warp] = kind == RowKind::kPlain ? draw.best() : greedy;
    }
  }
}

}  // namespace

gdn_status LaunchMarkHistory(const SamplingPlan& plan, cudaStream_t stream) {
  Mark<<<GridFor(plan.args.rows, 1), kMarkThreads, 0, stream>>>(plan);
  return CheckLaunch("sample");
}

gdn_status LaunchScanLogits(const SamplingPlan& plan, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(plan.candidates / kScanWarps),
                  static_cast<unsigned>(std::min<int64_t>(plan.args.rows, 65535)));
  Scan<<<grid, kScanThreads, 0, stream>>>(plan);
  return CheckLaunch("sample");
}

}  // namespace gdn::cuda
