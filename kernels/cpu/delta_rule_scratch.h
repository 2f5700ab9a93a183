// Scratch memory of the chunked prefill, one per worker.
#ifndef KERNELS_CPU_DELTA_RULE_SCRATCH_H_
#define KERNELS_CPU_DELTA_RULE_SCRATCH_H_

#include <cstddef>
#include <cstdint>

#include "gdn/kernels/delta_rule.h"
#include "kernels/cpu/delta_rule_common.h"

namespace gdn::cpu {

// Tokens a chunk holds. The work inside a chunk grows with its square, the traffic of the state
// falls with its length.
inline constexpr int64_t kChunk = 16;
// State rows that pass through a chunk together.
inline constexpr int64_t kValueBlock = 48;
// Two of the widest vectors, so that rows of scratch need no tails on any target.
inline constexpr int64_t kScratchAlign = 32;

inline constexpr int64_t RoundUp(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

inline int64_t PaddedKeyDim(const gdn_delta_rule_args& args) {
  return RoundUp(args.key_dim, kScratchAlign);
}

// The chunk loop updates an FP32 state with rows of whole vectors where it lies; others are
// unpacked into scratch at the start of a sequence and packed at its end.
inline bool UpdatesInPlace(const gdn_delta_rule_args& args) {
  return args.state_dtype == GDN_F32 && args.key_dim == PaddedKeyDim(args);
}

// All row-major. C, Vb, Kp: the bounds above and the padded key dimension.
struct ChunkScratch {
  float* k;          // [C][Kp] prepared keys
  float* q;          // [C][Kp] prepared queries
  float* kq_t;       // [K][2C] keys and queries, in panels of two vectors
  float* gram;       // [C][2C] k_j . k_i and k_j . q_i
  float* system;     // [C][C] M^T, strictly upper triangular
  float* inverse;    // [C][C] N, the inverse of I + M^T
  float* mix;        // [C][C] decay from j to i times k_j . q_i
  float* decayed_k;  // [C][Kp] keys times the decay from their token to the chunk's end
  float* gates;      // [5][C] g, beta, decay from the chunk's start, times beta; sums of g
  float* read;       // [Vb][2C] S k and S q
  float* x;          // [Vb][C] right-hand side
  float* u;          // [Vb][C] solution
  float* rows;       // [C][Vb] v, then o, in token-major order
  float* state;      // [HV/H][V][Kp] unpacked states, NULL if updated in place
};

// Lays the buffers out behind `base`; returns their size in floats. `base` may be NULL.
inline int64_t LayOutScratch(const gdn_delta_rule_args& args, float* base, ChunkScratch* scratch) {
  const int64_t key_dim = PaddedKeyDim(args);
  int64_t used = 0;
  auto take = [&](int64_t floats) {
    float* buffer = base == nullptr ? nullptr : base + used;
    used += RoundUp(floats, 16);
    return buffer;
  };
  scratch->k = take(kChunk * key_dim);
  scratch->q = take(kChunk * key_dim);
  scratch->kq_t = take(key_dim * 2 * kChunk);
  scratch->gram = take(kChunk * 2 * kChunk);
  scratch->system = take(kChunk * kChunk);
  scratch->inverse = take(kChunk * kChunk);
  scratch->mix = take(kChunk * kChunk);
  scratch->decayed_k = take(kChunk * key_dim);
  scratch->gates = take(5 * kChunk);
  scratch->read = take(kValueBlock * 2 * kChunk);
  scratch->x = take(kValueBlock * kChunk);
  scratch->u = take(kValueBlock * kChunk);
  scratch->rows = take(kChunk * kValueBlock);
  scratch->state =
      UpdatesInPlace(args) ? nullptr : take(HeadsPerKey(args) * args.value_dim * key_dim);
  return used;
}

}  // namespace gdn::cpu

#endif  // KERNELS_CPU_DELTA_RULE_SCRATCH_H_
