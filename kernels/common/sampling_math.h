// The parts of the sampler's definition that every back end must evaluate alike.
#ifndef KERNELS_COMMON_SAMPLING_MATH_H_
#define KERNELS_COMMON_SAMPLING_MATH_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "kernels/common/philox.h"

namespace gdn::kernels {

// The repetition penalty, in FP32. A finite logit stays finite.
inline float Penalise(float logit, float penalty) {
  if (std::isinf(logit)) return logit;
  constexpr float kMax = std::numeric_limits<float>::max();
  return std::clamp(logit > 0.0f ? logit / penalty : logit * penalty, -kMax, kMax);
}

// G = -log(-log(u)) with u = 1 - (word + 0.5) / 2^32. Small words give large G; formed from 1 - u
// through log1p, the upper tail keeps its precision, and G spans about [-3.2, 22.9].
inline double GumbelFromWord(uint32_t word) {
  const double complement = (static_cast<double>(word) + 0.5) * 0x1p-32;
  return -std::log(-std::log1p(-complement));
}

// No word gives a larger G than this.
inline constexpr float kGumbelMax = 22.9f;

// l / t + G of one candidate, shifted by the largest l so that a small t cannot overflow.
inline double GumbelScore(float logit, float max_logit, float temperature, uint64_t seed,
                          int64_t position, int32_t id) {
  return (static_cast<double>(logit) - max_logit) / temperature +
         GumbelFromWord(SamplingWord(seed, position, id));
}

}  // namespace gdn::kernels

#endif  // KERNELS_COMMON_SAMPLING_MATH_H_
