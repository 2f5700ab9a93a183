// The sampler's definition on the device: keys that order logits, noise, penalty. The host's form
// is kernels/common/sampling_math.h.
#ifndef KERNELS_CUDA_SAMPLING_MATH_CUH_
#define KERNELS_CUDA_SAMPLING_MATH_CUH_

#include <cstdint>

#include "kernels/common/philox.h"

namespace gdn::cuda {

constexpr float kSamplingInf = __builtin_huge_valf();
// No word gives a larger G.
constexpr float kGumbelBound = 22.9f;

// Unsigned integers in the order of the floats; NaN excepted. -0 must have become +0.
__device__ inline uint32_t KeyOf(float value) {
  const uint32_t bits = __float_as_uint(value);
  return bits ^ ((bits >> 31) != 0 ? 0xffffffffu : 0x80000000u);
}
__device__ inline float ValueOf(uint32_t key) {
  return __uint_as_float(key ^ ((key >> 31) != 0 ? 0x80000000u : 0xffffffffu));
}

// A logit and its id in one integer: the larger logit is larger, of equal ones the lower id. Never
// 0.
__device__ inline uint64_t RankOf(float value, uint32_t id) {
  return uint64_t{KeyOf(value)} << 32 | static_cast<uint32_t>(~id);
}
__device__ inline float RankValue(uint64_t rank) {
  return ValueOf(static_cast<uint32_t>(rank >> 32));
}
__device__ inline int32_t RankId(uint64_t rank) {
  return static_cast<int32_t>(~static_cast<uint32_t>(rank));
}

// The repetition penalty. A finite logit stays finite.
__device__ inline float Penalised(float logit, float penalty) {
  if (isinf(logit)) return logit;
  constexpr float kMax = 3.402823466e+38f;
  const float value = logit > 0.0f ? logit / penalty : logit * penalty;
  return fminf(fmaxf(value, -kMax), kMax);
}

// The first word of Philox4x32-10 with counter (id, 0, position) and a seed's key, as a function of
// the id: what the first rounds make of the position is computed once.
class RowPhilox {
 public:
  __device__ RowPhilox(uint64_t seed, int64_t position)
      : key0_(static_cast<uint32_t>(seed)), key1_(static_cast<uint32_t>(seed >> 32)) {
    const auto p = static_cast<uint64_t>(position);
    const uint64_t product1 = uint64_t{kernels::kPhiloxMul1} * static_cast<uint32_t>(p);
    const uint32_t counter0 = High(product1) ^ key0_;
    const uint64_t product0 = uint64_t{kernels::kPhiloxMul0} * counter0;
    first_ = static_cast<uint32_t>(p >> 32) ^ key1_;
    second0_ = static_cast<uint32_t>(product1) ^ Key0(1);
    second2_ = High(product0) ^ Key1(1);
    third2_ = static_cast<uint32_t>(product0) ^ Key1(2);
  }

  __device__ uint32_t Word(uint32_t id) const {
    uint64_t product0 = uint64_t{kernels::kPhiloxMul0} * id;
    uint64_t product1 = uint64_t{kernels::kPhiloxMul1} * (High(product0) ^ first_);
    uint32_t c0 = High(product1) ^ second0_;
    uint32_t c1 = static_cast<uint32_t>(product1);
    uint32_t c2 = static_cast<uint32_t>(product0) ^ second2_;
    product0 = uint64_t{kernels::kPhiloxMul0} * c0;
    product1 = uint64_t{kernels::kPhiloxMul1} * c2;
    c0 = High(product1) ^ c1 ^ Key0(2);
    c1 = static_cast<uint32_t>(product1);
    c2 = High(product0) ^ third2_;
    uint32_t c3 = static_cast<uint32_t>(product0);
#pragma unroll
    for (int round = 3; round < kernels::kPhiloxRounds - 1; ++round) {
      product0 = uint64_t{kernels::kPhiloxMul0} * c0;
      product1 = uint64_t{kernels::kPhiloxMul1} * c2;
      c0 = High(product1) ^ c1 ^ Key0(round);
      c1 = static_cast<uint32_t>(product1);
      c2 = High(product0) ^ c3 ^ Key1(round);
      c3 = static_cast<uint32_t>(product0);
    }
    return High(uint64_t{kernels::kPhiloxMul1} * c2) ^ c1 ^ Key0(kernels::kPhiloxRounds - 1);
  }

 private:
  static __device__ uint32_t High(uint64_t product) { return static_cast<uint32_t>(product >> 32); }
  __device__ uint32_t Key0(uint32_t round) const { return key0_ + round * kernels::kPhiloxWeyl0; }
  __device__ uint32_t Key1(uint32_t round) const { return key1_ + round * kernels::kPhiloxWeyl1; }

  uint32_t key0_;
  uint32_t key1_;
  uint32_t first_;
  uint32_t second0_;
  uint32_t second2_;
  uint32_t third2_;
};

// G of a word, as the host computes it.
__device__ inline double GumbelOf(uint32_t word) {
  const double complement = (static_cast<double>(word) + 0.5) * 0x1p-32;
  return -log(-log1p(-complement));
}

}  // namespace gdn::cuda

#endif  // KERNELS_CUDA_SAMPLING_MATH_CUH_
