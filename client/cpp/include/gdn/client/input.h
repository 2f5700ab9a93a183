// File: gdn/client/input.h
//
// Inputs and tensors of a request from plain arrays, and back.
#ifndef GDN_CLIENT_INPUT_H_
#define GDN_CLIENT_INPUT_H_

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "gdn/v1/types.pb.h"

namespace gdn::client {

v1::Input TokensInput(std::span<const int32_t> ids);

// The bytes of `text` as tokens, for a model with ModelInfo.byte_vocabulary.
v1::Input BytesInput(std::string_view text);

// Rows of hidden states: [values.size() / hidden_size, hidden_size]. hidden_size > 0 must divide
// the number of values.
v1::Input HiddenInput(std::span<const float> values, int64_t hidden_size);

// A FLOAT32 tensor. The caller vouches that the shape fits the number of values; the server checks.
v1::Tensor Float32Tensor(std::span<const float> values, std::span<const int64_t> shape);

// The elements of a FLOAT32 tensor, row-major. INVALID_ARGUMENT if it has another type or its data
// does not fit its shape.
absl::StatusOr<std::vector<float>> ToFloats(const v1::Tensor& tensor);

}  // namespace gdn::client

#endif  // GDN_CLIENT_INPUT_H_
