#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "server/model/element_convert.h"
#include "server/model/test_checkpoint.h"
#include "server/model/weights.h"

namespace gdn::model {
namespace {

using testing::TempFolder;
using testing::TinyConfig;

// Odd sizes, so that no row is a whole number of blocks or words.
std::string Config() {
  return TinyConfig({{"vocab_size", "259"},
                     {"hidden_size", "67"},
                     {"intermediate_size", "131"},
                     {"linear_key_head_dim", "64"},
                     {"linear_value_head_dim", "33"},
                     {"linear_num_value_heads", "6"},
                     {"linear_num_key_heads", "2"}});
}

std::vector<float> Values(const MatrixView& m) {
  EXPECT_EQ(m.type, ElementType::kBF16);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(m.data) % 2, 0u);
  std::vector<float> values;
  for (int64_t i = 0; i < m.rows * m.cols; ++i) {
    uint16_t bits = 0;
    std::memcpy(&bits, m.data + 2 * i, 2);
    values.push_back(Bf16ToF32(bits));
  }
  return values;
}

// Mean, deviation and correlation of neighbours as independent noise of that deviation has them.
void ExpectNoise(const MatrixView& m, double sigma) {
  const std::vector<float> v = Values(m);
  double sum = 0, squares = 0, neighbours = 0;
  for (size_t i = 0; i < v.size(); ++i) {
    ASSERT_LT(std::abs(v[i]), 1.75 * sigma);
    sum += v[i];
    squares += static_cast<double>(v[i]) * v[i];
    if (i > 0) neighbours += static_cast<double>(v[i]) * v[i - 1];
  }
  const double n = static_cast<double>(v.size());
  EXPECT_LT(std::abs(sum / n), 5 * sigma / std::sqrt(n));
  EXPECT_NEAR(std::sqrt(squares / n), sigma, 5 * sigma / std::sqrt(n));
  EXPECT_LT(std::abs(neighbours / n), 5 * sigma * sigma / std::sqrt(n));
}

Model Load(const std::string& path, uint64_t seed, std::optional<LayerRange> layers = {}) {
  auto model = LoadModel({.path = path, .layers = layers, .random_weights = seed});
  EXPECT_TRUE(model.ok()) << model.status();
  return model.ok() ? *std::move(model) : Model{};
}

TEST(RandomWeightsTest, NeedsAConfigurationAlone) {
  const TempFolder folder;
  const std::string file = folder.Write("config.json", Config());
  const std::string named = folder.Write("made-up.json", Config());
  const Model by_folder = Load(folder.path(), 1);
  EXPECT_EQ(Load(file, 1).weights.fingerprint, by_folder.weights.fingerprint);
  EXPECT_EQ(Load(file, 1).name, by_folder.name);
  EXPECT_EQ(Load(named, 1).name, "made-up");
  EXPECT_FALSE(by_folder.spec.tied_embedding);  // Without tensors the configuration decides.
  EXPECT_NE(by_folder.weights.head->data, by_folder.weights.embedding->data);
  testing::ExpectError(LoadModel({.path = folder.path()}).status(), absl::StatusCode::kNotFound,
                       {"model.safetensors"});
}

TEST(RandomWeightsTest, TheSeedDecides) {
  const TempFolder folder;
  folder.Write("config.json", Config());
  const Model one = Load(folder.path(), 1), again = Load(folder.path(), 1),
              two = Load(folder.path(), 2);
  EXPECT_EQ(one.weights.fingerprint, again.weights.fingerprint);
  EXPECT_EQ(Values(one.weights.layers[1].qkv), Values(again.weights.layers[1].qkv));
  EXPECT_NE(one.weights.fingerprint, two.weights.fingerprint);
  EXPECT_NE(Values(one.weights.layers[0].qkv), Values(two.weights.layers[0].qkv));
  EXPECT_NE(Values(one.weights.layers[0].qkv), Values(one.weights.layers[1].qkv));
  EXPECT_NE(Values(one.weights.layers[0].gate), Values(one.weights.layers[0].up));
}

TEST(RandomWeightsTest, SlicesAgreeWithTheWhole) {
  const TempFolder folder;
  folder.Write("config.json", Config());
  const Model whole = Load(folder.path(), 3), slice = Load(folder.path(), 3, LayerRange{1, 2});
  ASSERT_EQ(slice.weights.layers.size(), 1u);
  EXPECT_EQ(Values(slice.weights.layers[0].down), Values(whole.weights.layers[1].down));
  EXPECT_EQ(slice.weights.layers[0].a_log, whole.weights.layers[1].a_log);
  EXPECT_EQ(Values(*slice.weights.head), Values(*whole.weights.head));
  EXPECT_FALSE(slice.weights.embedding.has_value());
}

TEST(RandomWeightsTest, ScalesKeepActivationsNearOne) {
  const TempFolder folder;
  folder.Write("config.json", Config());
  const Model model = Load(folder.path(), 4);
  const double hidden = 1 / std::sqrt(67.0);
  ExpectNoise(*model.weights.embedding, hidden);
  ExpectNoise(*model.weights.head, hidden);
  int64_t parameters = 2 * 259 * 67 + 67;
  for (const GdnLayerWeights& w : model.weights.layers) {
    for (const MatrixView* m : {&w.qkv, &w.z, &w.a, &w.b, &w.gate, &w.up}) ExpectNoise(*m, hidden);
    ExpectNoise(w.out, 1 / std::sqrt(198.0));
    ExpectNoise(w.down, 1 / std::sqrt(131.0));
    ASSERT_EQ(w.a_log.size(), 6u);
    ASSERT_EQ(w.dt_bias.size(), 6u);
    for (size_t i = 0; i < 6; ++i) {
      EXPECT_GE(std::exp(w.a_log[i]), 1.0f);
      EXPECT_LE(std::exp(w.a_log[i]), 16.001f);
      const double step = std::log1p(std::exp(static_cast<double>(w.dt_bias[i])));
      EXPECT_GT(step, 0.000999);
      EXPECT_LT(step, 0.100001);
    }
    EXPECT_NE(w.a_log[0], w.a_log[1]);
    ASSERT_EQ(w.conv.size(), 454u * 2);
    double squares = 0;
    for (const float tap : w.conv) squares += static_cast<double>(tap) * tap;
    EXPECT_NEAR(squares / 908, 0.5, 0.08);
    for (const std::vector<float>* norm : {&w.input_norm, &w.mlp_norm, &w.gated_norm}) {
      const auto [low, high] = std::minmax_element(norm->begin(), norm->end());
      EXPECT_GE(*low, 0.8f);
      EXPECT_LE(*high, 1.2f);
      EXPECT_NE(*low, *high);
    }
    parameters += 67 * (454 + 198 + 12) + 67 * 198 + 3 * 67 * 131 + 454 * 2 + 12 + 33 + 2 * 67;
  }
  EXPECT_EQ(model.weights.num_parameters, parameters);
}

TEST(RandomWeightsTest, TiedHeadIsTheEmbedding) {
  const TempFolder folder;
  std::string config = Config();
  config.replace(config.find("\"tie_word_embeddings\":false"), 27, "\"tie_word_embeddings\":true ");
  folder.Write("config.json", config);
  const Model model = Load(folder.path(), 5);
  EXPECT_TRUE(model.spec.tied_embedding);
  EXPECT_EQ(model.weights.head->data, model.weights.embedding->data);
}

TEST(RandomWeightsTest, RefusesMoreThanTheMachineHas) {
  const TempFolder folder;
  folder.Write("config.json", TinyConfig({{"hidden_size", "65536"},
                                          {"intermediate_size", "1048576"},
                                          {"num_hidden_layers", "1024"},
                                          {"layer_types", ""},
                                          {"full_attention_interval", "2000"}}));
  testing::ExpectError(LoadModel({.path = folder.path(), .random_weights = 1}).status(),
                       absl::StatusCode::kResourceExhausted, {"no memory", "bytes of weights"});
}

}  // namespace
}  // namespace gdn::model
