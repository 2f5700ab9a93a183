// Vectorised passes over one row of logits.
#ifndef KERNELS_CPU_SAMPLING_SCAN_H_
#define KERNELS_CPU_SAMPLING_SCAN_H_

#include <array>
#include <cstdint>

namespace gdn::cpu {

inline constexpr int kNumMassLevels = 5;

// What SampleRow draws with.
struct GumbelDraw {
  const float* logits;  // indexed by id
  float max_logit;
  float temperature;
  uint64_t seed;
  int64_t position;
};

struct SamplingScans {
  // Lanes a scan may write behind the count it returns.
  int64_t lanes;
  // Largest element; NaN if any element is NaN.
  float (*max)(const float* logits, int64_t count);
  // Lowest index whose element equals `value`; `count` if there is none.
  int64_t (*find)(const float* logits, int64_t count, float value);
  // sum(exp(logits - max)).
  double (*sum_exp)(const float* logits, int64_t count, float max);
  // mass[i] = exp((logits[i] - max) / temperature). Returns the sum; level_sums[j] is that of the
  // elements above levels[j].
  double (*masses)(const float* logits, int64_t count, float max, float temperature, float* mass,
                   const std::array<float, kNumMassLevels>& levels,
                   std::array<double, kNumMassLevels>* level_sums);
  // Appends the indices from *next on whose elements exceed `threshold` to ids, until `capacity`
  // might not hold one more vector's. Returns the new size; *next is where it stopped.
  int64_t (*collect)(const float* logits, int64_t count, float threshold, int64_t* next,
                     int32_t* ids, int64_t size, int64_t capacity);
  // The id with the largest score; `first` is any candidate. NULL ids: all of 0..count-1.
  int32_t (*draw)(const GumbelDraw& draw, const int32_t* ids, int64_t count, int32_t first);
};

// Those of the best instruction set of this processor.
const SamplingScans& BestSamplingScans();

}  // namespace gdn::cpu

#endif  // KERNELS_CPU_SAMPLING_SCAN_H_
