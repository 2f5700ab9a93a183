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

// Relative L2 to the FP64 stack: of a position's logits, of a prompt's, and of the states after it.
struct ReferenceBounds {
  double position;
  double prompt;
  double states;
};
// Made-up weights carry rounding far at single positions: the FP64 stack itself, with activations
// rounded to BF16 where a GPU does, strays from the exact one by up to 0.04 at a position and by
// 0.012 to 0.019 over a prompt, models of linear_attention layers alike. A BF16 state
// alone adds up to 0.044 and 0.020 to the mixed model's; a GPU with both strays by 0.066 at one
// position.
inline constexpr ReferenceBounds kBfloat16Bounds = {
    .position = 9e-2, .prompt = 3e-2, .states = 3e-2};

// Prompts of several lengths, at once and token by token.
void ExpectReference(pipeline::Pipeline* pipeline, const model::Model& model,
                     const ReferenceBounds& bounds);

}  // namespace gdn::golden

#endif  // TESTS_GOLDEN_GDN2_TESTING_H_
