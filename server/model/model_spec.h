// File: model_spec.h
//
// What a checkpoint's config.json says, in the server's own terms: one ModelSpec for every family.
// Immutable after loading; plain data.
#ifndef SERVER_MODEL_MODEL_SPEC_H_
#define SERVER_MODEL_MODEL_SPEC_H_

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace gdn::model {

enum class LayerType { kLinearAttention, kGdn2 };
enum class GateActivation { kSilu, kSigmoid };
// How a gdn2 layer makes a channel's log decay from its projection; see gdn/kernels/gdn2_gates.h.
enum class DecayGate { kSoftplus, kBounded };

// One Gated DeltaNet block's dimensions, the same for all layers of a model, whatever their type.
struct GdnDims {
  int64_t key_heads = 0;    // H
  int64_t value_heads = 0;  // HV, a multiple of H
  int64_t key_dim = 0;      // K, of one head
  int64_t value_dim = 0;    // V, of one head
  int32_t conv_width = 0;   // W

  int64_t key_size() const { return key_heads * key_dim; }
  int64_t value_size() const { return value_heads * value_dim; }
  int64_t conv_channels() const { return 2 * key_size() + value_size(); }
  // Columns of the joint projection: q|k|v|z|b|a, or q|k|v|z|f|b|w of a gdn2 layer.
  int64_t projection_size(LayerType type) const {
    return conv_channels() + value_size() +
           (type == LayerType::kGdn2 ? 2 * key_size() + value_size() : 2 * value_heads);
  }
  // Elements of one layer's state of one session.
  int64_t recurrent_elements() const { return value_heads * value_dim * key_dim; }
  int64_t conv_elements() const { return (conv_width - 1) * conv_channels(); }
};

struct ModelSpec {
  std::string model_type;    // As in config.json, of the text part: "qwen3_5_text" or "gdn2".
  std::string architecture;  // First of `architectures`.
  int64_t vocab_size = 0;
  int64_t hidden_size = 0;
  int64_t intermediate_size = 0;
  int64_t num_layers = 0;
  std::vector<LayerType> layer_types;  // num_layers entries.
  GdnDims gdn;
  float rms_norm_eps = 0;  // Of every norm, the gated one included.
  GateActivation output_gate = GateActivation::kSilu;
  float beta_scale = 1.0f;  // Of beta and of erase: 2 where negative eigenvalues are allowed.
  DecayGate decay_gate = DecayGate::kSoftplus;  // Of the gdn2 layers.
  float decay_lower_bound = 0;                  // With kBounded: in [-5, 0).
  bool tied_embedding = false;
  std::vector<int32_t> eos_token_ids;  // config.json and generation_config.json merged, sorted.
  std::optional<int32_t> bos_token_id;
  int64_t max_positions = 0;  // Informational: a recurrent model has no hard limit.

  bool Has(LayerType type) const {
    return std::find(layer_types.begin(), layer_types.end(), type) != layer_types.end();
  }
  // Of the widest layer.
  int64_t max_projection_size() const {
    int64_t widest = 0;
    for (const LayerType type : layer_types) {
      widest = std::max(widest, gdn.projection_size(type));
    }
    return widest;
  }
};

// The layers one server holds: [first, last) of the stack; the embedding only with layer 0, the
// final norm and head only with the last layer.
struct LayerRange {
  int64_t first = 0;
  int64_t last = 0;
  int64_t size() const { return last - first; }
  bool has_embedding() const { return first == 0; }
  bool has_head(const ModelSpec& spec) const { return last == spec.num_layers; }
};

}  // namespace gdn::model

#endif  // SERVER_MODEL_MODEL_SPEC_H_
