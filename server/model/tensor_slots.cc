#include "server/model/tensor_slots.h"

#include <utility>

#include "absl/strings/str_cat.h"

namespace gdn::model {
namespace {

class SlotTable {
 public:
  void Matrix(std::string name, int64_t rows, int64_t cols, MatrixView* target) {
    slots_.push_back({std::move(name), {rows, cols}, TensorKind::kMatrix, target, nullptr});
  }
  void Vector(std::string name, std::vector<int64_t> shape, TensorKind kind,
              std::vector<float>* target) {
    slots_.push_back({std::move(name), std::move(shape), kind, nullptr, target});
  }
  std::vector<TensorSlot> Take() { return std::move(slots_); }

 private:
  std::vector<TensorSlot> slots_;
};

std::string LayerName(int64_t layer, const char* suffix) {
  return absl::StrCat("model.layers.", layer, ".", suffix);
}

void AddLinearAttention(const ModelSpec& spec, int64_t layer, GdnLayerWeights* w,
                        SlotTable* table) {
  const GdnDims& gdn = spec.gdn;
  const int64_t hidden = spec.hidden_size;
  const auto name = [layer](const char* suffix) { return LayerName(layer, suffix); };
  table->Matrix(name("linear_attn.in_proj_qkv.weight"), gdn.conv_channels(), hidden, &w->qkv);
  table->Matrix(name("linear_attn.in_proj_z.weight"), gdn.value_size(), hidden, &w->z);
  table->Matrix(name("linear_attn.in_proj_b.weight"), gdn.value_heads, hidden, &w->b);
  table->Matrix(name("linear_attn.in_proj_a.weight"), gdn.value_heads, hidden, &w->a);
  table->Vector(name("linear_attn.conv1d.weight"), {gdn.conv_channels(), 1, gdn.conv_width},
                TensorKind::kConv, &w->conv);
  table->Vector(name("linear_attn.A_log"), {gdn.value_heads}, TensorKind::kALog, &w->a_log);
  table->Vector(name("linear_attn.dt_bias"), {gdn.value_heads}, TensorKind::kDtBias, &w->dt_bias);
  table->Vector(name("linear_attn.norm.weight"), {gdn.value_dim}, TensorKind::kNorm,
                &w->gated_norm);
  table->Matrix(name("linear_attn.out_proj.weight"), hidden, gdn.value_size(), &w->out);
}

// Megatron's names and its one joint projection. The gates belong to the key heads.
void AddGdn2(const ModelSpec& spec, int64_t layer, GdnLayerWeights* w, SlotTable* table) {
  const GdnDims& gdn = spec.gdn;
  const int64_t hidden = spec.hidden_size;
  const auto name = [layer](const char* suffix) { return LayerName(layer, suffix); };
  table->Matrix(name("gdn2.in_proj.weight"), gdn.projection_size(LayerType::kGdn2), hidden,
                &w->in_proj);
  table->Vector(name("gdn2.conv1d.weight"), {gdn.conv_channels(), 1, gdn.conv_width},
                TensorKind::kConv, &w->conv);
  table->Vector(name("gdn2.A_log"), {gdn.key_heads}, TensorKind::kALog, &w->a_log);
  table->Vector(name("gdn2.dt_bias"), {gdn.key_size()}, TensorKind::kDtBias, &w->dt_bias);
  table->Vector(name("gdn2.out_norm.weight"), {gdn.value_dim}, TensorKind::kNorm, &w->gated_norm);
  table->Matrix(name("gdn2.out_proj.weight"), hidden, gdn.value_size(), &w->out);
}

void AddLayer(const ModelSpec& spec, int64_t layer, GdnLayerWeights* w, SlotTable* table) {
  const int64_t hidden = spec.hidden_size;
  const int64_t inner = spec.intermediate_size;
  const auto name = [layer](const char* suffix) { return LayerName(layer, suffix); };
  w->type = spec.layer_types[static_cast<size_t>(layer)];
  table->Vector(name("input_layernorm.weight"), {hidden}, TensorKind::kZeroCentredNorm,
                &w->input_norm);
  if (w->type == LayerType::kGdn2) {
    AddGdn2(spec, layer, w, table);
  } else {
    AddLinearAttention(spec, layer, w, table);
  }
  table->Vector(name("post_attention_layernorm.weight"), {hidden}, TensorKind::kZeroCentredNorm,
                &w->mlp_norm);
  table->Matrix(name("mlp.gate_proj.weight"), inner, hidden, &w->gate);
  table->Matrix(name("mlp.up_proj.weight"), inner, hidden, &w->up);
  table->Matrix(name("mlp.down_proj.weight"), hidden, inner, &w->down);
}

bool ConsumePrefix(const char* prefix, std::string* text) {
  const std::string_view view(prefix);
  if (text->compare(0, view.size(), prefix) != 0) return false;
  text->erase(0, view.size());
  return true;
}

}  // namespace

int64_t TensorSlot::elements() const {
  int64_t product = 1;
  for (const int64_t dimension : shape) product *= dimension;
  return product;
}

std::vector<TensorSlot> BindSlots(const ModelSpec& spec, const LayerRange& range,
                                  Weights* weights) {
  SlotTable table;
  const bool has_head = range.has_head(spec);
  weights->embedding.reset();
  weights->head.reset();
  if (range.has_embedding() || (has_head && spec.tied_embedding)) {
    table.Matrix("model.embed_tokens.weight", spec.vocab_size, spec.hidden_size,
                 &weights->embedding.emplace());
  }
  weights->layers.resize(static_cast<size_t>(range.size()));
  for (int64_t i = 0; i < range.size(); ++i) {
    AddLayer(spec, range.first + i, &weights->layers[static_cast<size_t>(i)], &table);
  }
  if (has_head) {
    table.Vector("model.norm.weight", {spec.hidden_size}, TensorKind::kZeroCentredNorm,
                 &weights->final_norm);
    if (!spec.tied_embedding) {
      table.Matrix(kHeadName, spec.vocab_size, spec.hidden_size, &weights->head.emplace());
    }
  }
  return table.Take();
}

std::optional<std::string> CanonicalName(const std::string& name) {
  std::string rest = name;
  if (ConsumePrefix("model.language_model.", &rest)) return "model." + rest;
  if (ConsumePrefix("model.visual.", &rest) || ConsumePrefix("mtp.", &rest)) return std::nullopt;
  return name;
}

}  // namespace gdn::model
