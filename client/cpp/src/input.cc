#include "gdn/client/input.h"

#include <bit>
#include <cstring>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace gdn::client {

// Tensors travel little-endian and are copied as they are.
static_assert(std::endian::native == std::endian::little);

v1::Input TokensInput(std::span<const int32_t> ids) {
  v1::Input input;
  input.mutable_token_ids()->mutable_ids()->Add(ids.begin(), ids.end());
  return input;
}

v1::Input BytesInput(std::string_view text) {
  v1::Input input;
  auto* ids = input.mutable_token_ids()->mutable_ids();
  ids->Reserve(static_cast<int>(text.size()));
  for (const char c : text) ids->AddAlreadyReserved(static_cast<unsigned char>(c));
  return input;
}

v1::Input HiddenInput(std::span<const float> values, int64_t hidden_size) {
  const int64_t shape[] = {static_cast<int64_t>(values.size()) / hidden_size, hidden_size};
  v1::Input input;
  *input.mutable_hidden_states() = Float32Tensor(values, shape);
  return input;
}

v1::Tensor Float32Tensor(std::span<const float> values, std::span<const int64_t> shape) {
  v1::Tensor tensor;
  tensor.set_element_type(v1::ELEMENT_TYPE_FLOAT32);
  tensor.mutable_shape()->Add(shape.begin(), shape.end());
  tensor.set_data(values.data(), values.size_bytes());
  return tensor;
}

absl::StatusOr<std::vector<float>> ToFloats(const v1::Tensor& tensor) {
  if (tensor.element_type() != v1::ELEMENT_TYPE_FLOAT32) {
    return absl::InvalidArgumentError(absl::StrCat("expected a tensor of FLOAT32, got ",
                                                   v1::ElementType_Name(tensor.element_type())));
  }
  size_t count = 1;
  for (const int64_t dim : tensor.shape()) {
    if (dim < 0 || __builtin_mul_overflow(count, static_cast<size_t>(dim), &count)) {
      return absl::InvalidArgumentError(
          absl::StrCat("impossible tensor shape [", absl::StrJoin(tensor.shape(), ", "), "]"));
    }
  }
  if (tensor.data().size() % sizeof(float) != 0 || tensor.data().size() / sizeof(float) != count) {
    return absl::InvalidArgumentError(
        absl::StrCat("a FLOAT32 tensor of shape [", absl::StrJoin(tensor.shape(), ", "), "] has ",
                     count, " elements of 4 bytes, but carries ", tensor.data().size(), " bytes"));
  }
  std::vector<float> values(count);
  if (count > 0) std::memcpy(values.data(), tensor.data().data(), tensor.data().size());
  return values;
}

}  // namespace gdn::client
