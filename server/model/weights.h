// File: weights.h
//
// The internal weight layout: what every supported checkpoint becomes before the pipeline sees it.
//
// Matrices are views of the checkpoint's memory ([out, in] row-major, as stored); the small vectors
// are materialised in FP32, norms as the multiplier to use, so that no later code asks whether a
// family's norms are zero-centred. A Weights object owns or keeps alive everything its views name:
// a pipeline that has packed its matrices drops it, and with it the mappings. The files must not
// change while they are mapped.
#ifndef SERVER_MODEL_WEIGHTS_H_
#define SERVER_MODEL_WEIGHTS_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "server/model/model_spec.h"

namespace gdn::model {

enum class ElementType { kF32, kBF16, kF16 };

inline size_t SizeOf(ElementType type) { return type == ElementType::kF32 ? 4 : 2; }

// A [rows, cols] matrix, dense, row-major, aligned to its element size.
struct MatrixView {
  const std::byte* data = nullptr;
  ElementType type = ElementType::kF32;
  int64_t rows = 0;
  int64_t cols = 0;
};

struct GdnLayerWeights {
  LayerType type = LayerType::kLinearAttention;
  std::vector<float> input_norm;  // [hidden] multiplier
  MatrixView qkv;                 // [2*H*K + HV*V, hidden]
  MatrixView z;                   // [HV*V, hidden]
  MatrixView b;                   // [HV, hidden]
  MatrixView a;                   // [HV, hidden]
  MatrixView in_proj;             // gdn2, in place of the four: rows q|k|v|z|f|b|w
  std::vector<float> conv;        // [conv_channels, W], tap W-1 newest
  std::vector<float> a_log;       // [HV]; gdn2 [H]
  std::vector<float> dt_bias;     // [HV]; gdn2 [H*K]
  std::vector<float> gated_norm;  // [V] multiplier
  MatrixView out;                 // [hidden, HV*V]
  std::vector<float> mlp_norm;    // [hidden] multiplier
  MatrixView gate;                // [intermediate, hidden]
  MatrixView up;                  // [intermediate, hidden]
  MatrixView down;                // [hidden, intermediate]

  // The blocks of the joint projection, in the order of its columns.
  std::vector<MatrixView> projection() const {
    if (type == LayerType::kGdn2) return {in_proj};
    return {qkv, z, b, a};
  }
};

struct Weights {
  std::optional<MatrixView> embedding;  // [vocab, hidden]; with layer 0, or as the tied head
  std::vector<GdnLayerWeights> layers;  // of the LayerRange, in order
  std::vector<float> final_norm;        // [hidden] multiplier; empty without the head
  std::optional<MatrixView> head;       // [vocab, hidden]; the embedding where tied
  int64_t num_parameters = 0;           // of what is held
  std::string fingerprint;              // 16 hex digits over configuration, layer range and weights
  std::vector<std::shared_ptr<const void>> storage;  // keeps the views alive
};

struct LoadOptions {
  std::string path;                        // Folder with config.json, or a config file in it.
  std::optional<LayerRange> layers;        // Default: all.
  std::optional<uint64_t> random_weights;  // Seed: make the weights up, read config.json alone.
};

struct Model {
  std::string name;  // Last component of the path.
  ModelSpec spec;
  LayerRange layers;
  Weights weights;
  std::vector<std::string> unknown_config_keys;  // Ignored by the loader; to be logged.
};

// Loads and fully validates a checkpoint. Everything that is wrong with the tensors is reported in
// one status, by name: missing, unexpected, wrong shape, wrong type.
//   NOT_FOUND            a file is missing
//   INVALID_ARGUMENT     malformed or inconsistent files; absurd dimensions; bad layer range
//   UNIMPLEMENTED        architecture, layer type, quantisation, rope type, ...: the message has
//                        its name and the list of what is supported
//   RESOURCE_EXHAUSTED   not enough memory for random weights
absl::StatusOr<Model> LoadModel(const LoadOptions& options);

}  // namespace gdn::model

#endif  // SERVER_MODEL_WEIGHTS_H_
