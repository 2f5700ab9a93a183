#include "server/rpc/tensor.h"

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace gdn::rpc {
namespace {

// Elements are copied as they lie in memory.
static_assert(std::endian::native == std::endian::little);

float FromBFloat16(uint16_t bits) { return std::bit_cast<float>(uint32_t{bits} << 16); }

float FromFloat16(uint16_t bits) {
  const uint32_t sign = uint32_t{bits & 0x8000u} << 16;
  const uint32_t magnitude = bits & 0x7FFFu;
  if (magnitude < 0x0400) {  // Zero or subnormal: magnitude * 2^-24.
    const float value = static_cast<float>(magnitude) * 0x1p-24f;
    return std::bit_cast<float>(std::bit_cast<uint32_t>(value) | sign);
  }
  if (magnitude >= 0x7C00) {  // Infinity or NaN.
    return std::bit_cast<float>(sign | 0x7F800000u | ((magnitude & 0x3FFu) << 13));
  }
  return std::bit_cast<float>(sign | ((magnitude << 13) + ((127u - 15u) << 23)));
}

int64_t ElementBytes(v1::ElementType type) {
  switch (type) {
    case v1::ELEMENT_TYPE_FLOAT32:
      return 4;
    case v1::ELEMENT_TYPE_BFLOAT16:
    case v1::ELEMENT_TYPE_FLOAT16:
      return 2;
    default:
      return 0;
  }
}

template <typename Convert>
void Widen(const std::string& data, Convert convert, std::vector<float>* rows) {
  for (size_t i = 0; i < rows->size(); ++i) {
    uint16_t bits;
    std::memcpy(&bits, data.data() + 2 * i, sizeof(bits));
    (*rows)[i] = convert(bits);
  }
}

}  // namespace

absl::Status DecodeRows(const v1::Tensor& tensor, int64_t columns, const std::string& field,
                        std::vector<float>* rows) {
  const int64_t element_bytes = ElementBytes(tensor.element_type());
  if (element_bytes == 0) {
    return absl::InvalidArgumentError(
        absl::StrCat(field, ".element_type: ", static_cast<int>(tensor.element_type()),
                     " is not one of FLOAT32 (1), BFLOAT16 (2), FLOAT16 (3)"));
  }
  if (tensor.shape_size() != 2 || tensor.shape(0) < 0 || tensor.shape(1) != columns) {
    constexpr int kShown = 8;  // A hostile shape may have millions of entries.
    const auto shown_end = tensor.shape().begin() + std::min(tensor.shape_size(), kShown);
    return absl::InvalidArgumentError(
        absl::StrCat(field, ".shape: [", absl::StrJoin(tensor.shape().begin(), shown_end, ", "),
                     tensor.shape_size() > kShown ? ", ..." : "", "] is not [T, ", columns, "]"));
  }
  // By division, since a product with a hostile T may overflow.
  const auto size = static_cast<int64_t>(tensor.data().size());
  const int64_t row_bytes = columns * element_bytes;
  if (size % row_bytes != 0 || size / row_bytes != tensor.shape(0)) {
    return absl::InvalidArgumentError(absl::StrCat(field, ".data: ", size, " bytes do not make ",
                                                   tensor.shape(0), " rows of ", columns,
                                                   " elements of ", element_bytes, " bytes"));
  }
  rows->resize(static_cast<size_t>(size / element_bytes));
  if (rows->empty()) return absl::OkStatus();
  switch (tensor.element_type()) {
    case v1::ELEMENT_TYPE_FLOAT32:
      std::memcpy(rows->data(), tensor.data().data(), tensor.data().size());
      break;
    case v1::ELEMENT_TYPE_BFLOAT16:
      Widen(tensor.data(), FromBFloat16, rows);
      break;
    default:
      Widen(tensor.data(), FromFloat16, rows);
      break;
  }
  return absl::OkStatus();
}

void EncodeTensor(std::span<const float> values, std::initializer_list<int64_t> shape,
                  v1::Tensor* tensor) {
  tensor->set_element_type(v1::ELEMENT_TYPE_FLOAT32);
  tensor->mutable_shape()->Assign(shape.begin(), shape.end());
  tensor->mutable_data()->assign(reinterpret_cast<const char*>(values.data()), values.size_bytes());
}

}  // namespace gdn::rpc
