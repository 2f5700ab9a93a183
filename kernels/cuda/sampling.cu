#include "gdn/kernels/sampling.h"

#include <algorithm>
#include <bit>

#include "kernels/cuda/sampling_plan.h"

namespace gdn::cuda {
namespace {

constexpr char kOp[] = "sample";
constexpr size_t kAlignment = 64;
// Teams need a list each: few where a list is large.
constexpr int64_t kMaxTeams = 128;
constexpr int64_t kMaxTeamsWithLargeLists = 32;
// Warps per multiprocessor that keep the memory busy; beyond that a warp takes several slices.
constexpr int64_t kWarpsWanted = 64;
constexpr int64_t kMaxSlicesPerWarp = 16;

// Hands out aligned pieces of the workspace; from NULL, only counts.
class Arena {
 public:
  explicit Arena(void* base) : base_(static_cast<char*>(base)) {}
  template <typename T>
  void Take(int64_t count, T** pointer) {
    *pointer = base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + bytes_);
    const size_t bytes = static_cast<size_t>(count) * sizeof(T);
    bytes_ += (bytes + kAlignment - 1) / kAlignment * kAlignment;
  }
  size_t bytes() const { return bytes_; }

 private:
  char* base_;
  size_t bytes_ = 0;
};

// The layout is the same on every device.
size_t MakePlan(const gdn_sampling_args& args, void* workspace, SamplingPlan* plan) {
  plan->args = args;
  plan->slices = (args.vocab + kSliceSize - 1) / kSliceSize;
  plan->candidate_stride = (plan->slices + kScanWarps - 1) / kScanWarps * kScanWarps;
  plan->seen_words = (args.vocab + 31) / 32;
  plan->list_capacity = std::max(
      kSharedList,
      static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(std::max(args.top_logprobs, 1)))));
  plan->teams =
      std::min(args.rows, plan->list_capacity == kSharedList ? kMaxTeams : kMaxTeamsWithLargeLists);
  const bool history = args.history != nullptr;
  Arena arena(workspace);
  arena.Take(args.rows * plan->slices, &plan->stats);
  arena.Take(args.rows * plan->candidate_stride, &plan->candidate);
  arena.Take(history ? args.rows * plan->seen_words : 0, &plan->seen);
  arena.Take(history ? args.rows : 0, &plan->damaged);
  arena.Take(plan->teams * plan->list_capacity, &plan->list);
  return arena.bytes();
}

}  // namespace

size_t SampleWorkspace(const gdn_exec&, const gdn_sampling_args& args) {
  SamplingPlan plan;
  return MakePlan(args, nullptr, &plan);
}

gdn_status Sample(const gdn_exec& exec, const gdn_sampling_args& args) {
  if (args.rows == 0) return GDN_OK;
  Device device;
  if (const gdn_status status = CurrentDevice(kOp, &device); status != GDN_OK) return status;
  SamplingPlan plan;
  MakePlan(args, exec.workspace, &plan);
  plan.slices_per_warp = std::clamp<int64_t>(
      args.rows * plan.slices / (device.multiprocessors * kWarpsWanted), 1, kMaxSlicesPerWarp);
  const int64_t per_block = plan.slices_per_warp * kScanWarps;
  plan.candidates = (plan.slices + per_block - 1) / per_block * kScanWarps;
  if (args.history != nullptr) {
    const gdn_status status = LaunchMarkHistory(plan, Stream(exec));
    if (status != GDN_OK) return status;
  }
  if (const gdn_status status = LaunchScanLogits(plan, Stream(exec)); status != GDN_OK) {
    return status;
  }
  return LaunchChooseTokens(plan, device, Stream(exec));
}

}  // namespace gdn::cuda
