#include "server/model/config.h"

#include <gtest/gtest.h>

#include <map>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/model/test_checkpoint.h"
#include "server/model/weights.h"

namespace gdn::model {
namespace {

using testing::ExpectError;
using testing::TinyConfig;
using Overrides = std::map<std::string, std::string>;
constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
constexpr auto kUnimplemented = absl::StatusCode::kUnimplemented;

absl::StatusOr<ParsedConfig> Parse(const std::string& text, const std::string& generation = "") {
  std::optional<Document> document;
  if (!generation.empty()) document = Document{"generation_config.json", generation};
  return ParseConfig({"config.json", text}, document);
}
absl::StatusOr<ParsedConfig> ParseWith(const Overrides& overrides) {
  return Parse(TinyConfig(overrides));
}
std::string Wrapped(const std::string& text_config, const std::string& more = "") {
  return absl::StrCat(R"({"model_type":"qwen3_5",)",
                      R"("architectures":["Qwen3_5ForConditionalGeneration"],)",
                      R"("vision_config":{"depth":1},"text_config":)", text_config, more, "}");
}

TEST(ConfigTest, ReadsEveryField) {
  const auto parsed = ParseWith({{"bos_token_id", "3"}, {"max_position_embeddings", "777"}});
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  const ModelSpec& spec = parsed->spec;
  EXPECT_EQ(spec.model_type, "qwen3_5_text");
  EXPECT_EQ(spec.architecture, "Qwen3_5ForCausalLM");
  EXPECT_EQ(spec.vocab_size, 6);
  EXPECT_EQ(spec.hidden_size, 4);
  EXPECT_EQ(spec.intermediate_size, 5);
  EXPECT_EQ(spec.num_layers, 2);
  EXPECT_EQ(spec.layer_types, std::vector<LayerType>(2, LayerType::kLinearAttention));
  EXPECT_EQ(spec.gdn.key_heads, 1);
  EXPECT_EQ(spec.gdn.value_heads, 2);
  EXPECT_EQ(spec.gdn.key_dim, 2);
  EXPECT_EQ(spec.gdn.value_dim, 3);
  EXPECT_EQ(spec.gdn.conv_width, 2);
  EXPECT_EQ(spec.rms_norm_eps, 1e-6f);
  EXPECT_EQ(spec.output_gate, GateActivation::kSilu);
  EXPECT_EQ(spec.beta_scale, 1.0f);
  EXPECT_FALSE(spec.tied_embedding);
  EXPECT_TRUE(parsed->tying_is_explicit);
  EXPECT_EQ(spec.eos_token_ids, std::vector<int32_t>{5});
  EXPECT_EQ(spec.bos_token_id, std::optional<int32_t>(3));
  EXPECT_EQ(spec.max_positions, 777);
  EXPECT_TRUE(parsed->unknown_keys.empty());
}

TEST(ConfigTest, DefaultsAreTheFormatsOwn) {
  const auto parsed = ParseWith({{"linear_num_key_heads", ""},
                                 {"linear_num_value_heads", ""},
                                 {"linear_key_head_dim", ""},
                                 {"linear_value_head_dim", ""},
                                 {"linear_conv_kernel_dim", "null"},
                                 {"rms_norm_eps", ""},
                                 {"eos_token_id", ""},
                                 {"architectures", ""},
                                 {"tie_word_embeddings", ""}});
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_EQ(parsed->spec.gdn.key_heads, 16);
  EXPECT_EQ(parsed->spec.gdn.value_heads, 32);
  EXPECT_EQ(parsed->spec.gdn.key_dim, 128);
  EXPECT_EQ(parsed->spec.gdn.value_dim, 128);
  EXPECT_EQ(parsed->spec.gdn.conv_width, 4);
  EXPECT_EQ(parsed->spec.rms_norm_eps, 1e-6f);
  EXPECT_TRUE(parsed->spec.eos_token_ids.empty());
  EXPECT_EQ(parsed->spec.bos_token_id, std::nullopt);
  EXPECT_FALSE(parsed->tying_is_explicit);
}

TEST(ConfigTest, ReadsTheWrapper) {
  const auto parsed =
      Parse(Wrapped(TinyConfig({{"architectures", ""}, {"tie_word_embeddings", "false"}}),
                    R"(,"tie_word_embeddings":true,"eos_token_id":2,"image_token_id":1)"));
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_EQ(parsed->spec.model_type, "qwen3_5_text");
  EXPECT_EQ(parsed->spec.architecture, "Qwen3_5ForConditionalGeneration");
  EXPECT_EQ(parsed->spec.hidden_size, 4);
  EXPECT_TRUE(parsed->spec.tied_embedding);  // The top level decides.
  EXPECT_EQ(parsed->spec.eos_token_ids, (std::vector<int32_t>{2, 5}));
  EXPECT_TRUE(parsed->unknown_keys.empty());

  const auto inner = Parse(Wrapped(TinyConfig({{"tie_word_embeddings", "true"}})));
  ASSERT_TRUE(inner.ok()) << inner.status();
  EXPECT_TRUE(inner->spec.tied_embedding);
}

TEST(ConfigTest, RefusesInconsistentWrappers) {
  ExpectError(Parse(R"({"model_type":"qwen3_5"})").status(), kInvalid, {"text_config", "nothing"});
  ExpectError(Parse(Wrapped("[]")).status(), kInvalid, {"text_config", "an array"});
  ExpectError(Parse(Wrapped(TinyConfig({{"model_type", "\"qwen3_5_moe_text\""}}))).status(),
              kUnimplemented, {"text_config", "'qwen3_5_moe_text'"});
  ExpectError(ParseWith({{"text_config", "{}"}}).status(), kInvalid, {"text_config", "flat"});
}

TEST(ConfigTest, RefusesEveryOtherFamilyByName) {
  for (const char* family : {"fla-gdn", "olmo_hybrid", "qwen3_5-moe", "qwen3_next-moe",
                             "qwen3_5-hybrid", "qwen3_5-vl"}) {
    const std::string path =
        absl::StrCat(GDN_SOURCE_DIR "/tests/data/configs/", family, "/config.json");
    const std::map<std::string, std::string> names = {
        {"fla-gdn", "model_type 'gated_deltanet'"},
        {"olmo_hybrid", "model_type 'olmo_hybrid'"},
        {"qwen3_5-moe", "model_type 'qwen3_5_moe_text'"},
        {"qwen3_next-moe", "model_type 'qwen3_next'"},
        {"qwen3_5-hybrid", "layer_types[3] 'full_attention'"},
        {"qwen3_5-vl", "layer_types[3] 'full_attention'"}};
    // As a whole model: the family is found out before any tensor is looked for.
    ExpectError(LoadModel({.path = path}).status(), kUnimplemented,
                {path, names.at(family), "supported", "linear_attention"});
  }
  for (const char* type : {"qwen3_5_moe", "qwen4_exp", "qwen4_exp_text", "kimi_linear", "glm5_next",
                           "llama", "QWEN3_5_TEXT"}) {
    ExpectError(ParseWith({{"model_type", absl::StrCat("\"", type, "\"")}}).status(),
                kUnimplemented, {absl::StrCat("'", type, "'"), "qwen3_5_text"});
  }
  ExpectError(ParseWith({{"model_type", ""}}).status(), kInvalid, {"model_type", "qwen3_5_text"});
  ExpectError(ParseWith({{"model_type", "3"}}).status(), kInvalid, {"model_type", "got 3"});
}

TEST(ConfigTest, RefusesOtherArchitectures) {
  ExpectError(ParseWith({{"architectures", R"(["Qwen3_5ForSequenceClassification"])"}}).status(),
              kUnimplemented, {"'Qwen3_5ForSequenceClassification'", "Qwen3_5ForCausalLM"});
  for (const char* value : {"[]", "\"Qwen3_5ForCausalLM\"", "[1]", "{}"}) {
    ExpectError(ParseWith({{"architectures", value}}).status(), kInvalid, {"architectures"});
  }
}

TEST(ConfigTest, RefusesFullAttentionByLayer) {
  ExpectError(ParseWith({{"layer_types", R"(["linear_attention","full_attention"])"}}).status(),
              kUnimplemented, {"layer_types[1]", "'full_attention'", "'linear_attention'"});
  ExpectError(ParseWith({{"layer_types", R"(["sliding_attention","linear_attention"])"}}).status(),
              kUnimplemented, {"layer_types[0]", "'sliding_attention'"});
  // The default is a mixture.
  ExpectError(ParseWith({{"layer_types", ""}, {"num_hidden_layers", "8"}}).status(), kUnimplemented,
              {"layer_types[3]", "'full_attention'", "full_attention_interval is 4"});
  ExpectError(ParseWith({{"layer_types", "null"}, {"full_attention_interval", "1"}}).status(),
              kUnimplemented, {"layer_types[0]"});
  EXPECT_TRUE(ParseWith({{"layer_types", ""}, {"full_attention_interval", "3"}}).ok());
  ExpectError(ParseWith({{"layer_types", ""}, {"full_attention_interval", "0"}}).status(), kInvalid,
              {"full_attention_interval", "got 0"});
  ExpectError(ParseWith({{"layer_types", R"(["linear_attention"])"}}).status(), kInvalid,
              {"layer_types", "2 names", "array of 1"});
  ExpectError(ParseWith({{"layer_types", R"(["linear_attention",7])"}}).status(), kInvalid,
              {"layer_types", "got 7"});
  ExpectError(ParseWith({{"layer_types", "7"}}).status(), kInvalid, {"layer_types", "got 7"});
}

TEST(ConfigTest, RefusesFeaturesByName) {
  ExpectError(ParseWith({{"quantization_config", R"({"quant_method":"fp8"})"}}).status(),
              kUnimplemented, {"quantization_config", "'fp8'", "unquantised"});
  ExpectError(ParseWith({{"quantization_config", "{}"}}).status(), kUnimplemented,
              {"quantization_config", "absent"});
  ExpectError(
      Parse(Wrapped(TinyConfig(), R"(,"quantization_config":{"quant_method":"awq"})")).status(),
      kUnimplemented, {"'awq'"});
  EXPECT_TRUE(ParseWith({{"quantization_config", "null"}}).ok());

  ExpectError(ParseWith({{"rope_parameters", R"({"rope_type":"yarn"})"}}).status(), kUnimplemented,
              {"rope_parameters", "rope_type 'yarn'", "'default'"});
  ExpectError(ParseWith({{"rope_scaling", R"({"type":"linear","factor":2})"}}).status(),
              kUnimplemented, {"rope_scaling", "type 'linear'"});
  EXPECT_TRUE(ParseWith({{"rope_parameters", R"({"rope_type":"default","rope_theta":1})"},
                         {"rope_scaling", "null"}})
                  .ok());

  ExpectError(ParseWith({{"hidden_act", "\"gelu\""}}).status(), kUnimplemented,
              {"hidden_act 'gelu'", "'silu'"});
  ExpectError(ParseWith({{"dtype", "\"float8_e4m3fn\""}}).status(), kUnimplemented,
              {"dtype 'float8_e4m3fn'", "'bfloat16'"});
  ExpectError(ParseWith({{"torch_dtype", "\"int8\""}}).status(), kUnimplemented,
              {"torch_dtype 'int8'"});
  EXPECT_TRUE(ParseWith({{"dtype", "\"float16\""}, {"torch_dtype", "\"float32\""}}).ok());
}

TEST(ConfigTest, MapsTheOutputGate) {
  for (const char* name : {"\"swish\"", "\"silu\"", "null"}) {
    EXPECT_EQ(ParseWith({{"output_gate_type", name}})->spec.output_gate, GateActivation::kSilu);
  }
  EXPECT_EQ(ParseWith({{"output_gate_type", "\"sigmoid\""}})->spec.output_gate,
            GateActivation::kSigmoid);
  ExpectError(ParseWith({{"output_gate_type", "\"tanh\""}}).status(), kUnimplemented,
              {"output_gate_type", "'tanh'", "'sigmoid'"});
}

TEST(ConfigTest, RefusesAbsurdDimensions) {
  const std::map<std::string, std::vector<std::string>> bad = {
      {"vocab_size", {"0", "-1", "1e3", "6.0", "\"6\"", "4194305", "18446744073709551615", "[6]"}},
      {"hidden_size", {"0", "-4", "65537", "9223372036854775807"}},
      {"intermediate_size", {"0", "1048577"}},
      {"num_hidden_layers", {"0", "1025", "-2147483648"}},
      {"linear_num_key_heads", {"0", "1025"}},
      {"linear_num_value_heads", {"0", "1025"}},
      {"linear_key_head_dim", {"0", "257"}},
      {"linear_value_head_dim", {"0", "513"}},
      {"linear_conv_kernel_dim", {"1", "9"}},
      {"max_position_embeddings", {"0", "1e6"}},
      {"rms_norm_eps", {"0", "-1e-6", "1", "1e-300", "\"1e-6\""}},
      {"eos_token_id", {"6", "-1", "true", "[0,6]", "[[0]]", "2.0", "{}"}},
      {"bos_token_id", {"6", "-1", "[1]"}},
      {"tie_word_embeddings", {"1", "\"true\""}},
  };
  for (const auto& [key, values] : bad) {
    for (const std::string& value : values) {
      SCOPED_TRACE(absl::StrCat(key, " = ", value));
      ExpectError(ParseWith({{key, value}}).status(), kInvalid, {"config.json", key});
    }
  }
  for (const char* key : {"vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"}) {
    ExpectError(ParseWith({{key, ""}}).status(), kInvalid, {key, "got nothing"});
  }
}

TEST(ConfigTest, BoundsTheHeadRatio) {
  const auto ratio = [](const char* key_heads, const char* value_heads) {
    return ParseWith({{"linear_num_key_heads", key_heads}, {"linear_num_value_heads", value_heads}})
        .status();
  };
  EXPECT_TRUE(ratio("2", "2").ok());
  EXPECT_TRUE(ratio("2", "16").ok());
  ExpectError(ratio("2", "18"), kInvalid, {"linear_num_value_heads", "8 times", "got 18"});
  ExpectError(ratio("2", "3"), kInvalid, {"linear_num_value_heads", "= 2", "got 3"});
  ExpectError(ratio("4", "2"), kInvalid, {"linear_num_value_heads", "got 2"});
}

TEST(ConfigTest, MergesTokenIdsWithTheGenerationConfig) {
  const auto parsed = Parse(TinyConfig({{"eos_token_id", "[5,1]"}}),
                            R"({"eos_token_id":[4,1],"bos_token_id":2,"temperature":0.7})");
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_EQ(parsed->spec.eos_token_ids, (std::vector<int32_t>{1, 4, 5}));
  EXPECT_EQ(parsed->spec.bos_token_id, std::optional<int32_t>(2));
  const auto own = Parse(TinyConfig({{"bos_token_id", "0"}}), R"({"bos_token_id":2})");
  EXPECT_EQ(own->spec.bos_token_id, std::optional<int32_t>(0));
  ExpectError(Parse(TinyConfig(), R"({"eos_token_id":6})").status(), kInvalid,
              {"generation_config.json", "eos_token_id", "0..5", "got 6"});
  ExpectError(Parse(TinyConfig(), "[").status(), kInvalid, {"generation_config.json", "JSON"});
  ExpectError(Parse(TinyConfig(), "[]").status(), kInvalid, {"generation_config.json", "object"});
}

TEST(ConfigTest, ReportsUnknownKeys) {
  EXPECT_EQ(ParseWith({{"zeta", "1"}, {"attention_bias", "true"}, {"alpha", "{}"}})->unknown_keys,
            (std::vector<std::string>{"alpha", "zeta"}));
  EXPECT_EQ(Parse(Wrapped(TinyConfig({{"zeta", "1"}, {"architectures", ""}}), R"(,"alpha":1)"))
                ->unknown_keys,
            (std::vector<std::string>{"alpha", "text_config.zeta"}));
}

TEST(ConfigTest, RefusesMalformedDocuments) {
  for (const std::string text : {"", "{", "NaN", R"({"rms_norm_eps":NaN})", "\xff\xfe", "{}{}"}) {
    ExpectError(Parse(text).status(), kInvalid, {"config.json", "JSON"});
  }
  ExpectError(Parse("[]").status(), kInvalid, {"config.json", "a JSON object", "an array"});
  ExpectError(Parse(std::string(200'000, '[')).status(), kInvalid, {"config.json", "levels deep"});
  ExpectError(Parse(std::string(5 << 20, ' ')).status(), kInvalid, {"config.json", "the limit is"});
  const std::string twice = TinyConfig();
  ExpectError(Parse(twice.substr(0, twice.size() - 1) + ",\"hidden_size\":4}").status(), kInvalid,
              {"'hidden_size'", "twice"});
}

}  // namespace
}  // namespace gdn::model
