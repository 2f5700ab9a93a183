#include "gdn/kernels/delta_rule.h"

#include <algorithm>
#include <atomic>
#include <type_traits>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/delta_rule.cc"
#include "hwy/foreach_target.h"
// After foreach_target.h.
#include "gdn/kernels/cpu_pool.h"
#include "hwy/highway.h"
#include "kernels/cpu/delta_rule_chunk-inl.h"
#include "kernels/cpu/delta_rule_common.h"
#include "kernels/cpu/delta_rule_scratch.h"
#include "kernels/cpu/delta_rule_step-inl.h"

HWY_BEFORE_NAMESPACE();
namespace gdn::cpu::HWY_NAMESPACE {

inline void ZeroOutputs(const gdn_delta_rule_args& args, int64_t begin, int64_t end, int64_t hv) {
  WithElementType(args.o_dtype, [&](auto element) {
    using T = decltype(element);
    T* o = static_cast<T*>(args.o) + hv * args.value_dim;
    for (int64_t t = begin; t < end; ++t) {
      std::fill_n(o + t * args.o_token_stride, args.value_dim, T{});
    }
  });
}

// Tokens [begin, end) of one sequence and value head through the recurrence.
template <typename TState>
void StepHead(const gdn_delta_rule_args& args, int64_t sequence, int64_t begin, int64_t end,
              int64_t hv, StepScratch& scratch) {
  const int64_t head_size = args.value_dim * args.key_dim;
  TState* state = static_cast<TState*>(args.state);
  TState* dst = state + args.write_index[sequence] * args.state_slot_stride + hv * head_size;
  const TState* src = reinterpret_cast<const TState*>(kZeroRow);
  int64_t src_stride = 0;
  if (!IsFresh(args, sequence)) {
    src = state + args.read_index[sequence] * args.state_slot_stride + hv * head_size;
    src_stride = args.key_dim;
  }
  PrepareValues(args, begin, end - begin, hv, scratch.values);
  const auto run = RowsArePairs(args.key_dim) ? TokensOnHead<true, TState, TState>
                                              : TokensOnHead<false, TState, TState>;
  run(scratch.keys, scratch.values, end - begin, args.key_dim, args.value_dim, src, src_stride,
      dst);
  StoreOutputs(args, begin, end - begin, hv, scratch.values);
}

// Tasks are (row, value head), heads fastest.
void DeltaRuleStepRange(const gdn_delta_rule_args& args, int64_t begin, int64_t end) {
  StepScratch scratch;
  int64_t prepared = -1;
  for (int64_t task = begin; task < end; ++task) {
    const int64_t row = task / args.value_heads;
    const int64_t hv = task % args.value_heads;
    if (args.read_index[row] < 0 || args.write_index[row] < 0) {
      ZeroOutputs(args, row, row + 1, hv);
      continue;
    }
    const int64_t key = task / HeadsPerKey(args);
    if (key != prepared) {
      PrepareKeys(args, row, 1, hv / HeadsPerKey(args), scratch.keys);
      prepared = key;
    }
    if (args.state_dtype == GDN_F32) {
      StepHead<float>(args, row, row, row + 1, hv, scratch);
    } else {
      StepHead<Bf16>(args, row, row, row + 1, hv, scratch);
    }
  }
}

// A sequence without tokens: its state moves to the write slot, if that is another.
template <typename TState>
void MoveState(const gdn_delta_rule_args& args, int64_t sequence, int64_t hv) {
  const int64_t size = args.value_dim * args.key_dim;
  const int64_t read = args.read_index[sequence];
  const int64_t write = args.write_index[sequence];
  if (read == write) return;
  TState* state = static_cast<TState*>(args.state) + hv * size;
  TState* dst = state + write * args.state_slot_stride;
  if (IsFresh(args, sequence)) {
    std::fill_n(dst, size, TState{});
  } else {
    std::copy_n(state + read * args.state_slot_stride, size, dst);
  }
}

// Value heads [hv0, hv1) of one key head, chunk by chunk: the work on keys is shared.
template <typename TState>
void ChunkHeads(const gdn_delta_rule_args& args, int64_t sequence, int64_t begin, int64_t end,
                int64_t hv0, int64_t hv1, ChunkScratch& scratch) {
  const int64_t head_size = args.value_dim * args.key_dim;
  const int64_t padded_size = args.value_dim * PaddedKeyDim(args);
  TState* state = static_cast<TState*>(args.state);
  const TState* read = state + args.read_index[sequence] * args.state_slot_stride;
  TState* write = state + args.write_index[sequence] * args.state_slot_stride;
  const bool fresh = IsFresh(args, sequence);
  const bool in_place = UpdatesInPlace(args);
  for (int64_t hv = hv0; hv < hv1 && !in_place && !fresh; ++hv) {
    UnpackState(read + hv * head_size, args, scratch.state + (hv - hv0) * padded_size);
  }
  for (int64_t first = begin; first < end; first += kChunk) {
    const int64_t count = std::min(kChunk, end - first);
    const Chunk chunk{first, count, RoundUp(count, kLanes)};
    ChunkKeys(args, chunk, hv0 / HeadsPerKey(args), scratch);
    for (int64_t hv = hv0; hv < hv1; ++hv) {
      float* dst = scratch.state + (hv - hv0) * padded_size;
      const float* src = dst;
      if constexpr (std::is_same_v<TState, float>) {
        if (in_place) {
          dst = write + hv * head_size;
          src = first == begin ? read + hv * head_size : dst;
        }
      }
      if (fresh && first == begin) src = nullptr;
      ChunkGates(args, chunk, hv, scratch);
      for (int64_t v = 0; v < args.value_dim; v += kValueBlock) {
        const int64_t offset = v * PaddedKeyDim(args);
        ChunkRows(args, chunk, hv, v, std::min(kValueBlock, args.value_dim - v),
                  src == nullptr ? nullptr : src + offset, dst + offset, scratch);
      }
    }
  }
  for (int64_t hv = hv0; hv < hv1 && !in_place; ++hv) {
    PackState(scratch.state + (hv - hv0) * padded_size, args, write + hv * head_size);
  }
}

// Value heads [hv0, hv1), all of one key head, of one sequence. The way it is computed depends on
// the length of this sequence alone.
void DeltaRulePrefillTask(const gdn_delta_rule_args& args, int64_t sequence, int64_t hv0,
                          int64_t hv1, float* workspace) {
  const int64_t begin = args.cu_seqlens[sequence];
  const int64_t end = args.cu_seqlens[sequence + 1];
  if (args.read_index[sequence] < 0 || args.write_index[sequence] < 0) {
    for (int64_t hv = hv0; hv < hv1; ++hv) ZeroOutputs(args, begin, end, hv);
    return;
  }
  const auto run = [&](auto element) HWY_ATTR {
    using TState = decltype(element);
    if (begin == end) {
      for (int64_t hv = hv0; hv < hv1; ++hv) MoveState<TState>(args, sequence, hv);
    } else if (end - begin <= kMaxStepTokens) {
      StepScratch scratch;
      PrepareKeys(args, begin, end - begin, hv0 / HeadsPerKey(args), scratch.keys);
      for (int64_t hv = hv0; hv < hv1; ++hv) {
        StepHead<TState>(args, sequence, begin, end, hv, scratch);
      }
    } else {
      ChunkScratch scratch;
      LayOutScratch(args, workspace, &scratch);
      ChunkHeads<TState>(args, sequence, begin, end, hv0, hv1, scratch);
    }
  };
  if (args.state_dtype == GDN_F32) {
    run(float{});
  } else {
    run(Bf16{});
  }
}

}  // namespace gdn::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace gdn::cpu {

HWY_EXPORT(DeltaRuleStepRange);
HWY_EXPORT(DeltaRulePrefillTask);

namespace {

// The workspace holds the order of the sequences, then one scratch area a worker.
size_t OrderBytes(const gdn_delta_rule_args& args) {
  return static_cast<size_t>(RoundUp(args.sequences * static_cast<int64_t>(sizeof(int32_t)), 64));
}

size_t WorkerBytes(const gdn_delta_rule_args& args) {
  ChunkScratch scratch;
  return static_cast<size_t>(LayOutScratch(args, nullptr, &scratch)) * sizeof(float);
}

}  // namespace

size_t DeltaRuleStepWorkspace(const gdn_exec&, const gdn_delta_rule_args&) { return 0; }

gdn_status DeltaRuleStep(const gdn_exec& exec, const gdn_delta_rule_args& args) {
  ParallelFor(exec.pool, args.sequences * args.value_heads, 1,
              [&](int64_t begin, int64_t end, int32_t) {
                HWY_DYNAMIC_DISPATCH(DeltaRuleStepRange)(args, begin, end);
              });
  return GDN_OK;
}

size_t DeltaRulePrefillWorkspace(const gdn_exec& exec, const gdn_delta_rule_args& args) {
  const auto workers = static_cast<size_t>(gdn_cpu_pool_threads(exec.pool));
  return OrderBytes(args) + workers * WorkerBytes(args);
}

gdn_status DeltaRulePrefill(const gdn_exec& exec, const gdn_delta_rule_args& args) {
  if (args.sequences == 0) return GDN_OK;
  // Longest first, handed out one by one: the last tasks to start are the shortest.
  int32_t* order = static_cast<int32_t*>(exec.workspace);
  for (int64_t i = 0; i < args.sequences; ++i) order[i] = static_cast<int32_t>(i);
  std::sort(order, order + args.sequences, [&](int32_t a, int32_t b) {
    const int32_t length_a = args.cu_seqlens[a + 1] - args.cu_seqlens[a];
    const int32_t length_b = args.cu_seqlens[b + 1] - args.cu_seqlens[b];
    return length_a != length_b ? length_a > length_b : a < b;
  });
  // The value heads of a key head share the work on keys, unless that leaves threads idle.
  const int64_t threads = gdn_cpu_pool_threads(exec.pool);
  const int64_t ratio = HeadsPerKey(args);
  const bool busy = threads == 1 || args.sequences * args.key_heads >= 4 * threads;
  const int64_t heads = busy ? ratio : 1;
  const int64_t tasks_per_sequence = args.value_heads / heads;
  const int64_t tasks = args.sequences * tasks_per_sequence;
  const size_t worker_bytes = WorkerBytes(args);
  char* scratch = static_cast<char*>(exec.workspace) + OrderBytes(args);
  std::atomic<int64_t> next{0};
  ParallelFor(exec.pool, threads, 1, [&](int64_t, int64_t, int32_t worker) {
    auto* mine = reinterpret_cast<float*>(scratch + static_cast<size_t>(worker) * worker_bytes);
    for (int64_t task; (task = next.fetch_add(1, std::memory_order_relaxed)) < tasks;) {
      const int64_t hv = task % tasks_per_sequence * heads;
      HWY_DYNAMIC_DISPATCH(DeltaRulePrefillTask)
      (args, order[task / tasks_per_sequence], hv, hv + heads, mine);
    }
  });
  return GDN_OK;
}

}  // namespace gdn::cpu
#endif  // HWY_ONCE
