// The two places weights come from. Both fill everything of Weights but the fingerprint.
#ifndef SERVER_MODEL_WEIGHT_SOURCES_H_
#define SERVER_MODEL_WEIGHT_SOURCES_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "server/model/config.h"
#include "server/model/model_spec.h"
#include "server/model/weights.h"

namespace gdn::model {

// Reads the folder's tensors. Sets config->spec.tied_embedding to what the tensors say: the head is
// tied where there is no lm_head.weight. (Only a configuration that says outright that it is not
// tied makes that tensor mandatory: guessing would turn a damaged checkpoint into noise.)
absl::StatusOr<Weights> LoadCheckpointWeights(const std::string& folder, const LayerRange& range,
                                              ParsedConfig* config);

// BF16 matrices of uniform noise with standard deviation 1/sqrt(in), norms near 1, decays as at
// the start of training. A layer's values depend on the seed and the layer's index alone, so slices
// of one model agree with the whole.
absl::StatusOr<Weights> MakeRandomWeights(const ModelSpec& spec, const LayerRange& range,
                                          uint64_t seed);

// 16 hex digits. Covers what decides the function: dimensions, eps, activations, tying, the layer
// range, and every weight's type, shape and bytes; not names, file layout or token ids.
std::string Fingerprint(const ModelSpec& spec, const LayerRange& range, const Weights& weights);

}  // namespace gdn::model

#endif  // SERVER_MODEL_WEIGHT_SOURCES_H_
