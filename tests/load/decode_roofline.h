// The least time of a decode step on a GPU: the bytes it must move over the copy bandwidth.
#ifndef TESTS_LOAD_DECODE_ROOFLINE_H_
#define TESTS_LOAD_DECODE_ROOFLINE_H_

#include <cstdint>

#include "server/model/model_spec.h"

namespace gdn {

struct DecodeBytes {
  double weights = 0;  // Matrices, the head included, once a step.
  double states = 0;   // Recurrent and convolution, read and written, per row.
};

inline DecodeBytes BytesOfDecode(const model::ModelSpec& spec, int state_element_bytes) {
  const model::GdnDims& dims = spec.gdn;
  const auto hidden = static_cast<double>(spec.hidden_size);
  DecodeBytes bytes;
  bytes.weights = 2.0 * hidden * static_cast<double>(spec.vocab_size);
  for (const model::LayerType type : spec.layer_types) {
    bytes.weights += 2.0 * hidden *
                     static_cast<double>(dims.projection_size(type) + dims.value_size() +
                                         3 * spec.intermediate_size);
  }
  bytes.states = 2.0 * static_cast<double>(spec.num_layers) *
                 (static_cast<double>(dims.recurrent_elements()) * state_element_bytes +
                  static_cast<double>(dims.conv_elements()) * 2.0);
  return bytes;
}

}  // namespace gdn

#endif  // TESTS_LOAD_DECODE_ROOFLINE_H_
