#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/model/element_convert.h"
#include "server/model/test_checkpoint.h"
#include "server/model/weights.h"

namespace gdn::model {
namespace {

using testing::Bf16Tensor;
using testing::ExpectError;
using testing::F16Tensor;
using testing::F32Tensor;
using testing::SafetensorsBytes;
using testing::TempFolder;
using testing::TestTensor;
using testing::TinyConfig;
using testing::TinyTensors;
using testing::TinyValue;
constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
constexpr char kDemo[] = GDN_SOURCE_DIR "/deploy/models/demo-gdn-7m";

TestTensor* Find(std::vector<TestTensor>* tensors, const std::string& name) {
  for (TestTensor& tensor : *tensors) {
    if (tensor.name == name) return &tensor;
  }
  ADD_FAILURE() << name;
  return &tensors->front();
}

void Remove(std::vector<TestTensor>* tensors, const std::string& name) {
  const auto at = std::remove_if(tensors->begin(), tensors->end(),
                                 [&](const TestTensor& t) { return t.name == name; });
  EXPECT_EQ(tensors->end() - at, 1) << name;
  tensors->erase(at, tensors->end());
}

// The tiny checkpoint in a folder of its own, tensors as given.
absl::StatusOr<Model> LoadTiny(const TempFolder& folder, const std::vector<TestTensor>& tensors,
                               const std::string& config = TinyConfig(),
                               std::optional<LayerRange> layers = {}, int padding = 0) {
  folder.Write("config.json", config);
  folder.Write("model.safetensors", SafetensorsBytes(tensors, padding));
  return LoadModel({.path = folder.path(), .layers = layers});
}

float Element(const MatrixView& m, int64_t i) {
  if (m.type == ElementType::kF32) {
    float value = 0;
    std::memcpy(&value, m.data + 4 * i, 4);
    return value;
  }
  uint16_t bits = 0;
  std::memcpy(&bits, m.data + 2 * i, 2);
  return m.type == ElementType::kBF16 ? Bf16ToF32(bits) : F16ToF32(bits);
}

void ExpectMatrix(const MatrixView& m, const std::string& name, int64_t rows, int64_t cols) {
  SCOPED_TRACE(name);
  ASSERT_EQ(m.rows, rows);
  ASSERT_EQ(m.cols, cols);
  ASSERT_EQ(reinterpret_cast<uintptr_t>(m.data) % SizeOf(m.type), 0u);
  for (int64_t i = 0; i < rows * cols; ++i) ASSERT_EQ(Element(m, i), TinyValue(name, i)) << i;
}

void ExpectVector(const std::vector<float>& v, const std::string& name, size_t size, float offset) {
  SCOPED_TRACE(name);
  ASSERT_EQ(v.size(), size);
  for (size_t i = 0; i < size; ++i) {
    ASSERT_EQ(v[i], offset + TinyValue(name, static_cast<int64_t>(i))) << i;
  }
}

void ExpectLayer(const GdnLayerWeights& w, const std::string& p) {
  ExpectVector(w.input_norm, p + "input_layernorm.weight", 4, 1);
  ExpectMatrix(w.qkv, p + "linear_attn.in_proj_qkv.weight", 10, 4);
  ExpectMatrix(w.z, p + "linear_attn.in_proj_z.weight", 6, 4);
  ExpectMatrix(w.b, p + "linear_attn.in_proj_b.weight", 2, 4);
  ExpectMatrix(w.a, p + "linear_attn.in_proj_a.weight", 2, 4);
  ExpectVector(w.conv, p + "linear_attn.conv1d.weight", 20, 0);
  ExpectVector(w.a_log, p + "linear_attn.A_log", 2, 0);
  ExpectVector(w.dt_bias, p + "linear_attn.dt_bias", 2, 0);
  ExpectVector(w.gated_norm, p + "linear_attn.norm.weight", 3, 0);
  ExpectMatrix(w.out, p + "linear_attn.out_proj.weight", 4, 6);
  ExpectVector(w.mlp_norm, p + "post_attention_layernorm.weight", 4, 1);
  ExpectMatrix(w.gate, p + "mlp.gate_proj.weight", 5, 4);
  ExpectMatrix(w.up, p + "mlp.up_proj.weight", 5, 4);
  ExpectMatrix(w.down, p + "mlp.down_proj.weight", 4, 5);
}

TEST(LoadModelTest, EveryElementLandsInItsPlace) {
  const TempFolder folder;
  const auto model = LoadTiny(folder, TinyTensors());
  ASSERT_TRUE(model.ok()) << model.status();
  const Weights& w = model->weights;
  ASSERT_EQ(w.layers.size(), 2u);
  ExpectLayer(w.layers[0], "model.layers.0.");
  ExpectLayer(w.layers[1], "model.layers.1.");
  ExpectMatrix(*w.embedding, "model.embed_tokens.weight", 6, 4);
  ExpectMatrix(*w.head, "lm_head.weight", 6, 4);
  ExpectVector(w.final_norm, "model.norm.weight", 4, 1);
  EXPECT_FALSE(model->spec.tied_embedding);
  // A layer: norms 8, projections 80, conv 20, A_log and dt_bias 4, gated norm 3, out 24, MLP 60.
  EXPECT_EQ(w.num_parameters, 2 * 199 + 24 + 24 + 4);
  EXPECT_EQ(model->layers.first, 0);
  EXPECT_EQ(model->layers.last, 2);
}

TEST(LoadModelTest, ViewsOutliveTheModelsOtherParts) {
  Weights weights;
  {
    const TempFolder folder;
    auto model = LoadTiny(folder, TinyTensors());
    ASSERT_TRUE(model.ok()) << model.status();
    weights = std::move(model->weights);
  }  // The folder is removed; the mapping keeps the file's content.
  ExpectLayer(weights.layers[1], "model.layers.1.");
}

TEST(LoadModelTest, MixedTypesAndUnalignedDataGiveTheSameValues) {
  for (int padding = 0; padding < 8; ++padding) {
    const TempFolder folder;
    std::vector<TestTensor> tensors = TinyTensors();
    tensors.insert(tensors.begin() + 1, {"mtp.odd", "U8", {1}, "x"});  // Skipped, but shifts data.
    for (const char* name :
         {"model.layers.0.linear_attn.A_log", "model.layers.1.mlp.up_proj.weight",
          "model.layers.0.input_layernorm.weight"}) {
      TestTensor* tensor = Find(&tensors, name);
      *tensor = F32Tensor(name, tensor->shape);
    }
    for (const char* name :
         {"model.layers.1.linear_attn.in_proj_qkv.weight", "model.layers.1.linear_attn.dt_bias"}) {
      TestTensor* tensor = Find(&tensors, name);
      *tensor = F16Tensor(name, tensor->shape);
    }
    const auto model = LoadTiny(folder, tensors, TinyConfig(), {}, padding);
    ASSERT_TRUE(model.ok()) << model.status();
    ExpectLayer(model->weights.layers[0], "model.layers.0.");
    ExpectLayer(model->weights.layers[1], "model.layers.1.");
    ExpectMatrix(*model->weights.embedding, "model.embed_tokens.weight", 6, 4);
    EXPECT_EQ(model->weights.layers[1].up.type, ElementType::kF32);
    EXPECT_EQ(model->weights.layers[1].qkv.type, ElementType::kF16);
  }
}

TEST(LoadModelTest, TheVisionLanguagePrefixIsTheSameModel) {
  const TempFolder plain_folder, prefixed_folder;
  const auto plain = LoadTiny(plain_folder, TinyTensors());
  ASSERT_TRUE(plain.ok()) << plain.status();
  // The same bytes under the other names.
  std::vector<TestTensor> tensors = TinyTensors();
  for (TestTensor& tensor : tensors) {
    if (tensor.name != "lm_head.weight") tensor.name.insert(6, "language_model.");
  }
  tensors.push_back(Bf16Tensor("model.visual.patch_embed.proj.weight", {3, 3}));
  tensors.push_back(Bf16Tensor("mtp.fc.weight", {2, 2}));
  const auto prefixed =
      LoadTiny(prefixed_folder, tensors,
               absl::StrCat(R"({"model_type":"qwen3_5","text_config":)", TinyConfig(), "}"));
  ASSERT_TRUE(prefixed.ok()) << prefixed.status();
  ExpectLayer(prefixed->weights.layers[1], "model.layers.1.");
  EXPECT_EQ(prefixed->weights.fingerprint, plain->weights.fingerprint);
}

TEST(LoadModelTest, OneTensorUnderBothPrefixesIsRefused) {
  const TempFolder folder;
  std::vector<TestTensor> tensors = TinyTensors();
  tensors.push_back(Bf16Tensor("model.language_model.norm.weight", {4}));
  ExpectError(LoadTiny(folder, tensors).status(), kInvalid,
              {"1 unexpected", "'model.norm.weight'", "'model.language_model.norm.weight'"});
}

TEST(LoadModelTest, TheTensorsDecideAboutTying) {
  std::vector<TestTensor> tied_tensors = TinyTensors();
  Remove(&tied_tensors, "lm_head.weight");
  for (const char* says : {"true", ""}) {
    const TempFolder folder;
    const auto tied = LoadTiny(folder, tied_tensors, TinyConfig({{"tie_word_embeddings", says}}));
    ASSERT_TRUE(tied.ok()) << tied.status();
    EXPECT_TRUE(tied->spec.tied_embedding);
    EXPECT_EQ(tied->weights.head->data, tied->weights.embedding->data);
    EXPECT_EQ(tied->weights.num_parameters, 2 * 199 + 24 + 4);
    const TempFolder other;
    const auto untied = LoadTiny(other, TinyTensors(), TinyConfig({{"tie_word_embeddings", says}}));
    ASSERT_TRUE(untied.ok()) << untied.status();
    EXPECT_FALSE(untied->spec.tied_embedding);
    ExpectMatrix(*untied->weights.head, "lm_head.weight", 6, 4);
  }
  const TempFolder folder;
  ExpectError(LoadTiny(folder, tied_tensors).status(), kInvalid,
              {"1 missing", "'lm_head.weight' [6, 4]", "tie_word_embeddings is false"});
}

TEST(LoadModelTest, AllProblemsAreListedInOneStatus) {
  const TempFolder folder;
  std::vector<TestTensor> tensors = TinyTensors();
  Remove(&tensors, "model.layers.0.mlp.up_proj.weight");
  Remove(&tensors, "model.norm.weight");
  tensors.push_back(Bf16Tensor("model.layers.2.mlp.up_proj.weight", {5, 4}));
  tensors.push_back(Bf16Tensor("model.layers.0.self_attn.q_proj.weight", {2}));
  *Find(&tensors, "model.layers.1.linear_attn.in_proj_z.weight") =
      Bf16Tensor("model.layers.1.linear_attn.in_proj_z.weight", {4, 6});
  *Find(&tensors, "model.layers.1.linear_attn.conv1d.weight") =
      Bf16Tensor("model.layers.1.linear_attn.conv1d.weight", {10, 2});
  *Find(&tensors, "model.layers.0.linear_attn.dt_bias") = {
      "model.layers.0.linear_attn.dt_bias", "I32", {2}, std::string(8, '\0')};
  *Find(&tensors, "model.layers.0.mlp.gate_proj.weight") = {
      "model.layers.0.mlp.gate_proj.weight", "F8_E4M3", {5, 4}, std::string(20, '\0')};
  const absl::Status status = LoadTiny(folder, tensors).status();
  ExpectError(status, kInvalid,
              {folder.path(), "2 missing: ", "'model.layers.0.mlp.up_proj.weight' [5, 4]",
               "'model.norm.weight' [4]", "2 unexpected: ", "'model.layers.2.mlp.up_proj.weight'",
               "'model.layers.0.self_attn.q_proj.weight'", "2 of the wrong shape: ",
               "'model.layers.1.linear_attn.in_proj_z.weight' expected [6, 4], got [4, 6]",
               "'model.layers.1.linear_attn.conv1d.weight' expected [10, 1, 2], got [10, 2]",
               "2 of the wrong type: ", "dt_bias' expected F32, BF16 or F16, got I32",
               "gate_proj.weight' expected F32, BF16 or F16, got F8_E4M3"});
}

TEST(LoadModelTest, LongListsAreCutWithACount) {
  const TempFolder folder;
  std::vector<TestTensor> tensors = TinyTensors();
  for (int i = 0; i < 1000; ++i) tensors.push_back(Bf16Tensor(absl::StrCat("x.", 1000 + i), {1}));
  const absl::Status status = LoadTiny(folder, tensors).status();
  ExpectError(status, kInvalid, {"1000 unexpected: 'x.1000'; 'x.1001'", "and 976 more"});
  EXPECT_LT(status.message().size(), 1000u);
}

TEST(LoadModelTest, NonFiniteVectorsAreDamaged) {
  const TempFolder folder;
  std::vector<TestTensor> tensors = TinyTensors();
  TestTensor* a_log = Find(&tensors, "model.layers.1.linear_attn.A_log");
  a_log->bytes[3] = '\x7f';  // 0x7f__ with the low byte below: an infinity or NaN in BF16.
  a_log->bytes[2] = '\xc0';
  ExpectError(LoadTiny(folder, tensors).status(), kInvalid,
              {"1 damaged", "'model.layers.1.linear_attn.A_log' element 1 is nan"});
}

TEST(LoadModelTest, SlicesHoldTheirOwnPart) {
  const TempFolder folder;
  const auto first = LoadTiny(folder, TinyTensors(), TinyConfig(), LayerRange{0, 1});
  ASSERT_TRUE(first.ok()) << first.status();
  ASSERT_EQ(first->weights.layers.size(), 1u);
  ExpectLayer(first->weights.layers[0], "model.layers.0.");
  EXPECT_TRUE(first->weights.embedding.has_value());
  EXPECT_FALSE(first->weights.head.has_value());
  EXPECT_TRUE(first->weights.final_norm.empty());
  EXPECT_EQ(first->weights.num_parameters, 199 + 24);

  const auto last = LoadTiny(folder, TinyTensors(), TinyConfig(), LayerRange{1, 2});
  ASSERT_TRUE(last.ok()) << last.status();
  ASSERT_EQ(last->weights.layers.size(), 1u);
  ExpectLayer(last->weights.layers[0], "model.layers.1.");
  EXPECT_FALSE(last->weights.embedding.has_value());
  ExpectMatrix(*last->weights.head, "lm_head.weight", 6, 4);
  EXPECT_EQ(last->weights.final_norm.size(), 4u);
  EXPECT_NE(first->weights.fingerprint, last->weights.fingerprint);

  std::vector<TestTensor> tied = TinyTensors();
  Remove(&tied, "lm_head.weight");
  const TempFolder other;
  const auto tied_last =
      LoadTiny(other, tied, TinyConfig({{"tie_word_embeddings", "true"}}), LayerRange{1, 2});
  ASSERT_TRUE(tied_last.ok()) << tied_last.status();
  ExpectMatrix(*tied_last->weights.head, "model.embed_tokens.weight", 6, 4);
  EXPECT_TRUE(tied_last->weights.embedding.has_value());
}

TEST(LoadModelTest, ASliceNeedsNothingElse) {
  const TempFolder folder;
  std::vector<TestTensor> tensors = TinyTensors();
  Remove(&tensors, "model.layers.0.mlp.up_proj.weight");  // Of another slice: not required,
  Find(&tensors, "model.layers.0.mlp.down_proj.weight")->shape = {5, 4};       // nor looked at;
  tensors.push_back(Bf16Tensor("model.layers.7.mlp.up_proj.weight", {5, 4}));  // no such layer.
  ExpectError(LoadTiny(folder, tensors, TinyConfig(), LayerRange{1, 2}).status(), kInvalid,
              {"1 unexpected: 'model.layers.7.mlp.up_proj.weight'"});
  tensors.pop_back();
  EXPECT_TRUE(LoadTiny(folder, tensors, TinyConfig(), LayerRange{1, 2}).ok());
  EXPECT_FALSE(LoadTiny(folder, tensors).ok());
}

TEST(LoadModelTest, ShardsOfOtherSlicesNeedNotBeThere) {
  const TempFolder folder;
  folder.Write("config.json", TinyConfig());
  std::vector<TestTensor> here, elsewhere;
  std::string map;
  for (const TestTensor& tensor : TinyTensors()) {
    const bool other = tensor.name.find("layers.0.") != std::string::npos ||
                       tensor.name == "model.embed_tokens.weight";
    (other ? elsewhere : here).push_back(tensor);
    absl::StrAppend(&map, map.empty() ? "" : ",", "\"", tensor.name, "\":\"",
                    other ? "elsewhere.safetensors" : "here.safetensors", "\"");
  }
  folder.Write("model.safetensors.index.json", absl::StrCat("{\"weight_map\":{", map, "}}"));
  folder.Write("here.safetensors", SafetensorsBytes(here));
  EXPECT_TRUE(LoadModel({.path = folder.path(), .layers = LayerRange{1, 2}}).ok());
  ExpectError(LoadModel({.path = folder.path()}).status(), absl::StatusCode::kNotFound,
              {folder.path(), "'elsewhere.safetensors'"});
  folder.Write("elsewhere.safetensors", SafetensorsBytes(elsewhere));
  const auto whole = LoadModel({.path = folder.path()});
  ASSERT_TRUE(whole.ok()) << whole.status();
  const TempFolder single;
  EXPECT_EQ(whole->weights.fingerprint, LoadTiny(single, TinyTensors())->weights.fingerprint);
}

TEST(LoadModelTest, RefusesBadLayerRanges) {
  const TempFolder folder;
  const LayerRange bad[] = {{-1, 1}, {0, 0}, {1, 1}, {2, 1}, {0, 3}, {2, 3}, {0, INT64_MAX}};
  for (const LayerRange& range : bad) {
    ExpectError(LoadTiny(folder, TinyTensors(), TinyConfig(), range).status(), kInvalid,
                {"layers", "<= 2", absl::StrCat(range.first, ":", range.last)});
  }
}

TEST(LoadModelTest, FilesThatAreNotThereAreNamed) {
  const TempFolder folder;
  ExpectError(LoadModel({.path = ""}).status(), kInvalid, {"path"});
  ExpectError(LoadModel({.path = folder.path() + "/none"}).status(), absl::StatusCode::kNotFound,
              {folder.path() + "/none"});
  ExpectError(LoadModel({.path = folder.path()}).status(), absl::StatusCode::kNotFound,
              {folder.path() + "/config.json"});
  folder.Write("config.json", TinyConfig());
  ExpectError(LoadModel({.path = folder.path()}).status(), absl::StatusCode::kNotFound,
              {folder.path(), "model.safetensors"});
}

TEST(LoadModelTest, TheFingerprintFollowsEveryWeightAndDimension) {
  const TempFolder folder;
  const auto fingerprint = [&folder](const std::function<void(std::vector<TestTensor>*)>& change,
                                     const std::string& config = TinyConfig()) {
    std::vector<TestTensor> tensors = TinyTensors();
    change(&tensors);
    const auto model = LoadTiny(folder, tensors, config);
    EXPECT_TRUE(model.ok()) << model.status();
    return model.ok() ? model->weights.fingerprint : "";
  };
  const auto nothing = [](std::vector<TestTensor>*) {};
  const std::string original = fingerprint(nothing);
  EXPECT_EQ(original.size(), 16u);
  EXPECT_EQ(original.find_first_not_of("0123456789abcdef"), std::string::npos);
  EXPECT_EQ(fingerprint(nothing), original);
  for (const TestTensor& tensor : TinyTensors()) {
    // Lowest bit of the mantissa of the last element.
    const auto flip = [&tensor](std::vector<TestTensor>* tensors) {
      std::string& bytes = Find(tensors, tensor.name)->bytes;
      char& byte = bytes[bytes.size() - 2];
      byte = static_cast<char>(byte ^ (tensor.shape.size() == 1 ? 0x40 : 0x01));
    };
    EXPECT_NE(fingerprint(flip), original) << tensor.name;
  }
  EXPECT_NE(fingerprint(nothing, TinyConfig({{"rms_norm_eps", "1e-5"}})), original);
  EXPECT_NE(fingerprint(nothing, TinyConfig({{"output_gate_type", "\"sigmoid\""}})), original);
  // What does not decide the function does not count.
  EXPECT_EQ(fingerprint(nothing, TinyConfig({{"eos_token_id", "1"}})), original);
  EXPECT_EQ(fingerprint([](auto* t) { std::reverse(t->begin(), t->end()); }), original);
}

TEST(LoadModelTest, LoadsTheModelsOfTheRepository) {
  const auto demo = LoadModel({.path = std::string(kDemo) + "/"});
  ASSERT_TRUE(demo.ok()) << demo.status();
  EXPECT_EQ(demo->name, "demo-gdn-7m");
  EXPECT_EQ(demo->spec.num_layers, 6);
  EXPECT_EQ(demo->spec.vocab_size, 260);
  EXPECT_EQ(demo->spec.eos_token_ids, std::vector<int32_t>{257});
  EXPECT_EQ(demo->spec.bos_token_id, std::optional<int32_t>(256));
  EXPECT_TRUE(demo->spec.tied_embedding);
  EXPECT_EQ(demo->weights.num_parameters, 6792240);
  EXPECT_TRUE(demo->unknown_config_keys.empty());

  const std::string folder = GDN_SOURCE_DIR "/tests/data/models/";
  const auto d64 = LoadModel({.path = folder + "qwen3_5-pure-d64"});
  ASSERT_TRUE(d64.ok()) << d64.status();
  EXPECT_TRUE(d64->spec.tied_embedding);
  EXPECT_EQ(d64->spec.gdn.key_dim, 64);
  const auto r3 = LoadModel({.path = folder + "qwen3_5-pure-r3"});
  ASSERT_TRUE(r3.ok()) << r3.status();
  EXPECT_FALSE(r3->spec.tied_embedding);
  EXPECT_EQ(r3->spec.gdn.value_heads, 3 * r3->spec.gdn.key_heads);
}

}  // namespace
}  // namespace gdn::model
