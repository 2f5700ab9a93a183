// The tensors a model consists of: canonical name, shape, and where each goes in Weights. The one
// table that loading, random weights and the check for unexpected tensors share.
#ifndef SERVER_MODEL_TENSOR_SLOTS_H_
#define SERVER_MODEL_TENSOR_SLOTS_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "server/model/model_spec.h"
#include "server/model/weights.h"

namespace gdn::model {

// What a tensor is, for random initialisation and for the form it is kept in.
enum class TensorKind {
  kMatrix,
  kNorm,             // A multiplier.
  kZeroCentredNorm,  // Stored as w, the multiplier is 1 + w.
  kConv,
  kALog,
  kDtBias,
};

struct TensorSlot {
  std::string name;  // "model.layers.0.mlp.up_proj.weight"
  std::vector<int64_t> shape;
  TensorKind kind = TensorKind::kMatrix;
  // Exactly one of them is set, pointing into the Weights the table was made for.
  MatrixView* matrix = nullptr;
  std::vector<float>* vector = nullptr;

  int64_t elements() const;
};

// Sizes `weights` for the range, and returns a slot for every tensor it needs. A tied head has no
// slot: set Weights::head once the embedding is there. The slots point into `weights`.
std::vector<TensorSlot> BindSlots(const ModelSpec& spec, const LayerRange& range, Weights* weights);

inline constexpr char kHeadName[] = "lm_head.weight";

// A checkpoint's own name with the vision-language prefix "model.language_model." made "model.".
// Null for tensors of parts that are not served: "model.visual.", "mtp.".
std::optional<std::string> CanonicalName(const std::string& name);

}  // namespace gdn::model

#endif  // SERVER_MODEL_TENSOR_SLOTS_H_
