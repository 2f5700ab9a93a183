#include <algorithm>
#include <iterator>
#include <string_view>

#include "absl/strings/str_cat.h"
#include "server/model/config.h"
#include "server/model/quote.h"

namespace gdn::model {
namespace {

// Keys that are read, and keys known not to change what linear-attention layers compute.
constexpr std::string_view kTextKeys[] = {
    "_attn_implementation",
    "_name_or_path",
    "attention_bias",
    "attention_dropout",
    "attn_output_gate",
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "full_attention_interval",
    "head_dim",
    "hidden_act",
    "hidden_size",
    "initializer_range",
    "intermediate_size",
    "layer_types",
    "linear_conv_kernel_dim",
    "linear_key_head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_value_head_dim",
    "mamba_ssm_dtype",
    "max_position_embeddings",
    "mlp_only_layers",
    "model_type",
    "mtp_num_hidden_layers",
    "mtp_use_dedicated_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "output_gate_type",
    "pad_token_id",
    "partial_rotary_factor",
    "quantization_config",
    "rms_norm_eps",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "tie_word_embeddings",
    "torch_dtype",
    "use_cache",
    "vocab_size",
};
// What model_type gdn2 adds.
constexpr std::string_view kGdn2Keys[] = {
    "allow_neg_eigval",
    "gdn2_decay_gate",
    "gdn2_decay_lower_bound",
    "use_qk_l2norm",
};
// At the top level of either kind of file.
constexpr std::string_view kRootKeys[] = {
    "_name_or_path",       "architectures",         "bos_token_id",        "dtype",
    "eos_token_id",        "image_token_id",        "language_model_only", "model_type",
    "pad_token_id",        "quantization_config",   "text_config",         "tie_word_embeddings",
    "torch_dtype",         "transformers_version",  "video_token_id",      "vision_config",
    "vision_end_token_id", "vision_start_token_id",
};

template <size_t N>
bool Contains(const std::string_view (&keys)[N], const std::string& key) {
  return std::find(std::begin(keys), std::end(keys), key) != std::end(keys);
}

}  // namespace

std::vector<std::string> UnknownKeys(const JsonObject& root, const JsonObject& text,
                                     const ModelSpec& spec) {
  const bool flat = root.json == text.json;
  const bool gdn2 = spec.model_type == kGdn2ModelType;
  std::vector<std::string> unknown;
  for (const JsonMember& member : *root.json->As<Json::Object>()) {
    if (!Contains(kRootKeys, member.key) && !(flat && Contains(kTextKeys, member.key)) &&
        !(gdn2 && Contains(kGdn2Keys, member.key))) {
      unknown.push_back(member.key);
    }
  }
  if (flat) return unknown;
  for (const JsonMember& member : *text.json->As<Json::Object>()) {
    if (!Contains(kTextKeys, member.key)) unknown.push_back("text_config." + member.key);
  }
  return unknown;
}

}  // namespace gdn::model
