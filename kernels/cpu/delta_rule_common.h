// What the step and the chunked prefill of the delta rule share, outside any Highway target.
#ifndef KERNELS_CPU_DELTA_RULE_COMMON_H_
#define KERNELS_CPU_DELTA_RULE_COMMON_H_

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "gdn/kernels/delta_rule.h"

namespace gdn::cpu {

inline constexpr int64_t kMaxKeyDim = 256;
inline constexpr int64_t kMaxValueDim = 512;
// Tokens a state row takes in one visit. A sequence of at most this many tokens is stepped: its
// state is read and written once, and no chunk has to be set up.
inline constexpr int64_t kMaxStepTokens = 8;

// One head of one token's q and k, normalised and scaled, zero beyond K.
struct KeyTokens {
  alignas(64) float q[kMaxStepTokens][kMaxKeyDim];
  alignas(64) float k[kMaxStepTokens][kMaxKeyDim];
  float kq[kMaxStepTokens];  // k . q
};

struct ValueTokens {
  alignas(64) float v[kMaxStepTokens][kMaxValueDim];
  alignas(64) float o[kMaxStepTokens][kMaxValueDim];
  float decay[kMaxStepTokens];  // exp(g)
  float beta[kMaxStepTokens];
};

struct StepScratch {
  KeyTokens keys;
  ValueTokens values;
};

inline int64_t HeadsPerKey(const gdn_delta_rule_args& args) {
  return args.value_heads / args.key_heads;
}

inline float QueryScale(const gdn_delta_rule_args& args) {
  return args.scale != 0.0f ? args.scale : 1.0f / std::sqrt(static_cast<float>(args.key_dim));
}

inline bool IsFresh(const gdn_delta_rule_args& args, int64_t sequence) {
  return args.fresh != nullptr && args.fresh[sequence] != 0;
}

// A state row that is all zeros; with row stride 0 it stands for the state of a fresh sequence.
alignas(64) inline constexpr float kZeroRow[kMaxKeyDim] = {};

}  // namespace gdn::cpu

#endif  // KERNELS_CPU_DELTA_RULE_COMMON_H_
