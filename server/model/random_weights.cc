#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#include "server/model/element_convert.h"
#include "server/model/status_macros.h"
#include "server/model/storage.h"
#include "server/model/tensor_slots.h"
#include "server/model/weight_sources.h"
#include "xxhash.h"

namespace gdn::model {
namespace {

// Counter-based: word i of a stream is a hash of (stream, i), so any part can be made on its own.
class CounterRandom {
 public:
  explicit CounterRandom(uint64_t stream) : stream_(stream) {}

  // The finaliser of SplitMix64.
  uint64_t Word(uint64_t counter) const {
    uint64_t x = stream_ + counter * 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
  }
  // In [0, 1).
  double Uniform(uint64_t counter) const {
    return static_cast<double>(Word(counter) >> 11) * 0x1p-53;
  }

 private:
  uint64_t stream_;
};

constexpr float kSqrt3 = 1.7320508f;  // Half the width of a uniform of standard deviation 1.

// Four elements from each word; 16 bits hold all that BF16 can show. In blocks, so that the
// compiler can vectorise the conversion.
void FillMatrix(const CounterRandom& random, float sigma, std::span<uint16_t> out) {
  constexpr size_t kWords = 256;
  const float scale = sigma * kSqrt3 / 32768.0f;
  std::array<uint64_t, kWords> words;
  std::array<int16_t, kWords * 4> lanes;
  for (size_t begin = 0; begin < out.size(); begin += lanes.size()) {
    for (size_t i = 0; i < kWords; ++i) words[i] = random.Word(begin / 4 + i);
    std::memcpy(lanes.data(), words.data(), sizeof(lanes));
    const size_t count = std::min(lanes.size(), out.size() - begin);
    for (size_t i = 0; i < count; ++i) {
      out[begin + i] = F32ToBf16((static_cast<float>(lanes[i]) + 0.5f) * scale);
    }
  }
}

// At the start of training: A uniform in [1, 16], the step softplus(dt_bias) log-uniform in
// [0.001, 0.1].
float VectorElement(const TensorSlot& slot, double uniform) {
  switch (slot.kind) {
    case TensorKind::kALog:
      return static_cast<float>(std::log(1.0 + 15.0 * uniform));
    case TensorKind::kDtBias: {
      const double step = std::exp(std::log(0.001) + uniform * std::log(100.0));
      return static_cast<float>(step + std::log(-std::expm1(-step)));  // The inverse of softplus.
    }
    case TensorKind::kConv:
      return static_cast<float>((2.0 * uniform - 1.0) * kSqrt3 /
                                std::sqrt(static_cast<double>(slot.shape.back())));
    default:  // Norms, as the multiplier.
      return static_cast<float>(1.0 + 0.2 * (2.0 * uniform - 1.0));
  }
}

}  // namespace

absl::StatusOr<Weights> MakeRandomWeights(const ModelSpec& spec, const LayerRange& range,
                                          uint64_t seed) {
  Weights weights;
  const std::vector<TensorSlot> slots = BindSlots(spec, range, &weights);
  uint64_t matrix_bytes = 0;
  for (const TensorSlot& slot : slots) {
    weights.num_parameters += slot.elements();
    // Each begins on a cache line.
    if (slot.matrix != nullptr)
      matrix_bytes += (static_cast<uint64_t>(slot.elements()) * 2 + 63) / 64 * 64;
  }
  GDN_ASSIGN_OR_RETURN(Storage storage, AllocateStorage(matrix_bytes));

  size_t used = 0;
  for (const TensorSlot& slot : slots) {
    const auto elements = static_cast<size_t>(slot.elements());
    const CounterRandom random(XXH3_64bits_withSeed(slot.name.data(), slot.name.size(), seed));
    if (slot.matrix == nullptr) {
      slot.vector->resize(elements);
      for (size_t i = 0; i < elements; ++i) {
        (*slot.vector)[i] = VectorElement(slot, random.Uniform(i));
      }
      continue;
    }
    auto* data = reinterpret_cast<uint16_t*>(storage.bytes.data() + used);
    FillMatrix(random, 1.0f / std::sqrt(static_cast<float>(slot.shape[1])), {data, elements});
    *slot.matrix = {storage.bytes.data() + used, ElementType::kBF16, slot.shape[0], slot.shape[1]};
    used += (elements * 2 + 63) / 64 * 64;
  }
  weights.storage.push_back(std::move(storage.owner));
  if (range.has_head(spec) && spec.tied_embedding) weights.head = weights.embedding;
  return weights;
}

}  // namespace gdn::model
