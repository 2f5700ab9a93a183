#include <cmath>
#include <cstring>
#include <map>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/model/checkpoint.h"
#include "server/model/element_convert.h"
#include "server/model/quote.h"
#include "server/model/status_macros.h"
#include "server/model/storage.h"
#include "server/model/tensor_slots.h"
#include "server/model/weight_sources.h"

namespace gdn::model {
namespace {

// Everything wrong with the tensors of one checkpoint, for one message.
struct TensorProblems {
  ProblemList missing;
  ProblemList unexpected;
  ProblemList misshaped;
  ProblemList mistyped;
  ProblemList damaged;

  absl::Status ToStatus(const std::string& folder) const {
    std::string text;
    const auto add = [&text](const char* title, const ProblemList& problems) {
      if (problems.empty()) return;
      absl::StrAppend(&text, text.empty() ? "" : ". ", problems.count(), " ", title, ": ",
                      problems.Joined());
    };
    add("missing", missing);
    add("unexpected", unexpected);
    add("of the wrong shape", misshaped);
    add("of the wrong type", mistyped);
    add("damaged", damaged);
    if (text.empty()) return absl::OkStatus();
    return absl::InvalidArgumentError(
        absl::StrCat(folder, ": the tensors do not fit config.json. ", text));
  }
};

// Canonical name -> the checkpoint's own. Names that two tensors share are reported.
std::map<std::string, std::string> CanonicalNames(const Checkpoint& checkpoint,
                                                  TensorProblems* problems) {
  std::map<std::string, std::string> names;
  for (const std::string& name : checkpoint.TensorNames()) {
    const std::optional<std::string> canonical = CanonicalName(name);
    if (!canonical.has_value()) continue;
    const auto [at, inserted] = names.emplace(*canonical, name);
    if (!inserted) {
      problems->unexpected.Add(
          absl::StrCat(Quoted(name), " (there is ", Quoted(at->second), " too)"));
    }
  }
  return names;
}

float LoadElement(const std::byte* data, ElementType type, int64_t index) {
  if (type == ElementType::kF32) {
    float value = 0;
    std::memcpy(&value, data + 4 * index, sizeof(value));
    return value;
  }
  uint16_t bits = 0;
  std::memcpy(&bits, data + 2 * index, sizeof(bits));
  return type == ElementType::kBF16 ? Bf16ToF32(bits) : F16ToF32(bits);
}

void FillVector(const TensorSlot& slot, const TensorInfo& info, ElementType type,
                TensorProblems* problems) {
  const int64_t elements = slot.elements();
  slot.vector->resize(static_cast<size_t>(elements));
  const float offset = slot.kind == TensorKind::kZeroCentredNorm ? 1.0f : 0.0f;
  for (int64_t i = 0; i < elements; ++i) {
    const float value = LoadElement(info.data.data(), type, i);
    if (!std::isfinite(value)) {
      problems->damaged.Add(absl::StrCat(Quoted(info.name), " element ", i, " is ", value));
      return;
    }
    (*slot.vector)[static_cast<size_t>(i)] = offset + value;
  }
}

absl::Status FillMatrix(const TensorSlot& slot, const Checkpoint::Tensor& tensor, ElementType type,
                        Weights* weights) {
  const std::byte* data = tensor.info->data.data();
  if (reinterpret_cast<uintptr_t>(data) % SizeOf(type) != 0) {
    GDN_ASSIGN_OR_RETURN(Storage copy, AllocateStorage(tensor.info->data.size()));
    std::memcpy(copy.bytes.data(), data, tensor.info->data.size());
    data = copy.bytes.data();
    weights->storage.push_back(std::move(copy.owner));
  }
  *slot.matrix = {data, type, slot.shape[0], slot.shape[1]};
  return absl::OkStatus();
}

absl::Status FillSlot(const TensorSlot& slot, const Checkpoint::Tensor& tensor, Weights* weights,
                      TensorProblems* problems) {
  const TensorInfo& info = *tensor.info;
  if (info.shape != slot.shape) {
    problems->misshaped.Add(absl::StrCat(Quoted(info.name), " expected ", ShapeString(slot.shape),
                                         ", got ", ShapeString(info.shape)));
  }
  if (!info.dtype->weight.has_value()) {
    problems->mistyped.Add(
        absl::StrCat(Quoted(info.name), " expected F32, BF16 or F16, got ", info.dtype->name));
  }
  if (info.shape != slot.shape || !info.dtype->weight.has_value()) return absl::OkStatus();
  weights->num_parameters += slot.elements();
  if (slot.matrix != nullptr) return FillMatrix(slot, tensor, *info.dtype->weight, weights);
  FillVector(slot, info, *info.dtype->weight, problems);
  return absl::OkStatus();
}

std::set<std::string> NamesOfWholeModel(const ModelSpec& spec) {
  Weights scratch;
  std::set<std::string> names;
  for (const TensorSlot& slot : BindSlots(spec, {0, spec.num_layers}, &scratch)) {
    names.insert(slot.name);
  }
  return names;
}

}  // namespace

absl::StatusOr<Weights> LoadCheckpointWeights(const std::string& folder, const LayerRange& range,
                                              ParsedConfig* config) {
  GDN_ASSIGN_OR_RETURN(Checkpoint checkpoint, Checkpoint::Open(folder));
  TensorProblems problems;
  const std::map<std::string, std::string> names = CanonicalNames(checkpoint, &problems);
  ModelSpec& spec = config->spec;
  const bool has_head = names.count(kHeadName) > 0;
  const bool head_is_mandatory = config->tying_is_explicit && !spec.tied_embedding;
  spec.tied_embedding = !has_head && !head_is_mandatory;

  const std::set<std::string> known = NamesOfWholeModel(spec);
  for (const auto& [canonical, name] : names) {
    if (known.count(canonical) == 0) problems.unexpected.Add(Quoted(name));
  }

  Weights weights;
  const std::vector<TensorSlot> slots = BindSlots(spec, range, &weights);
  std::set<std::string> needed;
  for (const TensorSlot& slot : slots) {
    const auto at = names.find(slot.name);
    if (at != names.end()) {
      needed.insert(at->second);
      continue;
    }
    problems.missing.Add(absl::StrCat(
        Quoted(slot.name), " ", ShapeString(slot.shape),
        slot.name == kHeadName ? " (config.json says tie_word_embeddings is false)" : ""));
  }
  GDN_RETURN_IF_ERROR(
      checkpoint.OpenShards([&needed](const std::string& name) { return needed.count(name) > 0; }));

  std::set<std::shared_ptr<const void>> files;
  for (const TensorSlot& slot : slots) {
    const auto at = names.find(slot.name);
    if (at == names.end()) continue;
    const Checkpoint::Tensor tensor = checkpoint.Get(at->second);
    GDN_RETURN_IF_ERROR(FillSlot(slot, tensor, &weights, &problems));
    if (slot.matrix != nullptr) files.insert(tensor.file);
  }
  GDN_RETURN_IF_ERROR(problems.ToStatus(folder));
  weights.storage.insert(weights.storage.end(), files.begin(), files.end());
  if (range.has_head(spec) && spec.tied_embedding) weights.head = weights.embedding;
  return weights;
}

}  // namespace gdn::model
