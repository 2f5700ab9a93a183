// Configurations of model_type gdn2, and the tensors of their layers.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/model/config.h"
#include "server/model/element_convert.h"
#include "server/model/test_checkpoint.h"
#include "server/model/weights.h"

namespace gdn::model {
namespace {

using testing::Bf16Tensor;
using testing::ExpectError;
using testing::SafetensorsBytes;
using testing::TempFolder;
using testing::TestTensor;
using testing::TinyConfig;
using testing::TinyGdn2Config;
using testing::TinyGdn2Tensors;
using testing::TinyValue;
using Overrides = std::map<std::string, std::string>;
constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
constexpr auto kUnimplemented = absl::StatusCode::kUnimplemented;

absl::StatusOr<ParsedConfig> ParseWith(const Overrides& overrides) {
  return ParseConfig({"config.json", TinyGdn2Config(overrides)}, std::nullopt);
}

TEST(Gdn2ConfigTest, ReadsEveryField) {
  const auto parsed = ParseWith({{"gdn2_decay_gate", "\"bounded\""},
                                 {"gdn2_decay_lower_bound", "-2.5"},
                                 {"allow_neg_eigval", "true"},
                                 {"use_qk_l2norm", "true"},
                                 {"output_gate_type", "\"sigmoid\""}});
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  const ModelSpec& spec = parsed->spec;
  EXPECT_EQ(spec.model_type, "gdn2");
  EXPECT_EQ(spec.architecture, "Gdn2ForCausalLM");
  EXPECT_EQ(spec.layer_types,
            (std::vector<LayerType>{LayerType::kGdn2, LayerType::kLinearAttention}));
  EXPECT_EQ(spec.decay_gate, DecayGate::kBounded);
  EXPECT_EQ(spec.decay_lower_bound, -2.5f);
  EXPECT_EQ(spec.beta_scale, 2.0f);
  EXPECT_EQ(spec.output_gate, GateActivation::kSigmoid);
  EXPECT_EQ(spec.gdn.key_heads, 1);
  EXPECT_EQ(spec.gdn.value_dim, 3);
  // q|k|v|z|f|b|w and q|k|v|z|b|a.
  EXPECT_EQ(spec.gdn.projection_size(LayerType::kGdn2), 4 * 2 + 3 * 6);
  EXPECT_EQ(spec.gdn.projection_size(LayerType::kLinearAttention), 2 * 2 + 2 * 6 + 2 * 2);
  EXPECT_EQ(spec.max_projection_size(), 26);
  EXPECT_TRUE(parsed->unknown_keys.empty());
}

TEST(Gdn2ConfigTest, HasDefaults) {
  const auto parsed = ParseWith({{"layer_types", ""}, {"architectures", ""}});
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_EQ(parsed->spec.architecture, "Gdn2ForCausalLM");
  EXPECT_EQ(parsed->spec.layer_types, std::vector<LayerType>(2, LayerType::kGdn2));
  EXPECT_EQ(parsed->spec.decay_gate, DecayGate::kSoftplus);
  EXPECT_EQ(parsed->spec.beta_scale, 1.0f);
  EXPECT_EQ(parsed->spec.output_gate, GateActivation::kSilu);
  const auto bounded = ParseWith({{"gdn2_decay_gate", "\"bounded\""}});
  EXPECT_EQ(bounded->spec.decay_lower_bound, -5.0f);
}

TEST(Gdn2ConfigTest, BoundsTheDecay) {
  const auto bound = [](const char* value) {
    return ParseWith({{"gdn2_decay_gate", "\"bounded\""}, {"gdn2_decay_lower_bound", value}})
        .status();
  };
  EXPECT_TRUE(bound("-5").ok());
  EXPECT_TRUE(bound("-1e-30").ok());
  for (const char* value : {"-5.000001", "0", "-0.0", "1", "-1e-60", "\"-5\"", "[-5]", "true"}) {
    SCOPED_TRACE(value);
    ExpectError(bound(value), kInvalid, {"config.json: gdn2_decay_lower_bound: expected a number"});
  }
  ExpectError(ParseWith({{"gdn2_decay_lower_bound", "-5"}}).status(), kInvalid,
              {"gdn2_decay_lower_bound: expected nothing", "gdn2_decay_gate is 'softplus'"});
  ExpectError(ParseWith({{"gdn2_decay_gate", "\"exp\""}}).status(), kUnimplemented,
              {"gdn2_decay_gate", "'exp'", "'softplus', 'bounded'"});
  ExpectError(ParseWith({{"gdn2_decay_gate", "1"}}).status(), kInvalid, {"gdn2_decay_gate"});
}

TEST(Gdn2ConfigTest, RefusesWhatItDoesNotCompute) {
  ExpectError(ParseWith({{"layer_types", R"(["gdn2","full_attention"])"}}).status(), kUnimplemented,
              {"layer_types[1] 'full_attention'", "'gdn2', 'linear_attention'"});
  ExpectError(ParseWith({{"layer_types", R"(["gdn2"])"}}).status(), kInvalid,
              {"layer_types", "2 names", "array of 1"});
  ExpectError(ParseWith({{"layer_types", "[1,2]"}}).status(), kInvalid, {"layer_types", "got 1"});
  ExpectError(ParseWith({{"use_qk_l2norm", "false"}}).status(), kUnimplemented,
              {"use_qk_l2norm: false", "supported: true"});
  ExpectError(ParseWith({{"use_qk_l2norm", "1"}}).status(), kInvalid, {"use_qk_l2norm"});
  ExpectError(ParseWith({{"allow_neg_eigval", "2"}}).status(), kInvalid, {"allow_neg_eigval"});
  ExpectError(ParseWith({{"architectures", R"(["Qwen3_5ForCausalLM"])"}}).status(), kUnimplemented,
              {"'Qwen3_5ForCausalLM'", "Gdn2ForCausalLM"});
  ExpectError(ParseWith({{"text_config", "{}"}}).status(), kInvalid, {"text_config", "gdn2"});
  ExpectError(ParseWith({{"quantization_config", R"({"quant_method":"fp8"})"}}).status(),
              kUnimplemented, {"'fp8'"});
  ExpectError(ParseWith({{"linear_num_value_heads", "9"}}).status(), kInvalid,
              {"linear_num_value_heads", "8 times"});
  ExpectError(ParseWith({{"linear_key_head_dim", "257"}}).status(), kInvalid,
              {"linear_key_head_dim", "got 257"});
}

// The other family has neither the layers nor the keys.
TEST(Gdn2ConfigTest, BelongsToItsOwnModelType) {
  const auto qwen = [](const Overrides& overrides) {
    return ParseConfig({"config.json", TinyConfig(overrides)}, std::nullopt);
  };
  ExpectError(qwen({{"layer_types", R"(["gdn2","linear_attention"])"}}).status(), kUnimplemented,
              {"layer_types[0] 'gdn2'", "'linear_attention' in every layer"});
  ExpectError(qwen({{"architectures", R"(["Gdn2ForCausalLM"])"}}).status(), kUnimplemented,
              {"'Gdn2ForCausalLM'"});
  const auto parsed = qwen({{"allow_neg_eigval", "true"}, {"gdn2_decay_gate", "\"bounded\""}});
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_EQ(parsed->spec.beta_scale, 1.0f);
  EXPECT_EQ(parsed->unknown_keys,
            (std::vector<std::string>{"allow_neg_eigval", "gdn2_decay_gate"}));
}

absl::StatusOr<Model> Load(const TempFolder& folder, const std::vector<TestTensor>& tensors,
                           const Overrides& overrides = {}) {
  folder.Write("config.json", TinyGdn2Config(overrides));
  folder.Write("model.safetensors", SafetensorsBytes(tensors));
  return LoadModel({.path = folder.path()});
}

void ExpectMatrix(const MatrixView& m, const std::string& name, int64_t rows, int64_t cols) {
  SCOPED_TRACE(name);
  ASSERT_EQ(m.rows, rows);
  ASSERT_EQ(m.cols, cols);
  ASSERT_EQ(m.type, ElementType::kBF16);
  for (int64_t i = 0; i < rows * cols; ++i) {
    uint16_t bits = 0;
    std::memcpy(&bits, m.data + 2 * i, 2);
    ASSERT_EQ(Bf16ToF32(bits), TinyValue(name, i)) << i;
  }
}

void ExpectVector(const std::vector<float>& v, const std::string& name, size_t size) {
  SCOPED_TRACE(name);
  ASSERT_EQ(v.size(), size);
  for (size_t i = 0; i < size; ++i) ASSERT_EQ(v[i], TinyValue(name, static_cast<int64_t>(i))) << i;
}

TEST(Gdn2LoadTest, EveryElementLandsInItsPlace) {
  const TempFolder folder;
  const auto model = Load(folder, TinyGdn2Tensors());
  ASSERT_TRUE(model.ok()) << model.status();
  const std::string p = "model.layers.0.gdn2.";
  const GdnLayerWeights& w = model->weights.layers[0];
  EXPECT_EQ(w.type, LayerType::kGdn2);
  ExpectMatrix(w.in_proj, p + "in_proj.weight", 26, 4);
  ExpectMatrix(w.out, p + "out_proj.weight", 4, 6);
  ExpectVector(w.conv, p + "conv1d.weight", 20);
  ExpectVector(w.a_log, p + "A_log", 1);
  ExpectVector(w.dt_bias, p + "dt_bias", 2);
  ExpectVector(w.gated_norm, p + "out_norm.weight", 3);
  ASSERT_EQ(w.projection().size(), 1u);
  EXPECT_EQ(w.projection()[0].data, w.in_proj.data);
  const GdnLayerWeights& other = model->weights.layers[1];
  EXPECT_EQ(other.type, LayerType::kLinearAttention);
  ExpectMatrix(other.qkv, "model.layers.1.linear_attn.in_proj_qkv.weight", 10, 4);
  EXPECT_EQ(other.projection().size(), 4u);
  // Norms 8, MLP 60, out 24, conv 20, gated norm 3; then 104 and 3 beside the 80 and 4 of the
  // other.
  EXPECT_EQ(model->weights.num_parameters, 2 * 115 + 107 + 84 + 24 + 24 + 4);
}

TEST(Gdn2LoadTest, NamesWhatIsMissingOrOfTheWrongShape) {
  const TempFolder folder;
  std::vector<TestTensor> tensors = TinyGdn2Tensors();
  std::erase_if(tensors, [](const TestTensor& t) { return t.name.ends_with("gdn2.dt_bias"); });
  for (TestTensor& tensor : tensors) {
    // Of GDN's projection, and with A_log of the value heads.
    if (tensor.name.ends_with("gdn2.in_proj.weight")) tensor = Bf16Tensor(tensor.name, {20, 4});
    if (tensor.name.ends_with("gdn2.A_log")) tensor = Bf16Tensor(tensor.name, {2});
  }
  tensors.push_back(Bf16Tensor("model.layers.0.linear_attn.in_proj_a.weight", {2, 4}));
  tensors.push_back(Bf16Tensor("model.layers.1.gdn2.A_log", {1}));
  ExpectError(Load(folder, tensors).status(), kInvalid,
              {folder.path(), "1 missing: ", "'model.layers.0.gdn2.dt_bias' [2]",
               "2 unexpected: ", "'model.layers.0.linear_attn.in_proj_a.weight'",
               "'model.layers.1.gdn2.A_log'", "2 of the wrong shape: ",
               "'model.layers.0.gdn2.in_proj.weight' expected [26, 4], got [20, 4]",
               "'model.layers.0.gdn2.A_log' expected [1], got [2]"});
}

TEST(Gdn2LoadTest, TheFingerprintKnowsWhatDecidesTheFunction) {
  const TempFolder folder;
  std::set<std::string> fingerprints;
  for (const Overrides& overrides : std::vector<Overrides>{
           {},
           {{"gdn2_decay_gate", "\"bounded\""}},
           {{"gdn2_decay_gate", "\"bounded\""}, {"gdn2_decay_lower_bound", "-4"}},
           {{"allow_neg_eigval", "true"}},
           {{"output_gate_type", "\"sigmoid\""}}}) {
    const auto model = Load(folder, TinyGdn2Tensors(), overrides);
    ASSERT_TRUE(model.ok()) << model.status();
    EXPECT_TRUE(fingerprints.insert(model->weights.fingerprint).second);
  }
  std::vector<TestTensor> tensors = TinyGdn2Tensors();
  for (TestTensor& tensor : tensors) {
    if (tensor.name.ends_with("gdn2.in_proj.weight")) tensor.bytes.back() ^= 1;
  }
  EXPECT_TRUE(fingerprints.insert(Load(folder, tensors)->weights.fingerprint).second);
}

TEST(Gdn2LoadTest, RandomWeightsAreThoseOfAStart) {
  const TempFolder folder;
  folder.Write("config.json", TinyGdn2Config({{"linear_num_key_heads", "2"},
                                              {"linear_num_value_heads", "4"},
                                              {"linear_key_head_dim", "32"},
                                              {"hidden_size", "64"}}));
  const auto model = LoadModel({.path = folder.path(), .random_weights = 3});
  ASSERT_TRUE(model.ok()) << model.status();
  const GdnLayerWeights& w = model->weights.layers[0];
  ASSERT_EQ(w.in_proj.rows, 4 * 64 + 3 * 12);
  double squares = 0;
  for (int64_t i = 0; i < w.in_proj.rows * 64; ++i) {
    uint16_t bits = 0;
    std::memcpy(&bits, w.in_proj.data + 2 * i, 2);
    squares += std::pow(static_cast<double>(Bf16ToF32(bits)), 2);
  }
  EXPECT_NEAR(squares / static_cast<double>(w.in_proj.rows), 1.0, 0.05);
  ASSERT_EQ(w.a_log.size(), 2u);
  ASSERT_EQ(w.dt_bias.size(), 64u);
  for (const float bias : w.dt_bias) {
    const double step = std::log1p(std::exp(static_cast<double>(bias)));
    EXPECT_GT(step, 0.000999);
    EXPECT_LT(step, 0.100001);
  }
}

// Dimensions at their limits are an answer, not an overflow.
TEST(Gdn2LoadTest, RefusesMoreThanTheMachineHas) {
  const TempFolder folder;
  folder.Write("config.json", TinyGdn2Config({{"hidden_size", "65536"},
                                              {"intermediate_size", "1048576"},
                                              {"num_hidden_layers", "1024"},
                                              {"layer_types", ""},
                                              {"linear_num_key_heads", "1024"},
                                              {"linear_num_value_heads", "1024"},
                                              {"linear_key_head_dim", "256"},
                                              {"linear_value_head_dim", "512"}}));
  ExpectError(LoadModel({.path = folder.path(), .random_weights = 1}).status(),
              absl::StatusCode::kResourceExhausted, {"no memory", "bytes of weights"});
}

}  // namespace
}  // namespace gdn::model
