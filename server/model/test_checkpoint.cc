#include "server/model/test_checkpoint.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace gdn::model::testing {
namespace {

template <typename T>
void Append(T value, std::string* bytes) {
  char raw[sizeof(T)];
  std::memcpy(raw, &value, sizeof(T));
  bytes->append(raw, sizeof(T));
}

int64_t Elements(const std::vector<int64_t>& shape) {
  int64_t product = 1;
  for (const int64_t dimension : shape) product *= dimension;
  return product;
}

}  // namespace

TempFolder::TempFolder() {
  std::string pattern = (std::filesystem::temp_directory_path() / "gdn_model_XXXXXX").string();
  if (mkdtemp(pattern.data()) == nullptr) std::abort();
  path_ = pattern;
}

TempFolder::~TempFolder() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

std::string TempFolder::Write(const std::string& file, const std::string& bytes) const {
  std::string path = absl::StrCat(path_, "/", file);
  std::ofstream stream(path, std::ios::binary);
  stream.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  stream.close();
  EXPECT_TRUE(stream.good()) << path;
  return path;
}

std::string SafetensorsBytes(uint64_t length, const std::string& header, const std::string& data) {
  std::string file;
  for (int i = 0; i < 8; ++i) file.push_back(static_cast<char>(length >> (8 * i)));
  return file + header + data;
}

std::string SafetensorsBytes(const std::string& header, const std::string& data) {
  return SafetensorsBytes(header.size(), header, data);
}

std::string SafetensorsBytes(const std::vector<TestTensor>& tensors, int padding) {
  std::string header = R"({"__metadata__":{"format":"pt"})";
  std::string data;
  for (const TestTensor& tensor : tensors) {
    const size_t begin = data.size();
    data += tensor.bytes;
    absl::StrAppend(&header, ",\"", tensor.name, R"(":{"dtype":")", tensor.dtype, R"(","shape":[)",
                    absl::StrJoin(tensor.shape, ","), R"(],"data_offsets":[)", begin, ",",
                    data.size(), "]}");
  }
  header += "}";
  header.append((8 - header.size() % 8) % 8 + static_cast<size_t>(padding), ' ');
  return SafetensorsBytes(header, data);
}

float TinyValue(const std::string& name, int64_t i) {
  uint32_t hash = 2166136261u;
  for (const char c : absl::StrCat(name, "#", i)) {
    hash = (hash ^ static_cast<unsigned char>(c)) * 16777619u;
  }
  return (static_cast<float>(hash % 127) - 63.0f) / 64.0f;  // Six bits and a sign.
}

TestTensor F32Tensor(const std::string& name, const std::vector<int64_t>& shape) {
  TestTensor tensor{name, "F32", shape, ""};
  for (int64_t i = 0; i < Elements(shape); ++i) Append(TinyValue(name, i), &tensor.bytes);
  return tensor;
}

TestTensor Bf16Tensor(const std::string& name, const std::vector<int64_t>& shape) {
  TestTensor tensor{name, "BF16", shape, ""};
  for (int64_t i = 0; i < Elements(shape); ++i) {
    const auto bits = std::bit_cast<uint32_t>(TinyValue(name, i));
    Append(static_cast<uint16_t>(bits >> 16), &tensor.bytes);
  }
  return tensor;
}

TestTensor F16Tensor(const std::string& name, const std::vector<int64_t>& shape) {
  TestTensor tensor{name, "F16", shape, ""};
  for (int64_t i = 0; i < Elements(shape); ++i) {
    // Normal in half precision, with a mantissa that fits: rebias the exponent, shift the rest.
    const auto bits = std::bit_cast<uint32_t>(TinyValue(name, i));
    const uint32_t magnitude = bits & 0x7fffffffu;
    const uint32_t half = magnitude == 0 ? 0 : (magnitude - (112u << 23)) >> 13;
    Append(static_cast<uint16_t>((bits >> 16 & 0x8000u) | half), &tensor.bytes);
  }
  return tensor;
}

std::string TinyConfig(const std::map<std::string, std::string>& overrides) {
  std::map<std::string, std::string> keys = {
      {"architectures", R"(["Qwen3_5ForCausalLM"])"},
      {"model_type", R"("qwen3_5_text")"},
      {"vocab_size", "6"},
      {"hidden_size", "4"},
      {"intermediate_size", "5"},
      {"num_hidden_layers", "2"},
      {"layer_types", R"(["linear_attention","linear_attention"])"},
      {"linear_num_key_heads", "1"},
      {"linear_num_value_heads", "2"},
      {"linear_key_head_dim", "2"},
      {"linear_value_head_dim", "3"},
      {"linear_conv_kernel_dim", "2"},
      {"rms_norm_eps", "1e-06"},
      {"eos_token_id", "5"},
      {"tie_word_embeddings", "false"},
  };
  for (const auto& [key, value] : overrides) keys[key] = value;
  std::vector<std::string> members;
  for (const auto& [key, value] : keys) {
    if (!value.empty()) members.push_back(absl::StrCat("\"", key, "\":", value));
  }
  return absl::StrCat("{", absl::StrJoin(members, ",\n"), "}");
}

std::vector<TestTensor> TinyTensors(const std::string& prefix) {
  std::vector<TestTensor> tensors = {Bf16Tensor("lm_head.weight", {6, 4}),
                                     Bf16Tensor(prefix + "embed_tokens.weight", {6, 4}),
                                     Bf16Tensor(prefix + "norm.weight", {4})};
  for (int layer = 0; layer < 2; ++layer) {
    const std::string p = absl::StrCat(prefix, "layers.", layer, ".");
    tensors.push_back(Bf16Tensor(p + "input_layernorm.weight", {4}));
    tensors.push_back(Bf16Tensor(p + "linear_attn.A_log", {2}));
    tensors.push_back(Bf16Tensor(p + "linear_attn.conv1d.weight", {10, 1, 2}));
    tensors.push_back(Bf16Tensor(p + "linear_attn.dt_bias", {2}));
    tensors.push_back(Bf16Tensor(p + "linear_attn.in_proj_a.weight", {2, 4}));
    tensors.push_back(Bf16Tensor(p + "linear_attn.in_proj_b.weight", {2, 4}));
    tensors.push_back(Bf16Tensor(p + "linear_attn.in_proj_qkv.weight", {10, 4}));
    tensors.push_back(Bf16Tensor(p + "linear_attn.in_proj_z.weight", {6, 4}));
    tensors.push_back(Bf16Tensor(p + "linear_attn.norm.weight", {3}));
    tensors.push_back(Bf16Tensor(p + "linear_attn.out_proj.weight", {4, 6}));
    tensors.push_back(Bf16Tensor(p + "mlp.down_proj.weight", {4, 5}));
    tensors.push_back(Bf16Tensor(p + "mlp.gate_proj.weight", {5, 4}));
    tensors.push_back(Bf16Tensor(p + "mlp.up_proj.weight", {5, 4}));
    tensors.push_back(Bf16Tensor(p + "post_attention_layernorm.weight", {4}));
  }
  return tensors;
}

std::string TinyGdn2Config(const std::map<std::string, std::string>& overrides) {
  std::map<std::string, std::string> keys = {{"architectures", R"(["Gdn2ForCausalLM"])"},
                                             {"model_type", R"("gdn2")"},
                                             {"layer_types", R"(["gdn2","linear_attention"])"}};
  for (const auto& [key, value] : overrides) keys[key] = value;
  return TinyConfig(keys);
}

std::vector<TestTensor> TinyGdn2Tensors() {
  std::vector<TestTensor> tensors = TinyTensors();
  const std::string own = "model.layers.0.linear_attn.";
  std::erase_if(tensors, [&own](const TestTensor& t) { return t.name.starts_with(own); });
  const std::string p = "model.layers.0.gdn2.";
  tensors.push_back(Bf16Tensor(p + "A_log", {1}));
  tensors.push_back(Bf16Tensor(p + "conv1d.weight", {10, 1, 2}));
  tensors.push_back(Bf16Tensor(p + "dt_bias", {2}));
  tensors.push_back(Bf16Tensor(p + "in_proj.weight", {26, 4}));
  tensors.push_back(Bf16Tensor(p + "out_norm.weight", {3}));
  tensors.push_back(Bf16Tensor(p + "out_proj.weight", {4, 6}));
  return tensors;
}

void ExpectError(const absl::Status& status, absl::StatusCode code,
                 const std::vector<std::string>& fragments) {
  EXPECT_EQ(status.code(), code) << status;
  const std::string message(status.message().data(), status.message().size());
  for (const std::string& fragment : fragments) {
    EXPECT_THAT(message, ::testing::HasSubstr(fragment));
  }
}

}  // namespace gdn::model::testing
