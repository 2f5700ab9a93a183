#include "server/pipeline/cuda/device_model.h"

#include <chrono>
#include <span>

#include "server/pipeline/cuda/weight_upload.h"

namespace gdn::pipeline {
namespace {

// Gives out aligned pieces of one allocation. Run once to measure, with no memory, and once to
// fill.
class Arena {
 public:
  explicit Arena(std::byte* memory) : memory_(memory) {}
  template <typename T>
  T* Take(int64_t count) {
    T* piece = memory_ == nullptr ? nullptr : reinterpret_cast<T*>(memory_ + used_);
    used_ += (count * static_cast<int64_t>(sizeof(T)) + kAlignment - 1) / kAlignment * kAlignment;
    return piece;
  }
  int64_t used() const { return used_; }

 private:
  static constexpr int64_t kAlignment = 256;
  std::byte* memory_;
  int64_t used_ = 0;
};

// Places every weight; with an upload, fills it too.
class Placer {
 public:
  Placer(std::byte* memory, WeightUpload* upload) : arena_(memory), upload_(upload) {}

  absl::Status Matrices(const std::vector<model::MatrixView>& blocks, uint16_t** place) {
    int64_t elements = 0;
    for (const model::MatrixView& block : blocks) elements += block.rows * block.cols;
    *place = arena_.Take<uint16_t>(elements);
    matrix_bytes_ += elements * static_cast<int64_t>(sizeof(uint16_t));
    uint16_t* to = *place;
    for (const model::MatrixView& block : blocks) {
      if (upload_ == nullptr) continue;
      GDN_RETURN_IF_ERROR(upload_->Matrix(block, to));
      to += block.rows * block.cols;
    }
    return absl::OkStatus();
  }

  absl::Status Vector(std::span<const float> values, float** place) {
    *place = arena_.Take<float>(static_cast<int64_t>(values.size()));
    return upload_ == nullptr ? absl::OkStatus() : upload_->Floats(values, *place);
  }

  int64_t bytes() const { return arena_.used(); }
  int64_t matrix_bytes() const { return matrix_bytes_; }

 private:
  Arena arena_;
  WeightUpload* upload_;
  int64_t matrix_bytes_ = 0;
};

absl::Status Place(const model::Weights& weights, const model::LayerRange& range, Placer* placer,
                   DeviceModel* model) {
  model->layers.clear();
  for (const model::GdnLayerWeights& layer : weights.layers) {
    DeviceLayer& out = model->layers.emplace_back();
    GDN_RETURN_IF_ERROR(placer->Vector(layer.input_norm, &out.input_norm));
    out.type = layer.type;
    GDN_RETURN_IF_ERROR(placer->Matrices(layer.projection(), &out.in_proj));
    GDN_RETURN_IF_ERROR(placer->Vector(layer.conv, &out.conv));
    GDN_RETURN_IF_ERROR(placer->Vector(layer.a_log, &out.a_log));
    GDN_RETURN_IF_ERROR(placer->Vector(layer.dt_bias, &out.dt_bias));
    GDN_RETURN_IF_ERROR(placer->Vector(layer.gated_norm, &out.gated_norm));
    GDN_RETURN_IF_ERROR(placer->Matrices({layer.out}, &out.out_proj));
    GDN_RETURN_IF_ERROR(placer->Vector(layer.mlp_norm, &out.mlp_norm));
    GDN_RETURN_IF_ERROR(placer->Matrices({layer.gate, layer.up}, &out.gate_up));
    GDN_RETURN_IF_ERROR(placer->Matrices({layer.down}, &out.down));
  }
  if (weights.head.has_value()) {
    GDN_RETURN_IF_ERROR(placer->Vector(weights.final_norm, &model->final_norm));
    GDN_RETURN_IF_ERROR(placer->Matrices({*weights.head}, &model->head));
  }
  model->matrix_bytes = placer->matrix_bytes();
  if (range.has_embedding() && weights.embedding.has_value()) {
    const bool tied = weights.head.has_value() && weights.head->data == weights.embedding->data;
    if (tied) {
      model->embedding = model->head;
    } else {
      GDN_RETURN_IF_ERROR(placer->Matrices({*weights.embedding}, &model->embedding));
    }
  }
  return absl::OkStatus();
}

}  // namespace

// NOLINTNEXTLINE(performance-unnecessary-value-param): the host's memory goes with the call.
absl::Status DeviceModel::Load(model::Weights weights, const model::LayerRange& range) {
  Placer measure(nullptr, nullptr);
  GDN_RETURN_IF_ERROR(Place(weights, range, &measure, this));
  GDN_RETURN_IF_ERROR(memory.Allocate(measure.bytes(), "cannot allocate the weights"));
  const auto start = std::chrono::steady_clock::now();
  WeightUpload upload;
  GDN_RETURN_IF_ERROR(upload.Create());
  Placer fill(memory.data(), &upload);
  GDN_RETURN_IF_ERROR(Place(weights, range, &fill, this));
  GDN_RETURN_IF_ERROR(upload.Finish());
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
  upload_bytes_per_second = static_cast<double>(upload.bytes()) / took.count();
  return absl::OkStatus();
}

}  // namespace gdn::pipeline
