#include "server/pipeline/packed_weights.h"

#include <string>
#include <utility>

#include "server/pipeline/kernel_status.h"

namespace gdn::pipeline {
namespace {

gdn_dtype ToDtype(model::ElementType type) {
  switch (type) {
    case model::ElementType::kF32:
      return GDN_F32;
    case model::ElementType::kBF16:
      return GDN_BF16;
    case model::ElementType::kF16:
      return GDN_F16;
  }
  return GDN_F32;
}

absl::Status Pack(const std::vector<model::MatrixView>& blocks, const PackOptions& options,
                  const char* name, PackedWeight* packed) {
  std::vector<gdn_weight_rows> rows;
  rows.reserve(blocks.size());
  for (const model::MatrixView& block : blocks) {
    rows.push_back({block.data, ToDtype(block.type), block.rows});
  }
  gdn_packed_weight* raw = nullptr;
  const gdn_status status = gdn_packed_weight_create(
      options.backend, options.math, blocks.front().cols, rows.data(),
      static_cast<int32_t>(rows.size()), options.row_block, options.threads, &raw);
  packed->reset(raw);
  return KernelStatus(status, name);
}

int64_t Bytes(const PackedWeight& weight) {
  return weight == nullptr ? 0 : static_cast<int64_t>(gdn_packed_weight_bytes(weight.get()));
}

}  // namespace

int64_t PackedModel::matrix_bytes() const {
  int64_t bytes = static_cast<int64_t>(embedding.size()) + Bytes(head);
  for (const PackedLayer& layer : layers) {
    bytes +=
        Bytes(layer.in_proj) + Bytes(layer.out_proj) + Bytes(layer.gate_up) + Bytes(layer.down);
  }
  return bytes;
}

absl::StatusOr<PackedModel> PackWeights(model::Weights weights, const model::LayerRange& range,
                                        const PackOptions& options) {
  PackedModel packed;
  if (range.has_embedding() && weights.embedding.has_value()) {
    const model::MatrixView& table = *weights.embedding;
    const auto bytes = static_cast<size_t>(table.rows * table.cols) * model::SizeOf(table.type);
    packed.embedding.assign(table.data, table.data + bytes);
    packed.embedding_type = ToDtype(table.type);
  }
  for (model::GdnLayerWeights& layer : weights.layers) {
    PackedLayer& out = packed.layers.emplace_back();
    out.type = layer.type;
    GDN_RETURN_IF_ERROR(Pack(layer.projection(), options, "pack in_proj", &out.in_proj));
    GDN_RETURN_IF_ERROR(Pack({layer.out}, options, "pack out_proj", &out.out_proj));
    GDN_RETURN_IF_ERROR(Pack({layer.gate, layer.up}, options, "pack gate_up_proj", &out.gate_up));
    GDN_RETURN_IF_ERROR(Pack({layer.down}, options, "pack down_proj", &out.down));
    out.input_norm = std::move(layer.input_norm);
    out.conv = std::move(layer.conv);
    out.a_log = std::move(layer.a_log);
    out.dt_bias = std::move(layer.dt_bias);
    out.gated_norm = std::move(layer.gated_norm);
    out.mlp_norm = std::move(layer.mlp_norm);
  }
  if (weights.head.has_value()) {
    GDN_RETURN_IF_ERROR(Pack({*weights.head}, options, "pack head", &packed.head));
    packed.final_norm = std::move(weights.final_norm);
  }
  return packed;
}

}  // namespace gdn::pipeline
