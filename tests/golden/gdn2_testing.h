// Models with gdn2 layers for the golden tests.
#ifndef TESTS_GOLDEN_GDN2_TESTING_H_
#define TESTS_GOLDEN_GDN2_TESTING_H_

#include <cstdint>
#include <string>
#include <vector>

#include "server/model/weights.h"
#include "server/pipeline/pipeline.h"
#include "tests/golden/reference_stack.h"

namespace gdn::golden {

model::Model LoadRandom(const std::string& model_dir, uint64_t seed);

// The same function with gdn2 layers in place of the linear_attention layers for which `convert`
// is true, or of all if it is empty: erase and write are beta, every channel of a head decays
// alike. The gates of gdn2 belong to the key heads, so there become as many of these as there are
// value heads; a mixture therefore needs a model with as many from the start.
model::Model AsGdn2(model::Model model, const std::vector<bool>& convert = {});

// Prompts of several lengths, at once and token by token, against the FP64 stack: logits at every
// position, and the states after the last token where the pipeline keeps readable ones.
void ExpectReference(pipeline::Pipeline* pipeline, const model::Model& model, double bound);

}  // namespace gdn::golden

#endif  // TESTS_GOLDEN_GDN2_TESTING_H_
