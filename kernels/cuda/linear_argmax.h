// What the kernels of linear_argmax share.
#ifndef KERNELS_CUDA_LINEAR_ARGMAX_H_
#define KERNELS_CUDA_LINEAR_ARGMAX_H_

#include <cuda.h>

#include <cstdint>

#include "gdn/kernels/linear_argmax.h"

namespace gdn::cuda {

// What is known of some logits of a row.
struct alignas(16) ArgmaxPart {
  float max;  // -inf: none, or nothing larger.
  float sum;  // Of exp(logit - max); NaN if NaN or +inf is among them.
  int32_t id;
  int32_t padding;
};

struct LinearArgmaxParams {
  CUtensorMap weight;
  CUtensorMap n;
  int32_t rows;
  int32_t outputs;
  int32_t stages;     // Of 64 elements of K.
  int32_t w_slots;    // Of the ring.
  ArgmaxPart* parts;  // [rows, blocks]
};

}  // namespace gdn::cuda

#endif  // KERNELS_CUDA_LINEAR_ARGMAX_H_
