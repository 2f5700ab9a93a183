// A model's answers in FP64: plain loops for what every layer has, the kernels' REF back end for
// convolution, gates, norms and rules. Independent of the pipelines: it reads the weights as loaded
// and keeps the columns of each layer's projection apart from the first product on.
#ifndef TESTS_GOLDEN_REFERENCE_STACK_H_
#define TESTS_GOLDEN_REFERENCE_STACK_H_

#include <cstdint>
#include <span>
#include <vector>

#include "server/model/weights.h"

namespace gdn::golden {

struct ReferenceRun {
  std::vector<float> logits;     // [T, vocab]
  std::vector<float> recurrent;  // [layers][HV][V][K] after the last token
  std::vector<float> conv;       // [layers][W-1][C]
};

// The whole of `tokens` from an empty state. The model must hold all layers.
ReferenceRun RunReference(const model::Model& model, std::span<const int32_t> tokens);

}  // namespace gdn::golden

#endif  // TESTS_GOLDEN_REFERENCE_STACK_H_
