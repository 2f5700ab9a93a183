// File: weight_upload.h
//
// Moves weights from the host, usually a file's mapped pages, into device memory through two pinned
// buffers: several threads fill one while the device empties the other.
#ifndef SERVER_PIPELINE_CUDA_WEIGHT_UPLOAD_H_
#define SERVER_PIPELINE_CUDA_WEIGHT_UPLOAD_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "absl/status/status.h"
#include "server/model/weights.h"
#include "server/pipeline/cuda/device_memory.h"

namespace gdn::pipeline {

class WeightUpload {
 public:
  // Allocates the buffers.
  absl::Status Create();

  // Copies a matrix to `to` in BF16, rounding what is stored in another type.
  absl::Status Matrix(const model::MatrixView& matrix, uint16_t* to);
  absl::Status Floats(std::span<const float> values, float* to);
  // Waits for all copies.
  absl::Status Finish();

  int64_t bytes() const { return bytes_; }  // Written to the device so far.

 private:
  // The next buffer, once the device has emptied it.
  absl::StatusOr<std::byte*> NextBuffer();
  absl::Status Send(void* to, size_t bytes);

  static constexpr int64_t kBufferBytes = int64_t{32} << 20;
  struct Buffer {
    PinnedArray<std::byte> memory;
    CudaEvent empty;
  };
  CudaStream stream_;
  std::array<Buffer, 2> buffers_;
  size_t current_ = 0;
  int64_t bytes_ = 0;
};

}  // namespace gdn::pipeline

#endif  // SERVER_PIPELINE_CUDA_WEIGHT_UPLOAD_H_
