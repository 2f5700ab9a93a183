// Fuzz target: config.json, generation_config.json (behind a zero byte, if there is one) and the
// shard index, all from the same bytes.
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <optional>
#include <string_view>

#include "server/model/checkpoint.h"
#include "server/model/config.h"

namespace gdn::model {
namespace {

void Require(bool condition) {
  if (!condition) std::abort();
}

// What the rest of the server takes for granted about a configuration that was accepted.
void CheckSpec(const ModelSpec& spec) {
  const GdnDims& gdn = spec.gdn;
  Require(spec.vocab_size > 0 && spec.hidden_size > 0 && spec.intermediate_size > 0);
  Require(static_cast<int64_t>(spec.layer_types.size()) == spec.num_layers && spec.num_layers > 0);
  Require(gdn.key_heads > 0 && gdn.value_heads % gdn.key_heads == 0);
  Require(gdn.value_heads / gdn.key_heads >= 1 && gdn.value_heads / gdn.key_heads <= 8);
  Require(gdn.key_dim >= 1 && gdn.key_dim <= 256 && gdn.value_dim >= 1 && gdn.value_dim <= 512);
  Require(gdn.conv_width >= 2 && gdn.conv_width <= 8);
  Require(std::isfinite(spec.rms_norm_eps) && spec.rms_norm_eps > 0);
  for (const int32_t id : spec.eos_token_ids) Require(id >= 0 && id < spec.vocab_size);
  const bool gdn2 = spec.model_type == "gdn2";
  Require(gdn2 || spec.model_type == "qwen3_5_text");
  for (const LayerType type : spec.layer_types) {
    Require(gdn2 || type == LayerType::kLinearAttention);
    Require(gdn.projection_size(type) <= spec.max_projection_size());
  }
  Require(spec.beta_scale == 1.0f || (gdn2 && spec.beta_scale == 2.0f));
  if (spec.decay_gate == DecayGate::kBounded) {
    Require(gdn2 && spec.decay_lower_bound >= -5.0f && spec.decay_lower_bound < 0.0f);
  } else {
    Require(spec.decay_lower_bound == 0.0f);
  }
}

void Check(std::string_view input) {
  const size_t cut = input.find('\0');
  std::optional<Document> generation;
  if (cut != std::string_view::npos) {
    generation = Document{"generation_config.json", input.substr(cut + 1)};
  }
  const auto parsed = ParseConfig({"config.json", input.substr(0, cut)}, generation);
  if (parsed.ok()) CheckSpec(parsed->spec);

  const auto map = ParseShardIndex(input, "index.json");
  if (!map.ok()) return;
  for (const auto& [tensor, file] : *map) {
    Require(!file.empty() && file.find('/') == std::string::npos && file != "..");
  }
}

}  // namespace
}  // namespace gdn::model

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  gdn::model::Check({reinterpret_cast<const char*>(data), size});
  return 0;
}
