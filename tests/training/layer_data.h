// A Gated DeltaNet layer for the tests of training: extents, packed sequences, parameters and the
// loss, and its forward in FP64 without the library.
#ifndef TESTS_TRAINING_LAYER_DATA_H_
#define TESTS_TRAINING_LAYER_DATA_H_

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "kernels/gradient_test_util.h"

namespace gdn::kernels {

struct LayerShape {
  std::vector<int32_t> lengths;
  int64_t hidden = 0;
  int64_t key_heads = 0;
  int64_t ratio = 0;  // value heads of a key head
  int64_t key_dim = 0;
  int64_t value_dim = 0;
  gdn_dtype dtype = GDN_BF16;  // of activations and projection weights

  static constexpr int32_t kWidth = 4;
  static constexpr double kEps = 1e-6;

  int64_t sequences() const { return static_cast<int64_t>(lengths.size()); }
  int64_t tokens() const;
  int64_t value_heads() const { return key_heads * ratio; }
  int64_t keys() const { return key_heads * key_dim; }
  int64_t values() const { return value_heads() * value_dim; }
  // First columns of the parts q|k|v|z|b|a of the projection; the convolution takes q|k|v.
  int64_t v() const { return 2 * keys(); }
  int64_t z() const { return v() + values(); }
  int64_t b() const { return z() + values(); }
  int64_t a() const { return b() + value_heads(); }
  int64_t projected() const { return a() + value_heads(); }
};

struct LayerData {
  LayerShape shape;
  std::vector<int32_t> cu = {0};
  Doubles x;               // [T, hidden]
  Doubles in_weight;       // [projected, hidden]
  Doubles conv_weight;     // [q|k|v, width]
  Doubles conv_bias;       // [q|k|v]: zeros, as the forward op has none; its gradient is wanted
  Doubles a_log, dt_bias;  // [HV]
  Doubles gamma;           // [V]
  Doubles out_weight;      // [hidden, values]
  Doubles target;          // [T, hidden]: the loss is half the squared distance to it

  LayerData(const LayerShape& s, uint32_t seed);

  // What has a gradient, by the name of the parameter.
  std::vector<std::pair<std::string, Doubles*>> Parameters();
};

// Half the squared distance of a layer's output to the target.
double Loss(const LayerData& data, const Doubles& out);
// The output in FP64, nothing rounded.
Doubles Forward64(const LayerData& data);

}  // namespace gdn::kernels

#endif  // TESTS_TRAINING_LAYER_DATA_H_
