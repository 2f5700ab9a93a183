// Tensors between the wire and FP32 rows.
#ifndef SERVER_RPC_TENSOR_H_
#define SERVER_RPC_TENSOR_H_

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "gdn/v1/types.pb.h"

namespace gdn::rpc {

// Decodes a [T, columns] tensor of any element type. INVALID_ARGUMENT names what is wrong, under
// the field path `field`. Values are not judged: finiteness is the engine's check.
absl::Status DecodeRows(const v1::Tensor& tensor, int64_t columns, const std::string& field,
                        std::vector<float>* rows);

// Fills a FLOAT32 tensor. The size of `values` is the product of `shape`.
void EncodeTensor(std::span<const float> values, std::initializer_list<int64_t> shape,
                  v1::Tensor* tensor);

}  // namespace gdn::rpc

#endif  // SERVER_RPC_TENSOR_H_
