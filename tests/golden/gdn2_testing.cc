#include "tests/golden/gdn2_testing.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <memory>
#include <utility>

#include "server/model/element_convert.h"
#include "tests/golden/testing.h"

namespace gdn::golden {
namespace {

// Rows of a matrix one behind the other, for a new one in FP32.
class RowWriter {
 public:
  // Row `row` of the matrix, `copies` times.
  void Append(const model::MatrixView& from, int64_t row, int64_t copies = 1) {
    cols_ = from.cols;
    for (int64_t copy = 0; copy < copies; ++copy) {
      for (int64_t c = 0; c < from.cols; ++c) {
        const auto* bits = reinterpret_cast<const uint16_t*>(from.data) + row * from.cols + c;
        values_->push_back(model::Bf16ToF32(*bits));
      }
    }
  }
  model::MatrixView Take(model::Weights* weights) {
    weights->storage.push_back(values_);
    return {reinterpret_cast<const std::byte*>(values_->data()), model::ElementType::kF32,
            static_cast<int64_t>(values_->size()) / cols_, cols_};
  }

 private:
  std::shared_ptr<std::vector<float>> values_ = std::make_shared<std::vector<float>>();
  int64_t cols_ = 1;
};

// The channels of q|k|v, with a key head for each value head.
std::vector<int64_t> ReplicatedChannels(const model::GdnDims& dims) {
  std::vector<int64_t> channels;
  for (int64_t part = 0; part < 2; ++part) {
    for (int64_t hv = 0; hv < dims.value_heads; ++hv) {
      const int64_t head = hv / (dims.value_heads / dims.key_heads);
      for (int64_t i = 0; i < dims.key_dim; ++i) {
        channels.push_back(part * dims.key_size() + head * dims.key_dim + i);
      }
    }
  }
  for (int64_t j = 0; j < dims.value_size(); ++j) channels.push_back(2 * dims.key_size() + j);
  return channels;
}

void ConvertLayer(const model::GdnDims& dims, model::GdnLayerWeights* layer,
                  model::Weights* weights) {
  EXPECT_EQ(layer->qkv.type, model::ElementType::kBF16);
  RowWriter rows;
  std::vector<float> conv;
  for (const int64_t channel : ReplicatedChannels(dims)) {
    rows.Append(layer->qkv, channel);
    const auto taps = layer->conv.begin() + channel * dims.conv_width;
    conv.insert(conv.end(), taps, taps + dims.conv_width);
  }
  for (int64_t j = 0; j < dims.value_size(); ++j) rows.Append(layer->z, j);
  std::vector<float> dt_bias;
  for (int64_t hv = 0; hv < dims.value_heads; ++hv) {
    rows.Append(layer->a, hv, dims.key_dim);
    dt_bias.insert(dt_bias.end(), static_cast<size_t>(dims.key_dim),
                   layer->dt_bias[static_cast<size_t>(hv)]);
  }
  for (int64_t hv = 0; hv < dims.value_heads; ++hv) rows.Append(layer->b, hv, dims.key_dim);
  for (int64_t hv = 0; hv < dims.value_heads; ++hv) rows.Append(layer->b, hv, dims.value_dim);
  layer->type = model::LayerType::kGdn2;
  layer->in_proj = rows.Take(weights);
  layer->conv = std::move(conv);
  layer->dt_bias = std::move(dt_bias);
}

}  // namespace

model::Model LoadRandom(const std::string& model_dir, uint64_t seed) {
  model::LoadOptions load;
  load.path = model_dir;
  load.random_weights = seed;
  auto model = model::LoadModel(load);
  EXPECT_TRUE(model.ok()) << model.status();
  if (!model.ok()) std::abort();
  return *std::move(model);
}

model::Model AsGdn2(model::Model model, const std::vector<bool>& convert) {
  model::GdnDims& dims = model.spec.gdn;
  for (size_t i = 0; i < model.weights.layers.size(); ++i) {
    if (!convert.empty() && !convert[i]) continue;
    ConvertLayer(dims, &model.weights.layers[i], &model.weights);
    model.spec.layer_types[i] = model::LayerType::kGdn2;
  }
  EXPECT_TRUE(convert.empty() || dims.key_heads == dims.value_heads);
  dims.key_heads = dims.value_heads;
  return model;
}

void ExpectReference(pipeline::Pipeline* pipeline, const model::Model& model,
                     const ReferenceBounds& bounds) {
  const auto vocab = static_cast<size_t>(model.spec.vocab_size);
  for (const size_t length : {1u, 2u, 65u, 150u}) {
    SCOPED_TRACE(length);
    const std::vector<int32_t> tokens = TextTokens(length, length);
    const ReferenceRun reference = RunReference(model, tokens);
    Session whole(pipeline, 1);
    Session stepped(pipeline, 2);
    const std::vector<float> whole_rows = whole.Feed(tokens, pipeline::Positions::kAll);
    std::vector<float> stepped_rows;
    for (const int32_t token : tokens) {
      const std::vector<float> row = stepped.Feed({&token, 1});
      stepped_rows.insert(stepped_rows.end(), row.begin(), row.end());
    }
    for (const std::vector<float>& rows : {whole_rows, stepped_rows}) {
      // No first choices: made-up weights tell no token from another.
      ExpectGoldenRows(rows, reference.logits, vocab, bounds.position, 1e30);
      EXPECT_LE(RelativeL2(rows, reference.logits), bounds.prompt);
    }
    for (const Session* session : {&whole, &stepped}) {
      const pipeline::SlotState state = session->State();
      EXPECT_LE(RelativeL2(state.recurrent, reference.recurrent), bounds.states);
      EXPECT_LE(RelativeL2(state.conv, reference.conv), bounds.states);
    }
  }
}

}  // namespace gdn::golden
