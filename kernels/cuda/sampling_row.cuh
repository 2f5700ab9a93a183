// One row of the sampler: its kind, its logits as they are read, and the Gumbel draw over a slice.
#ifndef KERNELS_CUDA_SAMPLING_ROW_CUH_
#define KERNELS_CUDA_SAMPLING_ROW_CUH_

#include <cstdint>

#include "kernels/cuda/math.cuh"
#include "kernels/cuda/sampling_math.cuh"
#include "kernels/cuda/sampling_plan.h"

namespace gdn::cuda {

enum class RowKind { kSkipped, kInvalid, kGreedy, kPlain, kFiltered };

__device__ inline bool AreLegal(const gdn_sampling_params& p) {
  return isfinite(p.temperature) && p.temperature >= 0.0f && p.top_k >= 0 && p.top_p > 0.0f &&
         p.top_p <= 1.0f && p.min_p >= 0.0f && p.min_p < 1.0f && isfinite(p.repetition_penalty) &&
         p.repetition_penalty > 0.0f;
}

__device__ inline RowKind KindOf(const SamplingPlan& plan, int64_t row) {
  const gdn_sampling_args& a = plan.args;
  if (a.position[row] < 0) return RowKind::kSkipped;
  const gdn_sampling_params& p = a.params[row];
  if (!AreLegal(p) || (a.history != nullptr && plan.damaged[row] != 0)) return RowKind::kInvalid;
  if (p.temperature == 0.0f) return RowKind::kGreedy;
  const bool filtered = (p.top_k > 0 && p.top_k < a.vocab) || p.top_p < 1.0f || p.min_p > 0.0f;
  return filtered ? RowKind::kFiltered : RowKind::kPlain;
}

// A row's logits, raw or after the repetition penalty; -0 is read as +0, which it equals.
struct RowView {
  const float* logits;
  const uint32_t* seen;  // Bitmap of the ids to penalise, or NULL.
  float penalty;
  uint32_t vocab;
  bool aligned;  // To 16 bytes.

  __device__ RowView(const SamplingPlan& plan, int64_t row)
      : logits(plan.args.logits + row * plan.args.logits_row_stride),
        seen(nullptr),
        penalty(1.0f),
        vocab(static_cast<uint32_t>(plan.args.vocab)),
        aligned(reinterpret_cast<uintptr_t>(logits) % 16 == 0) {}

  // With the penalty of a row that is neither skipped nor invalid.
  static __device__ RowView WithPenalty(const SamplingPlan& plan, int64_t row) {
    RowView view(plan, row);
    const gdn_sampling_args& a = plan.args;
    view.penalty = a.params[row].repetition_penalty;
    if (a.history != nullptr && view.penalty != 1.0f &&
        a.history_offsets[row] < a.history_offsets[row + 1]) {
      view.seen = plan.seen + row * plan.seen_words;
    }
    return view;
  }

  // Four raw logits from id on, a multiple of 4; -inf behind the end.
  __device__ float4 LoadRaw(uint32_t id) const {
    float4 v = {-kSamplingInf, -kSamplingInf, -kSamplingInf, -kSamplingInf};
    if (aligned && id + 4 <= vocab) {
      v = __ldg(reinterpret_cast<const float4*>(logits + id));
    } else {
      if (id < vocab) v.x = __ldg(logits + id);
      if (id + 1 < vocab) v.y = __ldg(logits + id + 1);
      if (id + 2 < vocab) v.z = __ldg(logits + id + 2);
      if (id + 3 < vocab) v.w = __ldg(logits + id + 3);
    }
    return {v.x + 0.0f, v.y + 0.0f, v.z + 0.0f, v.w + 0.0f};
  }

  // The four logits after the penalty.
  __device__ float4 Apply(uint32_t id, float4 v) const {
    if (seen == nullptr || id >= vocab) return v;
    const uint32_t bits = __ldg(seen + id / 32) >> (id % 32) & 15u;
    if (bits == 0) return v;
    if ((bits & 1u) != 0) v.x = Penalised(v.x, penalty) + 0.0f;
    if ((bits & 2u) != 0) v.y = Penalised(v.y, penalty) + 0.0f;
    if ((bits & 4u) != 0) v.z = Penalised(v.z, penalty) + 0.0f;
    if ((bits & 8u) != 0) v.w = Penalised(v.w, penalty) + 0.0f;
    return v;
  }

  __device__ float4 Load(uint32_t id) const { return Apply(id, LoadRaw(id)); }
};

__device__ inline float At(const float4& v, uint32_t i) {
  return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}
__device__ inline float Max4(const float4& v) { return fmaxf(fmaxf(v.x, v.y), fmaxf(v.z, v.w)); }

__device__ inline float WarpMax(float value) {
  // Integers in the order of the floats. fmaxf drops NaN.
  const int bits = __float_as_int(fmaxf(value, -kSamplingInf));
  const int ordered = bits ^ (bits >> 31 & 0x7fffffff);
  const int max = __reduce_max_sync(kFullMask, ordered);
  return __int_as_float(max ^ (max >> 31 & 0x7fffffff));
}

// The Gumbel draw of a warp: all its lanes hold the same best. Scores are compared in FP64 relative
// to the best's logit; FP32 only rules out what cannot win.
class WarpDraw {
 public:
  __device__ WarpDraw(const gdn_sampling_params& params, int64_t position)
      : philox_(params.seed, position),
        temperature_(params.temperature),
        inverse_(fminf(1.0f / params.temperature, 3e38f)) {}

  __device__ Candidate best() const { return {logit_, id_}; }

  // Adds the elements of a slice whose rank is at least `least`; `max` bounds their logits.
  __device__ void AddSlice(const RowView& view, uint32_t first, float max, uint64_t least) {
    if (!(max > -kSamplingInf) || !(max < kSamplingInf)) return;
    if (id_ >= 0 && (max - logit_) * inverse_ < static_cast<float>(gumbel_) - 23.0f) return;
    const uint32_t lane = threadIdx.x % 32;
#pragma unroll 1
    for (uint32_t part = 0; part < kSliceSize; part += 128) {
      const uint32_t id = first + part + 4 * lane;
      float4 v = view.Load(id);
      if (least != 0) {
        if (RankOf(v.x, id) < least) v.x = -kSamplingInf;
        if (RankOf(v.y, id + 1) < least) v.y = -kSamplingInf;
        if (RankOf(v.z, id + 2) < least) v.z = -kSamplingInf;
        if (RankOf(v.w, id + 3) < least) v.w = -kSamplingInf;
      }
      uint32_t words[4];
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) words[i] = philox_.Word(id + i);
      uint32_t contenders = Contenders(v, words);
      if (id_ < 0) {  // One of each lane first: it rules out most of the others.
        const uint32_t first_of_lane = contenders & -contenders;
        if (!__any_sync(kFullMask, first_of_lane != 0)) continue;
        Contend(v, words, id, first_of_lane);
        contenders = Contenders(v, words) & ~first_of_lane;
      }
      if (__any_sync(kFullMask, contenders != 0)) Contend(v, words, id, contenders);
    }
  }

 private:
  // Bit i: element i may beat the best. With c = 1 - u, -log(u) >= c, hence G <= -log(c): the score
  // can reach the best's only where c <= exp((l - best l) / t - best G).
  __device__ uint32_t Contenders(const float4& v, const uint32_t (&words)[4]) const {
    constexpr float kLog2e = 1.4426950408889634f;
    // 2^-9 of the word, exact, plus 2^23; the margins exceed all roundings.
    constexpr float kOffset = 8388608.0f;
    const float scale = fminf(inverse_ * kLog2e, 3e38f);
    const float reach = static_cast<float>(gumbel_) * kLog2e - 1e-3f;
    uint32_t mask = 0;
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
      const float l = At(v, i);
      const float limit = Exp2(fmaf(l - logit_, scale, -reach));
      const float word = __uint_as_float(0x4b000000u | words[i] >> 9);
      const bool reaches = word <= fmaf(limit, kOffset, kOffset + 4.0f);
      if ((id_ < 0 || reaches) && l > -kSamplingInf) mask |= 1u << i;
    }
    return mask;
  }

  // Compares the contenders exactly. All lanes call it.
  __device__ void Contend(const float4& v, const uint32_t (&words)[4], uint32_t first_id,
                          uint32_t contenders) {
    float anchor = logit_;
    if (id_ < 0) {
      float max = -kSamplingInf;
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) {
        if ((contenders >> i & 1u) != 0) max = fmaxf(max, At(v, i));
      }
      anchor = WarpMax(max);
    }
    double score = -static_cast<double>(kSamplingInf);
    double gumbel = 0.0;
    float logit = 0.0f;
    uint32_t id = 0xffffffffu;
    for (; contenders != 0; contenders &= contenders - 1) {
      const uint32_t i = __ffs(static_cast<int>(contenders)) - 1;
      const float l = At(v, i);
      const uint32_t word = i == 0 ? words[0] : i == 1 ? words[1] : i == 2 ? words[2] : words[3];
      const double g = GumbelOf(word);
      const double s = (static_cast<double>(l) - anchor) / temperature_ + g;
      if (s > score) {
        score = s;
        gumbel = g;
        logit = l;
        id = first_id + i;
      }
    }
#pragma unroll
    for (int bit = 16; bit > 0; bit >>= 1) {
      const double other_score = __shfl_xor_sync(kFullMask, score, bit);
      const double other_gumbel = __shfl_xor_sync(kFullMask, gumbel, bit);
      const float other_logit = __shfl_xor_sync(kFullMask, logit, bit);
      const uint32_t other_id = __shfl_xor_sync(kFullMask, id, bit);
      if (other_score > score || (other_score == score && other_id < id)) {
        score = other_score;
        gumbel = other_gumbel;
        logit = other_logit;
        id = other_id;
      }
    }
    if (id == 0xffffffffu) return;
    if (id_ < 0 || score > gumbel_ || (score == gumbel_ && static_cast<int32_t>(id) < id_)) {
      logit_ = logit;
      gumbel_ = gumbel;
      id_ = static_cast<int32_t>(id);
    }
  }

  RowPhilox philox_;
  float temperature_;
  float inverse_;
  float logit_ = 0.0f;
  double gumbel_ = 0.0;
  int32_t id_ = -1;
};

}  // namespace gdn::cuda

#endif  // KERNELS_CUDA_SAMPLING_ROW_CUH_
