#include <bit>
#include <cstdint>
#include <memory>

#include "absl/strings/str_cat.h"
#include "server/model/config.h"
#include "server/model/weight_sources.h"
#include "xxhash.h"

namespace gdn::model {
namespace {

class Hasher {
 public:
  Hasher() : state_(XXH3_createState(), &XXH3_freeState) { XXH3_64bits_reset(state_.get()); }

  void Text(const std::string& text) { Bytes(text.data(), text.size()); }
  void Matrix(const MatrixView& m) {
    Text(absl::StrCat("m", static_cast<int>(m.type), ",", m.rows, ",", m.cols, ";"));
    Bytes(m.data, static_cast<size_t>(m.rows) * static_cast<size_t>(m.cols) * SizeOf(m.type));
  }
  void Vector(const std::vector<float>& v) {
    Text(absl::StrCat("v", v.size(), ";"));
    Bytes(v.data(), v.size() * sizeof(float));
  }
  std::string Hex() const { return absl::StrCat(absl::Hex(Digest(), absl::kZeroPad16)); }

 private:
  void Bytes(const void* data, size_t size) { XXH3_64bits_update(state_.get(), data, size); }
  uint64_t Digest() const { return XXH3_64bits_digest(state_.get()); }

  std::unique_ptr<XXH3_state_t, XXH_errorcode (*)(XXH3_state_t*)> state_;
};

// Of model_type gdn2 alone: the other texts are as they were before it.
std::string Gdn2Config(const ModelSpec& spec) {
  if (spec.model_type != kGdn2ModelType) return "";
  std::string types;
  for (const LayerType type : spec.layer_types) types += type == LayerType::kGdn2 ? '2' : '1';
  return absl::StrCat("types=", types, ";decay=", static_cast<int>(spec.decay_gate), ",",
                      absl::Hex(std::bit_cast<uint32_t>(spec.decay_lower_bound)), ";");
}

// Changing this text changes every fingerprint, and with it which snapshots can be restored.
std::string CanonicalConfig(const ModelSpec& spec, const LayerRange& range) {
  const GdnDims& gdn = spec.gdn;
  return absl::StrCat("gdn-model-1;type=", spec.model_type, ";vocab=", spec.vocab_size,
                      ";hidden=", spec.hidden_size, ";inner=", spec.intermediate_size,
                      ";layers=", spec.num_layers, ";heads=", gdn.key_heads, ",", gdn.value_heads,
                      ",", gdn.key_dim, ",", gdn.value_dim, ";conv=", gdn.conv_width,
                      ";eps=", spec.rms_norm_eps, ";gate=", static_cast<int>(spec.output_gate),
                      ";beta=", spec.beta_scale, ";tied=", spec.tied_embedding,
                      ";range=", range.first, ",", range.last, ";", Gdn2Config(spec));
}

}  // namespace

std::string Fingerprint(const ModelSpec& spec, const LayerRange& range, const Weights& weights) {
  Hasher hasher;
  hasher.Text(CanonicalConfig(spec, range));
  if (weights.embedding.has_value()) hasher.Matrix(*weights.embedding);
  for (const GdnLayerWeights& layer : weights.layers) {
    for (const std::vector<float>* v : {&layer.input_norm, &layer.conv, &layer.a_log,
                                        &layer.dt_bias, &layer.gated_norm, &layer.mlp_norm}) {
      hasher.Vector(*v);
    }
    for (const MatrixView& block : layer.projection()) hasher.Matrix(block);
    for (const MatrixView* m : {&layer.out, &layer.gate, &layer.up, &layer.down}) {
      hasher.Matrix(*m);
    }
  }
  hasher.Vector(weights.final_norm);
  if (weights.head.has_value() && !spec.tied_embedding) hasher.Matrix(*weights.head);
  return hasher.Hex();
}

}  // namespace gdn::model
